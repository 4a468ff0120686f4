"""The one controller of plans: `offload.amount: "auto"` (by regions) and `plan` (by blocks, or by regions where none may be
recomputed).

```
a step ends -> measure it -> is a plan due? -> search -> keep or follow -> say what was decided
   subject      derating     subject,           finder   _follow,          table, plot,
   .step_ended  .step_ended  derating                    _nearest          metrics
```

What is planned for (`Regions`, `Blocks`: the subject) records steps and carries a plan out; everything that is decided is decided
here. Every rank plans for itself, from what it measures: what a rank offloads changes nothing that another one sees. Blocks that
several ranks recompute are agreed on (`ssdtrain.planner.agreement`).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from torch import nn

from ssdtrain.features import Feature, Forward, Step
from ssdtrain.messages import report
from ssdtrain.metrics import MetricSet
from ssdtrain.offload.engine import OffloadEngine
from ssdtrain.planner.derating import DRIFTED, ArenaCost, BandwidthDerating
from ssdtrain.planner.explain import Outcome, limit_text, plan_table
from ssdtrain.planner.finder import FoundPlans, Goal, PlanFinder
from ssdtrain.planner.memory_plot import PlanPlot
from ssdtrain.planner.model.types import DEVICE, Block, Machine, StepTimeline
from ssdtrain.planner.plan_metrics import PeakLimit, PlanMetrics
from ssdtrain.planner.plans import NoPlan, Plan, SearchProblem, kept_step, warn_outgrown
from ssdtrain.planner.regions import FASTER, Regions
from ssdtrain.planner.subject import PlanSubject
from ssdtrain.storage import Endurance, SpillStore

__all__ = ["PlanController"]

logger = logging.getLogger("ssdtrain")

STAYS = "ssdtrain.plan: what is measured has changed, and the plan of before is followed because now %s"


class PlanController(Feature):
    """Plans for one engine.

    Args:
        engine: whose policy is the subject's.
        store: its tiers.
        subject: what is planned for (`Regions`, `Blocks`).
        goal: what the config asks for.
        endurance: of the drives, which are not to wear faster than it says; None: they are written as fast as they can.
        reports: log a table of what was decided.
        plot: where the memory of a step that follows the plan is drawn; None: nowhere.

    Attributes:
        plan: that is followed; None: there is none yet, or none for forwards as they are now.
        problem: that it was searched for.
        steps: that have ended.

    Raises:
        NoPlan: from the end of the step in which the first plan is made, where none keeps to the limits of a strict goal; has the
            smallest peak. Later the nearest plan is followed, with a warning: an error on one rank would leave others waiting.
        ConfigError: from there too, where blocks are to be recomputed and none can be.
    """

    def __init__(
        self,
        engine: OffloadEngine,
        store: SpillStore,
        subject: PlanSubject,
        goal: Goal,
        *,
        endurance: Endurance | None = None,
        reports: bool = False,
        plot: Path | None = None,
    ) -> None:
        self.plan: Plan | None = None
        self.problem: SearchProblem | None = None
        self.metric = PlanMetrics()
        self.steps = 0
        self.subject, self.goal = subject, goal
        by_regions = isinstance(subject, Regions)
        self.derating = BandwidthDerating(
            store.metrics, engine.device.link_bandwidth(), endurance, split=by_regions
        )
        self._engine, self._store, self._reports = engine, store, reports
        self._finder = PlanFinder(goal, engine, subject.remedy)
        self._limit = PeakLimit(goal.key, goal.limit, self.metric)
        self._arena, self._plot = ArenaCost(engine), PlanPlot(plot, engine.meter)
        self._kept: StepTimeline | None = None  # the step that keeps everything, of `problem`
        self._decided = ""
        self._reason = "profiled"  # why the next plan is made; "": none is due
        self._planned_at = 0  # step of the latest plan
        self._reshaped = False  # what is followed was not planned for forwards like these
        self._known: set[tuple[str, ...]] = set()  # actions that were followed for forwards like these
        self._started = False  # a plan was followed
        self._new_peak = False  # a new peak begins with the next forward
        self._settling = False  # the first step of a plan begins with what was alive before
        self._outcome_due = self._same = False  # the latter: the plan is the one before
        self._warned = self._warned_of_size = False
        self._unended = False  # this step has so many forwards that no more are recorded
        subject.begin(self)

    # Events

    def attach(self, model: nn.Module) -> None:
        self.subject.attach(model)

    def before_call(self, module: nn.Module, arguments: Any) -> None:
        self.subject.before_call(module, arguments)

    def on_forward(self, forward: Forward) -> AbstractContextManager[Any] | None:
        if (
            self._new_peak
        ):  # measured peaks are those of the plan that is followed; the step before is in the journal now
            self._new_peak = False
            self._engine.reset_peak()
        watching = self.subject.on_forward(forward)
        return None if self._unended else watching

    def on_unended_step(self) -> str:
        self._unended = True
        return self.subject.on_unended_step()

    def on_step_end(self, step: Step) -> None:
        """Measure, and plan where that is due. Ends between which no forward came count as one; a last step is only counted."""
        self._unended = False
        if self._engine.forked or (step.failed and self.subject.failed()) or not step.forwards:
            return
        self.steps += 1
        if step.closing:
            return
        if self.subject.resting:
            self.metric.idle_steps += 1
            self.subject.rested()
            return
        # 1. Measure.
        self._engine.drain()  # notes the end of the last backward
        self._plot.step_ended()
        peaks = self._engine.meter.begin_recent()
        self._limit.step_ended(peaks.alive + self.subject.beside, planned=self.plan is not None)
        self.derating.step_ended(self._store.metrics, self._engine.metrics.offloaded_bytes, step.elapsed)
        fresh = self.subject.step_ended(peaks.unoffloaded)
        self._new_peak |= self._settling
        self._settling = False
        # 2. Plan, where one is due.
        if not self._reason:
            self._reason = self._due(fresh, step.seconds - step.idle)
        if self._reason and self.subject.ready(fresh):
            self._make()
        # 3. Say what came of the latest plan.
        elif self._outcome_due and self.steps >= self._planned_at + 2:
            self._outcome_due = False
            self._compare(self.subject.outcome(peaks, step.seconds - step.idle))
        self.subject.settle()

    # When to plan again

    def _due(self, fresh: bool, seconds: float) -> str:
        """Why a plan is due. Empty: none is."""
        if why := self.subject.due():
            return why
        if self.subject.moves() and self.derating.drifted(self.steps):
            return self.request(DRIFTED)
        if self.subject.probes():
            return self.request(FASTER)
        stalled = self.subject.stalled(fresh, seconds)
        if stalled is not None and self.steps > self._planned_at + 1 and self.plan is not None:
            # The first step of a plan still waits for transfers of the one before.
            self.derating.margin.observe(stalled, self.plan.timeline.stall / self.plan.seconds)
        why = self.derating.reason(self.steps)
        return self.request(why) if why else ""

    def request(self, why: str, *, reshaped: bool = False) -> str:
        """Plan when there is something to plan from, because of `why`.

        Args:
            reshaped: what is followed was not planned for forwards like these.
        """
        self._reason, self._reshaped = why, self._reshaped or reshaped
        self.subject.requested()
        self.derating.requested()
        return why

    def drop_plan(self) -> None:
        """Follow none any more: everything is measured again."""
        self.plan, self._reason = None, "profiled"
        self._known.clear()
        self._plot.cancel()

    @property
    def settled(self) -> bool:
        """No plan is due, and the outcome of the latest one is known."""
        return not self._reason and not self._outcome_due

    @property
    def planned_at(self) -> int:
        """Step of the latest plan."""
        return self._planned_at

    @property
    def reason(self) -> str:
        """Why a plan is due. Empty: none is."""
        return self._reason

    # Planning

    def machine(self, chunks: Sequence[Sequence[Block]], *, tiers: bool = True) -> Machine:
        """The machine that a plan for these blocks counts on.

        Args:
            tiers: what is saved may leave.
        """
        machine = self.derating.machine(self._engine) if tiers else Machine()
        return self._arena.counted(machine, chunks)

    def arena_used(self, used: bool) -> None:
        """Something leaves from the next step on, or nothing."""
        self._arena.planned(used=used)

    def best(self, problem: SearchProblem, larger: float) -> Plan:
        """The plan that would be followed. Arguments and errors: see `PlanFinder.find`."""
        return self._finder.find(problem, kept_step(problem), larger, self.derating.rate).plans[0]

    @property
    def started(self) -> bool:
        """A plan was followed."""
        return self._started

    def _make(self) -> None:
        """Search, and follow what is found."""
        problem = self.subject.problem()
        kept = kept_step(problem)
        rate = self.subject.write_rate(problem, self.derating.rate)
        larger = self.subject.larger()
        found: FoundPlans | None = None
        try:
            found = self._finder.find(problem, kept, larger, rate)
            plan: Plan | None = found.plans[0]
        except NoPlan as error:
            plan = self._nearest(error, problem, kept, larger, rate)
        if plan is not None:
            self._follow(problem, kept, plan, found, bound=self._bound(problem, kept, plan, larger))

    def _bound(self, problem: SearchProblem, kept: StepTimeline, plan: Plan, larger: float) -> bool:
        """Whether less is offloaded than could be hidden because the drives wear. A slow drive, or a small model, is written less
        than its life allows in any case."""
        rate = self.derating.rate
        if rate is None or not problem.machine.tiers or rate >= problem.machine.tiers[0].write:
            return False
        try:
            free = self._finder.find(problem, kept, larger, self.subject.write_rate(problem, None)).plans[0]
        except NoPlan as error:
            free = error.nearest
        return free.actions != plan.actions

    def _nearest(
        self, error: NoPlan, problem: SearchProblem, kept: StepTimeline, larger: float, rate: float | None
    ) -> Plan | None:
        """The plan to follow where none keeps to the limits. None: the one of before, since only bandwidths have changed, or how
        much may be written: what is followed is no worse than it was."""
        if not self.goal.strict:
            return error.nearest
        if not self._started and not self.subject.agreed:
            if larger == 1:
                raise error.named()
            # At first only for the forwards that were profiled: other ranks, whose forwards vary otherwise, go on.
            try:
                self._finder.find(problem, kept, 1.0, rate)
            except NoPlan as first:
                raise first.named() from None
        if self.plan is not None and not self._reshaped:
            self.derating.failed(self.steps, self._reason)
            if not self._warned:
                self._warned = True
                logger.warning(STAYS, error)
            self._planned_at, self._reason = self.steps, ""
            return None
        if not self.subject.warn_of_limits(error, started=self._started) and not self._warned_of_size:
            self._warned_of_size = True
            warn_outgrown(error)
        return error.nearest

    def _follow(
        self, problem: SearchProblem, kept: StepTimeline, plan: Plan, found: FoundPlans | None, *, bound: bool
    ) -> None:
        problem = problem.under(plan.state)
        if self._reshaped:
            self._known.clear()
        new = plan.actions not in self._known
        self._known.add(plan.actions)
        choices = [problem.choice(name) for name in plan.actions]
        self._arena.planned(used=any(choice.tier != DEVICE for choice in choices))
        same = self.subject.follow(self.plan, problem, plan)
        settles = self._reason == self.subject.SETTLES
        self.derating.planned(self.steps, self._reason, same=same, new=new, bound=bound, settles=settles)
        self._same = same and not self._outcome_due
        self._outcome_due |= self.subject.MEASURES_OUTCOME and (not same or self._reason != FASTER)
        self.plan, self.problem, self._kept = plan, problem, kept
        self._started, self._reshaped = True, False
        limit = self.goal.limit if found is None or self.goal.limit is not None else found.limits.device
        self._settling |= not same
        if not same:
            self._limit.planned()
            self._plot.planned(problem, plan, limit)
        self.metric.update(problem.blocks, choices, plan.timeline, kept)
        logger.debug("planned at step %d: %s", self.steps, self._reason)
        self._planned_at, self._reason = self.steps, ""
        if not self.subject.MEASURES_OUTCOME:
            better = found.alternatives(problem) if found is not None and self._reports and not same else ()
            plans = [plan] if found is None else found.plans
            self._same = False
            table = plan_table(self.subject.TITLE, problem, plans, kept, limit=limit, better=better)
            self._report(table)

    # Reports

    def _compare(self, outcome: Outcome | None) -> None:
        """Say what came of the latest plan. Of one that is the same as before everything was said."""
        if outcome is None or self.plan is None or self.problem is None or self._kept is None:
            return
        if not self._same and any(block.saved for block in self.problem.blocks):
            for warning in outcome.warnings():
                logger.warning(warning)
        limit, title = self.goal.limit, self.subject.TITLE
        table = plan_table(
            title,
            self.problem,
            [self.plan],
            self._kept,
            limit=limit,
            outcome=outcome,
            modules=self.subject.modules,
        )
        self._report(table)

    def _report(self, table: str) -> None:
        self._decided = table + self.subject.note
        if self._reports and not self._same:
            report(self._decided)

    def limited_by(self, seconds: float) -> str:
        return "" if self.plan is None or self.problem is None else limit_text(self.problem, self.plan)

    def metrics(self) -> Sequence[tuple[str, MetricSet]]:
        return [(self.subject.METRICS, self.metric)]

    def decisions(self) -> str:
        return self._decided

    def description(self) -> str:
        return self.subject.description()

    def detach(self) -> None:
        self._plot.cancel()
        self.subject.detach()

    close = detach
