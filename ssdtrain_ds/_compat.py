"""Every name of DeepSpeed that this package relies on, checked at install.

Run with DeepSpeed 0.19.8. Other versions are tried with a warning; a missing name is refused by its name.
"""

from __future__ import annotations

import logging
from typing import Any

import deepspeed
import torch
from deepspeed.runtime.engine import DeepSpeedEngine

__all__ = ["TESTED", "DeepSpeedEngine", "check", "is_pipeline", "is_zero_parameter", "parameter_dict"]

logger = logging.getLogger("ssdtrain")

TESTED = ("0.19.8",)

_METHODS = ("forward", "backward", "step", "destroy", "is_gradient_accumulation_boundary")


def check() -> None:
    """Refuse a DeepSpeed that lacks a name this package needs; warn of a version that was never run.

    Raises:
        ImportError: names what is missing.
    """
    missing = [name for name in _METHODS if not callable(getattr(DeepSpeedEngine, name, None))]
    if missing:
        raise ImportError(
            f"DeepSpeed {deepspeed.__version__} has no DeepSpeedEngine.{', .'.join(missing)}: "
            f"ssdtrain_ds was run with {', '.join(TESTED)}"
        )
    version = deepspeed.__version__.split("+")[0]
    if version not in TESTED:
        logger.warning(
            "DeepSpeed %s was never run with this version of ssdtrain_ds (tested: %s)",
            version,
            ", ".join(TESTED),
        )


def parameter_dict(config_class: Any) -> dict[str, Any]:
    """The config as the user wrote it, whether it came as a dict, a file or base64.

    Raises:
        ImportError: this DeepSpeed keeps it elsewhere.
    """
    found = getattr(config_class, "_param_dict", None)
    if not isinstance(found, dict):
        raise ImportError(
            f"DeepSpeed {deepspeed.__version__} has no DeepSpeedConfig._param_dict: ssdtrain_ds was run with {', '.join(TESTED)}"
        )
    return found


def is_pipeline(engine: DeepSpeedEngine) -> bool:
    """True for a PipelineEngine, whose schedule bypasses the engine's forward."""
    from deepspeed.runtime.pipe.engine import PipelineEngine

    return isinstance(engine, PipelineEngine)


def is_zero_parameter(tensor: torch.Tensor) -> bool:
    """True for a parameter that ZeRO-3 partitions, and for a view of one: its gathered storage is DeepSpeed's to free."""
    base = tensor._base
    return hasattr(tensor, "ds_id") or (base is not None and hasattr(base, "ds_id"))
