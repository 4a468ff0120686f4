"""The page is HTML that loads nothing, has the journals' figures, and shows names as text."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from ssdtrain.config.units import MiB
from ssdtrain.metrics import Unit
from ssdtrain.tools.report.chart import Bar, ChartLine, bar_chart, line_chart
from ssdtrain.tools.report.figures import rank_rows
from ssdtrain.tools.report.page import page
from ssdtrain.tools.report.run import JournaledRun
from tests.support.journals import line, write

VOID = {"meta", "br", "line", "path"}


class Reader(HTMLParser):
    """Checks that elements close in order, and collects text and references."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text: list[str] = []
        self.tags: list[str] = []
        self.references: list[str] = []
        self.data: list[dict[str, object]] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.references += [value or "" for name, value in attributes if name in ("src", "href")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, self.getpos()

    def handle_data(self, data: str) -> None:
        if self.open[-1:] == ["script"]:
            if data.startswith("{"):
                self.data.append(json.loads(data))
        elif self.open[-1:] != ["style"]:
            self.text.append(data)


def read(html: str) -> Reader:
    reader = Reader()
    reader.feed(html)
    reader.close()
    assert reader.open == []
    return reader


def test_it_parses_and_loads_nothing(tmp_path: Path) -> None:
    html = page(
        JournaledRun.read(write(tmp_path / "run", loss=2.5)),
        JournaledRun.read(write(tmp_path / "other", loss=2.5)),
    )
    reader = read(html)
    assert reader.references == []
    assert not re.search(r"https?://|@import|url\(", html)


def test_it_has_the_figures_of_the_journals(tmp_path: Path) -> None:
    reader = read(page(JournaledRun.read(write(tmp_path, loss=2.5))))
    text = " | ".join(part for part in reader.text if part.strip())
    for figure in (
        "31.0 MiB",  # the peak of the largest rank
        "x0.31 of 100 MiB without",
        "600 ms",  # a step of the slower rank
        "2.0%",  # waited: 0.01 of 0.5 s
        "180 MiB",  # to SSD per step, both ranks
        "30.0 days",  # SSD life, the rank with less
        "25.0%",  # sent of what was to send
        "2.5000",  # loss
        "layers.0.mlp",
        "100 ms",  # waited for it: 5 steps x 2 ranks
        "x0.250",
        "44.0 MiB",  # kept by layers.10.mlp, both ranks
        "34.0 MiB",  # offloaded by layers.2.mlp
        "in step 4",
    ):
        assert figure in text, figure
    (memory,) = [d for d in reader.data if any("without SSDTrain" in line["label"] for line in d["lines"])]  # type: ignore[attr-defined]
    assert [line["values"] for line in memory["lines"]] == [[30.0] * 5, [31.0] * 5, [100.0] * 5]  # type: ignore[attr-defined]
    assert memory["unit"] == "MiB" and memory["steps"] == [1, 2, 3, 4, 5]
    for axis in ("activations, MiB", "time, ms", "waited, ms", "bytes, MiB", "step"):
        assert axis in text, axis


def test_names_from_outside_are_text_and_never_markup(tmp_path: Path) -> None:
    name = "<img src=x onerror=alert(1)></script><script>"
    directory = write(tmp_path / name.replace("/", "")[:40], load_waits=[{"module": name, "seconds": 1.0}])
    (directory / "rank-0.jsonl").write_text(
        (directory / "rank-0.jsonl").read_text().replace("comm/dp", "comm/<b>")
    )
    run = JournaledRun.read(directory)
    reader = read(page(run, run))
    assert "img" not in reader.tags and "b" not in reader.tags
    assert any(name in part for part in reader.text)


def test_it_shows_what_was_decided_last_and_why(tmp_path: Path) -> None:
    directory = write(tmp_path / "run", steps=4)
    assert "<h2>Decisions</h2>" not in page(JournaledRun.read(directory))
    for step, why in ((5, "no time"), (9, "hidden < all")):
        with (directory / "rank-1.jsonl").open("a") as stream:
            stream.write(json.dumps(line(step, 1, decisions=[f"block 0: offload: {why}"])) + "\n")
    text = page(JournaledRun.read(directory))
    assert "rank 1, since step 9, made 2 times" in text and "block 0: offload: hidden &lt; all" in text
    assert "no time" not in text


def test_a_comparison_says_which_is_better(tmp_path: Path) -> None:
    run = JournaledRun.read(write(tmp_path / "new"))
    other = JournaledRun.read(write(tmp_path / "old", activation_peak_bytes=62 * MiB, step_seconds=0.3))
    html = page(run, other)
    assert '<span class="better">-50.0%</span> against 62.0 MiB' in html
    assert '<span class="worse">+100.0%</span> against 300 ms' in html
    assert "x0.500" in html


def test_many_ranks_are_drawn_as_three_lines_and_listed_all(tmp_path: Path) -> None:
    reader = read(page(JournaledRun.read(write(tmp_path, ranks=20, steps=2))))
    labels = {line["label"] for data in reader.data for line in data["lines"]}  # type: ignore[attr-defined]
    assert {"highest rank", "median rank", "lowest rank"} <= labels and "rank 0" not in labels
    assert "rank 19" in reader.text


@pytest.mark.parametrize("steps", [1, 2, 3000])
def test_a_chart_of_any_length_keeps_its_peak(steps: int) -> None:
    points = {step: 5.0 for step in range(steps)} | {steps // 2: 7000.0}
    html = line_chart([ChartLine("a", points), ChartLine("b", {0: 1.0})], Unit.BYTES, "bytes")
    data = json.loads(re.findall(r'json">(.*?)</script>', html)[0])
    assert len(data["steps"]) <= 400
    assert max(v for v in data["lines"][0]["values"] if v is not None) == pytest.approx(7000 / 1024, rel=1e-3)
    assert ("highest of" in html) == (steps > 400)
    assert "NaN" not in html and "inf" not in html


def test_values_that_are_all_zero_or_missing_make_no_chart_of_nothing() -> None:
    assert "no such values" in line_chart([ChartLine("a", {})], Unit.BYTES, "bytes")
    assert "<svg" in line_chart([ChartLine("a", {1: 0.0, 2: 0.0})], Unit.SECONDS, "time")


def test_parts_of_a_bar_that_are_0_are_not_drawn() -> None:
    html = bar_chart([Bar("a", [5.0, 0.0]), Bar("b", [0.0, 0.0])], Unit.BYTES, ["offloaded", "kept"])
    assert html.count('class="track"') == 3 and html.count("0 B") == 2


def test_a_first_step_whose_begin_is_not_known_has_no_time(tmp_path: Path) -> None:
    directory = write(tmp_path, ranks=1, steps=3)
    lines = (directory / "rank-0.jsonl").read_text().splitlines()
    lines[0] = json.dumps(line(1, step_seconds=0.0))
    (directory / "rank-0.jsonl").write_text("\n".join(lines) + "\n")
    (time,) = [
        d for d in read(page(JournaledRun.read(directory))).data if d["unit"] == "ms" and d["steps"] == [2, 3]
    ]  # type: ignore[attr-defined]
    assert [one["values"] for one in time["lines"]] == [[500.0, 500.0]]


def test_a_rate_counts_a_step_that_was_trained_again_once(tmp_path: Path) -> None:
    write(tmp_path, ranks=1, steps=2)
    again = (tmp_path / "rank-0.jsonl").read_text()
    (tmp_path / "rank-0.jsonl").write_text(again * 2)
    assert "360 MiB in all, 180 MiB/s" in page(JournaledRun.read(tmp_path))


def test_the_peak_of_a_rank_is_that_of_the_plan_that_is_followed_as_everywhere(tmp_path: Path) -> None:
    directory = write(tmp_path, ranks=1, steps=3, activation_peak_bytes=20 * MiB)
    lines = (directory / "rank-0.jsonl").read_text().splitlines()
    lines[0] = json.dumps(line(1, activation_peak_bytes=50 * MiB))
    (directory / "rank-0.jsonl").write_text("\n".join(lines) + "\n")
    heads, [row] = rank_rows(JournaledRun.read(directory))
    assert row[heads.index("activation peak")] == "20.0 MiB"
