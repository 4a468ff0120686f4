"""What of DeepSpeed compressed inputs of linear layers do not go with."""

from __future__ import annotations

from typing import Any

from ssdtrain.config import ConfigError, Problem
from ssdtrain_ds import _compat, _compat_compact
from ssdtrain_ds.block import BLOCK

__all__ = ["check_compact"]


def check_compact(engine: Any) -> None:
    """Raises ConfigError: layers of the engine's model cannot be compressed, and would be left whole without a word."""
    if not _compat.is_pipeline(engine) and engine.dp_world_size > 1:
        why = (
            f"meets data parallelism over {engine.dp_world_size} ranks without a pipeline, where training was not shown to "
            "equal that of one process: it is not in this version"
        )
        allowed = "leaving the compact section out, or a pipeline"
        raise ConfigError([Problem(f"{BLOCK}.compact", "compact", why, allowed)])
    found = _compat_compact.tensor_parallel_layers(engine.module)
    if found:
        why = (
            f"meets layers that DeepSpeed's AutoTP divides among ranks ({found[0]} and {len(found) - 1} more); "
            "compressing their inputs is not in this version"
        )
        allowed = "leaving the compact section out, or a config without tensor_parallel"
        raise ConfigError([Problem(f"{BLOCK}.compact", "compact", why, allowed)])
