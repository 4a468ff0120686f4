"""Findings are legible on a narrow terminal: no word is cut into columns, and no path is lost."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from ssdtrain.tools.cli.finding import BROKEN, GOOD, NOTE, WARNING, Finding, show

LONG = "/local_nvme/user/jobs/2026-11-22/a-run-with-a-long-name/spill"
FOUND = [
    ("all", Finding("torch", "2.13.0", GOOD)),
    ("a", Finding("matplotlib", "not installed", NOTE, "only for plots")),
    ("a", Finding(f"{LONG}: O_DIRECT", "refused", WARNING, "buffered I/O takes several times the CPU time")),
    (
        "b",
        Finding("config ds.json", "invalid SSDTrain config (1 error):\n  [offload]", BROKEN, "name the key"),
    ),
]


def printed(width: int, *, with_nodes: bool = False) -> list[str]:
    to = io.StringIO()
    show(FOUND, Console(file=to, width=width), with_nodes=with_nodes)
    return to.getvalue().splitlines()


@pytest.mark.parametrize("width", [60, 80, 100])
@pytest.mark.parametrize("with_nodes", [False, True])
def test_on_a_narrow_terminal_each_finding_is_a_paragraph(width: int, with_nodes: bool) -> None:
    lines = printed(width, with_nodes=with_nodes)
    assert all(len(line.rstrip()) <= width for line in lines)
    begins = [line.split()[0] for line in lines if not line.startswith(" ")]
    assert begins == ["ok", "-", "warning", "broken", "1"]
    words = " ".join(" ".join(lines).split())
    for where, finding in FOUND:
        beginning = finding.found.splitlines()[0]
        assert f"{finding.subject}: {beginning}".replace(" ", "") in words.replace(" ", "")
        assert f"-> {finding.remedy}" in words or not finding.remedy
        assert (f"({where})" in words) is with_nodes
    assert "[offload]" in words  # is no markup
    assert lines[-1] == "1 broken, 1 warning"


def test_on_a_wide_terminal_there_are_columns() -> None:
    lines = printed(220, with_nodes=True)
    assert all(word in lines[1] for word in ("nodes", "found", "what to do"))
    (row,) = [line for line in lines if LONG in line]
    assert "refused" in row and "warning" in row and "buffered I/O" in row
