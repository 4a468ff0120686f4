"""Writes docs/metrics.md from the declarations: `python -m ssdtrain.tools.report.document docs/metrics.md`."""

from __future__ import annotations

import ast
import inspect
import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import ssdtrain.telemetry.totals  # noqa: F401 - and with it every feature's metrics
from ssdtrain.metrics import MetricSet

_INTRODUCTION = """\
# Metrics

This page is generated from the declarations by `make docs`. The names are the keys of the JSON lines of `report.path`, and
of what frameworks write to their own monitors, with a prefix of theirs. `print(runtime.statistics())` shows the same, with
spaces for underscores and without zeros. Metrics of collectives begin with `comm/` and the parallel dimension, as in
`comm/dp/wire_bytes`; those of compressed inputs with `compact/`, of model state with `state/`, of a plan with `plan/`, or
`auto/` where it is of `offload.amount`.

A counter is a total since the start; a line of the journal has what the step added. A gauge is a value of the moment. "Ranks"
says how the values of several ranks become one: the sum, or that of the rank with the most or the least.

A line of the journal also has `load_waits`, the three modules whose saved tensors backward waited for longest in the step, and
`decisions`, where they are others than before. The lines of steps 2, 4, 8 ... 1024 and of each 1024th have `modules`: for each
module that saved tensors, `offloaded_bytes`, `kept_bytes` (by the policy, for want of room, or because backward came before the
store) and `load_wait_seconds`. Names are unknown in a model that `torch.compile` has compiled: there regions have the number of
their model chunk and their own.
"""


def document() -> str:
    """The whole page."""
    parts = [_INTRODUCTION]
    for kind in sorted(MetricSet.__subclasses__(), key=lambda kind: (kind.__module__, kind.__name__)):
        if kind.__module__.startswith("ssdtrain."):
            subject = re.sub(r"(?<=.)([A-Z])", r" \1", kind.__name__.removesuffix("Metrics")).capitalize()
            parts += [f"## {subject}\n\n{_first_sentence(kind)}.\n", "\n".join(_table(kind)) + "\n"]
    return "\n".join(parts)


def _first_sentence(kind: type[MetricSet]) -> str:
    return " ".join((kind.__doc__ or kind.__name__).split()).partition(". ")[0].rstrip(".")


def _table(kind: type[MetricSet]) -> Iterator[str]:
    meanings = dict(_meanings(kind))
    yield "| name | unit | kind | ranks | meaning |"
    yield "|---|---|---|---|---|"
    for metric in kind.declared():
        sort = "counter" if metric.cumulative else "gauge"
        meaning = meanings.get(metric.name) or metric.label
        yield f"| `{metric.name}` | {metric.unit.value} | {sort} | {metric.ranks.value} | {meaning} |"


def _meanings(kind: type[MetricSet]) -> Iterator[tuple[str, str]]:
    """The string below each field; Python drops it, so it is read from the source."""
    (declaration,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    assert isinstance(declaration, ast.ClassDef)
    for field, below in zip(declaration.body, declaration.body[1:], strict=False):
        if (
            isinstance(field, ast.AnnAssign)
            and isinstance(field.target, ast.Name)
            and isinstance(below, ast.Expr)
        ):
            text = ast.literal_eval(below.value)
            yield field.target.id, " ".join(text.split()).replace("|", "\\|")


if __name__ == "__main__":
    if sys.argv[1:]:
        Path(sys.argv[1]).write_text(document())
    else:
        print(document(), end="")
