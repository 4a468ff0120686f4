"""The step of one chunk in host memory, by the thread of `HostOptimizer`.

Note: [Who has a chunk]
    The loop's thread moves all bytes and changes all states of parts, as where chunks are stepped on the device. A `ChunkStep`
    that has begun gives the tensors of its chunk to the one thread of `HostOptimizer`, which waits for their loads and runs the
    optimizer's code on them; the loop's thread does not look at them before `ChunkStep.finish`, which whoever needs the chunk
    calls first (`Residency.load`). So nothing is locked but the optimizer's code, which the loop's thread runs for what is in no
    chunk.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from ssdtrain.state.chunk import Chunk, Where
from ssdtrain.state.clip import norms_of
from ssdtrain.state.stored import StoredTensor
from ssdtrain.state.transfers import HostCopy
from ssdtrain.storage import IOFailure, signals_deferred

if TYPE_CHECKING:
    from ssdtrain.state.host_steps import HostOptimizer

_AT_A_TIME = 2
"""Chunks of a GPU whose parameters and gradients are in host memory beside their slots: one that is stepped, one that follows."""

Groups = list[dict[str, Any]]
"""Groups of an optimizer, as in its `param_groups`."""


class _Stepped(NamedTuple):
    """What the thread steps for one parameter: its bytes, its gradient, factors for that, and its optimizer state."""

    parameter: nn.Parameter
    value: HostCopy
    gradient: HostCopy
    scales: Sequence[torch.Tensor]
    state: dict[str, Any]


class ChunkStep:
    """The step of one chunk, with the options of the moment when it fell due.

    Args:
        groups: of the optimizer, each with those of its parameters that are of the chunk and have a gradient.
        factor: for the gradients, whose norms before are computed then; None: 1.
    """

    def __init__(
        self, owner: HostOptimizer, chunk: Chunk, groups: Groups, factor: torch.Tensor | None
    ) -> None:
        self._owner = owner
        self._chunk = chunk
        self._groups = groups
        self._factor = factor
        self._tensors: list[_Stepped] = []
        self._versions = {parameter: parameter._version for group in groups for parameter in group["params"]}
        self._written: str | None = None  # a parameter that the loop has written to since
        self._norms: dict[nn.Parameter, torch.Tensor] = {}
        self._future: Future[None] | None = None
        self._seconds = 0.0  # the thread's, without waits for copies of the device
        self._loaded = self._taken = False

    # The loop's thread

    @property
    def done(self) -> bool:
        """Whether `finish` does not wait for the thread."""
        return self._future is not None and self._future.done()

    def begin(self, *, required: bool) -> bool:
        """Bring what it needs into memory, or on its way, and give it to the thread. Returns whether it has it.

        Args:
            required: wait for room, and exceed the limit rather than not begin.
        """
        if self._future is not None:
            return True
        owner, chunk, residency = self._owner, self._chunk, self._owner.residency
        self._note_writes()
        parameters = [parameter for group in self._groups for parameter in group["params"]]
        # 1. Room and loads.
        if owner.in_place:
            for part in (chunk.values, chunk.gradients, chunk.state):
                if not residency.begin(part, chunk, required=required, patient=required):
                    return False
        else:
            while len(residency.running) >= _AT_A_TIME:
                if not required:
                    return False
                residency.running[0].finish()
            residency.begin(chunk.state, chunk)
            for part in (chunk.values, chunk.gradients):
                if part.where is Where.LOADING:  # to the device
                    residency.finish(part)
            if chunk.values.where is Where.HERE:
                for value in chunk.values.tensors:
                    value.begin_store()  # nothing, unless the loop has changed it
            owner.make_room(2 * sum(parameter.nbytes for parameter in parameters))
        stored = {value.tensor: value for value in chunk.values.tensors}
        gradients = {gradient.parameter: gradient for gradient in chunk.stored_gradients()}
        for tensor in (*stored.values(), *gradients.values()):
            tensor.wait_for_store()
        # 2. To the thread.
        with signals_deferred():
            chunk.stepping = True
            self._tensors = [
                _Stepped(
                    parameter,
                    stored[parameter].to_host() if parameter in stored else owner.to_host(parameter),
                    gradients[parameter].to_host(),
                    [scale.to("cpu") for scale in gradients[parameter].pending_scales()],
                    owner.optimizer.state[parameter],
                )
                for parameter in parameters
            ]
            in_place = [*stored.values(), *gradients.values()] if owner.in_place else []
            self._future = owner.submit(self._run, [*in_place, *chunk.state.tensors])
            residency.running.append(self)
            chunk.ahead = not required
        self._free_device()
        return True

    def finish(self) -> None:
        """Begin it if it has not begun, wait for its end, and let go what it has used.

        Raises:
            Exception: what the thread has raised.
        """
        owner, chunk, residency = self._owner, self._chunk, self._owner.residency
        self.begin(required=True)
        assert self._future is not None
        # 1. The thread is done, and the chunk the loop's again.
        began = time.perf_counter()
        failure = self._future.exception()
        residency.metrics.step_wait_seconds += time.perf_counter() - began
        residency.times.stepping += self._seconds
        residency.times.stepped_bytes += sum(stepped.parameter.nbytes for stepped in self._tensors)
        try:
            self._free_device()
            with signals_deferred():
                self._take()
            # 2. What it used is let go.
            residency.forget(chunk.gradients)
            residency.finish(chunk.state)
            owner.adopt_state(chunk)
            residency.release(chunk.state)
            if owner.in_place:
                residency.finish(chunk.values)
                residency.write(chunk.values)
        except (IOFailure, RuntimeError):
            self._end()
            raise
        self._end()
        if failure is not None:
            raise failure
        if self._written is not None:
            raise RuntimeError(
                f"{self._written} was written to after its step fell due and before that was made (config section state, "
                'optimizer "cpu"): write it in the forward of its block, by load_state_dict, or after close()'
            )

    def _free_device(self) -> None:
        """Let go what the thread has copies of, when they are made."""
        if not self._owner.in_place:
            self._owner.residency.let_go(self._chunk.gradients)
            if not self._chunk.values.pinned:
                self._owner.residency.let_go(self._chunk.values)

    def _take(self) -> None:
        """Let the chunk have the bytes that the thread has left, once; if it had all of them."""
        stored = {value.tensor: value for value in self._chunk.values.tensors}
        if not self._taken:
            self._note_writes()
        for parameter, value, gradient, *_ in () if self._taken else self._tensors:
            torch.autograd.graph.increment_version(parameter)
            if (
                self._loaded
                and parameter in stored
                and (self._owner.in_place or not self._chunk.values.pinned)
            ):
                stored[parameter].take(value)
            elif self._loaded:
                self._chunk.arriving.append(self._owner.from_host(value, parameter))
                if parameter in stored:
                    stored[parameter].in_slot = False
            value.release()
            gradient.release()
        if self._loaded and not self._taken:
            for tensor in self._chunk.state.tensors:
                tensor.in_slot = False
            self._chunk.norms = self._norms
        self._taken = True

    def _note_writes(self) -> None:
        """Note writes of the loop to parameters that it sees as they were before the step: it would undo them, or come after."""
        away = {value.tensor for value in self._chunk.values.tensors if value.away}
        for parameter, version in self._versions.items():
            if parameter._version != version and parameter not in away:
                self._written = self._written or self._chunk.names[parameter]

    def _end(self) -> None:
        with signals_deferred():
            if self in self._owner.residency.running:
                self._owner.residency.running.remove(self)
            self._chunk.gradients.tensors = []
            self._chunk.stepping = False
            self._chunk.pending = None

    # The optimizer's thread

    def _run(self, loads: Sequence[StoredTensor]) -> None:
        began = time.perf_counter()
        for tensor in loads:
            tensor.wait_for_load()
        seconds = time.perf_counter() - began
        for tensor in self._chunk.state.tensors:
            tensor.show()
        copies: dict[nn.Parameter, nn.Parameter] = {}
        for stepped in self._tensors:
            stepped.value.wait()
            stepped.gradient.wait()
        began = time.perf_counter()
        for parameter, value, gradient, scales, _ in self._tensors:
            for scale in scales:
                gradient.tensor.mul_(scale)
            if self._factor is not None:
                self._norms[parameter] = norms_of([gradient.tensor], *self._owner.norm_kind)[0]
                gradient.tensor.mul_(self._factor)
            copies[parameter] = nn.Parameter(value.tensor)
            copies[parameter].grad = gradient.tensor
        groups = [
            {**group, "params": [copies[parameter] for parameter in group["params"]]}
            for group in self._groups
        ]
        states = {copies[stepped.parameter]: stepped.state for stepped in self._tensors}
        self._loaded = True
        seconds += time.perf_counter() - began
        self._seconds = seconds + self._owner.run(groups, defaultdict(dict, states))
