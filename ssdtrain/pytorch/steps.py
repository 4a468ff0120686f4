"""Steps of a training loop that announces none, such as a trainer's.

For the journal, TensorBoard, the trace and the log a step is over where a forward with gradients begins after an optimizer of
the model has stepped, and so several optimizers, and several microbatches, are one step. For compressed collectives it is over
where the next gradients are reduced, if all ranks of the job reduce them together. A loop that announces steps itself
(`Runtime.step_end`, `Runtime.step`) is left to do so.

Note: [Steps of compressed collectives]
At some ends of steps ranks exchange messages, so all ranks have to come there together. Between two steps they need not: one of
them evaluates while the others wait for it at a barrier. Gradients are reduced by all ranks at once, unless each stage of a
pipeline reduces its own: there a loop has to announce its steps. Optimizers of other models do not count, as one rank may have
them alone.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable

import torch
from torch import nn
from torch.optim.optimizer import Optimizer

from ssdtrain.comm import Communicator
from ssdtrain.features import FIRST_STEPS, Feature, Forward, Step
from ssdtrain.integration.inner_hooks import InnerHooks
from ssdtrain.optimizer_hooks import call_after_steps, call_before_steps
from ssdtrain.planner.step_ends import OptimizerHook
from ssdtrain.runtime import Runtime

__all__ = ["BypassedModel", "UnannouncedSteps", "end_unannounced_steps", "record_unannounced_steps"]

logger = logging.getLogger("ssdtrain")

UNENDED_STEPS = 10
"""Steps of an optimizer without an end of a step of compressed collectives after which a warning is logged."""


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


def end_unannounced_steps(runtime: Runtime, comm: Communicator, together: bool) -> Callable[[], object]:
    """Let steps of `comm` end while the loop of `runtime` announces none, or warn of it; call it before the model is registered.

    Args:
        together: all ranks of the job reduce gradients together.

    Returns:
        What to call on all ranks before gradients are reduced. See Note: [Steps of compressed collectives].
    """
    runtime.features.append(UnannouncedSteps(_Unended(comm).optimizer_stepped))
    if not together:
        return lambda: None
    steps = UnannouncedSteps(comm.step_end, at_forward=False)
    runtime.features.append(steps)
    return steps.finish


class _Unended:
    """Warns of a loop whose steps of compressed collectives never end: it trains on, but wrongly."""

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self._steps = 0

    def optimizer_stepped(self) -> None:
        self._steps += 1
        if self._steps == UNENDED_STEPS and not self._comm.steps and self._comm.rank == 0:
            logger.warning(
                "comm: an optimizer made %d steps and runtime.step_end() was not called: warm-up goes on for ever, random "
                "numbers repeat, and residuals of buckets that were rebuilt stay in memory; call it after each optimizer "
                "step, on all ranks",
                UNENDED_STEPS,
            )


class UnannouncedSteps(Feature):
    """Records or ends steps until the loop announces one.

    Args:
        record: records that a step is over, or ends it; called between two steps.
        at_forward: a step is over where the next forward begins; False: where `finish` is called, after an optimizer of the
            model has stepped.
    """

    def __init__(self, record: Callable[[], object], at_forward: bool = True) -> None:
        self._record = record
        self._at_forward = at_forward
        self._stepped = False
        self._hook = OptimizerHook(self._optimizer_steps, register=call_after_steps, own=not at_forward)

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


class BypassedModel(Feature):
    """Warns once where an optimizer of the attached model makes steps, and no forward of the model is recorded between them.

    Args:
        again: called at the second step, may see to it that forwards are recorded.
    """

    def __init__(self, again: Callable[[], object] = lambda: None) -> None:
        self._again = again
        self._models: list[weakref.ref[nn.Module]] = []
        self._steps: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        itself = weakref.ref(self)

        def hook(optimizer: Optimizer, *_: object) -> None:
            bypassed = None if torch.compiler.is_compiling() else itself()
            if bypassed is not None:
                bypassed._optimizer_steps(optimizer)

        self._hook = call_before_steps(hook)
        weakref.finalize(self, self._hook.remove)

    def attach(self, model: nn.Module) -> None:
        self._models.append(weakref.ref(model))

    def on_forward(self, forward: Forward) -> None:
        self._steps.clear()

    def _optimizer_steps(self, optimizer: Optimizer) -> None:
        # One optimizer for each parameter makes many steps after one forward.
        self._steps[optimizer] = steps = self._steps.get(optimizer, 0) + 1
        if steps == 2:
            self._again()
        if steps < FIRST_STEPS:
            return
        model = next((model for known in self._models if (model := known()) is not None), None)
        if model is None or not self._trains(optimizer, model):
            self._steps.clear()
            return
        self.close()
        logger.warning(
            "ssdtrain.attach: an optimizer made %d steps, and no forward with gradients of the attached %s or of a module inside "
            "of it was seen: nothing is done for them. Attach to the module that the loop calls, as it is when training begins, "
            "or run each forward inside of `with runtime.forward():`",
            FIRST_STEPS,
            type(model).__name__,
        )

    @staticmethod
    def _trains(optimizer: Optimizer, model: nn.Module) -> bool:
        """Whether these are steps of the model: the optimizer has its parameters, or as many elements (copies of another dtype),
        and they have gradients."""
        own = {id(parameter): parameter for parameter in model.parameters()}
        groups = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        if any(id(parameter) in own for parameter in groups):
            return True
        trained = sum(parameter.numel() for parameter in own.values() if parameter.grad is not None)
        return trained > 0 and trained == sum(parameter.numel() for parameter in groups)

    def close(self) -> None:
        self._hook.remove()
