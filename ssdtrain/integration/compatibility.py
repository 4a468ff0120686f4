"""What in a framework's config does not go together with a section of ours: one table for the check at start and for the docs."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ssdtrain.config import Config, ConfigError, Problem

__all__ = ["Conflict", "check_conflicts", "conflict_table"]

logger = logging.getLogger("ssdtrain")

_ABSENT = object()


def _is_on(value: Any, config: Config, written: Mapping[str, Any]) -> bool:
    return bool(value)


@dataclass(frozen=True)
class Conflict:
    """A key of the framework's config beside a section of ours.

    Attributes:
        key: its full path in the framework's config, as in "zero_optimization.zenflow".
        section: the section of our config that it meets.
        kind: "error", or "warning" where it may work and was never run.
        why: what would go wrong; completes the sentence "<value> ...".
        remedy: what to write instead.
        applies: called with the key's value, our config and the framework's whole config; by default the value is on.
    """

    key: str
    section: Literal["offload", "comm"]
    kind: Literal["error", "warning"]
    why: str
    remedy: str
    applies: Callable[[Any, Config, Mapping[str, Any]], bool] = _is_on


def check_conflicts(table: Iterable[Conflict], config: Config, written: Mapping[str, Any]) -> None:
    """Look for the rows of `table` in the framework's config; log the warnings.

    Args:
        config: ours, active.
        written: the framework's whole config.

    Raises:
        ConfigError: names the framework's keys, their values and the remedies of all rows of kind "error" that apply.
    """
    problems = []
    for row in table:
        value = _at(written, row.key)
        if (
            getattr(config, row.section) is None
            or value is _ABSENT
            or not row.applies(value, config, written)
        ):
            continue
        problem = Problem(row.key, value, row.why, row.remedy)
        if row.kind == "error":
            problems.append(problem)
        else:
            logger.warning("%s", problem)
    if problems:
        raise ConfigError(problems)


def conflict_table(table: Iterable[Conflict]) -> str:
    """The table in Markdown, for docs."""
    lines = ["| key | with | | why | instead |", "|---|---|---|---|---|"]
    lines += [f"| `{row.key}` | `{row.section}` | {row.kind} | {row.why} | {row.remedy} |" for row in table]
    return "\n".join(lines) + "\n"


def _at(written: Mapping[str, Any], key: str) -> Any:
    found: Any = written
    for name in key.split("."):
        if not isinstance(found, Mapping) or name not in found:
            return _ABSENT
        found = found[name]
    return found
