"""The journals of one run, all ranks, in memory."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ssdtrain.telemetry.totals  # noqa: F401 - and with it every feature's metrics
from ssdtrain.metrics import Metric, MetricSet, Reduce, Unit
from ssdtrain.telemetry.lines import read_lines

_FILE = re.compile(r"rank-(\d{1,9})(?:\.(\d{1,9}))?\.jsonl")
_LARGEST = 1e200
"""Largest size of a value: means and axes of larger ones do not fit into a float."""
_DECLARED = re.compile(r"(?:(?P<prefix>comm/\w+|(?!comm/)[a-z]+)/)?(?P<own>\w+)", re.ASCII)
"""Names that metrics of SSDTrain can have."""
_TRAFFIC = re.compile(r"comm/(?P<dimension>[^/]+)/raw_bytes")
_REDUCE: dict[Reduce, Callable[[Iterable[float]], float]] = {
    Reduce.SUM: sum,
    Reduce.MAX: max,
    Reduce.MIN: min,
}


class NoJournals(ValueError):
    """A directory has no journal with a complete line."""


@dataclass(frozen=True)
class ModuleUse:
    """What the tensors that one module saved did in one step."""

    offloaded_bytes: float = 0
    kept_bytes: float = 0
    load_wait_seconds: float = 0.0

    def __add__(self, other: ModuleUse) -> ModuleUse:
        return ModuleUse(
            self.offloaded_bytes + other.offloaded_bytes,
            self.kept_bytes + other.kept_bytes,
            self.load_wait_seconds + other.load_wait_seconds,
        )

    @property
    def saved_bytes(self) -> float:
        return self.offloaded_bytes + self.kept_bytes


@dataclass
class RankJournal:
    """One `rank-N.jsonl`.

    Attributes:
        rank: of the process that wrote it.
        engine: 0, or N of `rank-R.N.jsonl`: a further engine of the same process.
        lines: how many steps were written, those of an earlier start included.
        by_step: values by step number. A step that was trained again after a restart has its last values.
        totals: the sum of each value over all lines.
        waits: seconds that backward waited for loads, by the module that saved the tensor. A line of the journal names the three
            longest, so these are lower bounds.
        modules: what each module's saved tensors did in the last step of which the journal says so; such steps are few.
        modules_step: that step; 0: there is none.
        decisions: (step, what features decided at its end and why), in the order of writing.
    """

    rank: int
    engine: int
    lines: int = 0
    by_step: dict[int, dict[str, float]] = field(default_factory=dict)
    totals: dict[str, float] = field(default_factory=dict)
    waits: dict[str, float] = field(default_factory=dict)
    modules: dict[str, ModuleUse] = field(default_factory=dict)
    modules_step: int = 0
    decisions: list[tuple[int, str]] = field(default_factory=list)

    @property
    def label(self) -> str:
        return f"rank {self.rank}" + (f", engine {self.engine}" if self.engine else "")

    def values(self, name: str) -> list[float]:
        """Return the values in order of step number; steps without this value are left out."""
        return [record[name] for _, record in sorted(self.by_step.items()) if name in record]

    def last(self, name: str) -> float | None:
        """Return the value of the last step that has it; None: no step has."""
        values = self.values(name)
        return values[-1] if values else None

    def add(self, record: dict[str, Any]) -> None:
        """One line of the journal."""
        step = record["step"]
        if not isinstance(step, int) or not 0 <= step < 1 << 63:
            raise ValueError(f"the step {str(step)[:40]} is no number of a step")
        late = bool(record.get("late"))  # more values of a step that has its line
        values = {
            name: value for name, value in record.items() if name not in ("step", "late") and _is_value(value)
        }
        self.by_step[step] = {**(self.by_step.get(step, {}) if late else {}), **values}
        self.lines += not late
        for name, value in values.items():
            self.totals[name] = self.totals.get(name, 0) + value
        if record.get("decisions"):
            self.decisions.append((step, "\n".join(map(str, record["decisions"]))))
        for wait in record.get("load_waits", ()):
            name = str(wait["module"])
            self.waits[name] = self.waits.get(name, 0.0) + _value(wait["seconds"])
        if "modules" in record:
            self.modules_step = step
            self.modules = {
                str(used["module"]): ModuleUse(
                    _value(used["offloaded_bytes"]),
                    _value(used["kept_bytes"]),
                    _value(used["load_wait_seconds"]),
                )
                for used in record["modules"]
            }


@dataclass
class JournaledRun:
    """All journals below one directory."""

    name: str
    journals: list[RankJournal]

    @classmethod
    def read(cls, directory: Path) -> JournaledRun:
        """Reads every `rank-N.jsonl` in `directory` and below it. A last line that is still being written is left out.

        Raises:
            NoJournals: there is none, or none has a complete line yet.
            ValueError: a line is not a journal's; the message has the file and the line.
            OSError: a file cannot be read.
        """
        found = []
        for path in sorted(directory.rglob("rank-*.jsonl")):
            if match := _FILE.fullmatch(path.name):
                journal = RankJournal(int(match[1]), int(match[2] or 0))
                _fill(journal, path)
                if journal.lines:
                    found.append(journal)
        if not found:
            raise NoJournals(
                f"{directory} has no rank-N.jsonl with a complete line: give the directory of report.path, or wait for the "
                "first step"
            )
        return cls(directory.resolve().name, sorted(found, key=lambda j: (j.rank, j.engine)))

    @functools.cached_property
    def steps(self) -> list[int]:
        """Step numbers that any rank wrote, in order."""
        return sorted({step for journal in self.journals for step in journal.by_step})

    @functools.cached_property
    def names(self) -> list[str]:
        """Names of the values that any line has, in the order of the first line that has it."""
        return list(dict.fromkeys(name for journal in self.journals for name in journal.totals))

    def has(self, *names: str) -> bool:
        """Whether any of `names` is in a journal with another value than 0."""
        return any(journal.totals.get(name) for journal in self.journals for name in names)

    def over_ranks(self, name: str, how: Reduce | None = None) -> dict[int, float]:
        """The values of all ranks in one, by step.

        Args:
            how: None: as the metric is declared.
        """
        reduce = _REDUCE[how or metric_named(name).ranks]
        found: dict[int, list[float]] = {}
        for journal in self.journals:
            for step, record in journal.by_step.items():
                if name in record:
                    found.setdefault(step, []).append(record[name])
        return {step: reduce(found[step]) for step in sorted(found)}

    def last(self, name: str) -> float | None:
        """Return the last of `over_ranks`; None: no step has it."""
        found = self.over_ranks(name)
        return found[max(found)] if found else None

    def total(self, name: str) -> float:
        """Return the total of all lines, over ranks as the metric is declared."""
        values = [journal.totals[name] for journal in self.journals if name in journal.totals]
        return float(_REDUCE[metric_named(name).ranks](values)) if values else 0.0

    def waits(self) -> dict[str, float]:
        """Seconds that backward waited for loads, summed over ranks, by module, the longest first."""
        found: dict[str, float] = {}
        for journal in self.journals:
            for name, seconds in journal.waits.items():
                found[name] = found.get(name, 0.0) + seconds
        return dict(sorted(found.items(), key=lambda pair: -pair[1]))

    def modules(self) -> dict[str, ModuleUse]:
        """What each module's saved tensors did in one step, summed over ranks, in the order of their names. The step of a rank is
        the last of which its journal says so."""
        found: dict[str, ModuleUse] = {}
        for journal in self.journals:
            for name, used in journal.modules.items():
                found[name] = found.get(name, ModuleUse()) + used
        return dict(sorted(found.items(), key=lambda pair: _numbers_as_such(pair[0])))

    def dimensions(self) -> list[str]:
        """Parallel dimensions that sent anything."""
        matches = map(_TRAFFIC.fullmatch, self.names)
        return [match["dimension"] for match in matches if match and self.has(match[0])]


def _is_value(value: Any) -> bool:
    """Whether it is a number that can be counted with. NaN is none."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= _LARGEST


def _value(value: Any) -> float:
    if not _is_value(value):
        raise ValueError(f"{str(value)[:40]} is no finite number")
    return float(value)


def _numbers_as_such(name: str) -> list[tuple[int, str]]:
    """Return a key that puts "layers.10" behind "layers.9"."""
    return [(len(part) if part.isdecimal() else 0, part) for part in re.split(r"(\d+)", name)]


def _fill(journal: RankJournal, path: Path) -> None:
    if not path.is_file():
        raise ValueError(f"{path} is no regular file: remove it, or give another directory")
    text = path.read_text(encoding="utf-8", errors="replace")
    complete = text[: text.rfind("\n") + 1]
    try:
        for number, record in enumerate(read_lines(complete.split("\n")), start=1):
            try:
                journal.add(record)
            except (KeyError, TypeError, ValueError) as error:
                raise ValueError(f"line {number} is not one of a journal ({error!r})") from error
    except ValueError as error:
        raise ValueError(f"{path}, {error}: remove the line, or give another directory") from error


@functools.cache
def metric_named(name: str) -> Metric:
    """How `name` was declared, with or without a prefix such as "comm/dp". What no set of SSDTrain declares has its unit by its
    ending, and is a gauge."""
    metric = declared_metric(name)
    if metric is not None:
        return metric
    unit = next((unit for unit in (Unit.BYTES, Unit.SECONDS) if name.endswith(unit.value)), Unit.COUNT)
    return Metric(name, unit, cumulative=False, ranks=Reduce.MAX, label="")


def declared_metric(name: str) -> Metric | None:
    """The metric of SSDTrain with this name; None: a value of the training script, or of somebody else's feature."""
    match = _DECLARED.fullmatch(name)
    if match is None:
        return None
    metrics = (metric for metric in _declared() if metric.name == match["own"])
    return next((metric.under(match["prefix"] or "") for metric in metrics), None)


def _declared() -> Iterator[Metric]:
    for kind in MetricSet.__subclasses__():
        if kind.__module__.startswith("ssdtrain."):
            yield from kind.declared()
