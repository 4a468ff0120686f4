"""Compressed inputs of linear layers in DeepSpeed: ZeRO-3's functions around modules, and what does not go together."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

from ssdtrain.compact import register_passing
from ssdtrain.compact.feature import CompactLinear
from ssdtrain.config import Config, ConfigError
from ssdtrain_ds import _compat
from ssdtrain_ds.block import BLOCK_KEY

logger = logging.getLogger("ssdtrain")


def follow_zero() -> None:
    """Look through what ZeRO-3 puts around the inputs and outputs of modules. Idempotent."""
    register_passing(*_compat.PASSING_FUNCTIONS)


def check_mode(config: Config) -> None:
    """Raises ConfigError: the mode is not built for DeepSpeed."""
    if config.compact is not None and config.compact.mode == "lowrank":
        why = "replaces the optimizer's parameters, which is not built for DeepSpeed in this version"
        allowed = '"reconstruct" or "quant"'
        raise ConfigError.of(f"{BLOCK_KEY}.compact.mode", config.compact.mode, why, allowed)


def check_layers(engine: Any) -> None:
    """Raises ConfigError: layers of the engine's model cannot be compressed."""
    found = _compat.tensor_parallel_layers(engine.module)
    if found:
        why = (
            f"meets layers that DeepSpeed's AutoTP divides among ranks ({found[0]} and {len(found) - 1} more); "
            "compressing their inputs is not in this version"
        )
        allowed = "leaving the compact section out, or a config without tensor_parallel"
        raise ConfigError.of(f"{BLOCK_KEY}.compact", "compact", why, allowed)


def take_over(earlier: Iterable[CompactLinear]) -> None:
    """End the compression of the `earlier` engines of a model, which were not destroyed: a run that begins anew after an error
    (Hugging Face's `auto_find_batch_size`, a notebook) calls `deepspeed.initialize` with the same model."""
    for feature in earlier:
        feature.detach()
        logger.warning(
            "deepspeed.initialize was called again with a model whose engine was not destroyed: from now on the later engine "
            "compresses the inputs of its linear layers; call engine.destroy() on the earlier one"
        )
