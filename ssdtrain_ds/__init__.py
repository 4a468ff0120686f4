"""SSDTrain inside DeepSpeed.

A user adds `"ssdtrain": {...}` to the DeepSpeed config and calls `ssdtrain_ds.install()` once before
`deepspeed.initialize`, or starts the script with `python -m ssdtrain_ds`. This package turns DeepSpeed's events and groups
into calls on `ssdtrain.runtime.Runtime`; it holds no algorithm, and touches DeepSpeed's private names in `_compat` only.

What lives here: `attach` (which engine gets a runtime, its methods and metrics), `schedule` (pipelines), `checkpointing`
(DeepSpeed's activation checkpointing), `comm` (compressed collectives), `block` and `conflicts` (checks of the config),
`launch` (unchanged scripts). Importing the package imports neither torch nor deepspeed.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ssdtrain_ds.attach import install, runtime_of, uninstall
    from ssdtrain_ds.checkpointing import checkpoint

__all__ = ["checkpoint", "install", "runtime_of", "uninstall"]

_HOME = {
    "checkpoint": "ssdtrain_ds.checkpointing",
    "install": "ssdtrain_ds.attach",
    "runtime_of": "ssdtrain_ds.attach",
    "uninstall": "ssdtrain_ds.attach",
}


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(home), name)
