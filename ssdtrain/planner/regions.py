"""Plans by regions of a tape: of saved tensors, whatever module saved them. Nothing is recomputed.

Note: [Rest]
Where nothing is worth moving, hooks on saved tensors are all cost. So when a plan keeps everything, and the config has no limit
that is to be watched, forwards run without hooks. After `PROBE_PERIOD` steps, and twice as many each time that nothing new came
of it, one step has them again, and a plan is made from it. Larger inputs of a model end the rest at once, before their forward,
and everything is offloaded until there is a plan for them.
"""

from __future__ import annotations

import logging
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ssdtrain.offload.engine import OffloadEngine
from ssdtrain.offload.policy import KEEP, OFFLOAD, Action, ForwardProfile, ForwardSizes, SavedTensorInfo
from ssdtrain.offload.tensors.meter import Peaks
from ssdtrain.offload.tensors.region import place_of
from ssdtrain.planner.explain import Outcome
from ssdtrain.planner.model import types as step
from ssdtrain.planner.model.timeline import simulate
from ssdtrain.planner.model.types import DEVICE, Choice, Machine
from ssdtrain.planner.plans import Plan, SearchProblem
from ssdtrain.planner.profile import Profile, regions_problem
from ssdtrain.planner.recent import STEPS, RecentSteps
from ssdtrain.planner.subject import UNMEASURED_STEPS, WARM_UP, PlanSubject
from ssdtrain.profile.containers import leaves
from ssdtrain.profile.modules import ModuleHook, is_compiled
from ssdtrain.profile.passes import StepRecord

if TYPE_CHECKING:
    from ssdtrain.planner.controller import PlanController

__all__ = ["PROBE_PERIOD", "AdaptivePolicy", "Regions", "measure_by_one"]

logger = logging.getLogger("ssdtrain")

CALM_PERIOD = 8
"""Steps between two that are recorded, while nothing changes."""

PROBE_PERIOD = 16
"""Steps after which a plan that offloads nothing lets one region go, to see whether the drive is faster now."""

MOST_REST = 128
"""Maximum steps of a rest. See Note: [Rest]."""

RESTS = (
    'offload.amount is "auto", and nothing is worth moving: forwards run without saved-tensor hooks from here on. A step in '
    "every %d to %d has them, to see whether that changes, and so have forwards with larger inputs"
)

FASTER = "to see whether the tiers are faster now"
SEVERAL = "several steps are profiled now"


LARGER = 1.2
"""Factor by which inputs have grown where the method is called."""

_RECENT = 16
"""Number of latest calls of a module whose largest inputs are what others are compared with from `settle` on."""


class AdaptivePolicy:
    """Offloads what its plan says, and everything before there is one and past its end: memory must not run
    out first.

    The plan changes between steps only (`ssdtrain.planner.controller`), and holds no state that a checkpoint
    would need: three steps suffice to learn it again.
    """

    needs_modules = False

    def __init__(self) -> None:
        self.plans: dict[int, tuple[Action, ...]] = {}
        """Actions for the region at each position of a tape, by model chunk."""
        self.largest: dict[int, int] = {}
        """Bytes saved by the largest forward so far, by model chunk."""
        self.sizes = ForwardSizes()
        self.modules: dict[str, str] = {}
        """Module that saved each region, by its name, where modules were watched."""

    def decide(self, saved: SavedTensorInfo) -> Action:
        if saved.modules:
            self.modules.setdefault(place_of(saved.chunk, saved.position), saved.module)
        plan = self.plans.get(saved.chunk)
        if plan is None or saved.position >= len(plan):
            return OFFLOAD
        return plan[saved.position]

    def observe(self, forward: ForwardProfile) -> None:
        self.sizes.add(forward.saved_bytes, forward.chunk)
        self.largest[forward.chunk] = max(self.largest.get(forward.chunk, 0), forward.saved_bytes)

    def follow(self, plans: Mapping[int, Sequence[Action]]) -> None:
        """Follow these plans from the next tape on. Called between steps."""
        self.plans = {chunk: tuple(plan) for chunk, plan in plans.items()}
        self.sizes.settle()

    def shape_changed(self) -> bool:
        """The largest of the latest tapes of a chunk has another size than when the plan was made, by a fifth
        and more."""
        return self.sizes.changed()


class Regions(PlanSubject):
    """The regions of one engine's tapes, which a plan keeps or offloads.

    Args:
        engine: has `policy`.
        limited: the config has a limit of memory: forwards always have hooks.
        strict: that limit is one of the section plan.
        note: the end of the table of a plan.

    Attributes:
        profile: the latest recorded step; None: there is none yet.
    """

    TITLE, METRICS = "offload.amount auto", "auto"
    MEASURES_OUTCOME = True  # what came of a plan is said with its table, two steps later
    SETTLES = SEVERAL

    def __init__(
        self,
        engine: OffloadEngine,
        policy: AdaptivePolicy,
        *,
        limited: bool = False,
        strict: bool = False,
        note: str = "",
    ) -> None:
        super().__init__(note)
        self.modules = policy.modules
        self.profile: Profile | None = None
        self.policy = policy
        self._engine, self._recorder = engine, engine.recorder
        self._limited, self._strict = limited, strict
        # With their steps and the peaks of these without offload; the device has not passed them yet.
        self._records: list[tuple[int, int, StepRecord]] = []
        self._peak = 0  # of the step of `profile`
        self._searched_from = 0  # number of steps of the profile that the latest search was about
        self._recent = RecentSteps()
        self._since = WARM_UP  # the next plan is made from a profile of this step, or a later one
        self._stall_seconds = 0.0
        self._unused, self._evaluated = (
            0,
            False,
        )  # forwards so far whose backward never came; one in this step
        # See Note: [Rest].
        self._rest_steps, self._wakes_at, self._said_rest = PROBE_PERIOD, 0, False
        self._input_sizes = InputSizes(self._inputs_grew)

    def begin(self, controller: PlanController) -> None:
        super().begin(controller)
        self._recorder.request("plan", True)

    # Events

    def attach(self, model: nn.Module) -> None:
        self._input_sizes.watch(model)
        if not self.controller.started and not is_compiled(model):
            self._engine.modules.watch(model, owner=self)  # for the names in the table of the first plan

    def before_call(self, module: nn.Module, arguments: Any) -> None:
        self._input_sizes.called(module, arguments)

    def on_unended_step(self) -> str:
        if self.controller.steps:  # they end, after many forwards
            self._recorder.stop("plan")
        else:
            self._recorder.request("plan", False)
        return 'offload.amount is "auto", and everything is offloaded; an amount that is given needs no steps'

    def detach(self) -> None:
        self._input_sizes.remove()
        self._engine.modules.close(self)
        self._engine.rest(False)

    # A step

    def step_ended(self, unoffloaded: int) -> bool:
        record, fresh = self._recorder.take(), False
        if record.order:
            self._records.append((self.controller.steps, unoffloaded, record))
        while self._records and self._records[0][2].passed():
            number, peak, record = self._records.pop(0)
            profile = Profile(record, self._recent if number >= WARM_UP else None)
            if profile.chunks:
                self.profile, self._peak = profile, peak
                fresh = number >= self._since
        unused = self.policy.sizes.forwards - self._engine.backwards
        self._evaluated, self._unused = unused > self._unused, unused
        return fresh

    def ready(self, fresh: bool) -> bool:
        known = self.controller.derating.known or self.controller.steps >= WARM_UP + UNMEASURED_STEPS
        return fresh and self.profile is not None and known

    def due(self) -> str:
        if self.policy.shape_changed():
            return self.controller.request("the size of the tapes changed", reshaped=True)
        if self.profile is not None and self._searched_from < STEPS <= self.profile.steps:
            return self.controller.request(SEVERAL)
        return ""

    def requested(self) -> None:
        self._since = self.controller.steps

    def moves(self) -> bool:
        return True  # one region is written in any case

    def probes(self) -> bool:
        return self._writes_nothing() and self.controller.steps >= self.controller.planned_at + PROBE_PERIOD

    def _writes_nothing(self) -> bool:
        """Whether the plan writes nothing to the tier whose bandwidth may change: the drives, where there is host memory too."""
        plan, problem = self.controller.plan, self.controller.problem
        if plan is None or problem is None:
            return False
        tiers = {problem.choice(name).tier for name in plan.actions}
        return tiers <= ({DEVICE, "host"} if self.controller.derating.both else {DEVICE})

    def stalled(self, fresh: bool, total: float) -> float | None:
        """See `PlanSubject`. What a device waited is known of steps that were recorded."""
        seconds = self._engine.metrics.stall_seconds
        stall, self._stall_seconds = seconds - self._stall_seconds, seconds
        if self._evaluated:
            total = 0.0
        if self._engine.device.kind != "cpu":  # the host may wait while the device computes what was queued
            if not fresh or self.profile is None:
                return None
            stall, total = self.profile.stall, self.profile.seconds
        return stall / total if total else None

    def settle(self) -> None:
        controller = self.controller
        calm = not controller.reason and controller.steps > controller.planned_at + 3
        self._recorder.request("plan", not calm or controller.steps % CALM_PERIOD == 0)
        if self._nothing_to_do(controller):
            self._rest(controller.steps)

    # Rest

    @property
    def resting(self) -> bool:
        return self._wakes_at > 0

    def _nothing_to_do(self, controller: PlanController) -> bool:
        """See Note: [Rest]."""
        if self._limited or self._strict or controller.derating.both or self._input_sizes.blind:
            return False
        if controller.plan is None:  # nothing was saved that may move
            return self.profile is None and controller.steps >= WARM_UP + UNMEASURED_STEPS
        # Of forwards that vary in size no several are alike.
        several = self._searched_from >= STEPS or controller.steps >= controller.planned_at + CALM_PERIOD
        return several and controller.settled and self._writes_nothing()

    def _rest(self, steps: int) -> None:
        self._wakes_at = steps + self._rest_steps
        self._rest_steps = min(MOST_REST, 2 * self._rest_steps)
        self._recorder.request("plan", False)
        self._input_sizes.settle()
        self._engine.rest(True)
        if not self._said_rest:
            self._said_rest = True
            logger.warning(RESTS, PROBE_PERIOD, MOST_REST)

    def rested(self) -> None:
        if self.controller.steps >= self._wakes_at:
            self._wake(FASTER)

    def _wake(self, why: str, *, reshaped: bool = False) -> None:
        self._wakes_at = 0
        self._engine.rest(False)
        self._recorder.request("plan", True)
        self.controller.request(why, reshaped=reshaped)
        self._since = self.controller.steps + 1

    def _inputs_grew(self) -> None:
        """The forward that is about to begin has larger inputs than those before."""
        if not self.resting or self._engine.forked:
            return
        self._rest_steps = PROBE_PERIOD
        self.policy.follow({})  # memory must not run out before there is a plan for them
        self.controller.arena_used(True)
        self._engine.defer(True)
        self._wake("the inputs of forwards are larger", reshaped=True)

    # Planning

    def problem(self) -> SearchProblem:
        profile = self.profile
        assert profile is not None
        self._searched_from = profile.steps  # also where no plan is found, or each step would search again
        machine = self.controller.machine(profile.blocks)
        return regions_problem(profile.blocks, profile.order, machine, self._beside(profile))

    def _beside(self, profile: Profile) -> int:
        """Bytes of the activation peak beside the blocks: small saved tensors, and storages larger than their regions."""
        choices = [[step.KEPT] * len(one) for one in profile.blocks]
        kept = simulate(profile.blocks, choices, profile.order, Machine())
        return max(0, self._peak - kept.peak_bytes)

    def larger(self) -> float:
        return 1.0 if self.profile is None else self.profile.outgrown(self.policy.largest)

    def write_rate(self, problem: SearchProblem, borne: float | None) -> float | None:
        rate = problem.machine.tiers[0].write
        return rate if borne is None else min(borne, rate)

    def follow(self, before: Plan | None, problem: SearchProblem, plan: Plan) -> bool:
        self._engine.modules.close(self)
        profile = self.profile
        assert profile is not None
        choices, several = problem.choices(plan.actions), len(problem.machine.tiers) > 1
        plans = {}
        for chunk, spans, chosen in zip(profile.chunks, profile.spans, choices, strict=True):
            plans[chunk] = _actions(spans, chosen, problem.machine)
        if plans and self.controller.derating.wear is None:
            measure_by_one(plans[min(plans)], profile.movable, both=several)
        same = all(self.policy.plans.get(chunk) == tuple(actions) for chunk, actions in plans.items())
        self.policy.follow(plans)
        leaves = any(choice != step.KEPT for chosen in choices for choice in chosen)
        if leaves:
            self._rest_steps = PROBE_PERIOD
        self._engine.defer(leaves)  # nothing comes for which the one region that is written would wait
        return same

    def outcome(self, peaks: Peaks, seconds: float) -> Outcome | None:
        if self.profile is None:
            return None
        waits: dict[str, float] = {}
        for name, waited in self._engine.snapshot().load_waits.items():
            module = self.modules.get(name, name)
            waits[module] = waits.get(module, 0.0) + waited
        return Outcome(*peaks, seconds, self.profile.stall, waits, self._limited and not self._strict)


def _actions(spans: Sequence[tuple[int, int]], choices: Sequence[Choice], machine: Machine) -> list[Action]:
    """What the engine does with each region of a tape: without a tier it takes host memory first.

    Args:
        spans: [begin, end) of the positions that each choice is about.
    """
    plan = [KEEP] * spans[-1][1]
    for (begin, end), choice in zip(spans, choices, strict=True):
        if choice == step.KEPT:
            continue
        first = len(machine.tiers) > 1 and choice.tier == machine.tiers[0].name
        action = Action(True, tier="ssd") if first else OFFLOAD
        if choice.share != 1:
            action = action._replace(part=choice.share)
        plan[begin:end] = [action] * (end - begin)
    return plan


def measure_by_one(plan: list[Action], movable: Sequence[int], *, both: bool) -> None:
    """Have one region written in each step whatever becomes of the others: by it a change of the bandwidth is seen. It is the
    first one that `plan` offloads, or else that may be.

    Args:
        movable: the positions of regions that may be offloaded; the first are taken first.
        both: there are host memory and drives, and it is the drives that may change.
    """
    away = Action(True, tier="ssd") if both else OFFLOAD
    leaving = [
        position for position in movable if plan[position].offload and plan[position].tier == away.tier
    ]
    for position in (leaving or movable)[:1]:
        action = plan[position] if leaving else away
        plan[position] = action._replace(must_write=True)


class InputSizes:
    """Calls a method before a forward with gradients whose inputs are larger by a fifth than those of the first forward, of the
    latest call of the method, or of the forwards before `settle`.

    Args:
        grew: a bound method; its object is not kept alive.
    """

    def __init__(self, grew: Callable[[], object]) -> None:
        self._grew = weakref.WeakMethod(grew)
        # Bytes.
        self._known: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()
        self._recent: weakref.WeakKeyDictionary[nn.Module, deque[int]] = weakref.WeakKeyDictionary()
        self.blind = False
        """Whether a call had no tensor that is found: in an object of the program's own."""
        self._handles: list[Any] = []

    def watch(self, model: nn.Module) -> None:
        """Watch the calls of `model` too, unless they are compiled: a ScriptModule takes no hooks."""
        if isinstance(model, torch.jit.ScriptModule):
            return
        self._handles.append(
            model.register_forward_pre_hook(ModuleHook(self._before_forward), with_kwargs=True)
        )

    def _before_forward(self, module: nn.Module, *arguments: Any) -> None:
        """See what a framework calls, whose forward is being recorded then: hooks are on from the next one."""
        if not torch.compiler.is_compiling() and torch.is_grad_enabled():
            self.called(module, arguments)

    def called(self, module: nn.Module, arguments: Any) -> None:
        """Compare the size of what a module is called with."""
        tensors = [leaf for leaf in leaves(arguments) if isinstance(leaf, torch.Tensor)]
        self.blind |= not tensors
        nbytes = sum(
            tensor.numel() * tensor.element_size() for tensor in tensors
        )  # `nbytes` raises of a sparse one
        self._recent.setdefault(module, deque(maxlen=_RECENT)).append(nbytes)
        if nbytes <= LARGER * self._known.get(module, 0):
            return
        self._known[module] = nbytes
        if (grew := self._grew()) is not None:
            grew()

    def settle(self) -> None:
        """Compare with the latest calls from now on: larger ones of before are over."""
        for module, recent in self._recent.items():
            self._known[module] = max(recent)

    def remove(self) -> None:
        """Watch no model any more. Idempotent."""
        while self._handles:
            self._handles.pop().remove()
