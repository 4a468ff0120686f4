"""ZeRO-3: the storages that parameters are gathered into while a module runs.

They are not activations: DeepSpeed frees them after the module's forward and gathers them again for its backward. The
parameter itself and its views are known by their `ds_id`. This finds what has lost it: `weight.detach()`, `weight.data`, and
other parameters gathered into the same flat buffer.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

__all__ = ["GatheredStorages"]


class GatheredStorages:
    """Notes the storages of a module's own parameters at the begin of each of its forwards.

    Args:
        model: partitioned by ZeRO-3 already, so that these hooks run after the gathering ones.
    """

    def __init__(self, model: nn.Module) -> None:
        self._known: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._hooks = [
            module.register_forward_pre_hook(self._note)
            for module in model.modules()
            if any(parameter is not None for parameter in module._parameters.values())
        ]

    def _note(self, module: nn.Module, _: Any) -> None:
        for parameter in module._parameters.values():
            if parameter is not None and parameter.numel():
                storage = parameter.untyped_storage()
                self._known[id(storage)] = weakref.ref(storage, self._forget(id(storage)))

    def _forget(self, key: int) -> Callable[[weakref.ref[torch.UntypedStorage]], None]:
        def forget(reference: weakref.ref[torch.UntypedStorage]) -> None:
            if self._known.get(key) is reference:
                del self._known[key]

        return forget

    def __contains__(self, tensor: torch.Tensor) -> bool:
        if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided:
            return False
        storage = tensor.untyped_storage()
        known = self._known.get(id(storage))
        return known is not None and known() is storage

    def remove(self) -> None:
        """Take the hooks off the model."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._known.clear()
