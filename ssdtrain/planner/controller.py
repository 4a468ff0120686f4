"""The controller of `offload.amount: "auto"`: profiles steps, plans what is offloaded, and plans again when
things change.

Every rank plans for itself, from what it measures: what a rank offloads changes nothing that another one
sees.

Note: [Rest]
Where nothing is worth moving, hooks on saved tensors are all cost. So when a plan keeps everything, and the config has no limit
that is to be watched, forwards run without hooks. After `PROBE_PERIOD` steps, and twice as many each time that nothing new came
of it, one step has them again, and a plan is made from it. Larger inputs of a model end the rest at once, before their forward,
and everything is offloaded until there is a plan for them.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import nn

from ssdtrain.features import Feature, Step
from ssdtrain.messages import report
from ssdtrain.metrics import MetricSet
from ssdtrain.offload.engine import OffloadEngine
from ssdtrain.offload.tensors.meter import Peaks
from ssdtrain.planner.adaptive import AdaptivePolicy, actions_of, measure_by_one
from ssdtrain.planner.arena import ArenaCost
from ssdtrain.planner.choose import SLACK, Chosen, as_plan, choose_offloads, no_plan
from ssdtrain.planner.decisions import Outcome, decision_table
from ssdtrain.planner.drift import DRIFT, MOST_DRIFT, Backoff, differ
from ssdtrain.planner.input_sizes import InputSizes
from ssdtrain.planner.margin import STALLS, StallMargin
from ssdtrain.planner.measured import Bandwidths, Profile, Rates, RecentRates, host_tier, measured_machine
from ssdtrain.planner.memory_plot import PlanPlot
from ssdtrain.planner.plan_metrics import PeakLimit, PlanMetrics
from ssdtrain.planner.plans import Limits, NoPlan
from ssdtrain.planner.recent import STEPS, RecentSteps
from ssdtrain.planner.room import Room
from ssdtrain.planner.step import KEEP, Choice, Machine
from ssdtrain.planner.timeline import simulate
from ssdtrain.planner.wear import WearLimit
from ssdtrain.profile.passes import StepRecord
from ssdtrain.storage import Endurance, SpillStore

__all__ = ["AdaptiveOffload"]

logger = logging.getLogger("ssdtrain")

Choices = tuple[tuple[Choice, ...], ...]

WARM_UP = 2
"""Steps before the first plan: the first one has costs of its own."""

CALM_PERIOD = 8
"""Steps between two that are recorded, while nothing changes."""

PROBE_PERIOD = 16
"""Steps after which a plan that offloads nothing lets one block go, to see whether the drive is faster
now."""

MOST_REST = 128
"""Steps of a rest, at most. See Note: [Rest]."""

PATIENCE = 8
"""Steps after `WARM_UP` in which nothing was saved that may move, or nothing was written because backward came before every
write: then a plan is made without bandwidths, and keeps everything."""

RESTS = (
    'offload.amount is "auto", and nothing is worth moving: forwards run without saved-tensor hooks from here on. A step in '
    "every %d to %d has them, to see whether that changes, and so have forwards with larger inputs"
)

STAYS = "ssdtrain.plan: what is measured has changed, and the plan of before is followed because now %s"

OUTGROWN = "ssdtrain.plan: forwards have become larger, and the plan nearest to the limits is followed, because now %s"

DRIFTED = "the bandwidth of the tiers changed"
FASTER = "to see whether the tiers are faster now"
SEVERAL = "several steps are profiled now"


class AdaptiveOffload(Feature):
    """Plans for an engine whose policy is an `AdaptivePolicy`.

    Args:
        engine, store: see `ActivationOffload`.
        policy: the engine's.
        device_budget: bytes that activations should stay under; None: as low as transfers can be hidden.
        endurance: of the drives, which are not to wear faster than it says; None: they are written as fast as they can.
        must_fit: where no choice stays under the budget, raise `NoPlan` from the end of the step in which the first plan is made;
            later ones are followed as they are, with a warning.
        slack: of the step's time, what transfers may cost; None: the default of `choose_offloads`.
        most_slowdown: with `must_fit`, the same where the budget asks for more; None: no limit.
        least_memory: minimise the peak within `slack`, instead of the time within the budget.
        reports: log a table of what was decided.
        plot: where the memory of a step that follows the plan is drawn; None: nowhere.
    """

    def __init__(
        self,
        engine: OffloadEngine,
        store: SpillStore,
        policy: AdaptivePolicy,
        *,
        device_budget: int | None = None,
        endurance: Endurance | None = None,
        must_fit: bool = False,
        slack: float | None = None,
        most_slowdown: float | None = None,
        least_memory: bool = False,
        reports: bool = False,
        plot: Path | None = None,
    ) -> None:
        self.chosen: Chosen | None = None
        """The plan that is followed."""
        self.metric, self.note = PlanMetrics(), ""  # the end of its table
        self._engine, self._store, self._policy = engine, store, policy
        self._device_budget, self._must_fit = device_budget, must_fit
        key = "plan.device_limit" if must_fit else "offload.device_budget"
        self._limit = PeakLimit(key, device_budget, self.metric)
        self._slack = SLACK if slack is None else slack
        self._most_slowdown, self._least_memory = most_slowdown, least_memory
        self._wear = WearLimit(endurance) if endurance is not None else None
        self._reports = reports
        self._decided = ""
        self._room, self._plot = Room(engine), PlanPlot(plot, engine.meter)
        self._arena = ArenaCost(engine)
        self._recorder = engine.recorder
        self._recorder.request("plan", True)
        # With their steps and the peaks of these without offload; the device has not passed them yet.
        self._records: list[tuple[int, int, StepRecord]] = []
        self._peak = 0  # of the step of `_profile`
        self._profile: Profile | None = None
        self._planned_profile: Profile | None = None
        self._recent, self._planned_from = RecentSteps(), 0  # the latest plan was made from so many steps
        # Where there are both, the model has a tier for each.
        self._both = store.metrics.host is not None and bool(store.metrics.drives)
        self._bandwidths, self._host_bandwidths = Bandwidths(host=not self._both), Bandwidths(drives=False)
        self._host_rates, self._recent_rates = Rates(None, None), RecentRates()
        self._planned_rates = self._rates = Rates(None, None)
        self.steps = 0
        self._planned_at = 0  # step of the latest plan
        self._profile_since = WARM_UP  # the next plan is made from a profile of this step, or a later one
        self._reshaped = False  # what is followed was not planned for tapes like these
        self._replan_reason = "profiled"  # why the next plan is made; "": none is due
        self._drifted, self._drift = 0, DRIFT  # steps in turn
        self._backoff, self._margin = Backoff(), StallMargin()
        self._known: set[Choices] = set()  # that were followed for tapes like these
        self._stall_seconds = 0.0
        self._unused = 0  # forwards so far whose backward never came
        self._outcome_due = False
        self._same = False  # the plan is the one before
        self._warned = self._warned_of_size = False
        self._link = engine.device.link_bandwidth()
        # See Note: [Rest].
        self._rest_steps, self._wakes_at, self._said_rest = PROBE_PERIOD, 0, False
        self._input_sizes = InputSizes(self._inputs_grew)

    def attach(self, model: nn.Module) -> None:
        self._input_sizes.watch(model)

    def before_call(self, module: nn.Module, arguments: Any) -> None:
        self._input_sizes.called(module, arguments)

    def on_unended_step(self) -> str:
        if self.steps:  # they end, after many forwards
            self._recorder.stop("plan")
        else:
            self._recorder.request("plan", False)
        return 'offload.amount is "auto", and everything is offloaded; an amount that is given needs no steps'

    def on_step_end(self, step: Step) -> None:
        """Take what was recorded, and plan where that is due. A last step is only counted."""
        if not self._engine.forked:
            if step.closing:
                self.steps += 1
            else:
                self._ended(step.seconds - step.idle, step.elapsed)

    def _ended(self, seconds: float, elapsed: float) -> None:
        self.steps += 1
        if self._wakes_at:
            self.metric.idle_steps += 1
            if self.steps >= self._wakes_at:
                self._wake(FASTER)
            return
        self._plot.step_ended()
        record, peaks = self._recorder.take(), self._engine.meter.begin_recent()
        self._limit.step_ended(peaks.alive, planned=self.chosen is not None)
        if record.order:
            self._records.append((self.steps, peaks.unoffloaded, record))
        store = self._store.metrics
        latest = self._bandwidths.since(store)
        if self._wear is not None:
            to_host = store.host_bytes_written if self._both else 0
            self._wear.observe(store, self._engine.metrics.offloaded_bytes - to_host, elapsed)
        self._rates = self._recent_rates.with_step(latest)
        self._host_rates = self._host_bandwidths.since(store).or_else(self._host_rates)
        fresh = self._resolve()
        unused = self._policy.forwards - self._engine.prefetcher.backwards
        evaluated, self._unused = unused > self._unused, unused
        if not self._replan_reason:
            self._watch(latest, fresh, 0.0 if evaluated else seconds)
        measured = self._rates.write or self._host_rates.write or self._link
        measured = measured or self.steps >= WARM_UP + PATIENCE
        if self._replan_reason and fresh and self._profile is not None and measured:
            self._plan(self._profile)
        elif self._outcome_due and self.steps >= self._planned_at + 2:
            self._outcome_due = False
            self._report_outcome(seconds, peaks)
        calm = not self._replan_reason and self.steps > self._planned_at + 3
        self._recorder.request("plan", not calm or self.steps % CALM_PERIOD == 0)
        if self._nothing_to_do():
            self._rest()

    # Rest

    def _nothing_to_do(self) -> bool:
        """See Note: [Rest]."""
        if self._device_budget is not None or self._must_fit or self._both or self._input_sizes.blind:
            return False
        if self.chosen is None:  # nothing was saved that may move
            return self._profile is None and self.steps >= WARM_UP + PATIENCE
        # Of forwards that vary in size no several are alike.
        several = self._planned_from >= STEPS or self.steps >= self._planned_at + CALM_PERIOD
        settled = several and not self._replan_reason and not self._outcome_due
        return settled and self._writes_nothing()

    def _rest(self) -> None:
        self._wakes_at = self.steps + self._rest_steps
        self._rest_steps = min(MOST_REST, 2 * self._rest_steps)
        self._recorder.request("plan", False)
        self._input_sizes.settle()
        self._engine.rest(True)
        if not self._said_rest:
            self._said_rest = True
            logger.warning(RESTS, PROBE_PERIOD, MOST_REST)

    def _wake(self, why: str) -> None:
        self._wakes_at = 0
        self._engine.rest(False)
        self._recorder.request("plan", True)
        self._request_plan(why)
        self._profile_since = self.steps + 1

    def _inputs_grew(self) -> None:
        """The forward that is about to begin has larger inputs than those before."""
        if not self._wakes_at or self._engine.forked:
            return
        self._rest_steps, self._reshaped = PROBE_PERIOD, True
        self._policy.follow({})  # memory must not run out before there is a plan for them
        self._arena.planned(used=True)
        self._engine.mover.defers = True
        self._wake("the inputs of forwards are larger")

    def _resolve(self) -> bool:
        """Read the records that the device has passed. True: one of a step that the next plan may be made
        from."""
        fresh = False
        while self._records and self._records[0][2].passed():
            number, peak, record = self._records.pop(0)
            profile = Profile(record, self._recent if number >= WARM_UP else None)
            if profile.chunks:
                self._profile, self._peak = profile, peak
                fresh = number >= self._profile_since
        return fresh

    # When to plan again

    def _watch(self, latest: Rates, fresh: bool, seconds: float) -> None:
        if self._policy.shape_changed():
            self._reshaped = True
            return self._request_plan("the size of the tapes changed")
        if self._profile is not None and self._planned_from < STEPS <= self._profile.steps:
            return self._request_plan(SEVERAL)
        self._drifted = self._drifted + 1 if differ(latest, self._planned_rates, self._drift) else 0
        if self._drifted >= 2 and self._backoff.due(self.steps):
            self._margin.reset()
            return self._request_plan(DRIFTED)
        if self._writes_nothing() and self.steps >= self._planned_at + PROBE_PERIOD:
            return self._request_plan(FASTER)
        self._note_stall(fresh, seconds)
        if why := self._margin.changed(self.steps):
            return self._request_plan(why)
        if self._wear is not None and self._wear.exceeded():
            return self._request_plan("the drives wore faster than their budget")

    def _note_stall(self, fresh: bool, total: float) -> None:
        """What computation waited for in a step of `total` seconds (0.0: not known, or it had an evaluation in it): that of a
        device is known of steps that were recorded."""
        seconds = self._engine.metrics.stall_seconds
        found, self._stall_seconds = seconds - self._stall_seconds, seconds
        if self._engine.device.kind != "cpu":  # the host may wait while the device computes what was queued
            if not fresh or self._profile is None:
                return
            found, total = self._profile.stall, self._profile.seconds
        if self.steps <= self._planned_at + 1 or not total or self.chosen is None:
            return  # the first step of a plan still waits for transfers of the one before
        predicted = self.chosen.predicted.stall / self.chosen.predicted.seconds
        self._margin.observe(found / total, predicted)

    def _writes_nothing(self) -> bool:
        """To the tier whose bandwidth may change: the drives, where there is host memory too."""
        if self.chosen is None:
            return False
        every = {choice for one in self.chosen.choices for choice in one}
        return all(choice == KEEP or (self._both and choice.tier == "host") for choice in every)

    def _request_plan(self, why: str) -> None:
        self._replan_reason = why
        self._profile_since = self.steps
        self._drifted = 0
        self._margin.requested()

    # Planning

    def machine(self) -> Machine:
        """The machine as measured."""
        metrics = self._store.metrics
        if not self._both or metrics.host is None:
            return measured_machine(self._engine, self._rates, self._link, self._margin.value)
        host = host_tier(metrics.host.capacity, self._host_rates, self._link)
        # Nothing was written to a drive where all fits into host memory.
        rates = self._rates.or_else(self._host_rates)
        return measured_machine(self._engine, rates, self._link, self._margin.value, host)

    def _plan(self, profile: Profile) -> None:
        machine = self._arena.counted(self.machine(), profile.blocks)
        rate, self._planned_from = self._wear.rate if self._wear is not None else None, profile.steps
        other = self._other_bytes(profile)
        found = self._choose(profile, machine, other, rate).beside(other)
        misfit = self._misfit(profile, found, profile.outgrown(self._policy.largest))
        if misfit is not None:
            # At first only for the forwards that were profiled: other ranks, whose forwards vary otherwise, go on.
            if self.chosen is None and (error := self._misfit(profile, found)) is not None:
                raise error.named()
            if self.chosen is not None and not self._reshaped:
                return self._keep_plan(misfit)
            if not self._warned_of_size:
                self._warned_of_size = True
                logger.warning(OUTGROWN, misfit)
        if self._reshaped:
            self._known.clear()
        new = self._note_plan(found.choices)
        self.chosen, self._reshaped = found, False
        if self._wear is not None:
            bound = rate is not None and rate < machine.tiers[0].write
            # A slow drive, or a small model, is written less than its life allows in any case.
            bound = bound and self._choose(profile, machine, other, None).choices != found.choices
            self._wear.planned(bound=bound, new=new)
        self._planned_profile = profile
        plans = {
            chunk: actions_of(spans, choices, machine)
            for chunk, spans, choices in zip(profile.chunks, profile.spans, found.choices, strict=True)
        }
        if plans and self._wear is None:
            measure_by_one(plans[min(plans)], profile.movable, both=self._both)
        same = all(self._policy.plans.get(chunk) == tuple(plan) for chunk, plan in plans.items())
        self._same = same and not self._outcome_due
        if not same or self._replan_reason != SEVERAL:
            self._drift = min(MOST_DRIFT, 1.5 * self._drift) if same else DRIFT
        self._policy.follow(plans)
        leaves = any(choice != KEEP for one in found.choices for choice in one)
        if leaves:
            self._rest_steps = PROBE_PERIOD
        self._arena.planned(used=leaves)
        self._engine.mover.defers = leaves  # nothing comes for which that one region would wait
        if not same:
            self._limit.planned()
            self._plot.planned(
                *as_plan(profile.blocks, profile.order, machine, found), self._device_budget, other
            )
        self._planned_rates, self._planned_at = self._rates, self.steps
        self._outcome_due |= not same or self._replan_reason != FASTER
        blocks = [block for chunk in profile.blocks for block in chunk]
        every = [choice for chunk in found.choices for choice in chunk]
        self.metric.update(blocks, every, found.predicted, found.kept)
        logger.debug("planned at step %d: %s", self.steps, self._replan_reason)
        self._replan_reason = ""

    def _note_plan(self, choices: Choices) -> bool:
        """How soon the next search for the same reason may be made: see `Backoff`. True: it was not followed before."""
        new = choices not in self._known
        self._known.add(choices)
        self._margin.planned(self.steps, self._replan_reason, new=new)
        if self._replan_reason == DRIFTED:
            self._backoff.searched(self.steps, new=new)
        return new

    def _keep_plan(self, error: NoPlan) -> None:
        """Only bandwidths have changed, or how much may be written: what is followed is no worse than before."""
        self._margin.restore()
        if self._replan_reason == DRIFTED:
            self._backoff.searched(self.steps, new=False)
        elif self._replan_reason == STALLS:
            self._margin.failed(self.steps)
        if not (self._wear is not None and self._wear.failed()) and not self._warned:
            self._warned = True
            logger.warning(STAYS, error)
        self._planned_rates, self._planned_at, self._replan_reason = self._rates, self.steps, ""

    def _choose(self, profile: Profile, machine: Machine, other: int, rate: float | None) -> Chosen:
        larger = profile.outgrown(self._policy.largest)

        def within(budget: int | None) -> Chosen:
            return choose_offloads(
                profile.blocks,
                profile.order,
                machine,
                slack=self._slack,
                device_budget=None if budget is None else max(0, int(budget / larger) - other),
                endurance=rate,
            )

        found = within(None if self._least_memory else self._device_budget)
        if self._device_budget is None:
            most = self._room()
            if most is not None and larger * (found.predicted.peak_bytes + other) > most:
                found = within(most)
                limits, nearest = Limits(int(most / larger)), found.beside(other)
                if nearest.predicted.peak_bytes > int(most / larger):
                    why = no_plan(profile.blocks, profile.order, machine, nearest, limits)
                    self._room.exceeded(most, why)
        return found

    def _other_bytes(self, profile: Profile) -> int:
        """Of the activation peak, beside the blocks: what is saved in small tensors, or in storages larger than their regions."""
        kept = simulate(
            profile.blocks, [[KEEP] * len(one) for one in profile.blocks], profile.order, Machine()
        )
        return max(0, self._peak - kept.peak_bytes)

    def _misfit(self, profile: Profile, found: Chosen, larger: float = 1.0) -> NoPlan | None:
        """Which limit is not kept to by a forward that is larger by this factor; None: all are."""
        budget, seconds = self._device_budget, None
        budget = None if budget is None else int(budget / larger)
        if self._most_slowdown is not None:
            seconds = found.kept.seconds * (1 + self._most_slowdown)
        fits = budget is None or found.predicted.peak_bytes <= budget
        in_time = seconds is None or found.predicted.seconds <= seconds * (1 + 1e-9)
        if not self._must_fit or (fits and in_time):
            return None
        return no_plan(profile.blocks, profile.order, self.machine(), found, Limits(budget, seconds=seconds))

    # Reports

    def _report_outcome(self, seconds: float, peaks: Peaks) -> None:
        if self.chosen is None or self._planned_profile is None or self._profile is None:
            return
        limited = not self._must_fit and self._device_budget is not None
        outcome = Outcome(*peaks, seconds, self._profile.stall, self._engine.snapshot().load_waits, limited)
        self._decided = decision_table(self._planned_profile, self.chosen, outcome) + self.note
        if self._same:
            return  # it was said of this plan
        if self._reports:
            report(self._decided)
        if any(block.saved for chunk in self._planned_profile.blocks for block in chunk):
            for warning in outcome.warnings():
                logger.warning(warning)

    def metrics(self) -> Sequence[tuple[str, MetricSet]]:
        return [("auto", self.metric)]

    def decisions(self) -> str:
        return self._decided

    def detach(self) -> None:
        self._input_sizes.remove()
        self._engine.rest(False)
