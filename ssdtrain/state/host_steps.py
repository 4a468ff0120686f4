"""Steps of chunks in host memory, by a thread of their own, while backward or the next forward goes on.

Note: [When a chunk is stepped]
    With clipping by the exact norm: after `optimizer.step()`, in the order of forward, as far as there is room; a forward waits
    for its chunk. Without, or with the norm of the step before: when the last backward of the step has completed the gradients of
    the chunk, which are used up then (arXiv 2306.09782). What that has left out, `optimizer.step()` does as in the first case.

Note: [Delayed clipping]
    Step t multiplies all gradients by min(1, max_norm / (n + 1e-6)), where n is the norm of all gradients of step t - 1 before
    they were multiplied, and max_norm what `clip_grad_norm_` was given in that step. A step whose predecessor was not clipped,
    as the first one of a run, is clipped by its own norm. The factor for the next step is in the optimizer's state dict.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import Optimizer

from ssdtrain.state.chunk import Chunk
from ssdtrain.state.chunk_step import ChunkStep, Groups
from ssdtrain.state.clip import clip_grad_norm, norms_of
from ssdtrain.state.hooks import BlockHooks
from ssdtrain.state.optimizer import ChunkedOptimizer
from ssdtrain.state.options import Options, copied_options, different_options
from ssdtrain.state.residency import Residency
from ssdtrain.state.stored import GradientInTier
from ssdtrain.state.transfers import HostCopy, StateTransfers
from ssdtrain.storage import SpillStore, signals_deferred

_FUSED = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad)
"""Classes with a fused version for the CPU, which is ten times as fast there."""

_FACTOR = "ssdtrain_clip_factor"
"""Key of the first group in state dicts; see Note: [Delayed clipping]."""

NormKind = tuple[float, bool | None]


class HostOptimizer(ChunkedOptimizer):
    """Steps chunks in host memory on a thread.

    Args:
        optimizer, residency, hooks, store: see `ChunkedOptimizer`.
        transfers: of the device.
        clip: "exact", "none" or "delayed", as the config's `state.clip`.
        microbatches: backwards of a step, where chunks are stepped in them.

    Attributes:
        in_place: the device's memory is host memory.
        norm_kind: order of the norm and `foreach` that `clip_grad_norm_` was called with.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        residency: Residency,
        hooks: BlockHooks,
        transfers: StateTransfers,
        store: SpillStore,
        clip: str,
        microbatches: int,
    ) -> None:
        super().__init__(optimizer, residency, hooks, transfers, store)
        self.in_place = not transfers.frees_at_once
        self.norm_kind: NormKind = 2.0, None
        self._microbatches = microbatches
        self._clip = clip
        self._norms_wanted = False  # the step before has asked for a norm
        self._clipped = False  # the gradients of this step
        self._factor: torch.Tensor | None = None  # for the gradients of this step, where it is delayed
        self._next_factor: torch.Tensor | None = None
        self._options_inside: Groups = []  # of the steps that were made inside of this step's backward
        self._due: deque[Chunk] = deque()  # since `step`, in the order of forward
        self._of_chunk = self._groups()
        self._device_transfers = transfers
        self._state_transfers = transfers.of_host()
        self._state_device = torch.device("cpu")
        self._state_counts = self.in_place
        kind = type(optimizer)
        # What a twin has is not its own, and some optimizers destroy it in their finalizers.
        self._twin_kind = type(kind.__name__, (kind,), {"__del__": lambda twin: None})
        self._code = threading.Lock()  # the optimizer's: its steps may share counters
        self._thread = ThreadPoolExecutor(1, "ssdtrain-step")
        hooks.steps = self

    # What a `ChunkStep` needs

    @property
    def residency(self) -> Residency:
        """The memory of the chunks."""
        return self._residency

    def submit(self, function: Callable[..., None], *arguments: Any) -> Future[None]:
        """Let the thread call `function`."""
        return self._thread.submit(function, *arguments)

    def make_room(self, nbytes: int) -> None:
        """See `StateTransfers`."""
        self._device_transfers.make_room(nbytes)

    def to_host(self, parameter: nn.Parameter) -> HostCopy:
        """Return the bytes of a parameter that stays on the device."""
        geometry = parameter.dtype, tuple(parameter.shape), tuple(parameter.stride())
        return self._device_transfers.to_host(None, parameter.untyped_storage(), *geometry)

    def from_host(self, stepped: HostCopy, parameter: nn.Parameter) -> Callable[[], None]:
        """Give a parameter that stays on the device the bytes that the thread has left, see `StateTransfers`."""
        return self._device_transfers.from_host(stepped, parameter.untyped_storage())

    def run(self, groups: Groups, state: defaultdict[Any, Any]) -> float:
        """Run the optimizer's code on parameters in host memory; any thread may. Returns the seconds that it took.

        Raises:
            RuntimeError: the code changes more than the parameters and their state.
        """
        twin: Optimizer = object.__new__(self._twin_kind)
        vars(twin).update(
            {key: value for key, value in dict(vars(self.optimizer)).items() if key not in self._plain}
        )
        twin.param_groups, twin.state = groups, state
        with self._code:
            began = time.perf_counter()
            options = Options(twin)
            self._plain["step"](twin)
            options.end_part([True] * len(groups))
            seconds = time.perf_counter() - began
        options.refuse_changes()
        return seconds

    # The step

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step what is in no chunk, and let the chunks fall due that backward has not stepped."""
        loss = self._begin_step(closure)
        self._check_step()
        self._of_chunk = self._groups()
        for chunk in self._residency.chunks:
            if self._fall_due(chunk, None):
                self._due.append(chunk)
        self._residency.times.outside += self._step_outside(self._of_chunk[None])
        for chunk in self._residency.chunks:
            chunk.backwards, chunk.norms = 0, {}
        self._factor, self._next_factor = self._next_factor, None
        self._options_inside, self._norms_wanted, self._clipped = [], self._clipped, False
        self._hooks.prefetch()
        for chunk in self._residency.chunks:
            chunk.arrive()  # also of what has just ended: who reads parameters between two steps does not ask
        return loss

    def _check_step(self) -> None:
        name = type(self.optimizer).__name__
        for group, inside in zip(self.optimizer.param_groups, self._options_inside, strict=False):
            if different := different_options(copied_options(group), inside):
                raise RuntimeError(
                    f"the option {min(different)} of {name} was changed between backward, in which chunks were stepped with its "
                    f'value of before, and optimizer.step() (config section state, clip "{self._clip}"): change options before '
                    'the forward, or use clip "exact"'
                )
        if self._factor is not None and not self._clipped:
            raise RuntimeError(
                "the gradients of the step before were clipped, and those of this one are not (config section state, clip "
                '"delayed"): call runtime.state.clip_grad_norm_ in every step, or use clip "exact"'
            )

    def _fall_due(self, chunk: Chunk, factor: torch.Tensor | None) -> bool:
        """Give `chunk` its step, which uses its gradients up. Returns False if it has none."""
        if chunk.pending is not None:
            return False
        known = {gradient.parameter for gradient in chunk.stored_gradients()}
        real = {
            parameter
            for parameter in chunk.parameters
            if parameter.grad is not None and not isinstance(parameter.grad, GradientInTier)
        }
        if real - known:
            self._hooks.adopt_gradients(chunk)
        few = known | real
        if not few:
            return False
        self._forget_replaced(chunk)
        if len(self._of_chunk[chunk]) != len(self.optimizer.param_groups):
            self._of_chunk = self._groups()
        groups = [
            {**self._host_options(group), "params": wanted}
            for group, parameters in zip(self.optimizer.param_groups, self._of_chunk[chunk], strict=True)
            if (wanted := [parameter for parameter in parameters if parameter in few])
        ]
        with signals_deferred():
            for gradient in chunk.stored_gradients():
                gradient.claim()
            chunk.pending = ChunkStep(self, chunk, groups, factor)
        return True

    def _host_options(self, group: dict[str, Any]) -> dict[str, Any]:
        options = copied_options(group)
        if type(self.optimizer) in _FUSED and not (
            options.get("foreach") or options.get("fused") is not None
        ):
            options["fused"] = True
        return options

    def _step_outside(self, parameters: Sequence[Sequence[nn.Parameter]]) -> float:
        """Step what is in no chunk, or stays on the device with all of it: where it is. Returns the seconds that it took."""
        if all(parameter.device.type == "cpu" for few in parameters for parameter in few):
            groups = [
                {**self._host_options(group), "params": few}
                for group, few in zip(self.optimizer.param_groups, parameters, strict=True)
                if few
            ]
            return self.run(groups, self.optimizer.state)
        options = Options(self.optimizer)
        with self._code:
            began = time.perf_counter()
            self._step_of(parameters, options)
            seconds = time.perf_counter() - began
        options.refuse_changes()
        return seconds

    def finish_steps(self) -> None:
        """Make all steps that are due, and wait for their end."""
        for chunk in self._residency.chunks:
            if chunk.pending is not None:
                chunk.pending.finish()
            chunk.arrive()

    @contextmanager
    def counting(self, microbatches: int) -> Iterator[None]:
        """See `ChunkedOptimizer`."""
        configured, self._microbatches = self._microbatches, microbatches
        try:
            yield
        finally:
            self._microbatches = configured

    def adopt_state(self, chunk: Chunk) -> None:
        """Let the optimizer state of `chunk` be in host memory, where it comes and goes or stays."""
        for parameter in chunk.parameters:
            state = self.optimizer.state.get(parameter, {})
            for key, value in state.items():
                if isinstance(value, torch.Tensor) and value.device.type != "cpu":
                    state[key] = value.to("cpu")
        super().adopt_state(chunk)

    # Events of backward and of blocks

    def before_backward(self, chunk: Chunk) -> bool:
        """Check that a backward through `chunk` may begin. Returns whether its step follows.

        Raises:
            RuntimeError: its gradients, or those of the step before, are used up.
        """
        chunk.norms = {}
        known = {gradient.parameter for gradient in chunk.stored_gradients()}
        used_up = any(isinstance(one.grad, GradientInTier) for one in chunk.parameters if one not in known)
        remedy = ""
        if self._options_inside and chunk.backwards >= self._microbatches:
            remedy = (
                f"optimizer.step() comes after {self._microbatches} backwards (state.microbatches), also where a loop drops the "
                "gradients"
            )
        elif used_up:
            remedy = "call optimizer.zero_grad() after optimizer.step()"
        if remedy:
            raise RuntimeError(
                f"a backward meets {chunk.name}, whose gradients a step has used up (config section state, optimizer "
                f'"cpu", clip "{self._clip}"): {remedy}'
            )
        return self.steps_inside and chunk.backwards + 1 == self._microbatches

    def after_backward(self, chunk: Chunk) -> bool:
        """Step `chunk`, whose gradients are complete, if it is time. Returns whether the step has them."""
        if self.steps_inside and chunk.backwards == self._microbatches:
            self._options_inside = self._options_inside or [
                copied_options(group) for group in self.optimizer.param_groups
            ]
            if self._fall_due(chunk, self._factor):
                assert chunk.pending is not None
                chunk.pending.begin(required=True)
                return True
        elif self._norms_wanted and not self.steps_inside:
            gradients = [parameter.grad for parameter in chunk.parameters if parameter.grad is not None]
            parameters = [parameter for parameter in chunk.parameters if parameter.grad is not None]
            chunk.norms = dict(zip(parameters, norms_of(gradients, *self.norm_kind), strict=True))
        return False

    @property
    def steps_inside(self) -> bool:
        """Whether the next backwards step the chunks whose gradients they complete."""
        return self._clip == "none" or (self._clip == "delayed" and self._factor is not None)

    def advance(self) -> None:
        """Finish the steps whose thread is done, and begin those that are due, as far as there is room.

        Raises:
            Exception: what the thread has raised.
        """
        for running in [*self._residency.running]:
            if running.done:
                running.finish()
        while self._due:
            pending = self._due[0].pending
            if pending is not None and not pending.begin(required=False):
                return
            self._due.popleft()

    # Clipping

    def clip_grad_norm(
        self,
        parameters: Sequence[nn.Parameter],
        max_norm: float,
        norm_type: float,
        error_if_nonfinite: bool,
        foreach: bool | None,
    ) -> torch.Tensor:
        """Clip by the exact norm, or see Note: [Delayed clipping]. Returns the norm of this step's gradients."""
        if self._clip == "none":
            raise RuntimeError(
                "clip_grad_norm_ meets gradients that are used up in backward (config section state): use clip "
                '"exact", or "delayed"'
            )
        if self._options_inside and self.norm_kind != (norm_type, foreach):
            raise RuntimeError(
                f"clip_grad_norm_ asks for a norm of order {norm_type} (foreach={foreach}), and the step before for one of order "
                f'{self.norm_kind[0]} (foreach={self.norm_kind[1]}): with clip "delayed" they are the same in every step '
                "(config section state)"
            )
        self.norm_kind = norm_type, foreach
        for running in [*self._residency.running]:
            running.finish()
        how = norm_type, error_if_nonfinite, foreach
        total, exact = clip_grad_norm(
            parameters, self._residency, self._hooks, max_norm, *how, factor=self._factor, on_host=True
        )
        self._clipped = True
        if self._clip == "delayed":
            self._next_factor = exact.to("cpu")
        return total

    # State dicts

    def state_dict(self) -> dict[str, Any]:
        """Return torch's state dict after all steps that are due, as `ChunkedOptimizer` does."""
        self.finish_steps()
        saved = super().state_dict()
        if self._factor is not None:
            saved["param_groups"][0][_FACTOR] = self._factor.clone()
        return saved

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load as `ChunkedOptimizer` does; see Note: [Delayed clipping]."""
        self.finish_steps()
        groups = [{**group} for group in state_dict["param_groups"]]
        factor = groups[0].pop(_FACTOR, None) if groups else None
        super().load_state_dict({**state_dict, "param_groups": groups})
        self._factor = factor.to("cpu") if factor is not None and self._clip == "delayed" else None

    def remove(self) -> None:
        """End the thread, and give the optimizer back its methods and its state to the device of its parameters."""
        self._thread.shutdown()
        super().remove()
        of_chunks = {parameter for chunk in self._residency.chunks for parameter in chunk.parameters}
        for group in self.optimizer.param_groups:
            counts_too = group.get("fused") or group.get("capturable")
            for parameter in of_chunks.intersection(group["params"]):
                state = self.optimizer.state.get(parameter, {})
                for key, value in state.items():
                    if isinstance(value, torch.Tensor) and (value.numel() > 1 or counts_too):
                        state[key] = value.to(parameter.device)
