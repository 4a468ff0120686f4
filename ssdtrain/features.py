"""The protocol of a feature: an object that a `Runtime` calls at the events of training.

Offloading and compressed collectives are two of them. A feature from outside of this package is given to `Runtime` or to
`ssdtrain.attach`:

```python
@dataclass
class CallMetrics(MetricSet):
    forwards: int = counter(Unit.COUNT, "forwards")

class CountForwards(Feature):
    def __init__(self) -> None:
        self.counted = CallMetrics()

    def on_forward(self, forward: Forward) -> None:
        self.counted.forwards += 1

    def metrics(self) -> list[tuple[str, MetricSet]]:
        return [("calls", self.counted)]

runtime = ssdtrain.attach(model, config, features=[CountForwards()])
```

Note: [Order of features]
Events reach features in the order of `Runtime.features`, contexts of `on_forward` and `on_backward` nest in it, and `detach` and
`close` run in the reverse order.

    offloading          outermost: saved-tensor hooks that another feature installs take precedence over its own, and their
                        results are not offloaded. What a feature saves by an autograd function of its own
                        (`ctx.save_for_backward`) is offloaded like the model's saved tensors
    trace, bytes by     they end where a step ends, before a plan is made there: that takes time, and may raise
    module
    plans               before what they turn: compressed inputs
    collectives, compressed inputs, model state: in any order
    features from outside and of adapters, in the order given
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import nn

from ssdtrain import ranks
from ssdtrain.metrics import MetricSet
from ssdtrain.steps import Step

__all__ = ["FIRST_STEPS", "UNNAMED", "Feature", "Forward", "Microbatch", "Placement", "Step"]

FIRST_STEPS = 3
"""Steps after which an enabled feature must have done something, or warn."""

UNNAMED = -1
"""`microbatch` of a forward or backward that the training loop does not name."""


class Placement(NamedTuple):
    """The device and the position of this process in the job."""

    device: torch.device
    rank: int = 0
    local_rank: int = 0
    local_world_size: int = 1
    """Ranks on this node, which share its drives and memory."""

    @classmethod
    def of(
        cls,
        device: torch.device | str,
        rank: int | None = None,
        local_rank: int | None = None,
        local_world_size: int | None = None,
    ) -> Placement:
        """The placement of this process; what is None comes from torch.distributed and the launcher."""
        return cls(
            torch.device(device),
            ranks.global_rank() if rank is None else rank,
            ranks.local_rank() if local_rank is None else local_rank,
            ranks.local_world_size() if local_world_size is None else local_world_size,
        )


class Microbatch(NamedTuple):
    """A microbatch on a model chunk."""

    chunk: int = 0
    """The model chunk (virtual pipeline stage) on this rank."""
    microbatch: int = UNNAMED
    """The number that the training loop gives it between its forward and its backward, or `UNNAMED`."""


class Forward(NamedTuple):
    """The forward of a microbatch on a model chunk."""

    chunk: int = 0
    microbatch: int = UNNAMED
    keep: bool = False
    """True if its backward follows at once, so that moving its activations would not pay."""


class Feature:
    """Base class of features. Every method has a default that does nothing: override what is needed.

    The runtime calls all methods from the thread that trains, except for `on_backward` and what runs inside of it where a
    framework starts backwards from another thread. An exception of a method reaches the training loop.

    Note: [Forwards of layers]
    A feature that computes layers differently replaces their forwards in `attach` and restores them in `detach`. `attach` is
    called once for each model (each model chunk of a pipeline), after the framework has wrapped, sharded and converted it, and
    before the first forward: parameters are the ones that train, and may be sharded. A feature must not assume that `on_forward`
    surrounds every forward of these layers: evaluation and recomputation run without it.
    """

    def attach(self, model: nn.Module) -> None:
        """Prepare `model`, whose forwards and backwards the next events are about."""

    def detach(self) -> None:
        """Undo what `attach` changed, on all models. Idempotent; called before `close`, and by it."""

    def on_step_begin(self) -> None:
        """A step begins: the optimizer may have moved parameters. Also called after each end that the clock finds, and not before
        the first step there."""

    def before_call(self, module: nn.Module, arguments: Any) -> None:
        """An attached module is called with these arguments, and its forward is about to be recorded as one."""

    def on_forward(self, forward: Forward) -> AbstractContextManager[Any] | None:
        """A forward with gradients begins.

        Returns:
            A context manager in which the forward runs; None where there is nothing to wrap. It leaves with the forward's
            exception, if there was one.
        """
        return None

    def on_backward(self, backward: Microbatch) -> AbstractContextManager[Any] | None:
        """A backward begins. Not called where the training loop does not announce its backwards (plain PyTorch).

        Returns:
            As `on_forward`.
        """
        return None

    def on_next_backward(self, upcoming: Sequence[Microbatch]) -> None:
        """These backwards come next, in this order. A hint: it may be missing, and schedules may change."""

    def on_backward_over(self) -> None:
        """A backward is known to be over: an optimizer is about to step, or backward has stepped optimizers itself. Not called
        where the training loop announces its steps."""

    def on_step_end(self, step: Step) -> None:
        """An optimizer step is over: see `ssdtrain.steps.StepClock`. Where the clock finds the end, the next forward is about to
        begin, or the runtime closes."""

    def on_unended_step(self) -> str:
        """`UNENDED_FORWARDS` forwards have begun in one step: what is recorded of it must not fill memory.

        Returns:
            what is not done while no step ends, for a warning where none has ended so far; "" for nothing.
        """
        return ""

    def metrics(self) -> Sequence[tuple[str, MetricSet]]:
        """The metrics since the start: (prefix of their names, "" for none; the set).

        The names must be the same on every rank and differ from those of other features. From here they
        reach the files of `report.path`, the log lines, the monitors of frameworks and `Runtime.statistics`.
        """
        return ()

    def reset_peak(self) -> None:
        """Begin a new peak in gauges that hold one."""

    def description(self) -> str:
        """What it does in this run, as a part of the log line at start; "" to be left out."""
        return ""

    def decisions(self) -> str:
        """What it decided for the steps to come and why, as lines of text; "" while there is nothing. The journal gets it when it
        is another than before."""
        return ""

    def limited_by(self, seconds: float) -> str:
        """Say what keeps it from bringing more, for the end of a run: "drive writes 0.91 GB/s, forward saves 3.10 GB/s"; "" where
        nothing does, or it is not known.

        Args:
            seconds: of all steps that have ended; a wait that is nothing of it limits nothing.
        """
        return ""

    def close(self) -> None:
        """Wait for what is under way and release everything. Idempotent."""
