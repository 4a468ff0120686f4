"""Steps of a training loop that announces none, such as a trainer's.

For the journal, TensorBoard, the trace and the log a step is over where a forward with gradients begins after an optimizer of
the model has stepped, and so several optimizers, and several microbatches, are one step. For compressed collectives it is over
where the next gradients are reduced. A loop that announces steps itself (`Runtime.step_end`, `Runtime.step`) is left to do so.

Note: [Steps of compressed collectives]
At some ends of steps ranks exchange messages, so all ranks have to come there together. Between two steps they need not: one of
them evaluates while the others wait for it at a barrier. Gradients are reduced by all ranks at once.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from ssdtrain.comm import Communicator
from ssdtrain.features import Feature, Forward, Step
from ssdtrain.integration.inner_hooks import InnerHooks
from ssdtrain.optimizer_hooks import call_after_steps
from ssdtrain.planner.step_ends import OptimizerHook
from ssdtrain.runtime import Runtime

__all__ = ["UnannouncedSteps", "end_unannounced_steps", "record_unannounced_steps"]


def record_unannounced_steps(runtime: Runtime) -> None:
    """Let `runtime` record the steps of its loop until that announces one, and warn after the first ones of saved-tensor hooks
    inside of the model; call it before the model is registered."""
    if runtime.records_steps:
        ends = [runtime.record_step]
        if runtime.engine is not None:
            inner = InnerHooks(runtime.engine.options.min_bytes)
            runtime.features.append(inner)
            ends.append(inner.step_end)
        steps = UnannouncedSteps(lambda: [end() for end in ends])
        runtime.features.insert(0, steps)  # a step ends before anything of the next one is recorded
        runtime.call_at_close(steps.finish)


def end_unannounced_steps(runtime: Runtime, comm: Communicator) -> Callable[[], object]:
    """Let steps of `comm` end while the loop of `runtime` announces none; call it before the model is registered.

    Returns:
        What to call on all ranks before gradients are reduced. See Note: [Steps of compressed collectives].
    """
    steps = UnannouncedSteps(comm.step_end, at_forward=False)
    runtime.features.append(steps)
    return steps.finish


class UnannouncedSteps(Feature):
    """Records or ends steps until the loop announces one.

    Args:
        record: records that a step is over, or ends it; called between two steps.
        at_forward: a step is over where the next forward begins; False: where `finish` is called.
    """

    def __init__(self, record: Callable[[], object], at_forward: bool = True) -> None:
        self._record = record
        self._at_forward = at_forward
        self._stepped = False
        self._hook = OptimizerHook(self._optimizer_steps, register=call_after_steps)

    def _optimizer_steps(self) -> None:
        self._stepped = True

    def attach(self, model: nn.Module) -> None:
        self._hook.attach(model)

    def before_forward(self) -> None:
        self._hook.before_forward()
        if self._at_forward and not (
            torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
        ):
            self.finish()  # which asks the device

    def on_forward(self, forward: Forward) -> None:
        """Has an attached model announce its forwards: see `before_forward`."""

    def finish(self) -> None:
        """A step whose optimizer has stepped is over."""
        if self._stepped:
            self._stepped = False
            self._record()

    def on_step_begin(self) -> None:
        self.close()

    def on_step_end(self, step: Step) -> None:
        self.close()

    def close(self) -> None:
        self._stepped = False
        self._hook.remove()
