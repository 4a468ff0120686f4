"""Checks the place of the block in a DeepSpeed config. DeepSpeed ignores unknown keys: a block under a misspelled
name, or inside of another section, would have no effect."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ssdtrain.config import ConfigError, ConfigIssue
from ssdtrain.config.similar import resembles

__all__ = ["BLOCK_KEY", "check_place"]

BLOCK_KEY = "ssdtrain"

_DEEPEST = 16  # levels


def check_place(written: Mapping[str, Any]) -> None:
    """Check that the block is at the top level, under its own name.

    Raises:
        ConfigError: names every key that was probably meant to be the block, and its value.
    """
    problems = [
        ConfigIssue(key, value, "is under a key that is not read", f"the key {BLOCK_KEY!r}")
        for key, value in written.items()
        if isinstance(key, str) and resembles(key, BLOCK_KEY)
    ]
    for key, value in written.items():
        if key != BLOCK_KEY:
            problems += _below(value, str(key), 1)
    if problems:
        raise ConfigError(problems)


def _below(section: Any, path: str, depth: int) -> Iterator[ConfigIssue]:
    """Blocks inside of another section."""
    if not isinstance(section, Mapping) or depth > _DEEPEST:
        return
    for key, value in section.items():
        full = f"{path}.{key}"
        named = isinstance(key, str) and (key == BLOCK_KEY or resembles(key, BLOCK_KEY))
        if named and isinstance(value, Mapping):
            why = f"is inside of {path}, where it is not read"
            yield ConfigIssue(
                full, value, why, f"the key {BLOCK_KEY!r} at the top level of the DeepSpeed config"
            )
        else:
            yield from _below(value, full, depth + 1)
