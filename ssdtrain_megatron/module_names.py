"""Names of Megatron's `--offload-modules` for parts of a layer, in patterns of `offload.modules`, `include` and `exclude`."""

from __future__ import annotations

from ssdtrain.config import Config
from ssdtrain_megatron import _compat


def with_plain_patterns(config: Config) -> Config:
    """Return the config with the patterns of modules in place of Megatron's names for them."""
    offload = config.offload
    if offload is None:
        return config
    rules = tuple((plain, place) for name, place in offload.modules for plain in _plain(name))
    chosen = {
        key: tuple(plain for name in getattr(offload, key) for plain in _plain(name))
        for key in ("include", "exclude")
    }
    return config.model_copy(update={"offload": offload.model_copy(update={"modules": rules, **chosen})})


def _plain(name: str) -> tuple[str, ...]:
    return _compat.OFFLOAD_MODULES.get(name, (name,))
