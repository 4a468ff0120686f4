"""A metric is declared once and is everywhere; what the numbers of a run mean; ranks and steps in one value."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from examples.support.activation_meter import SavedTensorMeter
from ssdtrain.config import load_config
from ssdtrain.config.units import MiB
from ssdtrain.metrics import MetricSet, Reduce, Unit, counter, gauge, line
from ssdtrain.runtime import Runtime
from ssdtrain.telemetry.journal import Journal
from ssdtrain.telemetry.totals import Interval, RuntimeMetrics, StepMetrics, reduce_over_ranks
from tests.support.ranks import on_ranks


@dataclass
class CacheMetrics(MetricSet):
    """Of a feature that this package does not know."""

    hit_bytes: int = counter(Unit.BYTES, "hits")
    lookups: int = counter(Unit.COUNT)
    wait_seconds: float = counter(Unit.SECONDS, "waited", ranks=Reduce.MAX)
    oldest_seconds: float | None = gauge(Unit.SECONDS, "oldest", ranks=Reduce.MIN, unknown=True)


def metrics(steps: int, cache: CacheMetrics) -> RuntimeMetrics:
    return RuntimeMetrics(steps, StepMetrics(), [("cache", cache)])


def test_one_declaration_reaches_the_file_the_log_and_the_table(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    journal = Journal(tmp_path, interval=2, rank=0)
    journal.step(1, metrics(1, CacheMetrics(MiB, 3)))
    journal.step(2, metrics(2, CacheMetrics(4 * MiB, 5, 0.5)))
    journal.close()
    lines = [json.loads(text) for text in (tmp_path / "rank-0.jsonl").read_text().splitlines()]
    assert [found["cache/hit_bytes"] for found in lines] == [MiB, 3 * MiB]
    assert [found["cache/lookups"] for found in lines] == [3, 2]
    assert "cache/oldest_seconds" not in lines[0]  # not known
    assert caplog.messages == ["[ssdtrain] step 2 | cache hits/step: 2.00 MiB | cache waited/step: 250 ms"]
    table = str(metrics(2, CacheMetrics(4 * MiB, 5, 0.5)))
    row = next(text for text in table.splitlines() if "hit bytes" in text)
    assert row.split() == ["cache/hit", "bytes", "4.00", "MiB", "2.00", "MiB"]


def test_an_interval_has_means_of_counters_and_the_last_value_of_gauges() -> None:
    interval = Interval(metrics(3, CacheMetrics(hit_bytes=100)))
    now = CacheMetrics(hit_bytes=700, oldest_seconds=7.0)
    assert interval.end(metrics(5, now))["cache/hit_bytes"] == 300
    assert interval.end(metrics(6, now)) == {
        "cache/hit_bytes": 0,
        "cache/lookups": 0,
        "cache/wait_seconds": 0,
        "cache/oldest_seconds": 7.0,
        "step_seconds": 0,
    }


def of_rank(rank: int) -> dict[str, float]:
    now = metrics(1, CacheMetrics(10 * (rank + 1), 1, 0.5 * rank, [None, 3.0, 2.0][rank]))
    return reduce_over_ranks(now.declared(), now.values(), torch.device("cpu"))


@pytest.mark.distributed
def test_ranks_are_combined_as_each_metric_is_declared() -> None:
    for found in on_ranks(3, of_rank):
        assert found["cache/hit_bytes"] == 60 and found["cache/lookups"] == 3
        assert found["cache/wait_seconds"] == 1.0
        assert found["cache/oldest_seconds"] == 2.0  # of those that know
        assert "ssd_life_seconds" not in found  # no rank knows


def test_a_line_shows_what_has_a_label_and_is_not_zero() -> None:
    assert (
        line(CacheMetrics.declared(), {"hit_bytes": 0, "lookups": 3, "oldest_seconds": 2}) == "oldest: 2.00 s"
    )


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(256, 256) for _ in range(20))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return x.sum()


def train(tmp_path: Path, offload: dict[str, Any], steps: int = 3, **options: Any) -> tuple[Runtime, Block]:
    torch.manual_seed(0)
    block = Block()
    config = {
        "offload": {"directories": str(tmp_path / "ssd"), "amount": "all", **offload},
        "report": {"interval": 0},
    }
    runtime = Runtime(load_config(config | options))
    runtime.register(block)
    for _ in range(steps):
        runtime.reset_peak()
        with runtime.step():
            with runtime.forward():
                loss = block(INPUT)
            while (found := runtime.statistics()) is not None and found.offload.in_flight_bytes:
                pass  # backward finds everything in its tier
            with runtime.backward():
                loss.backward()
    return runtime, block


INPUT = torch.randn(512, 256, generator=torch.Generator().manual_seed(0))


def test_a_codec_makes_written_bytes_fewer_than_offloaded_ones(tmp_path: Path) -> None:
    runtime, _ = train(tmp_path, {"codec": "int8"})
    values = runtime.statistics().values()  # type: ignore[union-attr]
    assert values["offloaded_bytes"] == 3 * 21 * INPUT.nbytes  # the input and every layer's output
    assert 0 < values["ssd_bytes_written"] < 0.3 * values["offloaded_bytes"]
    runtime.close()


def test_bytes_are_shown_for_each_tier(tmp_path: Path) -> None:
    runtime, _ = train(tmp_path, {"host": "4MiB"})
    found = runtime.statistics()
    values = found.values()
    assert values["host_bytes_written"] > 0 and values["ssd_bytes_written"] > 0
    assert values["host_bytes_written"] + values["ssd_bytes_written"] == values["offloaded_bytes"]
    assert values["spill_file_bytes"] == sum(drive.allocated for drive in found.store.drives) > 0
    shown = line(found.declared(), values)
    assert "offloaded/step: " in shown and "to host memory/step: " in shown and "to SSD/step: " in shown
    runtime.close()


def test_what_activations_would_take_is_known_and_small_models_get_small_buffers(tmp_path: Path) -> None:
    runtime, block = train(tmp_path, {"in_flight": "1MiB"})
    found = runtime.statistics().offload  # type: ignore[union-attr]
    meter = SavedTensorMeter(block)
    with meter.step() as record:
        block(INPUT).backward()
    # Autograd frees at once what the engine notes with its next call: one storage may be counted once more.
    assert record.peak_bytes <= found.unoffloaded_peak_bytes <= record.peak_bytes + INPUT.nbytes
    assert found.unoffloaded_peak_bytes > 10 * MiB
    # A quarter of what is away, and what backward holds: 24 MiB and more where that is not looked at.
    assert 0 < found.buffer_bytes <= 4 * MiB
    assert found.activation_peak_bytes < 0.7 * found.unoffloaded_peak_bytes
    runtime.reset_peak()
    assert runtime.statistics().offload.unoffloaded_peak_bytes <= INPUT.nbytes  # type: ignore[union-attr]
    runtime.close()


def test_nothing_is_allocated_for_loads_that_never_come(tmp_path: Path) -> None:
    with Runtime(
        load_config({"offload": {"directories": str(tmp_path / "ssd")}, "report": {"interval": 0}})
    ) as runtime:
        block = Block()
        with runtime.step(), runtime.forward(keep=True):
            loss = block(INPUT)
        with runtime.backward():
            loss.backward()
        assert runtime.statistics().offload.buffer_bytes == 0  # type: ignore[union-attr]


def test_the_table_has_units_and_no_rounded_zero(tmp_path: Path) -> None:
    runtime, _ = train(tmp_path, {})
    table = str(runtime.statistics())
    assert "in 3 steps" in table and "per step" in table
    row = next(text for text in table.splitlines() if text.split()[:2] == ["offloaded", "bytes"])
    assert row.split()[2:] == ["31.5", "MiB", "10.5", "MiB"]
    assert "0.000" not in table and " object at " not in table
    runtime.close()


def test_the_table_says_everything_once_and_gauges_are_no_totals(tmp_path: Path) -> None:
    runtime, _ = train(tmp_path, {})
    heads, _, *rows = str(runtime.statistics()).splitlines()
    runtime.close()
    words = [row[: heads.index("in 3 steps")].split() for row in rows]
    names = [" ".join(row) for row in words]
    assert names[0] == "step time" and "offloaded bytes" in names
    # "cancelled bytes" and "bytes cancelled" are one name.
    assert len({frozenset(row) for row in words}) == len(words), names
    end = heads.index("per step") + len("per step")
    gauges = {name for name, row in zip(names, rows, strict=True) if not row[len(name) + 2 : end].strip()}
    assert {"activation peak bytes", "spill file bytes", "capacity bytes"} <= gauges
    assert not gauges & {"step time", "saved bytes", "offloaded bytes", "SSD bytes written"}


def test_the_table_of_a_run_without_steps_has_no_mean() -> None:
    table = str(metrics(0, CacheMetrics(4 * MiB, 5, 0.5, 7.0)))
    assert table.splitlines()[0].split() == ["metric", "total", "now"]
    assert "per step" not in table


def reported(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "ssdtrain.report"]


def test_rank_0_says_at_start_where_tensors_go_and_at_the_end_what_happened(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    runtime, _ = train(
        tmp_path, {"host": "4MiB", "capacity": "1GiB", "codec": "int8"}, report={"interval": 10**9}
    )
    (start,) = reported(caplog)
    assert start == (
        "[ssdtrain] offload: all of what is saved, to host memory (4.00 MiB), "
        f"then {tmp_path / 'ssd'} (1.00 GiB) | codec: int8"
    )
    runtime.close()
    runtime.close()
    _, end = reported(caplog)
    assert end.startswith("[ssdtrain] summary of 3 steps: saved ") and "activation peak" in end
    rows = [line for line in end.splitlines() if line.startswith("  ")]
    assert 5 <= len(rows) <= 10 and "buffer bytes" not in end


@pytest.mark.parametrize(
    ("waited", "second"), [(0.008, "the tiers kept up with the step"), (0.5, "limited by: loads")]
)
def test_a_wait_of_less_than_a_hundredth_limits_nothing(
    waited: float, second: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    runtime, _ = train(tmp_path, {}, report={"interval": 10**9})
    counted, seconds = runtime.engine.metrics, runtime.statistics().step_seconds  # type: ignore[union-attr]
    counted.load_wait_seconds = waited * seconds + 0.0001 * seconds
    counted.store_wait_seconds = 0.0
    runtime.close()
    first, found, *_ = reported(caplog)[-1].splitlines()
    assert f"waited {100 * waited:.1f}% of the step" in first and found.startswith(second)


def test_the_end_has_the_peak_of_the_last_step_where_a_log_line_began_a_new_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As Megatron's log lines do, the last of them after the last step."""
    runtime, _ = train(tmp_path, {}, report={"interval": 10**9})
    runtime.reset_peak()
    runtime.close()
    assert "0 B" not in reported(caplog)[-1].splitlines()[0]


def test_a_verbose_report_ends_with_all_metrics(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    train(tmp_path, {}, report={"interval": 10**9, "verbose": True})[0].close()
    *_, end = reported(caplog)
    assert end.startswith("[ssdtrain] all metrics\n") and "unoffloaded peak bytes" in end


def test_no_step_no_summary_and_interval_0_says_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    train(tmp_path, {}, steps=0, report={"interval": 10})[0].close()
    assert [text.split()[1] for text in reported(caplog)] == ["offload:"]
    caplog.clear()
    train(tmp_path, {})[0].close()
    assert reported(caplog) == []


SAID = {
    "": True,
    "logging.basicConfig(level=logging.WARNING)": True,  # as frameworks do
    'logging.getLogger("ssdtrain").setLevel(logging.WARNING)': False,
    'logging.getLogger("ssdtrain.report").setLevel(logging.ERROR)': False,
    'logging.getLogger("ssdtrain.report").disabled = True': False,
}
"""Whether a report is seen after this was done to logging."""

SAY = """
import logging, os, sys
from ssdtrain.messages import report
for number, before in enumerate(sys.argv[1:]):
    if os.fork() == 0:
        exec(before)
        report(f"hello {number}")
        os._exit(0)
    assert os.wait()[1] == 0
"""


@pytest.mark.slow
def test_what_was_asked_for_is_shown_without_any_logging_configured() -> None:
    command = [sys.executable, "-c", SAY, *SAID]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert {before: f"[ssdtrain] hello {number}" in done.stderr for number, before in enumerate(SAID)} == SAID


def test_reports_are_records_of_their_own_logger(caplog: pytest.LogCaptureFixture) -> None:
    from ssdtrain.messages import report

    report("hello")
    (record,) = caplog.records
    assert (record.name, record.levelno) == ("ssdtrain.report", logging.INFO)
