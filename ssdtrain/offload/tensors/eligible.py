"""Which saved tensors may leave memory.

Note: [What must not move]

- Parameters and buffers, and every view of one: they are not activations, and they stay in memory anyway. A view is found
  by its storage where the model was registered (of a quantised weight by those of its parts), by `_base` otherwise (ZeRO-3
  hands out `W.t()` of a gathered parameter whose storage cannot be registered in advance).
- The copy that autocast makes of a parameter: it lives in autocast's cache as long as the region does. Its `grad_fn` (or
  that of its base) is a `ToCopyBackward0` whose next function accumulates into a Parameter.
- Tensors of classes the engine does not know, and tensors whose bytes alone do not say their value: conjugate or negative
  bit, the zero tangents of forward-mode AD, sparse, quantised, nested, fake, functional, functorch-wrapped.
- Memory that torch did not allocate, or that it shares with NumPy (`storage.resizable()` is false): its owner holds it anyway,
  and may write it without a sign on the version counter. Also the outputs of CUDA graphs, which lie in the graph's pool.
- Memory that is shared until it is written (`torch._lazy_clone`): asking for its address copies it.
- Storages that a framework frees and fills again by itself (`storage.resize_(0)`): those that an adapter names (`add_exclusion`,
  `add_freed_function`), and what is free when it is saved. Freed memory must not be read by a store, and nothing
  could be noticed of it later but its size.
- Small tensors: the operation costs more than the bytes are worth.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

_VIEWS = 16  # of views, at most

# Bound once: these run for every saved tensor, in the middle of a computation that has emptied the caches.
_Tensor = torch.Tensor
_Parameter = nn.Parameter
_is_copy_on_write: Callable[[torch.Tensor], bool] = torch._C._is_cow_tensor  # type: ignore[attr-defined]


class Eligibility:
    """Decides whether a saved tensor may move, from its properties alone. Whether it should is the policy's decision.

    Args:
        min_bytes: saved tensors of fewer bytes stay, and are in no region.
        device: tensors of other devices stay, also of another GPU of this process.
    """

    def __init__(self, min_bytes: int, device: torch.device) -> None:
        self.min_bytes = min_bytes
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        self.device = device if device.type == "cuda" else torch.device(device.type)
        self.moves_foreign_memory = False
        """Move also what lies in memory that torch did not allocate: for an allocator of tests."""
        self.excludes = False
        """Something was added whose tensors stay: `is_excluded` has to be asked of each."""
        self.modules: list[nn.Module] = []
        self._fixed: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._parameter_predicates: list[Callable[[torch.Tensor], bool]] = []
        self._exclusions: list[Callable[[torch.Tensor], bool]] = []
        self._freed_functions: set[str] = set()
        self._excluded: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def register(self, module: nn.Module) -> None:
        """Keep the parameters and buffers of `module`, wherever their storages move: `refresh` looks again."""
        self.modules.append(module)
        self.refresh()

    def record_from(self, nbytes: int) -> None:
        """Have saved tensors of `nbytes` and more in regions, for a policy that keeps those of less than `min_bytes` itself: a
        plan has to know what a block saves also where that is too small to leave."""
        self.min_bytes = min(self.min_bytes, nbytes)

    def add_parameter_predicate(self, predicate: Callable[[torch.Tensor], bool]) -> None:
        """Treat tensors for which `predicate` is true as parameters (classes of a framework, gathered weights)."""
        self._parameter_predicates.append(predicate)

    def add_exclusion(self, predicate: Callable[[torch.Tensor], bool]) -> None:
        """Keep tensors for which `predicate` is true (storages that a framework resizes)."""
        self._exclusions.append(predicate)
        self.excludes = True

    def add_freed_function(self, node: str) -> None:
        """Keep the outputs of an autograd function that are freed after they were saved, and views of them.

        Args:
            node: name of the class of its node, as "MyFunctionBackward".
        """
        self._freed_functions.add(node)
        self.excludes = True

    def _exclude_storage(self, storage: torch.UntypedStorage) -> None:
        self._excluded = {key: known for key, known in self._excluded.items() if known() is not None}
        self._excluded[id(storage)] = weakref.ref(storage)

    def refresh(self) -> None:
        """Collect the storages of the registered modules. Frameworks re-map them (a distributed optimizer's flat buffer).

        They are known by weak reference: an address that is used again by an activation is not mistaken for a parameter.
        """
        fixed = {}
        for tensor in self._tensors():
            for part in (tensor, *_parts(tensor)):
                if type(part.data) is torch.Tensor and part.layout is torch.strided:
                    storage = part.untyped_storage()
                    fixed[id(storage)] = weakref.ref(storage)
        self._fixed = fixed

    def _tensors(self) -> Iterable[torch.Tensor]:
        for module in self.modules:
            # By the class: a wrapper may have an attribute of that name (a list, for example).
            yield from nn.Module.parameters(module)
            yield from nn.Module.buffers(module)

    def may_move(self, tensor: torch.Tensor) -> bool:
        """True for a tensor of this device whose storage, dtype, sizes and strides say all there is to say about it, unless it is
        a parameter, a buffer, or a view or copy of one that autograd saves: these are no activations."""
        if (
            type(tensor) is not _Tensor
            or tensor.device != self.device
            or tensor.is_conj()
            or tensor.is_neg()
            or tensor.is_quantized
            or tensor.is_nested
        ):
            return False
        try:
            if _is_copy_on_write(tensor):
                return False
            storage = tensor.untyped_storage()
            if not storage.data_ptr():
                return False  # it is free
        except RuntimeError:
            return False  # sparse, a zero tangent, functional, or wrapped by functorch: it has no memory of its own
        base = tensor._base
        if base is None:
            node = tensor.grad_fn
        else:
            if type(base) is not _Tensor and _is_parameter(base):
                return False
            node = base.grad_fn
        if node is not None and type(node).__name__ == "ToCopyBackward0":
            source = node.next_functions[0][0]
            if isinstance(getattr(source, "variable", None), nn.Parameter):
                return False
        if self._fixed:
            known = self._fixed.get(id(storage))
            if known is not None and known() is storage:
                return False
        if self._parameter_predicates:
            return not any(is_one(tensor) for is_one in self._parameter_predicates)
        return True

    def is_excluded(self, tensor: torch.Tensor, storage: torch.UntypedStorage) -> bool:
        """Return True if this tensor, of `storage`, is known as one that its framework moves or frees by itself."""
        if self._excluded:
            known = self._excluded.get(id(storage))
            if known is not None and known() is storage:
                return True
        if not (storage.resizable() or self.moves_foreign_memory):
            return True
        if self._freed_functions and self._will_be_freed(tensor):
            self._exclude_storage(storage)
            return True
        if self._exclusions:
            return any(applies(tensor) for applies in self._exclusions)
        return False

    def _will_be_freed(self, tensor: torch.Tensor) -> bool:
        """Return True for the outputs of the functions whose outputs are freed, and views of them."""
        base = tensor._base
        node = (tensor if base is None else base).grad_fn
        if node is not None:
            return type(node).__name__ in self._freed_functions
        if base is None:
            return False
        # What a function returned may itself be a view of a tensor outside of the graph.
        node = tensor.grad_fn
        for _ in range(_VIEWS):
            if node is None or type(node).__name__ in self._freed_functions:
                break
            node = node.next_functions[0][0] if node.next_functions else None
        return node is not None and type(node).__name__ in self._freed_functions


def _parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return what a tensor of another class consists of: quantised weights and shards have their bytes in attributes."""
    if type(tensor) in (_Tensor, _Parameter):
        return []
    return [value for value in vars(tensor).values() if isinstance(value, _Tensor)]


def _is_parameter(tensor: torch.Tensor) -> bool:
    return type(tensor) is _Parameter or isinstance(tensor, _Parameter)  # which asks a metaclass


Gathered = Callable[[], list[torch.Tensor]]
"""Returns the parameters that are gathered now."""


def _storages_of(tensor: torch.Tensor) -> Iterator[torch.UntypedStorage]:
    """Yield the storages of a tensor that has elements, or of the tensors that one of a wrapper class (DTensor) is made of."""
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
