"""The controller of `offload.amount: "auto"`: profiles steps, plans what is offloaded, and plans again when
things change.

Every rank plans for itself, from what it measures: what a rank offloads changes nothing that another one
sees.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

from torch import nn

from ssdtrain.features import Feature, Forward, Step
from ssdtrain.offload import policy as offload
from ssdtrain.offload.engine import OffloadEngine
from ssdtrain.planner.adaptive import AdaptivePolicy
from ssdtrain.planner.choose import SLACK, Chosen, choose_offloads
from ssdtrain.planner.decisions import Outcome, decision_table
from ssdtrain.planner.measured import Bandwidths, Profile, Rates, host_tier, measured_machine
from ssdtrain.planner.plan_metrics import PlanMetrics
from ssdtrain.planner.plans import Limits, NoPlan, Plan
from ssdtrain.planner.room import Room
from ssdtrain.planner.step import KEEP, Choice, Machine
from ssdtrain.planner.step_ends import StepEnds
from ssdtrain.planner.timeline import simulate
from ssdtrain.planner.wear import WearLimit
from ssdtrain.profile.passes import StepRecord
from ssdtrain.storage import Endurance, SpillStore
from ssdtrain.telemetry.messages import report
from ssdtrain.telemetry.registry import MetricSet

__all__ = ["AdaptiveOffload"]

logger = logging.getLogger("ssdtrain")

WARM_UP = 2
"""Steps before the first plan: the first one has costs of its own."""

CALM_PERIOD = 8
"""Steps between two that are recorded, while nothing changes."""

PROBE_PERIOD = 16
"""Steps after which a plan that offloads nothing lets one block go, to see whether the drive is faster
now."""

DRIFT = 0.25
"""Of a bandwidth, in two steps in turn: plan again. Each time that the plan stays the same, half as much more is
tolerated, up to `MOST_DRIFT`: a drive whose speed varies from step to step is no reason to plan all the time."""

MOST_DRIFT = 0.6

STALL = 0.02
"""Of a step's time, more than predicted, in two steps in turn: plan again with a margin."""

STAYS = "ssdtrain.plan: the bandwidth of the tiers changed, and the plan of before is followed because now %s"

MARGIN = 0.85
"""By which the bandwidths are reduced where a plan stalls though they are as measured."""

LEAST_MARGIN = 0.1

UNENDED = 512
"""Forwards without the end of a step, after which nothing is recorded any more: records must not fill memory."""

ENDLESS = (
    'offload.amount is "auto", but %d forwards ran without the end of a step: everything is offloaded until one comes; call '
    "runtime.step_end() after each step, or give an amount"
)

VARIES = 1.05
"""Of the size of a recorded forward: another one that was larger by so much counts in what fits."""

CALM_STEPS = 64
"""Steps without stalls after which one such reduction is taken back. Twice as many each time that stalls come again, up to
`MOST_CALM_STEPS`: what made them may be over, or come every time."""

MOST_CALM_STEPS = 4096


class AdaptiveOffload(Feature):
    """Plans for an engine whose policy is an `AdaptivePolicy`.

    Args:
        engine, store: see `ActivationOffload`.
        policy: the engine's.
        device_budget: bytes that activations should stay under; None: as low as transfers can be hidden.
        endurance: of the drives, which are not to wear faster than it says; None: they are written as fast as they can.
        must_fit: where no choice stays under the budget, raise `NoPlan` from the end of the step.
        slack: of the step's time, what transfers may cost; None: the default of `choose_offloads`.
        most_slowdown: with `must_fit`, the same where the budget asks for more; None: no limit.
        least_memory: minimise the peak within `slack`, instead of the time within the budget.
        reports: log a table of what was decided.
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
    ) -> None:
        self.chosen: Chosen | None = None
        """The plan that is followed."""
        self.metric = PlanMetrics()
        self._engine, self._store, self._policy = engine, store, policy
        self._device_budget, self._must_fit = device_budget, must_fit
        self._slack = SLACK if slack is None else slack
        self._most_slowdown, self._least_memory = most_slowdown, least_memory
        self._wear = WearLimit(endurance) if endurance is not None else None
        self._reports = reports
        self._decided = ""
        self._ends = StepEnds(self._ended, engine.drain)
        self._room = Room(engine)
        self._recorder = engine.recorder
        self._recorder.request("plan", True)
        # With their steps and the peaks of these without offload; the device has not passed them yet.
        self._records: list[tuple[int, int, StepRecord]] = []
        self._peak = 0  # of the step of `_profile`
        self._profile: Profile | None = None
        self._planned_profile: Profile | None = None
        # Where there are both, the model has a tier for each.
        self._both = store.metrics.host is not None and bool(store.metrics.drives)
        self._bandwidths, self._host_bandwidths = Bandwidths(host=not self._both), Bandwidths(drives=False)
        self._host_rates = Rates(None, None)
        self._planned_rates = self._rates = Rates(None, None)
        self._steps = 0
        self._planned_at = 0  # step of the latest plan
        self._profile_since = WARM_UP  # the next plan is made from a profile of this step, or a later one
        self._reshaped = False  # what is followed was not planned for tapes like these
        self._replan_reason = "profiled"  # why the next plan is made; "": none is due
        self._drifted = self._stalled = 0  # steps in turn
        self._drift = DRIFT
        self._stall_seconds = 0.0
        self._margin = 1.0
        self._calm, self._calm_since = CALM_STEPS, 0
        self._outcome_due = False
        self._same = False  # the plan is the one before
        self._warned = self._warned_of_no_end = False
        self._link = engine.device.link_bandwidth()

    def attach(self, model: nn.Module) -> None:
        self._ends.attach(model)

    def on_forward(self, forward: Forward) -> None:
        if self._ends.forward() < UNENDED:
            return
        self._recorder.request("plan", False)
        if not self._warned_of_no_end:
            self._warned_of_no_end = True
            logger.warning(ENDLESS, UNENDED)

    def on_step_end(self, step: Step) -> None:
        self._ends.announced(step.seconds)

    def _ended(self, seconds: float) -> None:
        if self._engine.forked:
            return
        self._steps += 1
        record, peak = self._recorder.take(), self._engine.meter.begin_recent()
        if record.order:
            self._records.append((self._steps, peak, record))
        store = self._store.metrics
        latest = self._bandwidths.since(store)
        if self._wear is not None:
            to_host = store.host_bytes_written if self._both else 0
            self._wear.observe(store, self._engine.metrics.offloaded_bytes - to_host, seconds)
        self._rates = latest.or_else(self._rates)
        self._host_rates = self._host_bandwidths.since(store).or_else(self._host_rates)
        fresh = self._resolve()
        if not self._replan_reason:
            self._watch(latest, fresh, seconds)
        if self._replan_reason and fresh and self._profile is not None and self._measured():
            self._plan(self._profile)
        elif self._outcome_due and self._steps >= self._planned_at + 2:
            self._outcome_due = False
            self._report_outcome(seconds)
        calm = not self._replan_reason and self._steps > self._planned_at + 3
        self._recorder.request("plan", not calm or self._steps % CALM_PERIOD == 0)

    def _resolve(self) -> bool:
        """Read the records that the device has passed. True: one of a step that the next plan may be made
        from."""
        fresh = False
        while self._records and self._records[0][2].passed():
            number, peak, record = self._records.pop(0)
            profile = Profile(record)
            if profile.chunks:
                self._profile, self._peak = profile, peak
                fresh = number >= self._profile_since
        return fresh

    # When to plan again

    def _watch(self, latest: Rates, fresh: bool, seconds: float) -> None:
        if self._policy.shape_changed():
            self._reshaped = True
            return self._request_plan("the size of the tapes changed")
        pairs = zip(latest, self._planned_rates, strict=True)
        least = 1 - self._drift
        drifted = any(now and then and not least <= now / then <= 1 / least for now, then in pairs)
        self._drifted = self._drifted + 1 if drifted else 0
        if self._drifted >= 2:
            self._margin = 1.0
            return self._request_plan("the bandwidth of the tiers changed")
        if self._writes_nothing() and self._steps >= self._planned_at + PROBE_PERIOD:
            return self._request_plan("to see whether the tiers are faster now")
        self._note_stall(fresh, seconds)
        if self._stalled >= 2:
            self._margin = max(LEAST_MARGIN, self._margin * MARGIN)
            self._calm, self._calm_since = min(MOST_CALM_STEPS, 2 * self._calm), self._steps
            return self._request_plan("transfers were waited for")
        if self._stalled:
            self._calm_since = self._steps
        elif self._margin < 1 and self._steps >= self._calm_since + self._calm:
            self._margin, self._calm_since = min(1.0, self._margin / MARGIN), self._steps
            return self._request_plan("transfers were not waited for any more")
        if self._wear is not None and self._wear.exceeded():
            return self._request_plan("the drives wore faster than their budget")

    def _note_stall(self, fresh: bool, total: float) -> None:
        """What computation waited for in a step of `total` seconds: that of a device is known of steps that were recorded."""
        seconds = self._engine.metrics.stall_seconds
        found, self._stall_seconds = seconds - self._stall_seconds, seconds
        if self._engine.device.kind != "cpu":  # the host may wait while the device computes what was queued
            if not fresh or self._profile is None:
                return
            found, total = self._profile.stall, self._profile.seconds
        if self._steps <= self._planned_at + 1 or not total or self.chosen is None:
            return  # the first step of a plan still waits for transfers of the one before
        predicted = self.chosen.predicted.stall / self.chosen.predicted.seconds
        self._stalled = self._stalled + 1 if found / total > predicted + STALL else 0

    def _writes_nothing(self) -> bool:
        """To the tier whose bandwidth may change: the drives, where there is host memory too."""
        if self.chosen is None:
            return False
        every = {choice for one in self.chosen.choices for choice in one}
        return all(choice == KEEP or (self._both and choice.tier == "host") for choice in every)

    def _request_plan(self, why: str) -> None:
        self._replan_reason = why
        self._profile_since = self._steps
        self._drifted = self._stalled = 0

    # Planning

    def machine(self) -> Machine:
        """The machine as measured."""
        metrics = self._store.metrics
        if not self._both or metrics.host is None:
            return measured_machine(self._engine, self._rates, self._link, self._margin)
        host = host_tier(metrics.host.capacity, self._host_rates, self._link)
        # Nothing was written to a drive where all fits into host memory.
        rates = self._rates.or_else(self._host_rates)
        return measured_machine(self._engine, rates, self._link, self._margin, host)

    def _measured(self) -> bool:
        return bool(self._rates.write or self._host_rates.write or self._link)

    def _plan(self, profile: Profile) -> None:
        machine = self.machine()
        rate = self._wear.rate if self._wear is not None else None
        other = self._other_bytes(profile)
        found = self._choose(profile, machine, other, rate)
        predicted = replace(found.predicted, peak_bytes=found.predicted.peak_bytes + other)
        found = replace(found, predicted=predicted)
        try:
            self._check_fit(profile, found)
        except NoPlan as error:
            if self.chosen is None or self._reshaped:
                raise
            self._keep_plan(error)
            return
        self.chosen, self._reshaped = found, False
        if self._wear is not None:
            bound = rate is not None and rate < machine.tiers[0].write
            # A slow drive, or a small model, is written less than its life allows in any case.
            bound = bound and self._choose(profile, machine, other, None).choices != found.choices
            self._wear.planned(bound=bound)
        self._planned_profile = profile
        plans = {}
        for chunk, spans, choices in zip(profile.chunks, profile.spans, found.choices, strict=True):
            plan = [offload.KEEP] * spans[-1][1]
            for (begin, end), choice in zip(spans, choices, strict=True):
                plan[begin:end] = [_action(choice, machine)] * (end - begin)
            plans[chunk] = plan
        if self._writes_nothing() and plans and self._wear is None:
            first = min(plans)  # one region, by which a change of the bandwidth is seen
            plans[first][0] = offload.Action(True, tier="ssd") if self._both else offload.OFFLOAD
        same = all(self._policy.plans.get(chunk) == tuple(plan) for chunk, plan in plans.items())
        self._same = same and not self._outcome_due
        self._drift = min(MOST_DRIFT, 1.5 * self._drift) if same else DRIFT
        self._policy.follow(plans)
        self._planned_rates, self._planned_at, self._outcome_due = self._rates, self._steps, True
        blocks = [block for chunk in profile.blocks for block in chunk]
        every = [choice for chunk in found.choices for choice in chunk]
        self.metric.update(blocks, every, found.predicted, found.kept)
        logger.debug("planned at step %d: %s", self._steps, self._replan_reason)
        self._replan_reason = ""

    def _keep_plan(self, error: NoPlan) -> None:
        """Only bandwidths have changed: what is followed is no worse than before."""
        if not self._warned:
            self._warned = True
            logger.warning(STAYS, error)
        self._planned_rates, self._planned_at, self._replan_reason = self._rates, self._steps, ""

    def _choose(self, profile: Profile, machine: Machine, other: int, rate: float | None) -> Chosen:
        larger = self._larger(profile)

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
                return within(most)
        return found

    def _larger(self, profile: Profile) -> float:
        """By how much the largest forward so far was larger than the one that was recorded: it has to fit too."""
        found = 1.0
        for chunk, blocks in zip(profile.chunks, profile.blocks, strict=True):
            nbytes = sum(block.saved + block.fixed for block in blocks)
            if nbytes:
                found = max(found, self._policy.largest.get(chunk, 0) / nbytes)
        return found if found > VARIES else 1.0

    def _other_bytes(self, profile: Profile) -> int:
        """Of the activation peak, beside the blocks: what is saved in small tensors, or in storages larger than their regions."""
        kept = simulate(
            profile.blocks, [[KEEP] * len(one) for one in profile.blocks], profile.order, Machine()
        )
        return max(0, self._peak - kept.peak_bytes)

    def _check_fit(self, profile: Profile, found: Chosen) -> None:
        budget, seconds = self._device_budget, None
        if self._most_slowdown is not None:
            seconds = found.kept.seconds * (1 + self._most_slowdown)
        fits = budget is None or found.predicted.peak_bytes <= budget
        in_time = seconds is None or found.predicted.seconds <= seconds * (1 + 1e-9)
        if not self._must_fit or (fits and in_time):
            return
        names = tuple("keep" if choice == KEEP else "offload" for one in found.choices for choice in one)
        flat = [block for chunk in profile.blocks for block in chunk]
        raise NoPlan(Plan(names, found.predicted), Limits(budget, seconds=seconds), flat)

    # Reports

    def _report_outcome(self, seconds: float) -> None:
        if self.chosen is None or self._planned_profile is None or self._profile is None:
            return
        now = self._engine.snapshot()
        outcome = Outcome(
            now.activation_peak_bytes,
            now.unoffloaded_peak_bytes,
            seconds,
            self._profile.stall,
            now.load_waits,
        )
        self._decided = decision_table(self._planned_profile, self.chosen, outcome)
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
        self._ends.close()


def _action(choice: Choice, machine: Machine) -> offload.Action:
    """What the engine does for a choice: without a tier it takes host memory first."""
    if choice == KEEP:
        return offload.KEEP
    first = len(machine.tiers) > 1 and choice.tier == machine.tiers[0].name
    return offload.Action(True, tier="ssd") if first else offload.OFFLOAD
