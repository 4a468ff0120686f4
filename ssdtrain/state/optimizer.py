"""An optimizer of torch whose step walks the chunks: its own code on its own parameters, one chunk after the other.

Note: [One chunk at a time]
    For the time of a chunk's part of the step, `param_groups` lists the parameters of that chunk alone. All else about the
    optimizer stays: its class, its state, its groups with their learning rates. The operators run on the same tensors with
    the same options as without chunks, and all of them work element by element, so the bits are the same. This holds for
    optimizers whose update of a parameter depends on that parameter alone, which all of torch's do but LBFGS.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import Optimizer
from torch.utils._pytree import tree_iter, tree_map

from ssdtrain.state.chunk import Chunk, Part, Where
from ssdtrain.state.clip import clip_grad_norm
from ssdtrain.state.hooks import STEP, BlockHooks
from ssdtrain.state.options import Options
from ssdtrain.state.residency import Residency
from ssdtrain.state.sizes import plain_step
from ssdtrain.state.stored import MOVABLE, StoredTensor, is_movable
from ssdtrain.state.transfers import StateTransfers
from ssdtrain.steps import call_before_steps
from ssdtrain.storage import SpillStore, signals_deferred
from ssdtrain.text import size_text

logger = logging.getLogger("ssdtrain")


_METHODS = {
    "step": "step",
    "state_dict": "state_dict",
    "load_state_dict": "load_state_dict",
    "__getstate__": "refuse_to_be_copied",
}
"""Methods of an optimizer, and those of `ChunkedOptimizer` in their place."""


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
        transfers: StateTransfers,
        store: SpillStore,
    ) -> None:
        self.optimizer = optimizer
        self._residency = residency
        self._hooks = hooks
        self._store = store
        self._owner = {parameter: chunk for chunk in residency.chunks for parameter in chunk.parameters}
        self._plain = {name: getattr(type(optimizer), name) for name in _METHODS} | {
            "step": plain_step(type(optimizer))
        }
        self._fixed: dict[Chunk, int] = {}  # bytes of state that stays
        self._warned: set[str] = set()  # kinds of state that stay
        self._state_transfers = transfers
        self._state_device: torch.device | None = None  # None: that of its parameter
        self._state_counts = True  # in the memory of the device
        self._torn: str | None = None  # what ended a load of optimizer state half way
        functions = {name: _method_of(self, name) for name in _METHODS}
        functions["step"] = Optimizer.profile_hook_step(functions["step"])
        self._installed = {name: MethodType(function, optimizer) for name, function in functions.items()}
        hooks.keeper = self  # for as long as parameters come and go, whether or not the runtime is kept
        for name, method in self._installed.items():
            optimizer.__dict__[name] = method
        self._others = call_before_steps(self._check_other)

    def remove(self) -> None:
        """Give the optimizer back its methods. Its tensors are in memory."""
        self._others.remove()
        for name, method in self._installed.items():
            if self.optimizer.__dict__.get(name) is method:
                del self.optimizer.__dict__[name]
        self._installed = {}
        self._hooks.keeper = None
        state = self.optimizer.state
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                if parameter in state:  # in the order of parameters, as without chunks
                    state[parameter] = state.pop(parameter)

    def refuse_to_be_copied(self) -> Any:
        """Raise RuntimeError."""
        raise RuntimeError(
            f"{type(self.optimizer).__name__} cannot be copied or saved as an object, because its tensors are not all in memory "
            "(config section state): use its state_dict()"
        )

    def _check_not_torn(self) -> None:
        if self._torn is not None:
            raise RuntimeError(
                f"{type(self.optimizer).__name__} has the state of two checkpoints in part, because a load_state_dict has failed "
                f"({self._torn}; config section state): load a state dict"
            )

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
        """Make the optimizer's step, for what stays and then chunk by chunk."""
        loss = self._begin_step(closure)
        groups, times = self._groups(), self._residency.times
        options = Options(self.optimizer)
        began = time.perf_counter()
        self._step_of(groups[None], options)
        times.outside += time.perf_counter() - began
        began = time.perf_counter()
        for chunk in self._residency.chunks:
            if any(parameter.grad is not None for parameter in chunk.parameters):
                self._step(chunk, groups[chunk], options)
        times.chunks += time.perf_counter() - began
        options.finish()
        self._hooks.prefetch()
        return loss

    def _begin_step(self, closure: Callable[[], Any] | None) -> Any:
        """Return the loss of `closure`; the passes before the step are over."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._check_not_torn()
        self._hooks.end_abandoned()
        for chunk in self._residency.chunks:
            chunk.forwards = 0  # of one that an interrupt has ended
        return loss

    def _step_of(self, parameters: Sequence[Sequence[nn.Parameter]], options: Options) -> None:
        with self._only(parameters):
            self._plain["step"](self.optimizer)
        options.end_part([bool(few) for few in parameters])

    def _step(self, chunk: Chunk, parameters: Sequence[Sequence[nn.Parameter]], options: Options) -> None:
        chunk.stepping = True
        try:
            self._forget_replaced(chunk)
            self._residency.load(chunk, *chunk.parts)
            self._hooks.adopt_gradients(chunk)
            self._hooks.expect(STEP, chunk)
            self._hooks.prefetch(patient=True)
            for part in chunk.parts:
                self._residency.settle(part)
            began = time.perf_counter()
            self._step_of(parameters, options)
            self._residency.times.computing += time.perf_counter() - began
            for tensor in (*chunk.values.tensors, *chunk.state.tensors):
                tensor.in_slot = False
            self.adopt_state(chunk)
        finally:
            chunk.stepping = False
        self._residency.write(chunk.values)
        self._residency.release(chunk.state)
        self._residency.release(chunk.gradients)

    def _groups(self) -> dict[Chunk | None, list[list[nn.Parameter]]]:
        """Return the parameters of each group by chunk; None: those that stay."""
        by_chunk: dict[Chunk | None, list[list[nn.Parameter]]] = {
            chunk: [[] for _ in self.optimizer.param_groups] for chunk in (None, *self._residency.chunks)
        }
        for index, group in enumerate(self.optimizer.param_groups):
            for parameter in group["params"]:
                by_chunk[self._owner.get(parameter)][index].append(parameter)
        return by_chunk

    @contextmanager
    def _only(self, parameters: Sequence[Sequence[nn.Parameter]]) -> Iterator[None]:
        """Let the groups have these parameters alone; those without any are left out."""
        groups = self.optimizer.param_groups
        full = [group["params"] for group in groups]
        try:
            try:
                for group, few in zip(groups, parameters, strict=True):
                    group["params"] = list(few)
                self.optimizer.param_groups = [group for group in groups if group["params"]]
                yield
            finally:
                self._put_back(groups, full)
        except BaseException:  # it may be an interrupt of `finally`, before signals were deferred
            self._put_back(groups, full)
            raise

    def _put_back(self, groups: list[dict[str, Any]], full: list[list[nn.Parameter]]) -> None:
        with signals_deferred():
            self.optimizer.param_groups = groups
            for group, params in zip(groups, full, strict=True):
                group["params"] = params

    # State

    def adopt_state(self, chunk: Chunk) -> None:
        """Let tensors that the optimizer has made for `chunk`, which are in memory, come and go."""
        if chunk.state.stays:
            return
        known = {id(stored.tensor): stored for stored in chunk.state.tensors}
        kept: list[StoredTensor] = []
        fixed = 0
        taken = {
            stored._storage._cdata: stored.name
            for part in chunk.parts
            for stored in part.tensors
            if id(stored.tensor) not in known
        }
        for parameter, name in chunk.names.items():
            state = self.optimizer.state.get(parameter, {})
            for key, value in list(state.items()):
                if isinstance(value, list | tuple | dict):
                    fixed += self._stays(key, value, parameter)
                if not isinstance(value, torch.Tensor):
                    continue
                stored = known.pop(id(value), None)
                if stored is None and value.numel() > 1 and value.device == self._device_of(parameter):
                    if _is_a_loaded_one(value):  # its memory is not torch's to free
                        value = state[key] = value.clone()
                    if not is_movable(value):
                        fixed += self._stays(key, value, parameter)
                        continue
                    other = taken.setdefault(value.untyped_storage()._cdata, f"{key} of {name}")
                    if other != f"{key} of {name}":
                        raise RuntimeError(
                            f"the optimizer's {key} of {name} has the memory of {other}, and both could not leave it (config "
                            "section state): use an optimizer whose state has memory of its own"
                        )
                    with signals_deferred():
                        slot = self._store.reserve(value.nbytes)
                        stored = StoredTensor(
                            f"the optimizer's {key} of {name}", value, slot, self._state_transfers
                        )
                        chunk.state.tensors.append(stored)
                if stored is not None:
                    kept.append(stored)
        for gone in known.values():
            gone.wait_for_store()
        with signals_deferred():
            chunk.state.tensors = kept
            for gone in known.values():
                self._free(gone)
            if self._state_counts:
                self._residency.resize(chunk.state, sum(stored.nbytes for stored in kept))
                self._residency.count_fixed(fixed - self._fixed.get(chunk, 0))
                self._fixed[chunk] = fixed

    def _stays(self, key: str, value: Any, parameter: nn.Parameter) -> int:
        """Return the bytes of what cannot leave the device."""
        nbytes = sum(
            leaf.nbytes
            for leaf in tree_iter(value)
            if isinstance(leaf, torch.Tensor)
            and leaf.numel() > 1
            and leaf.device == self._device_of(parameter)
        )
        if nbytes and key not in self._warned:
            self._warned.add(key)
            logger.warning(
                "the optimizer's %s (%s for one parameter) stays on the device, because it is not a plain tensor of floating "
                "point with memory of its own (config section state): it counts in state.device_limit",
                key,
                size_text(nbytes),
            )
        return nbytes

    def _free(self, stored: StoredTensor) -> None:
        assert stored.slot is not None
        self._store.free(stored.slot, self._state_transfers.last_copy(stored.slot))

    def _device_of(self, parameter: nn.Parameter) -> torch.device:
        return self._state_device or parameter.device

    def _forget_replaced(self, chunk: Chunk) -> None:
        """Drop tensors that are the optimizer's no more (`optimizer.state.clear()`)."""
        if chunk.state.where is not Where.AWAY:
            return
        present = {
            id(value)
            for parameter in chunk.parameters
            for value in self.optimizer.state.get(parameter, {}).values()
        }
        with signals_deferred():
            for stored in chunk.state.tensors:
                if id(stored.tensor) not in present:
                    self._free(stored)
            chunk.state.tensors = [stored for stored in chunk.state.tensors if id(stored.tensor) in present]

    def finish_steps(self) -> None:
        """Make all steps that are due, and wait for their end."""

    def counting(self, microbatches: int) -> AbstractContextManager[None]:
        """Return a context in which so many backwards make a step."""
        return nullcontext()

    # Clipping

    def clip_grad_norm(
        self,
        parameters: Sequence[nn.Parameter],
        max_norm: float,
        norm_type: float,
        error_if_nonfinite: bool,
        foreach: bool | None,
    ) -> torch.Tensor:
        """Clip as `torch.nn.utils.clip_grad_norm_`. See `ssdtrain.state.clip`."""
        how = norm_type, error_if_nonfinite, foreach
        return clip_grad_norm(parameters, self._residency, self._hooks, max_norm, *how)[0]

    # State dicts

    def state_dict(self) -> dict[str, Any]:
        """Return torch's state dict, with copies in host memory, so that it is of one moment."""
        self._check_not_torn()
        saved: dict[str, Any] = self._plain["state_dict"](self.optimizer)
        numbers = self._numbers([group["params"] for group in saved["param_groups"]])
        saved["param_groups"] = [tree_map(_copied, group) for group in saved["param_groups"]]
        for chunk, groups in self._groups().items():
            if chunk is not None and chunk.state.tensors:
                self._residency.load(chunk, chunk.state)
            for parameter in (parameter for few in groups for parameter in few):
                number = numbers[parameter]
                if number in saved["state"]:
                    saved["state"][number] = tree_map(_in_host_memory, dict(self.optimizer.state[parameter]))
            if chunk is not None and chunk.state.tensors:
                self._residency.release(chunk.state)
        # In the order of parameters, as without chunks.
        order = [number for number in numbers.values() if number in saved["state"]]
        saved["state"] = {number: saved["state"][number] for number in order} | saved["state"]
        return saved

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load as torch does, chunk by chunk. If it raises, the groups are as before, and so is the state unless a chunk has lost
        it: then the optimizer is not used before another state dict is loaded."""
        optimizer = self.optimizer
        groups, saved = optimizer.param_groups, state_dict["param_groups"]
        if [len(group["params"]) for group in groups] != [len(group["params"]) for group in saved]:
            self._plain["load_state_dict"](optimizer, state_dict)  # raises
            raise AssertionError("a state dict of other parameters was loaded")
        full = [group["params"] for group in groups]
        before, attributes = optimizer.state, dict(vars(optimizer))
        dropped: set[nn.Parameter] = set()
        loaded: defaultdict[Any, Any] = defaultdict(dict)
        try:
            self._load_parts(state_dict, groups, loaded, dropped)
        except BaseException as error:
            vars(optimizer).update(attributes)
            for parameter in dropped:
                before.pop(parameter, None)
                if parameter in loaded:
                    before[parameter] = loaded[parameter]
            self._torn = f"{type(error).__name__}: {error}" if dropped else self._torn
            raise
        self._torn = None
        for group, params in zip(optimizer.param_groups, full, strict=True):
            group["params"] = params

    def _load_parts(
        self,
        state_dict: dict[str, Any],
        groups: list[dict[str, Any]],
        loaded: defaultdict[Any, Any],
        dropped: set[nn.Parameter],
    ) -> None:
        """Fill `loaded`, and `dropped` by parameters whose state of before is lost."""
        optimizer, saved = self.optimizer, state_dict["param_groups"]
        numbers = self._numbers([group["params"] for group in saved])
        others = {key: value for key, value in state_dict["state"].items() if key not in numbers.values()}
        theirs = {id(value) for value in tree_iter(state_dict["state"]) if isinstance(value, torch.Tensor)}
        for chunk, parameters in self._groups().items():
            wanted = [numbers[parameter] for few in parameters for parameter in few]
            part = {number: state_dict["state"][number] for number in wanted if number in state_dict["state"]}
            if chunk is not None:
                dropped.update(chunk.parameters)
                self._drop_state(chunk)
                self._residency.load(chunk, chunk.state)
            optimizer.param_groups = [
                {**group, "params": few} for group, few in zip(groups, parameters, strict=True)
            ]
            optimizer.state = defaultdict(dict)
            state = part | (others if chunk is None else {})
            param_groups = [
                {**group, "params": [numbers[parameter] for parameter in few]}
                for group, few in zip(saved, parameters, strict=True)
            ]
            self._plain["load_state_dict"](
                optimizer, {**state_dict, "state": state, "param_groups": param_groups}
            )
            for parameter in chunk.parameters if chunk is not None else ():
                state = optimizer.state.get(parameter, {})
                for key, value in state.items():
                    if id(value) in theirs:
                        state[key] = value.clone()  # the caller's tensor does not come and go
            loaded.update(optimizer.state)
            optimizer.state = loaded
            if chunk is not None:
                self.adopt_state(chunk)
                self._residency.release(chunk.state)

    def _numbers(self, saved: Sequence[Sequence[Any]]) -> dict[nn.Parameter, Any]:
        """Return the numbers of a state dict by parameter."""
        return {
            parameter: number
            for group, numbers in zip(self.optimizer.param_groups, saved, strict=True)
            for parameter, number in zip(group["params"], numbers, strict=True)
        }

    def _drop_state(self, chunk: Chunk) -> None:
        part: Part = chunk.state
        self._residency.release(part)
        self._residency.wait()
        with signals_deferred():
            for stored in part.tensors:
                self._free(stored)
            part.tensors = []


def _is_a_loaded_one(value: torch.Tensor) -> bool:
    """Return True for a plain tensor in memory of its own that torch cannot free and allocate, such as one of `torch.load`."""
    return (
        type(value) is torch.Tensor
        and value.layout is torch.strided
        and value.dtype in MOVABLE
        and value.untyped_storage().nbytes() == value.nbytes
        and not value.untyped_storage().resizable()
    )


def _in_host_memory(value: Any) -> Any:
    return value.detach().to("cpu", copy=True) if isinstance(value, torch.Tensor) else value


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def _method_of(chunked: ChunkedOptimizer, name: str) -> Callable[..., Any]:
    """Make a function for the optimizer, which calls `chunked`, or the class's own method where that is gone or removed."""
    reference = weakref.ref(chunked)
    kind = type(chunked.optimizer)

    def call(optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        owner = reference()
        if owner is None or not owner._installed:
            plain = plain_step(kind) if name == "step" else getattr(kind, name)
            return plain(optimizer, *args, **kwargs)
        return getattr(owner, _METHODS[name])(*args, **kwargs)

    call.__name__ = name
    return call
