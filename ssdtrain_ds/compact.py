"""Compressed inputs of linear layers in DeepSpeed: ZeRO-3's functions around modules, and what does not go together."""

from __future__ import annotations

from typing import Any

from ssdtrain.compact import register_passing
from ssdtrain.config import ConfigError, Problem
from ssdtrain_ds import _compat_compact
from ssdtrain_ds.block import BLOCK

__all__ = ["check_compact", "follow_zero"]


def follow_zero() -> None:
    """Look through what ZeRO-3 puts around the inputs and outputs of modules. Idempotent."""
    register_passing(*_compat_compact.PASSING_FUNCTIONS)


def check_compact(engine: Any, mode: str) -> None:
    """Raises ConfigError: the mode is not built for DeepSpeed, or layers of the engine's model cannot be compressed."""
    if mode == "lowrank":
        why = "replaces the optimizer's parameters, which is not built for DeepSpeed in this version"
        allowed = '"reconstruct" or "quant"'
        raise ConfigError([Problem(f"{BLOCK}.compact.mode", mode, why, allowed)])
    found = _compat_compact.tensor_parallel_layers(engine.module)
    if found:
        why = (
            f"meets layers that DeepSpeed's AutoTP divides among ranks ({found[0]} and {len(found) - 1} more); "
            "compressing their inputs is not in this version"
        )
        allowed = "leaving the compact section out, or a config without tensor_parallel"
        raise ConfigError([Problem(f"{BLOCK}.compact", "compact", why, allowed)])
