"""accelerate and the value "auto" inside of the block.

accelerate fills each "auto" of a DeepSpeed config from the Trainer's arguments and raises for one that it knows nothing of; the
block says "auto" where a key is left out. Its plugin goes through the config section by section: it is kept out of ours.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

from ssdtrain_ds.autoload import after_import
from ssdtrain_ds.block import BLOCK

__all__ = ["install", "uninstall"]

_MODULE = "accelerate.utils.dataclasses"
_PLUGIN = "DeepSpeedPlugin"
_METHOD = "deepspeed_config_process"
_PLAIN = "_ssdtrain_plain"


def install() -> None:
    """accelerate leaves the block alone; where it was not imported yet, as soon as it is. Idempotent."""
    after_import(_MODULE, _patch)


def uninstall() -> None:
    """Undo `install`."""
    plugin = _plugin()
    plain = getattr(getattr(plugin, _METHOD, None), _PLAIN, None)
    if plain is not None:
        setattr(plugin, _METHOD, plain)


def _plugin() -> Any:
    return getattr(sys.modules.get(_MODULE), _PLUGIN, None)


def _patch() -> None:
    plugin = _plugin()
    plain = getattr(plugin, _METHOD, None)
    if plain is None or hasattr(plain, _PLAIN):
        return  # one without this method does not read "auto" either

    @functools.wraps(plain)
    def process(self: Any, prefix: str = "", *args: Any, **kwargs: Any) -> Any:
        if prefix == f"{BLOCK}.":
            return None
        return plain(self, prefix, *args, **kwargs)

    setattr(process, _PLAIN, plain)
    setattr(plugin, _METHOD, process)
