"""Translation of the events of a pipeline schedule to calls on the runtime.

Note: [Order]
A schedule runs each microbatch on each chunk once in a step. So a forward that comes when no step is under way, or that this
step had already, begins a step, and it does not matter which chunk is the first in the list that `attach` was given. The order
of a step depends on nothing but the layout and the number of microbatches. So it is known from the step before with as many
microbatches: which backward comes next, and which forward is followed by its own backward. While it is not known (the first
step, a new number of microbatches) nothing is hinted, and each backward starts its own loads. An event that is not the expected
one (a step that raised) ends the hints until the next step.

Note: [Kept tapes]
Where the backward of a tape follows its forward at once while other tapes of this rank are alive (interleaving: the last
chunk on the last stage), nothing of it leaves memory: it is a small part of what the rank holds, and it is needed now.
Where it is the only tape alive (no pipeline, the last stage of 1F1B) it is all that the rank holds, and it leaves.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from ssdtrain.features import Feature, Forward
from ssdtrain.profile.modules import ModuleHook
from ssdtrain.runtime import Runtime

logger = logging.getLogger("ssdtrain")

TapeKey = tuple[int, int]
"""(chunk, microbatch): names a tape."""

LOOKAHEAD = 2  # backwards whose tapes are named to the runtime


class ScheduledEvent(NamedTuple):
    """One forward or backward of one microbatch on one chunk."""

    backward: bool
    chunk: int
    microbatch: int

    @property
    def key(self) -> TapeKey:
        return self.chunk, self.microbatch


class StepOrder:
    """The events of steps by number of microbatches, as seen. See Note: [Order]."""

    def __init__(self) -> None:
        self._known: dict[int, list[ScheduledEvent]] = {}
        self._seen: list[ScheduledEvent] = []
        self._expected: list[ScheduledEvent] | None = None
        self._count = 0

    def begin(self, count: int) -> None:
        """A step of `count` microbatches begins."""
        self._count = count
        self._seen = []
        self._expected = self._known.get(count)

    def record(self, event: ScheduledEvent) -> None:
        """Record the next event of the step."""
        at = len(self._seen)
        if self._expected is not None and (at >= len(self._expected) or self._expected[at] != event):
            self._expected = None
        self._seen.append(event)

    def end(self) -> None:
        """The step is complete."""
        self._known[self._count] = self._seen

    def next_event(self) -> ScheduledEvent | None:
        """The event after the current one, if it is known."""
        at = len(self._seen)
        return self._expected[at] if self._expected is not None and at < len(self._expected) else None

    def next_backwards(self, alive: set[TapeKey]) -> list[TapeKey]:
        """The tapes among `alive` whose backwards come next, in order; at most AHEAD."""
        found = []
        for event in (self._expected or [])[len(self._seen) :]:
            if event.backward:
                if event.key not in alive:
                    break
                found.append(event.key)
                if len(found) == LOOKAHEAD:
                    break
        return found


class Schedule:
    """Reports the forwards and backwards of one rank to a runtime.

    Args:
        runtime: enabled.
        chunks: model chunks on this rank.
        ends_steps: a step of the runtime ends with the last backward; else the caller ends it.
    """

    def __init__(self, runtime: Runtime, chunks: int, ends_steps: bool = True) -> None:
        self.runtime = runtime
        self._ends_steps = ends_steps
        self.order = StepOrder()
        self._chunks = chunks
        self._open = False
        self._left = 0  # backwards until the step is complete
        self._forwards: set[TapeKey] = set()  # that the step had
        self._alive: set[TapeKey] = set()
        self._outputs: dict[int, tuple[weakref.ref[torch.Tensor], TapeKey]] = {}

    def forward(self, chunk: int, microbatch: int, count: int, call: Callable[[], Any]) -> Any:
        """Run `call`, the forward of `microbatch` on `chunk`, of `count` microbatches in the step.

        Returns:
            What `call` returned. Pass `record_output` the output whose backward will come.
        """
        event = ScheduledEvent(False, chunk, microbatch)
        if not self._open or event.key in self._forwards:
            self._begin(count)
        self._forwards.add(event.key)
        self.order.record(event)
        following = self.order.next_event()
        at_once = following == ScheduledEvent(True, chunk, microbatch)
        keep = at_once and bool(self._alive)
        if following is not None and following.backward and not at_once:
            self.runtime.next_backward(*self.order.next_backwards(self._alive))
        with self.runtime.forward(chunk, microbatch, keep=keep):
            result = call()
        self._alive.add(event.key)
        return result

    def record_output(self, output: object, chunk: int, microbatch: int) -> None:
        """The forward returned `output`; its backward is known by the identity of it."""
        if isinstance(output, torch.Tensor):
            self._outputs[id(output)] = (weakref.ref(output), (chunk, microbatch))

    def knows(self, output: object) -> bool:
        """True if `output` came from a forward of this schedule and had no backward."""
        known = self._outputs.get(id(output))
        return known is not None and known[0]() is output

    def backward(self, output: object, call: Callable[[], Any]) -> Any:
        """Run `call`, the backward of an output that this schedule `knows`."""
        _, key = self._outputs.pop(id(output))
        self.order.record(ScheduledEvent(True, *key))
        self._alive.discard(key)
        with self.runtime.backward(*key):
            self.runtime.next_backward(*self.order.next_backwards(self._alive))
            result = call()
        self._left -= 1
        if self._open and self._left == 0:
            self.order.end()
            self._end()
        return result

    def _begin(self, count: int) -> None:
        if self._open:  # it raised, or was an evaluation with gradients on: no step of training
            self._clear()
        self._open = True
        self._left = count * self._chunks
        self.order.begin(count)
        self.runtime.step_begin()

    def _end(self) -> None:
        self._clear()
        if self._ends_steps:
            self.runtime.step_end()

    def _clear(self) -> None:
        self._open = False
        self._forwards.clear()
        self._alive.clear()
        self._outputs.clear()
        self.runtime.next_backward()


LOOSE_FORWARDS = 10
"""Forwards outside of a schedule, before any inside of one, that are taken for a loop's own beginning."""


class BypassedSchedules(Feature):
    """Warns once where a chunk's forwards with gradients do not come from a schedule, until the first one that does.

    An adapter appends it to `Runtime.features`.
    """

    def __init__(self) -> None:
        self._forwards = 0
        self._handles: list[RemovableHandle] = []

    def attach(self, model: nn.Module) -> None:
        self._handles.append(model.register_forward_pre_hook(ModuleHook(self.forward)))

    def forward(self, *_: object) -> None:
        """A chunk's forward begins."""
        if not torch.is_grad_enabled():
            return
        self._forwards += 1
        if self._forwards == LOOSE_FORWARDS:
            self.detach()
            logger.warning(
                "the model ran %d forwards with gradients, none of them by forward_step of "
                "megatron.core.pipeline_parallel.schedules: nothing of them is offloaded or recomputed. A loop that calls the "
                "model by itself uses ssdtrain.attach; a schedule of your own looks forward_step and backward_step up in that "
                "module when it calls them",
                LOOSE_FORWARDS,
            )

    def on_forward(self, forward: Forward) -> AbstractContextManager[Any] | None:
        self.detach()
        return None

    def detach(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
