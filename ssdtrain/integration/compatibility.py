"""What an adapter needs of its framework: names that must be there, versions that were tested, and keys of the framework's config
that do not go together with a section of ours. One table serves the check at start and the docs."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ssdtrain.config import Config, ConfigError, ConfigIssue

logger = logging.getLogger("ssdtrain")

_ABSENT = object()


def missing_names(needed: Iterable[tuple[Any, Sequence[str]]]) -> list[str]:
    """The names that modules or classes lack, as "holder.name".

    Args:
        needed: (module or class, the attributes that must be there).
    """
    return [
        f"{getattr(holder, '__qualname__', holder.__name__)}.{name}"
        for holder, names in needed
        for name in names
        if getattr(holder, name, None) is None
    ]


def check_nothing_missing(
    framework: str, version: str, missing: Sequence[str], tested: Sequence[str]
) -> None:
    """Raises ImportError: names what is `missing`, and the versions that were `tested`."""
    if missing:
        raise ImportError(
            f"{framework} {version} has no {', '.join(missing)}: ssdtrain was run with {', '.join(tested)}"
        )


def warn_if_untested(
    framework: str, version: str, tested: Sequence[str], tested_in_part: Sequence[str] = (), page: str = ""
) -> None:
    """Log a warning about a version of `framework` that the tests were not run with, or not all of them.

    Args:
        page: of the docs, which has the tests that were run with the versions `tested_in_part`.
    """
    release = version.split("+")[0]
    if release not in tested:
        how = f"run in part ({page})" if release in tested_in_part else "never run"
        logger.warning(
            "%s %s was %s with this version of ssdtrain (tested: %s)",
            framework,
            release,
            how,
            ", ".join(tested),
        )


@dataclass(frozen=True)
class FrameworkConflict:
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
    applies: Callable[[Any, Config, Mapping[str, Any]], bool] = lambda value, *_: bool(value)


def conflicts(
    table: Iterable[FrameworkConflict],
    config: Config,
    written: Mapping[str, Any],
    named: Callable[[str], str] = str,
) -> Iterator[ConfigIssue]:
    """The rows of kind "error" that apply to the framework's config; those of kind "warning" are logged.

    Args:
        config: ours, active.
        written: the framework's whole config.
        named: what users call a key.
    """
    for row in table:
        value = _at(written, row.key)
        if getattr(config, row.section) is None or value is _ABSENT:
            continue
        if row.applies(value, config, written):
            problem = ConfigIssue(named(row.key), value, row.why, row.remedy)
            if row.kind == "error":
                yield problem
            else:
                logger.warning("%s", problem)


def check_conflicts(table: Iterable[FrameworkConflict], config: Config, written: Mapping[str, Any]) -> None:
    """Raises ConfigError: names the framework's keys, their values and the remedies of all `conflicts`."""
    problems = list(conflicts(table, config, written))
    if problems:
        raise ConfigError(problems)


def conflict_table(table: Iterable[FrameworkConflict], named: Callable[[str], str] = str) -> str:
    """The table in Markdown, for docs."""
    lines = ["| key | with | | why | instead |", "|---|---|---|---|---|"]
    lines += [
        f"| `{named(row.key)}` | `{row.section}` | {row.kind} | {row.why} | {row.remedy} |" for row in table
    ]
    return "\n".join(lines) + "\n"


def _at(written: Mapping[str, Any], key: str) -> Any:
    found: Any = written
    for name in key.split("."):
        if not isinstance(found, Mapping) or name not in found:
            return _ABSENT
        found = found[name]
    return found
