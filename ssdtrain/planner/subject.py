"""What a controller plans for: the regions of tapes, or the blocks of a model."""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from ssdtrain.features import Feature
from ssdtrain.offload.tensors.meter import Peaks
from ssdtrain.planner.explain import Outcome
from ssdtrain.planner.plans import NoPlan, Plan, SearchProblem

if TYPE_CHECKING:
    from ssdtrain.planner.controller import PlanController

__all__ = ["UNMEASURED_STEPS", "WARM_UP", "PlanSubject"]

WARM_UP = 2
"""Steps that no plan is made from: the first ones have costs of their own."""

UNMEASURED_STEPS = 8
"""Steps after which a plan is made without tiers that nothing was written to: nothing was saved that may move, or backward came
before every write."""


class PlanSubject(Feature, ABC):
    """Records steps, describes them as a problem of the search, and carries plans out. What is decided, and when, is the
    controller's, which also calls the methods of a feature; this says whether there is a reason that it alone can see.

    Attributes:
        note: the end of the table of a plan.
        modules: modules that saved the regions, by the names of regions; those of blocks are their own.
    """

    TITLE: str
    """What decides, in the words of the table."""
    METRICS: str
    """Prefix of the metrics' names."""
    MEASURES_OUTCOME = False
    """Whether what came of a plan is said with its table, two steps later."""
    SETTLES = ""
    """Reason of a plan of which it says nothing about the bandwidths that it is the one of before."""

    remedy: str = ""
    """See `PlanBlocks`."""

    def __init__(self, note: str = "") -> None:
        self.note = note
        self.modules: dict[str, str] = {}
        self._controller: weakref.ref[PlanController] | None = None

    def begin(self, controller: PlanController) -> None:
        """Record steps for the plans of `controller`."""
        self._controller = weakref.ref(controller)

    @property
    def controller(self) -> PlanController:
        """The controller that plans for this."""
        controller = None if self._controller is None else self._controller()
        assert controller is not None
        return controller

    # Events

    @property
    def resting(self) -> bool:
        """Whether forwards run without hooks."""
        return False

    def rested(self) -> None:
        """A step without hooks is over."""

    def failed(self) -> bool:
        """A step ended by an exception. Returns whether it is no step that is planned from."""
        return False

    @abstractmethod
    def step_ended(self, unoffloaded: int) -> bool:
        """Take what was recorded of a step whose peak without offload is so many bytes.

        Returns:
            Whether there is something new that a plan may be made from.
        """

    def settle(self) -> None:
        """A step is over, and a plan was made if one was due."""

    # When to plan again

    @abstractmethod
    def ready(self, fresh: bool) -> bool:
        """Whether a plan can be made from what was measured. `fresh`: what `step_ended` returned."""

    def due(self) -> str:
        """Why a plan is due, where none is so far. Empty: none is."""
        return ""

    def requested(self) -> None:
        """A plan is due."""

    @property
    def beside(self) -> int:
        """Bytes on the device beside activations that count in the limit."""
        return 0

    @abstractmethod
    def moves(self) -> bool:
        """Whether bandwidths are measured under the plan."""

    def probes(self) -> bool:
        """Whether it is time to look whether the tiers are faster now."""
        return False

    def stalled(self, fresh: bool, total: float) -> float | None:
        """The part of a step of `total` seconds (0.0: not known) in which computation waited; None: not known."""
        return None

    # Planning

    @property
    def agreed(self) -> bool:
        """Whether ranks have decided which blocks all of them recompute."""
        return False

    @abstractmethod
    def problem(self) -> SearchProblem:
        """What is searched."""

    @abstractmethod
    def larger(self) -> float:
        """Size of the largest forward, which has to fit too, over the size of the one that was recorded; at least 1."""

    def write_rate(self, problem: SearchProblem, borne: float | None) -> float | None:
        """Bytes per second that the first tier is written at most, of which its drives bear `borne`; None: no limit."""
        return borne

    @abstractmethod
    def follow(self, before: Plan | None, problem: SearchProblem, plan: Plan) -> bool:
        """Carry out a plan from the next forward on. Returns whether it is the one of before."""

    def warn_of_limits(self, error: NoPlan, *, started: bool) -> bool:
        """Say why the plan that is nearest to the limits is followed, where it is for a reason of its own. Returns whether it is.

        Args:
            started: a plan was followed before.
        """
        return False

    def outcome(self, peaks: Peaks, seconds: float) -> Outcome | None:
        """What was measured in a step of `seconds` under the plan. None: it is not known, or not said."""
        return None
