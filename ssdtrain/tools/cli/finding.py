"""The findings of `ssdtrain doctor`, and their text: a table where the terminal is wide, else a paragraph for each finding."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.console import Console, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

GOOD, NOTE, WARNING, BROKEN = "ok", "-", "warning", "broken"
STYLES = {GOOD: "green", NOTE: "dim", WARNING: "yellow", BROKEN: "bold red"}
WIDE = 120
"""Columns of a terminal from which on the four columns of the table are wide enough to read."""


@dataclass(frozen=True)
class Finding:
    """One line of `ssdtrain doctor`."""

    subject: str
    found: str
    verdict: str
    """ok; "-" for what is missing and need not be there; warning: works, worse than it could; broken: SSDTrain will not run."""
    remedy: str = ""

    @classmethod
    def judged(cls, subject: str, found: str, trouble: str = "", verdict: str = WARNING) -> Finding:
        """Return a finding that is good, unless there is `trouble`, which says what to do."""
        return cls(subject, found, verdict if trouble else GOOD, trouble)


def show(findings: Sequence[tuple[str, Finding]], console: Console, *, with_nodes: bool = False) -> None:
    """Print each finding with its remedy, and how many are broken.

    Args:
        findings: (the nodes that it is about, finding).
        with_nodes: print the nodes too.
    """
    made = _table if console.width >= WIDE else _paragraphs
    console.print(made(findings, with_nodes))
    counts = {kind: sum(finding.verdict == kind for _, finding in findings) for kind in (BROKEN, WARNING)}
    warnings = f"{counts[WARNING]} {'warning' if counts[WARNING] == 1 else 'warnings'}"
    console.print(f"{counts[BROKEN] or 'nothing'} broken, {warnings}", highlight=False)


def _table(findings: Sequence[tuple[str, Finding]], with_nodes: bool) -> RenderableType:
    table = Table(*(["nodes"] if with_nodes else []), "", "found", "", "what to do")
    for where, finding in findings:
        nodes = [where] if with_nodes else []
        row = (*nodes, finding.subject, finding.found)
        table.add_row(*map(escape, row), _verdict(finding), escape(finding.remedy))
    return table


def _paragraphs(findings: Sequence[tuple[str, Finding]], with_nodes: bool) -> RenderableType:
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    for where, finding in findings:
        grid.add_row(_verdict(finding), Text().join(_parts(finding, where if with_nodes else "")))
    return grid


def _parts(finding: Finding, where: str) -> Iterator[Text]:
    yield Text(finding.subject, style="bold")
    yield Text(f": {finding.found}")
    if where:
        yield Text(f" ({where})", style="dim")
    if finding.remedy:
        yield Text(f"\n-> {finding.remedy}")


def _verdict(finding: Finding) -> Text:
    return Text(finding.verdict, style=STYLES[finding.verdict])
