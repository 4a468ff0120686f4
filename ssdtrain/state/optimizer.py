"""An optimizer of torch whose step walks the chunks: its own code on its own parameters, one chunk after the other.

Note: [One chunk at a time]
    For the time of a chunk's part of the step, `param_groups` lists the parameters of that chunk alone. All else about the
    optimizer stays: its class, its state, its groups with their learning rates. The operators run on the same tensors with
    the same options as without chunks, and all of them work element by element, so the bits are the same. This holds for
    optimizers whose update of a parameter depends on that parameter alone, which all of torch's do but LBFGS.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from ssdtrain.state.chunk import Chunk, Part, Where
from ssdtrain.state.hooks import BlockHooks
from ssdtrain.state.residency import Residency
from ssdtrain.state.sizes import plain_step
from ssdtrain.state.stored import StoredTensor, is_movable
from ssdtrain.state.transfers import Transfers
from ssdtrain.storage import SpillStore

__all__ = ["ChunkedOptimizer"]

_METHODS = ("step", "state_dict", "load_state_dict")


class ChunkedOptimizer:
    """Replaces methods of an optimizer, on the instance, until `remove`.

    Args:
        optimizer: has the parameters of the chunks.
        residency, hooks: of the chunks.
        transfers, store: for optimizer state that leaves.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        residency: Residency,
        hooks: BlockHooks,
        transfers: Transfers,
        store: SpillStore,
    ) -> None:
        self.optimizer = optimizer
        self._residency = residency
        self._hooks = hooks
        self._transfers = transfers
        self._store = store
        self._owner = {parameter: chunk for chunk in residency.chunks for parameter in chunk.parameters}
        self._plain = {name: getattr(type(optimizer), name) for name in _METHODS} | {
            "step": plain_step(type(optimizer))
        }
        self._installed = {
            "step": MethodType(Optimizer.profile_hook_step(_method(self, "step")), optimizer),
            "state_dict": MethodType(_method(self, "state_dict"), optimizer),
            "load_state_dict": MethodType(_method(self, "load_state_dict"), optimizer),
        }
        for name, method in self._installed.items():
            optimizer.__dict__[name] = method
        self._others = register_optimizer_step_pre_hook(_without_owner(self._check_other))
        weakref.finalize(self, self._others.remove)

    def remove(self) -> None:
        """Give the optimizer back its methods. Its tensors are in memory."""
        self._others.remove()
        for name, method in self._installed.items():
            if self.optimizer.__dict__.get(name) is method:
                del self.optimizer.__dict__[name]
        self._installed = {}
        state = self.optimizer.state
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                if parameter in state:  # in the order of parameters, as without chunks
                    state[parameter] = state.pop(parameter)

    def _check_other(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if optimizer is self.optimizer or not self._installed:
            return
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter in self._owner:
                    name = self._owner[parameter].names[parameter]
                    raise RuntimeError(
                        f"{type(optimizer).__name__} would update {name}, whose chunk belongs to another optimizer "
                        f"({type(self.optimizer).__name__}, config section state): give the optimizer that trains the model to "
                        "ssdtrain.attach(model, config, optimizer=optimizer)"
                    )

    # The step

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """The step of the optimizer, for what stays and then chunk by chunk."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._hooks.end_abandoned()
        groups = self._groups()
        with self._only(groups[None]):
            self._plain["step"](self.optimizer)
        for chunk in self._residency.chunks:
            if any(parameter.grad is not None for parameter in chunk.parameters):
                self._step(chunk, groups[chunk])
        self._hooks.prefetch()
        return loss

    def _step(self, chunk: Chunk, parameters: Sequence[Sequence[nn.Parameter]]) -> None:
        chunk.stepping = True
        try:
            self._forget_replaced(chunk)
            self._residency.load(chunk, *chunk.parts)
            self._hooks.adopt_gradients(chunk)
            self._hooks.expect_step(chunk)
            self._hooks.prefetch(patient=True)
            for part in chunk.parts:
                self._residency.settle(part)
            with self._only(parameters):
                self._plain["step"](self.optimizer)
            for tensor in (*chunk.values.tensors, *chunk.state.tensors):
                tensor.in_slot = False
            self.adopt_state(chunk)
        finally:
            chunk.stepping = False
        self._residency.write(chunk.values)
        self._residency.release(chunk.state)
        self._residency.release(chunk.gradients)

    def _groups(self) -> dict[Chunk | None, list[list[nn.Parameter]]]:
        """By chunk (None: what stays): the parameters of each group."""
        found: dict[Chunk | None, list[list[nn.Parameter]]] = {
            chunk: [[] for _ in self.optimizer.param_groups] for chunk in (None, *self._residency.chunks)
        }
        for index, group in enumerate(self.optimizer.param_groups):
            for parameter in group["params"]:
                found[self._owner.get(parameter)][index].append(parameter)
        return found

    @contextmanager
    def _only(self, parameters: Sequence[Sequence[nn.Parameter]]) -> Iterator[None]:
        """The groups have these parameters alone; those without any are left out."""
        groups = self.optimizer.param_groups
        full = [group["params"] for group in groups]
        try:
            for group, few in zip(groups, parameters, strict=True):
                group["params"] = list(few)
            self.optimizer.param_groups = [group for group in groups if group["params"]]
            yield
        finally:
            self.optimizer.param_groups = groups
            for group, params in zip(groups, full, strict=True):
                group["params"] = params

    # State

    def adopt_state(self, chunk: Chunk) -> None:
        """Let tensors that the optimizer has made for `chunk`, which are in memory, come and go."""
        known = {id(stored.tensor): stored for stored in chunk.state.tensors}
        kept: list[StoredTensor] = []
        for parameter, name in chunk.names.items():
            for key, value in self.optimizer.state.get(parameter, {}).items():
                if not isinstance(value, torch.Tensor):
                    continue
                stored = known.pop(id(value), None)
                if (
                    stored is None
                    and value.numel() > 1
                    and value.device == parameter.device
                    and is_movable(value)
                ):
                    slot = self._store.reserve(value.nbytes)
                    stored = StoredTensor(f"the optimizer's {key} of {name}", value, slot, self._transfers)
                if stored is not None:
                    kept.append(stored)
        for gone in known.values():
            gone.wait_for_store()
            self._store.free(gone.slot)
        chunk.state.tensors = kept
        self._residency.resize(chunk.state, sum(stored.nbytes for stored in kept))

    def _forget_replaced(self, chunk: Chunk) -> None:
        """Tensors that are the optimizer's no more (`optimizer.state.clear()`) are not loaded."""
        if chunk.state.where is not Where.AWAY:
            return
        held = {
            id(value)
            for parameter in chunk.parameters
            for value in self.optimizer.state.get(parameter, {}).values()
        }
        for stored in chunk.state.tensors:
            if id(stored.tensor) not in held:
                self._store.free(stored.slot)
        chunk.state.tensors = [stored for stored in chunk.state.tensors if id(stored.tensor) in held]

    # State dicts

    def state_dict(self) -> dict[str, Any]:
        """As torch's, with copies in host memory of what comes and goes."""
        found: dict[str, Any] = self._plain["state_dict"](self.optimizer)
        numbers = self._numbers([group["params"] for group in found["param_groups"]])
        for chunk in self._residency.chunks:
            if not chunk.state.tensors:
                continue
            self._residency.load(chunk, chunk.state)
            for parameter in chunk.parameters:
                number = numbers[parameter]
                found["state"][number] = {
                    key: value.to("cpu", copy=True) if isinstance(value, torch.Tensor) else value
                    for key, value in self.optimizer.state.get(parameter, {}).items()
                }
            self._residency.release(chunk.state)
        # In the order of parameters, as without chunks.
        order = [number for number in numbers.values() if number in found["state"]]
        found["state"] = {number: found["state"][number] for number in order} | found["state"]
        return found

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's, chunk by chunk."""
        optimizer = self.optimizer
        groups, saved = optimizer.param_groups, state_dict["param_groups"]
        if [len(group["params"]) for group in groups] != [len(group["params"]) for group in saved]:
            self._plain["load_state_dict"](optimizer, state_dict)  # raises
            raise AssertionError("a state dict of other parameters was loaded")
        full = [group["params"] for group in groups]
        numbers = self._numbers([group["params"] for group in saved])
        others = {key: value for key, value in state_dict["state"].items() if key not in numbers.values()}
        loaded: defaultdict[Any, Any] = defaultdict(dict)
        for chunk, parameters in self._groups().items():
            if chunk is not None:
                self._drop_state(chunk)
                self._residency.load(chunk, chunk.state)
            held = [numbers[parameter] for few in parameters for parameter in few]
            part = {number: state_dict["state"][number] for number in held if number in state_dict["state"]}
            optimizer.param_groups = [
                {**group, "params": few} for group, few in zip(groups, parameters, strict=True)
            ]
            optimizer.state = defaultdict(dict)
            self._plain["load_state_dict"](
                optimizer,
                {
                    **state_dict,
                    "state": part | (others if chunk is None else {}),
                    "param_groups": [
                        {**group, "params": [numbers[parameter] for parameter in few]}
                        for group, few in zip(saved, parameters, strict=True)
                    ],
                },
            )
            loaded.update(optimizer.state)
            optimizer.state = loaded
            if chunk is not None:
                self.adopt_state(chunk)
                self._residency.release(chunk.state)
        for group, params in zip(optimizer.param_groups, full, strict=True):
            group["params"] = params

    def _numbers(self, saved: Sequence[Sequence[Any]]) -> dict[nn.Parameter, Any]:
        """The numbers of a state dict by parameter."""
        return {
            parameter: number
            for group, numbers in zip(self.optimizer.param_groups, saved, strict=True)
            for parameter, number in zip(group["params"], numbers, strict=True)
        }

    def _drop_state(self, chunk: Chunk) -> None:
        part: Part = chunk.state
        self._residency.release(part)
        self._residency.wait()
        for stored in part.tensors:
            self._store.free(stored.slot)
        part.tensors = []


def _method(chunked: ChunkedOptimizer, name: str) -> Callable[..., Any]:
    """A function for the optimizer, which calls `chunked`, or the class's own method where that is gone or removed."""
    reference = weakref.ref(chunked)
    kind = type(chunked.optimizer)

    def call(optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        found = reference()
        if found is None or not found._installed:
            plain = plain_step(kind) if name == "step" else getattr(kind, name)
            return plain(optimizer, *args, **kwargs)
        return getattr(found, name)(*args, **kwargs)

    call.__name__ = name
    return call


def _without_owner(method: Callable[..., None]) -> Callable[..., None]:
    """The same for a table that is global, which would keep the owner and its model alive."""
    reference = weakref.WeakMethod(method)

    def call(*args: Any) -> None:
        found = reference()
        if found is not None:
            found(*args)

    return call
