"""What a forward saves, counted by plain autograd hooks that know nothing of the engine."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


class Held:
    """What autograd holds for a saved tensor, and lets go when it needs it no more."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


class Count:
    """Bytes that autograd holds when a `forward_step` of megatron-core is over, each byte of a storage once, by call.

    Left out: storages of parameters and buffers, tensors below `min_bytes`, storages that Megatron has emptied by then. A view
    with gaps counts its whole storage.
    """

    def __init__(self, modules: Iterable[torch.nn.Module], min_bytes: int) -> None:
        self.modules = list(modules)
        self.min_bytes = min_bytes
        self.calls: list[tuple[int, int, int]] = []
        """(chunk, microbatch, bytes)."""
        self._outputs: dict[
            int, int
        ] = {}  # the output of a forward that waits for its backward: the forward's number
        self._at_once: list[int] = []
        self._backward_before = False  # the event before was a backward

    @contextmanager
    def counting(self, schedules: Any) -> Iterator[Count]:
        forward, backward = schedules.forward_step, schedules.backward_step
        schedules.forward_step = self._counted(forward)
        schedules.backward_step = self._noted(backward)
        try:
            yield self
        finally:
            schedules.forward_step, schedules.backward_step = forward, backward

    def followed_at_once(self, per_step: int) -> list[int]:
        """Forwards of one step, by number, whose own backward came next while other microbatches waited for theirs."""
        return [number for number in self._at_once if number < per_step]

    def _noted(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(plain)
        def backward_step(input_tensor: Any, output_tensor: Any, *args: Any, **kwargs: Any) -> Any:
            output = output_tensor[0] if isinstance(output_tensor, list) else output_tensor
            number = self._outputs.pop(id(output))
            if number == len(self.calls) - 1 and self._outputs and not self._backward_before:
                self._at_once.append(number)
            self._backward_before = True
            return plain(input_tensor, output_tensor, *args, **kwargs)

        return backward_step

    def _counted(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(plain)
        def forward_step(*args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                return plain(*args, **kwargs)
            saved: list[tuple[weakref.ref[Held], torch.Tensor]] = []

            def pack(tensor: torch.Tensor) -> Held:
                held = Held(tensor if tensor.is_leaf else tensor.detach())
                # The alias keeps the storage, so that no other takes its place meanwhile.
                saved.append((weakref.ref(held), tensor.detach()))
                return held

            with torch.autograd.graph.saved_tensors_hooks(pack, lambda held: held.tensor):
                result = plain(*args, **kwargs)
            model = args[2] if len(args) > 2 else kwargs["model"]
            tensors = [tensor for held, tensor in saved if held() is not None]
            call = self.modules.index(model), kwargs["current_microbatch"], self._bytes(tensors)
            self.calls.append(call)
            output = result[0][0] if isinstance(result[0], list) else result[0]
            self._outputs[id(output)] = len(self.calls) - 1
            self._backward_before = False
            return result

        return forward_step

    def _bytes(self, tensors: list[torch.Tensor]) -> int:
        fixed = {
            tensor.untyped_storage()._cdata
            for module in self.modules
            for tensor in (*torch.nn.Module.parameters(module), *torch.nn.Module.buffers(module))
        }
        by_storage: dict[int, list[tuple[int, int]]] = {}
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage._cdata not in fixed and storage.nbytes() and tensor.nbytes >= self.min_bytes:
                by_storage.setdefault(storage._cdata, []).append(self._extent(tensor))
        return sum(map(_union, by_storage.values()))

    def _extent(self, tensor: torch.Tensor) -> tuple[int, int]:
        size = tensor.itemsize
        if not tensor.is_contiguous():
            span = 1 + sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
            own = 1
            for n, stride in zip(tensor.shape, tensor.stride(), strict=True):
                own *= n if stride else 1
            if own < span:
                return 0, tensor.untyped_storage().nbytes()
            if own * size < self.min_bytes:
                return 0, 0
            return tensor.storage_offset() * size, (tensor.storage_offset() + span) * size
        return tensor.storage_offset() * size, (tensor.storage_offset() + tensor.numel()) * size


def _union(extents: list[tuple[int, int]]) -> int:
    total = reached = 0
    for first, last in sorted(extents):
        total += max(0, last - max(first, reached))
        reached = max(reached, last)
    return total
