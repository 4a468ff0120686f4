"""Checks the place of the block in a DeepSpeed config. DeepSpeed ignores unknown keys: a block under a misspelled
name, or inside of another section, would have no effect."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ssdtrain.config import ConfigError, ConfigIssue
from ssdtrain.config.files import blocks_inside
from ssdtrain.config.similar import resembles

BLOCK_KEY = "ssdtrain"


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
            problems += blocks_inside(value, str(key))
    if problems:
        raise ConfigError(problems)
