"""When a step of training is over: the one clock of a runtime, and torch's hooks around the steps of all optimizers.

Note: [One entry in torch's table]
torch walks its table of global hooks while it calls them, and raises RuntimeError out of `optimizer.step` if the table changes
meanwhile: because another thread attaches or closes a runtime, or because a collection of garbage, which may begin inside of a
hook, frees one. So there is one entry of ours in the table, made at the first use and kept, and it walks a tuple of its own. A
function is removed by one assignment, which is safe in a finalizer too; what it leaves is dropped when another one is added.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

UNENDED_FORWARDS = 512
"""Number of forwards in one step after which nothing more is recorded of it, because records must not fill memory; a warning
where no step has ended so far."""

_graph_task = torch._C._current_graph_task_id
_queue_callback = torch.autograd.Variable._execution_engine.queue_callback

Called = Callable[[Optimizer, tuple[Any, ...], dict[str, Any]], object]


class StepHook:
    """A function that is called until `remove`, or a method until its object is gone.

    Attributes:
        ran_compiled: a compiled optimizer has made a step; to be set back by whom it concerns. Dynamo traces hooks once, and of
            what they do only a changed attribute is done again in each step: so the function is not called for it.
    """

    def __init__(self, called: Called) -> None:
        self.ran_compiled = False
        self.called: Callable[[], Called | None] | None = (
            weakref.WeakMethod(called) if isinstance(called, MethodType) else lambda: called
        )

    def remove(self) -> None:
        """Idempotent; may be called anywhere."""
        self.called = None


class _HookTable:
    """See Note: [One entry in torch's table].

    Args:
        register: torch's function that adds a global hook.
    """

    def __init__(self, register: Callable[[Callable[..., None]], object]) -> None:
        self._register = register
        self._lock = threading.Lock()
        self._hooks: tuple[StepHook, ...] = ()
        self._registered = False

    def add(self, called: Called) -> StepHook:
        hook = StepHook(called)
        with self._lock:
            kept = [known for known in self._hooks if known.called is not None and known.called() is not None]
            self._hooks = (*kept, hook)
            if not self._registered:
                self._registered = True
                self._register(self._call)
        return hook

    def _call(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.compiler.is_compiling():
            for hook in self._hooks:
                hook.ran_compiled = True
            return
        for hook in self._hooks:
            if (known := hook.called) is not None and (called := known()) is not None:
                called(optimizer, args, kwargs)


_before, _after = _HookTable(register_optimizer_step_pre_hook), _HookTable(register_optimizer_step_post_hook)


def call_before_steps(called: Called) -> StepHook:
    """Call `called(optimizer, args, kwargs)` before each step of any optimizer of the process, unless that is compiled. What it
    returns is not used."""
    return _before.add(called)


def call_after_steps(called: Called) -> StepHook:
    """Call it after each step."""
    return _after.add(called)


class Step(NamedTuple):
    """A finished optimizer step."""

    number: int
    """The number that the training loop gives it, else counted from 1."""
    seconds: float
    """Time since its begin, or else since the end of the step before; 0.0 for a first one whose begin is not known."""
    skipped: bool = False
    """True if its gradients overflowed and were dropped."""
    failed: bool = False
    """True if an exception ends it. Other ranks may not know: a feature must not wait for them then."""
    announced: bool = True
    """False where the clock found the end: ranks need not come to it together."""
    closing: bool = False
    """True if it ends because the runtime closes: nothing comes after it, and there may be no other rank any more."""
    forwards: int = 0
    """Forwards with gradients in it."""
    elapsed: float = 0.0
    """Time since the end of the step before, in seconds."""
    idle: float = 0.0
    """Part of `seconds` before its first forward and after its optimizer, where the loop does not announce steps: evaluations and
    checkpoints. All of it where the time of the optimizer is not known."""


class StepClock:
    """Says when a step is over, for everything in a runtime that counts steps.

    The loop ...                           A step is over ...
    -------------------------------------  ----------------------------------------------------------------------------------
    announces its steps                    where it says so (`Runtime.step_begin`, `step_end`); once it has said anything, only
                                           there
    runs an optimizer of torch             where the next forward with gradients begins after it, or the runtime closes
    accumulates gradients, or is a         the same: forwards between which no optimizer steps are of one step
    pipeline that announces nothing
    runs several optimizers                the same: the first one that trains an attached model counts. Another one takes its
                                           place if that is gone, or if it makes two steps while that makes none
    trains other models (a discriminator)  the same: what trains no attached model counts only until another optimizer does,
                                           because some optimizers train copies of the parameters
    gives a closure to `optimizer.step`    the same: at the first forward in the closure of the next step
    runs optimizers inside of backward     the same: at the next forward outside of backwards, also of reentrant ones
    compiles its optimizer                 the same; which optimizer ran is not known, nor when (`StepHook.ran_compiled`)
    captures its optimizer in a CUDA graph nowhere: nothing may be asked of the device then, and a replay calls no hook
    runs an optimizer before any forward   not there: a step has a forward
    evaluates between two steps            the same: it belongs to neither (`Step.idle`), and with gradients to the next one
    compresses collectives                 for these where all ranks reduce gradients after `optimizer_steps` has grown: at some
                                           ends they exchange messages, so they have to come there together. Stages of a
                                           pipeline reduce gradients apart, and so their loop has to announce its steps

    Runs on the thread that trains; with backwards on other threads, an optimizer inside of them does too.

    Args:
        ended: a bound method, called with each step that is over; its object is not kept alive.
        backward_over: the same, called where a backward is known to be over: before an optimizer runs, and after a backward in
            which one ran. The time of a step ends there.
        unended: the same, called when `UNENDED_FORWARDS` forwards have begun in one step.

    Attributes:
        ended: steps that are over.
        optimizer_steps: steps of the optimizer that counts, if it trains an attached model.
        announced: the loop says when a step is over.
        forwards: forwards with gradients since the end of the last step.
    """

    def __init__(
        self,
        ended: Callable[[Step], object],
        backward_over: Callable[[], object],
        unended: Callable[[], object],
    ) -> None:
        self.ended = self.optimizer_steps = self.forwards = 0
        self.announced = False
        self._on_end = weakref.WeakMethod(ended)
        self._on_backward_over = weakref.WeakMethod(backward_over)
        self._on_unended = weakref.WeakMethod(unended)
        self._hooks: list[StepHook] = []
        self._models: list[weakref.ref[nn.Module]] = []
        self._trained: weakref.WeakSet[Optimizer] = weakref.WeakSet()  # optimizers that train attached models
        self._others: weakref.WeakSet[Optimizer] = weakref.WeakSet()  # have stepped since the counted one did
        self._counted: weakref.ref[Optimizer] | None = None
        self._counted_trains = False
        self._stepped = False  # the counted optimizer has, and no backward runs
        self._stepped_inside = False  # of a backward
        self._queued_for = -1  # the backward at whose end `backward_over` is called
        # Times of `time.perf_counter`.
        self._began: float | None = None
        self._first_forward = self._last_end = time.perf_counter()
        # When the first optimizer since the last forward began to step.
        self._optimizer_at: float | None = None

    @property
    def steps(self) -> int:
        """Number of the step, from 0, to which the next forward belongs: steps that are over, or whose optimizer has stepped."""
        return self.ended + self._stepped

    def watch_optimizers(self) -> None:
        """Find the ends of steps that the loop does not announce, until it announces one."""
        self._hooks = [call_before_steps(self._before_step), call_after_steps(self._after_step)]

    def attach(self, model: nn.Module) -> None:
        """Count the steps of optimizers that train `model`."""
        self._models.append(weakref.ref(model))

    # The loop announces

    def begin(self) -> None:
        """Note that a step begins."""
        self._announce()
        self._began = time.perf_counter()

    def end(self, number: int | None = None, *, skipped: bool = False, failed: bool = False) -> None:
        """End a step. See `Step`."""
        self._announce()
        self._end(number, skipped=skipped, failed=failed)

    def _announce(self) -> None:
        if not self.announced:
            self.announced = True
            self._remove_hooks()

    # It does not

    def before_forward(self) -> None:
        """End the step whose optimizer has stepped: a forward with gradients is about to begin."""
        if not self.announced and _graph_task() == -1 and not _capturing():
            self._end_unannounced(closing=False)

    def forward_begins(self) -> None:
        """Count a forward with gradients."""
        self.before_forward()
        now = time.perf_counter()
        if not self.forwards:
            self._first_forward = now
        if self._began is None:
            self._began = now  # of the first step, where the loop does not say so
        self.forwards += 1
        self._optimizer_at = None
        if self.forwards == UNENDED_FORWARDS:
            _call(self._on_unended)

    def close(self) -> None:
        """End the last step, and watch no optimizer any more. Idempotent."""
        if self._hooks:
            self._end_unannounced(closing=True)
            self._remove_hooks()

    def remove(self) -> None:
        """Watch no optimizer any more, and drop the step that is not over."""
        self._remove_hooks()
        self._stepped = self._stepped_inside = False

    def _remove_hooks(self) -> None:
        while self._hooks:
            self._hooks.pop().remove()

    def _end_unannounced(self, *, closing: bool) -> None:
        if any(hook.ran_compiled for hook in self._hooks):
            self._optimizer_at = None
            self._count_step(trains=True)
        elif self._stepped_inside:
            self._count_step(trains=self._counted_trains)
        if self._stepped:
            self._end(closing=closing, announced=False)

    def _end(self, number: int | None = None, **how: bool) -> None:
        now = time.perf_counter()
        seconds = 0.0 if self._began is None else now - self._began
        elapsed = now - self._last_end if self.ended else seconds
        ran_at, idle = self._optimizer_at, 0.0
        if not self.announced:
            idle = seconds if ran_at is None else max(0.0, seconds - (ran_at - self._first_forward))
        forwards, self.forwards, self.ended = self.forwards, 0, self.ended + 1
        self._began = self._last_end = now  # of the next step, where the loop does not say so
        self._stepped = self._stepped_inside = False
        number = self.ended if number is None else number
        _call(self._on_end, Step(number, seconds, forwards=forwards, elapsed=elapsed, idle=idle, **how))

    # Optimizers

    def _before_step(self, optimizer: Optimizer, *_: object) -> None:
        if _capturing() or (self._counted_trains and not self._trains(optimizer)):
            return
        if (task := _graph_task()) == -1:
            if self._optimizer_at is None:
                self._optimizer_at = time.perf_counter()
                _call(self._on_backward_over)
        elif task != self._queued_for:
            self._queued_for = task
            _queue_callback(self._backward_with_optimizers_over)

    def _backward_with_optimizers_over(self) -> None:
        """Note the time. With reentrant checkpointing inner backwards come here too."""
        self._optimizer_at = time.perf_counter()
        _call(self._on_backward_over)

    def _after_step(self, optimizer: Optimizer, *_: object) -> None:
        if _capturing() or not self._counts(optimizer):
            return
        if _graph_task() != -1:
            self._stepped_inside = True
            return
        if self._optimizer_at is None:  # its forwards ran in a closure
            self._optimizer_at = time.perf_counter()
        self._count_step(trains=self._counted_trains)

    def _count_step(self, *, trains: bool) -> None:
        self._stepped_inside = False
        for hook in self._hooks:
            hook.ran_compiled = False
        self.optimizer_steps += trains
        self._stepped |= self.forwards > 0

    def _counts(self, optimizer: Optimizer) -> bool:
        """See the rows on several optimizers and on other models."""
        counted = None if self._counted is None else self._counted()
        trains = self._trains(optimizer)
        if counted is not None and counted is not optimizer:
            if trains < self._counted_trains:
                return False
            if trains == self._counted_trains and optimizer not in self._others:
                self._others.add(optimizer)
                return False
        self._counted, self._counted_trains = weakref.ref(optimizer), trains
        self._others.clear()
        return True

    def _trains(self, optimizer: Optimizer) -> bool:
        if optimizer in self._trained:
            return True
        models = [model for known in self._models if (model := known()) is not None]
        own = {id(parameter) for model in models for parameter in model.parameters()}
        if any(id(parameter) in own for group in optimizer.param_groups for parameter in group["params"]):
            self._trained.add(optimizer)
            return True
        return False


def _capturing() -> bool:
    """Whether a CUDA graph is captured: nothing may be asked of the device."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def _call(known: weakref.WeakMethod[Callable[..., object]], *arguments: object) -> None:
    method = known()
    if method is not None:
        method(*arguments)
