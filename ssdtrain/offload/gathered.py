"""Storages that parameters are gathered into while a module runs.

They are not activations: a framework that shards parameters frees them after the module's forward and fills them again for its
backward. The parameter itself and its views are known by their class. This finds what has lost it: `weight.detach()`,
`weight.data`, and whatever else lies in the same storage.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

__all__ = ["Gathered", "GatheredStorages"]

Gathered = Callable[[], list[torch.Tensor]]
"""Returns the parameters that are gathered now."""


def _storages_of(tensor: torch.Tensor) -> Iterator[torch.UntypedStorage]:
    """The storages of a tensor that has elements, or of the tensors that one of a wrapper class (DTensor) is made of."""
    if is_traceable_wrapper_subclass(tensor):
        names, _ = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
        for name in names:
            yield from _storages_of(getattr(tensor, name))
    elif tensor.layout is torch.strided and tensor.numel():
        yield tensor.untyped_storage()


class GatheredStorages:
    """Notes the storages of gathered parameters at the begin of forwards; `in` is true for a tensor that lies in one.

    Args:
        points: modules before whose forwards parameters are gathered, each with what then returns these parameters. The
            framework's own hooks have to be on the modules already, so that those of this class run after them.
        unannounced: what returns parameters that may be gathered without such a forward: it is asked for every tensor that is
            in no known storage.
    """

    def __init__(self, points: Mapping[nn.Module, Gathered], unannounced: Gathered | None = None) -> None:
        self._known: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._points = dict(points)
        self._unannounced = unannounced
        # The frameworks' own hooks are outside of what torch.compile compiles as well.
        hook = torch.compiler.disable(self._before_forward) if points else None
        self._hooks = [module.register_forward_pre_hook(hook) for module in points if hook is not None]

    def _before_forward(self, module: nn.Module, _: Any) -> None:
        if module in self._points:
            self._note(self._points[module]())

    def _note(self, parameters: Iterable[torch.Tensor]) -> None:
        for parameter in parameters:
            for storage in _storages_of(parameter):
                key = id(storage)
                known = self._known.get(key)
                if known is None or known() is not storage:
                    self._known[key] = weakref.ref(storage, self._forget(key))

    def _forget(self, key: int) -> Callable[[weakref.ref[torch.UntypedStorage]], None]:
        def forget(reference: weakref.ref[torch.UntypedStorage]) -> None:
            if self._known.get(key) is reference:
                del self._known[key]

        return forget

    def __contains__(self, tensor: torch.Tensor) -> bool:
        if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided:
            return False
        storage = tensor.untyped_storage()
        if self._is_known(storage):
            return True
        if self._unannounced is None:
            return False
        self._note(self._unannounced())
        return self._is_known(storage)

    def _is_known(self, storage: torch.UntypedStorage) -> bool:
        known = self._known.get(id(storage))
        return known is not None and known() is storage

    def remove(self) -> None:
        """Take the hooks off the modules."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._points.clear()
        self._known.clear()
        self._unannounced = None
