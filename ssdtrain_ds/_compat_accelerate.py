"""accelerate and the value "auto" inside of the block.

accelerate fills each "auto" of a DeepSpeed config from the Trainer's arguments and raises for one that it knows nothing of; the
block says "auto" where a key is left out. Its plugin goes through the config section by section: it is kept out of ours.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

from ssdtrain.integration.patching import Patches
from ssdtrain_ds.autoload import after_import
from ssdtrain_ds.block import BLOCK

__all__ = ["install"]

_MODULE = "accelerate.utils.dataclasses"
_PLUGIN = "DeepSpeedPlugin"
_METHOD = "deepspeed_config_process"


def install(patches: Patches) -> None:
    """accelerate leaves the block alone; where it was not imported yet, as soon as it is.

    Args:
        patches: active; takes the replacement, unless it has been undone by then.
    """
    after_import(_MODULE, functools.partial(_patch, patches))


def _patch(patches: Patches) -> None:
    plugin = getattr(sys.modules[_MODULE], _PLUGIN, None)
    # A plugin without this method does not read "auto" either.
    if patches.active and hasattr(plugin, _METHOD):
        patches.replace(plugin, _METHOD, _without_block)


def _without_block(plain: Callable[..., Any]) -> Callable[..., Any]:
    def process(self: Any, prefix: str = "", *args: Any, **kwargs: Any) -> Any:
        if prefix == f"{BLOCK}.":
            return None
        return plain(self, prefix, *args, **kwargs)

    return process
