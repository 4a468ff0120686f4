"""accelerate and the value "auto" inside of the block.

accelerate fills each "auto" of a DeepSpeed config from the Trainer's arguments and raises for one that it knows nothing of; the
block says "auto" where a key is left out. Its plugin goes through the config section by section: it is kept out of ours.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

from ssdtrain.integration.patching import Patches
from ssdtrain_ds.block import BLOCK_KEY

_MODULE = "accelerate.utils.dataclasses"
_PLUGIN = "DeepSpeedPlugin"
_METHOD = "deepspeed_config_process"


def install(patches: Patches) -> None:
    """Let accelerate leave the block alone; where it was not imported yet, as soon as it is.

    Args:
        patches: active; takes the replacement, unless it has been undone by then.
    """
    patch = functools.partial(_patch, patches)
    if _MODULE in sys.modules:
        patch()
    elif not any(isinstance(finder, _ImportWatch) for finder in sys.meta_path):
        sys.meta_path.insert(0, _ImportWatch(patch))


class _ImportWatch(importlib.abc.MetaPathFinder):
    """Calls `then` once the module has been imported, which the other finders find."""

    def __init__(self, then: Callable[[], None]) -> None:
        self._then = then

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != _MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                self._then()

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _patch(patches: Patches) -> None:
    plugin = getattr(sys.modules[_MODULE], _PLUGIN, None)
    # A plugin without this method does not read "auto" either.
    if patches.active and hasattr(plugin, _METHOD):
        patches.replace(plugin, _METHOD, _without_block)


def _without_block(plain: Callable[..., Any]) -> Callable[..., Any]:
    def process(self: Any, prefix: str = "", *args: Any, **kwargs: Any) -> Any:
        if prefix == f"{BLOCK_KEY}.":
            return None
        return plain(self, prefix, *args, **kwargs)

    return process
