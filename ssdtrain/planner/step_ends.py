"""When a step of training is over, also for a loop that does not say so.

Note: [A loop that announces no steps]
A plain loop may never say that a step is over. Then steps end before an optimizer runs, by torch's global hook: from the second
optimizer step on, so that the first one of a loop which does say so is not taken for an end, and only where a forward came in
between, so that several optimizers are one step.

Note: [Optimizers inside of backward]
An optimizer may run in a hook of each parameter, in the middle of a backward, or of a backward inside of another one (reentrant
checkpointing), of whose end nothing is told to the outer one. The step is over when the next forward begins outside of backwards.

Note: [Compiled optimizers]
torch.compile traces the hooks of an optimizer's step, once. Of what they do only the change of an attribute is done again in each
step; from that the step is known to be over when the next forward begins. Whose parameters it trained is not known.

Note: [Optimizers of other models]
The discriminator's optimizer runs between the generator's forward and its backward. So an optimizer counts only if it trains an
attached model; until one does, all count, because some train copies of the parameters.

Note: [Evaluation between steps]
A step takes from its first forward to its optimizer. So an evaluation without gradients, a checkpoint that is written or batches
that are loaded between two steps are no part of it.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable

import torch
from torch import nn
from torch.optim.optimizer import Optimizer

from ssdtrain.optimizer_hooks import StepHook, call_before_steps

__all__ = ["UNENDED", "OptimizerHook", "StepEnds", "warn_of_no_step_end"]

logger = logging.getLogger("ssdtrain")

UNENDED = 512
"""Forwards without the end of a step, after which nothing more is recorded until it comes: records must not fill memory."""

_graph_task = torch._C._current_graph_task_id
_queue_callback = torch.autograd.Variable._execution_engine.queue_callback


def warn_of_no_step_end() -> None:
    """After `UNENDED` forwards of a plan."""
    logger.warning(
        "ssdtrain.plan: %d forwards ran without the end of a step: nothing is planned until one comes; call runtime.step_end() "
        "after each step",
        UNENDED,
    )


class _Compiled:
    """See Note: [Compiled optimizers]."""

    ran = False


class OptimizerHook:
    """Calls a method when a step of any optimizer of the process is about to be made (or has been: `register`), or was made
    inside of a backward or compiled. See the notes above.

    Args:
        runs: a bound method; its object is not kept alive.
        backward_over: called where an optimizer ran inside of a backward, when that is over; with reentrant checkpointing also
            when inner ones are.
        register: `call_before_steps` or `call_after_steps`. A step that is given a closure runs forward and backward between the
            two.
        own: count only optimizers that train an attached model, from the first step on.

    Attributes:
        ran_at: when the latest optimizer ran, by `time.perf_counter`; None: not known, because it is compiled.
    """

    def __init__(
        self,
        runs: Callable[[], object],
        backward_over: Callable[[], None] = lambda: None,
        register: Callable[..., StepHook] = call_before_steps,
        own: bool = False,
    ) -> None:
        self._own = own
        self.ran_at: float | None = None
        self._runs, self._backward_over = weakref.WeakMethod(runs), backward_over
        self._queued_for = -1  # the backward at whose end `backward_over` is called
        self._ran_inside = False  # of a backward, and `runs` was not called since
        self._compiled = compiled = _Compiled()
        self._models: list[weakref.ref[nn.Module]] = []
        self._ours: weakref.WeakSet[Optimizer] = weakref.WeakSet()  # that train them
        itself = weakref.ref(self)

        def hook(optimizer: Optimizer, *_: object) -> None:
            if torch.compiler.is_compiling():
                compiled.ran = True
                return
            found = itself()
            if found is not None and found._counts(optimizer):
                found._optimizer_runs()

        handle = register(hook)  # the table outlives everything
        self.remove = handle.remove
        weakref.finalize(self, handle.remove)

    def attach(self, model: nn.Module) -> None:
        """Optimizers of other models than those attached do not count."""
        self._models.append(weakref.ref(model))

    def before_forward(self) -> None:
        """A forward with gradients is about to begin: what ran inside of a backward, or compiled, is over."""
        if (self._ran_inside or self._compiled.ran) and _graph_task() == -1:
            if self._compiled.ran:
                self.ran_at = None
            self._call()

    def _counts(self, optimizer: Optimizer) -> bool:
        """See Note: [Optimizers of other models]."""
        if optimizer in self._ours:
            return True
        models = [model for known in self._models if (model := known()) is not None]
        own = {id(parameter) for model in models for parameter in model.parameters()}
        if any(id(parameter) in own for group in optimizer.param_groups for parameter in group["params"]):
            self._ours.add(optimizer)
            return True
        return not self._ours and not self._own

    def _optimizer_runs(self) -> None:
        if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
            return  # nothing may be asked of the device
        self.ran_at = time.perf_counter()
        task = _graph_task()
        if task == -1:
            self._call()
            return
        self._ran_inside = True
        if task != self._queued_for:
            self._queued_for = task
            _queue_callback(self._backward_over)

    def _call(self) -> None:
        self._ran_inside = self._compiled.ran = False
        runs = self._runs()
        if runs is not None:
            runs()


class StepEnds:
    """Calls a method at the end of each step.

    Args:
        end: a bound method, which is called with the seconds of the step (0.0: not known), and those since the end of the step
            before; its object is not kept alive.
        before: called before it where the loop does not announce its steps.
    """

    def __init__(self, end: Callable[[float, float], None], before: Callable[[], None]) -> None:
        self._end, self._before = weakref.WeakMethod(end), before
        self._forwards = 0  # since the last end
        self._announced = self._optimizer_ran = False
        self._announced_at: float | None = None
        self._began = self._ended_at = time.perf_counter()
        self._hook = OptimizerHook(self._optimizer_runs, before)

    def attach(self, model: nn.Module) -> None:
        """See `OptimizerHook.attach`."""
        self._hook.attach(model)

    def before_forward(self) -> None:
        """A forward with gradients is about to begin."""
        self._hook.before_forward()
        if not self._forwards:
            self._began = time.perf_counter()

    def forward(self) -> int:
        """A forward with gradients begins: how many there were since the last end."""
        self._forwards += 1
        return self._forwards

    def announced(self, seconds: float) -> None:
        """The loop says that a step of so many seconds is over."""
        now, before = time.perf_counter(), self._announced_at
        self._announced, self._forwards, self._announced_at = True, 0, now
        self._call(seconds, seconds if before is None else now - before)

    def _optimizer_runs(self) -> None:
        """See Note: [A loop that announces no steps]."""
        if self._announced or not self._forwards:
            return
        now = self._hook.ran_at
        seconds = 0.0 if now is None else now - self._began
        now = time.perf_counter() if now is None else now
        ran, before = self._optimizer_ran, self._ended_at
        self._optimizer_ran, self._forwards, self._ended_at = True, 0, now
        if ran:
            self._before()
            self._call(seconds, now - before)

    def _call(self, seconds: float, elapsed: float) -> None:
        end = self._end()
        if end is not None:
            end(seconds, elapsed)

    def close(self) -> None:
        self._hook.remove()
