"""Published figures of papers beside what the planner computes for the same settings.

    python -m benchmarks.papers --json
    python -m benchmarks.papers --write docs/clusters.md

The ratio is computed over published; where a range is published, over its nearest end, and 1 inside of it. The last line of
`--json` is one object; `--write` puts the tables into a page, between two comments.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.common import parser
from benchmarks.papers.families import FAMILIES, LEFT_OUT
from benchmarks.papers.published import Row, rows

BEGIN = "<!-- what follows is written by: python -m benchmarks.papers --write docs/clusters.md -->"
END = "<!-- end of what is written -->"
FAR = 0.25
"""A ratio further from 1 is marked."""


@dataclass(frozen=True)
class Compared:
    """A row and what is computed for it."""

    row: Row
    computed: float | None

    @property
    def ratio(self) -> float | None:
        return None if self.computed is None else self.row.ratio(self.computed)

    @property
    def far(self) -> bool:
        """More than 25% off, or no plan at all."""
        return self.ratio is None or not 1 - FAR <= self.ratio <= 1 + FAR

    def texts(self) -> tuple[str, ...]:
        """The cells of a table."""
        row = self.row
        computed = "no plan" if self.computed is None else f"{self.computed:.4g} {row.unit}"
        ratio = "-" if self.ratio is None else f"{self.ratio:.2f}"
        return row.what, row.where, _published(row), computed, ratio, "yes" * self.far

    def figures(self) -> dict[str, Any]:
        """As plain data."""
        row = self.row
        return {
            "family": row.family,
            "what": row.what,
            "where": row.where,
            "published": [row.low, None if math.isinf(row.high) else row.high],
            "unit": row.unit,
            "computed": self.computed,
            "ratio": self.ratio,
            "far": self.far,
        }


def compare() -> list[Compared]:
    """All rows."""
    return [Compared(row, row.computed()) for row in rows()]


def page(found: list[Compared]) -> str:
    """The tables in Markdown, with what is assumed and why they differ."""
    far = sum(one.far for one in found)
    lines = [BEGIN, "", f"{far} of {len(found)} rows are off by more than 25%.", ""]
    for name, family in FAMILIES.items():
        lines += [f"**{family.title}**", "", f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|"]
        lines += [f"| {' | '.join(one.texts())} |" for one in found if one.row.family == name]
        lines += ["", f"Assumed: {family.assumed} {family.why}", ""]
    lines += ["Left out, since their values could not be read with certainty:", ""]
    return "\n".join([*lines, *(f"- {entry}." for entry in LEFT_OUT), "", END])


COLUMNS = ("figure", "in the paper", "published", "computed", "ratio", "more than 25% off")


def written(text: str, made: str) -> str:
    """`text` with `made` in place of what stands between the two comments."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return before + made + after


def show(found: list[Compared], console: Console) -> None:
    """Tables on the terminal."""
    for name, family in FAMILIES.items():
        table = Table(title=family.title, caption=f"Assumed: {family.assumed} {family.why}")
        for column in COLUMNS:
            table.add_column(column)
        for one in found:
            if one.row.family == name:
                table.add_row(*one.texts(), style="yellow" if one.far else "")
        console.print(table)
    for entry in LEFT_OUT:
        console.print(f"left out: {entry}")


def _published(row: Row) -> str:
    if math.isinf(row.high):
        return f"over {row.low:g} {row.unit}"
    if not row.low:
        return f"at most {row.high:g} {row.unit}"
    return f"{row.low:g} {row.unit}" if row.low == row.high else f"{row.low:g} to {row.high:g} {row.unit}"


def main() -> None:
    arguments = parser("Published figures of papers beside what the planner computes.")
    arguments.add_argument("--write", type=Path, metavar="PAGE", help="a Markdown page with the two comments")
    chosen = arguments.parse_args()
    found = compare()
    show(found, Console())
    if chosen.write:
        chosen.write.write_text(written(chosen.write.read_text(), page(found)))
    if chosen.json:
        far = sum(one.far for one in found)
        print(json.dumps({"rows": [one.figures() for one in found], "count": len(found), "far": far}))


if __name__ == "__main__":
    main()
