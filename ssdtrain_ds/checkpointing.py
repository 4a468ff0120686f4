"""DeepSpeed's activation checkpointing: what it keeps for the recomputation leaves memory too.

Note: [Where DeepSpeed keeps a block's inputs]
`deepspeed.checkpointing.checkpoint` and `non_reentrant_checkpoint` do not save their inputs by autograd's means, where hooks
would see them, but hold them: the first on its autograd function's context, the second in a closure. A held tensor whose
bytes are elsewhere has an attribute `saved_data`, of which the recomputation takes `saved_data.to(device)`: that is how
partitioned activations work upstream. So a held input is exchanged for an empty tensor whose `saved_data` reads it back, and
a partition for something that reads the partition back. With `cpu_checkpointing` DeepSpeed asks for an engine that takes and
returns inputs; it is given ours, whose tier is the SSD.

Before 0.19 there is no such engine, and `cpu_checkpointing` copies inputs to the host itself: then the copy is left out and the
inputs are held like any others. Nor does the second function read `saved_data` there: it is read where that function makes
the inputs of the recomputation.

Note: [Function objects stay]
Users pass these functions around, PipelineModule has one as a default argument, and DeepSpeed compares them by identity. They
are therefore not replaced: some names that they look up in their module are, while an engine with a runtime exists.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ssdtrain.config import CheckpointConfig
from ssdtrain.integration.patching import Patches
from ssdtrain.offload.checkpoint import Checkpoint
from ssdtrain.offload.engine import OffloadEngine
from ssdtrain.offload.hooks import HeldTensor, hold
from ssdtrain.offload.tensors.tape import Tape
from ssdtrain_ds import _compat

RANDOM_STATE = "deepspeed"
"""The name of the generators of DeepSpeed's model parallelism."""

RECOMPUTING = (_compat.checkpointing.__name__,)
"""Modules whose saved-tensor hooks recompute."""


class _ThreadState(threading.local):
    """State of the forwards that this thread is in: the innermost that offloads, what `checkpoint` calls in the innermost; and
    how many of DeepSpeed's reentrant checkpoints are running."""

    forward: _RecordedForward | None = None
    function: Checkpoint | None = None
    reentrant = 0


class _RecordedForward:
    """The engine and the tape of one forward. Also DeepSpeed's engine for cpu_checkpointing."""

    def __init__(self, engine: OffloadEngine, tape: Tape) -> None:
        self.engine = engine
        self.tape = tape

    def hold(self, tensor: torch.Tensor) -> _Held | None:
        """Offload `tensor`; None if it has to stay."""
        held = hold(self.engine, self.tape, tensor)
        return None if held is None else _Held(held.engine, held.handle)

    # What DeepSpeed calls on its engine for cpu_checkpointing.

    def offload_input(self, tensor: torch.Tensor) -> _Held | None:
        return self.hold(tensor)

    def restore_input(self, held: _Held) -> torch.Tensor:
        return held.to(None)

    def reset(self) -> None:
        """Nothing to do: what is held ends with the graph that holds it."""


class _Held(HeldTensor):
    """An offloaded input, with the one method that DeepSpeed calls on the `saved_data` of a tensor."""

    __slots__ = ()

    def to(self, _: Any) -> torch.Tensor:
        """The input, on the device it came from.

        Raises:
            RuntimeError: it was modified in place since the block's forward; and what `OffloadEngine.unpack` raises.
        """
        try:
            return self.value()
        except RuntimeError as error:
            if not self.handle.region.changed():
                raise
            dtype, size = self.handle.geometry[:2]
            raise RuntimeError(
                "an input of a block under DeepSpeed's activation checkpointing has been modified by an inplace operation "
                f"after the block's forward: [{dtype} {list(size)}]. The block would be recomputed from the new values, and its "
                "gradients be wrong. Write into another tensor (x = x + 1 for x += 1), or give the block x.clone()"
            ) from error


_state = _ThreadState()


@contextmanager
def recording(function: Checkpoint, engine: OffloadEngine | None, tape: Tape | None) -> Iterator[None]:
    """Inside, `ssdtrain_ds.checkpoint` calls `function`, and what DeepSpeed's checkpoint functions keep goes to `tape`."""
    outer = _state.function, _state.forward
    _state.function = function
    if engine is not None and tape is not None:
        _state.forward = _RecordedForward(engine, tape)
    try:
        yield
    finally:
        _state.function, _state.forward = outer


_default = Checkpoint()


def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Recompute `function` in backward and offload its inputs; `checkpoint` of the `ssdtrain` block has the defaults.

    May be given to a PipelineModule as `activation_checkpoint_func`. The arguments are those of
    `torch.utils.checkpoint.checkpoint`. Outside of an engine's forward nothing is offloaded and torch's defaults hold, except
    that it is not reentrant.
    """
    return (_state.function or _default)(function, *args, **kwargs)


def function_for(config: CheckpointConfig) -> Checkpoint:
    """The checkpoint function of one engine, which also restores the generators of DeepSpeed's model parallelism."""
    made = Checkpoint(config)
    made.register_tracker(RANDOM_STATE, _compat.rng_tracker)
    return made


_default.register_tracker(RANDOM_STATE, _compat.rng_tracker)


def spilled(forward: _RecordedForward, tensors: tuple[Any, ...]) -> tuple[Any, ...]:
    """What DeepSpeed is to hold instead of `tensors`. See Note: [Where DeepSpeed keeps a block's inputs]."""
    made: dict[int, torch.Tensor] = {}
    return tuple(_spill(forward, tensor, made) for tensor in tensors)


def _spill(forward: _RecordedForward, tensor: Any, made: dict[int, torch.Tensor]) -> Any:
    if not isinstance(tensor, torch.Tensor) or _compat.is_with_an_engine(tensor):
        return tensor
    partition = _compat.partition_of(tensor)
    if partition is not None:
        held = forward.hold(partition) if isinstance(partition, torch.Tensor) else None
        if held is not None:
            _compat.set_partition(tensor, held)
        return tensor
    if id(tensor) in made:
        return made[id(tensor)]
    held = forward.hold(tensor) if tensor.is_floating_point() else None
    if held is None:
        return tensor
    stub = torch.empty(0, dtype=tensor.dtype, device=tensor.device, requires_grad=tensor.requires_grad)
    _compat.set_partition(stub, held)
    made[id(tensor)] = stub
    return stub


def _reentrant_function(plain: Any) -> Any:
    """What stands where DeepSpeed's `checkpoint` looks up its autograd function: one derived from it, as others may derive
    theirs from this."""

    class CheckpointFunction(plain):  # type: ignore[misc]
        @classmethod
        def apply(cls, function: Callable[..., Any], all_outputs: list[Any], *args: Any) -> Any:
            # Autograd's node is of DeepSpeed's own function, unless another was derived from it.
            apply = plain.apply if cls is CheckpointFunction else super().apply
            forward = _state.forward
            if forward is None:
                return apply(function, all_outputs, *args)
            _state.reentrant += 1
            try:
                outputs = apply(function, all_outputs, *args)
            finally:
                _state.reentrant -= 1
            for output in all_outputs:
                node: Any = output.grad_fn if isinstance(output, torch.Tensor) else None
                held = _compat.get_saved_inputs(node)
                if held is not None:
                    _compat.set_saved_inputs(node, spilled(forward, held))
                    break
            return outputs

    for name in ("__module__", "__qualname__", "__doc__"):
        setattr(CheckpointFunction, name, getattr(plain, name))
    return CheckpointFunction


def _get_cpu_offload_engine(plain: Callable[[], Any]) -> Callable[[], Any]:
    def get_cpu_offload_engine() -> Any:
        return _forward_for_cpu_checkpoints() or plain()

    return get_cpu_offload_engine


def _copy_to_device(plain: Callable[..., Any]) -> Callable[..., Any]:
    def copy_to_device(item: Any, device: Any, criterion_func: Any) -> Any:
        spills = device == torch.device("cpu") and _forward_for_cpu_checkpoints() is not None
        return item if spills else plain(item, device, criterion_func)

    return copy_to_device


def _empty_inputs(plain: Callable[..., Any]) -> Callable[..., Any]:
    def get_cpu_activations_for_backward(args: Any, inputs: Any) -> list[Any]:
        forward = _forward_for_cpu_checkpoints()
        return list(plain(args, inputs) if forward is None else spilled(forward, tuple(args)))

    return get_cpu_activations_for_backward


def _forward_for_cpu_checkpoints() -> _RecordedForward | None:
    """The forward that takes the inputs of cpu_checkpointing; None: they go to the host."""
    return _state.forward if _compat.asks_for_offload_engine() else None


def _extract_tensors(plain: Callable[..., Any]) -> Callable[..., Any]:
    def extract_tensors(all_objects: Any) -> Any:
        tensors, others, flags = plain(all_objects=all_objects)
        # Of the two checkpoint functions only the one that is not reentrant calls this where a forward of ours runs and no
        # reentrant one: with what it is about to hold.
        if _state.forward is not None and not _state.reentrant and torch.is_grad_enabled():
            tensors = spilled(_state.forward, tuple(tensors))
        return tensors, others, flags

    return extract_tensors


def _detach(plain: Callable[..., Any]) -> Callable[..., Any]:
    def detach_variable(inputs: Any, device: Any = None) -> Any:
        return plain(tuple(_read_back(tensor) for tensor in inputs), device)

    return detach_variable


def _read_back(tensor: Any) -> Any:
    held = _compat.partition_of(tensor) if isinstance(tensor, torch.Tensor) else None
    if not isinstance(held, _Held):
        return tensor
    return held.to(None).detach().requires_grad_(tensor.requires_grad)


# What stands where DeepSpeed's checkpoint functions look up a name; made from what stood there.
_REPLACEMENTS: dict[str, Callable[[Any], Any]] = {
    _compat.CHECKPOINT_FUNCTION: _reentrant_function,
    _compat.EXTRACT_TENSORS: _extract_tensors,
    _compat.CPU_CHECKPOINTING_ENGINE: _get_cpu_offload_engine,
    _compat.COPY_TO_DEVICE: _copy_to_device,
    _compat.EMPTY_INPUTS: _empty_inputs,
    _compat.DETACH: _detach,
}


def patch_checkpointing(patches: Patches) -> None:
    """Make DeepSpeed's checkpoint functions offload, until `patches` are undone."""
    for name in _compat.replaced_names():
        patches.replace(_compat.checkpointing, name, _REPLACEMENTS[name])
