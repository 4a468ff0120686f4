"""When a step of training is over, also for a loop that does not say so.

Note: [A loop that announces no steps]
A plain loop may never say that a step is over. Then steps end before an optimizer runs, by torch's global hook: from the second
optimizer step on, so that the first one of a loop which does say so is not taken for an end, and only where a forward came in
between, so that several optimizers are one step.

Note: [Optimizers inside of backward]
An optimizer may run in a hook of each parameter, in the middle of a backward. The step is over when that backward is.

Note: [Optimizers of other models]
The discriminator's optimizer runs between the generator's forward and its backward. So an optimizer counts only if it trains an
attached model; until one does, all count, because some train copies of the parameters.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable

import torch
from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

__all__ = ["OptimizerHook", "StepEnds"]

_graph_task = torch._C._current_graph_task_id
_queue_callback = torch.autograd.Variable._execution_engine.queue_callback


class OptimizerHook:
    """Calls a method before any optimizer of the process runs. See Note: [Optimizers inside of backward].

    Args:
        runs: a bound method; its object is not kept alive.
    """

    def __init__(self, runs: Callable[[], object]) -> None:
        self._runs = weakref.WeakMethod(runs)
        self._queued_for = -1  # the backward at whose end `runs` is called
        self._models: list[weakref.ref[nn.Module]] = []
        self._ours: weakref.WeakSet[Optimizer] = weakref.WeakSet()  # that train them
        itself = weakref.ref(self)

        def hook(optimizer: Optimizer, *_: object) -> None:
            found = itself()
            if found is not None and found._counts(optimizer):
                found._before_step()

        handle = register_optimizer_step_pre_hook(hook)  # torch's table outlives everything
        self.remove = handle.remove
        weakref.finalize(self, handle.remove)

    def attach(self, model: nn.Module) -> None:
        """Optimizers of other models than those attached do not count."""
        self._models.append(weakref.ref(model))

    def _counts(self, optimizer: Optimizer) -> bool:
        """See Note: [Optimizers of other models]."""
        if optimizer in self._ours:
            return True
        models = [model for known in self._models if (model := known()) is not None]
        own = {id(parameter) for model in models for parameter in model.parameters()}
        if any(id(parameter) in own for group in optimizer.param_groups for parameter in group["params"]):
            self._ours.add(optimizer)
            return True
        return not self._ours

    def _before_step(self) -> None:
        if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
            return  # nothing may be asked of the device
        task = _graph_task()
        if task == -1:
            self._call()
        elif task != self._queued_for:
            self._queued_for = task
            _queue_callback(self._call)

    def _call(self) -> None:
        runs = self._runs()
        if runs is not None:
            runs()


class StepEnds:
    """Calls a method at the end of each step.

    Args:
        end: a bound method, which is called with the seconds of the step; its object is not kept alive.
        before: called before it where the loop does not announce its steps.
    """

    def __init__(self, end: Callable[[float], None], before: Callable[[], object]) -> None:
        self._end, self._before = weakref.WeakMethod(end), before
        self._forwards = 0  # since the last end
        self._announced = self._optimizer_ran = False
        self._ended_at = time.perf_counter()
        self._hook = OptimizerHook(self._optimizer_runs)

    def attach(self, model: nn.Module) -> None:
        """See `OptimizerHook.attach`."""
        self._hook.attach(model)

    def forward(self) -> int:
        """A forward with gradients begins: how many there were since the last end."""
        self._forwards += 1
        return self._forwards

    def announced(self, seconds: float) -> None:
        """The loop says that a step of so many seconds is over."""
        self._announced, self._forwards = True, 0
        self._call(seconds)

    def _optimizer_runs(self) -> None:
        """See Note: [A loop that announces no steps]."""
        if self._announced or not self._forwards:
            return
        now = time.perf_counter()
        ran, began = self._optimizer_ran, self._ended_at
        self._optimizer_ran, self._forwards, self._ended_at = True, 0, now
        if ran:
            self._before()
            self._call(now - began)

    def _call(self, seconds: float) -> None:
        end = self._end()
        if end is not None:
            end(seconds)

    def close(self) -> None:
        self._hook.remove()
