"""`"plan": "auto"` where blocks may be recomputed: profiles some steps, searches, and carries out what was found.

Note: [Steps]
A plan changes only where a step ends (`ssdtrain.steps.StepClock`). Ends between which no forward was recorded count as one.

Note: [Memory while steps are profiled]
What cannot fit must not be tried. With tiers everything is offloaded meanwhile. Without, and from the first forward on that is
kept because its backward follows at once (`Forward.keep`: the last stage of a pipeline), all blocks are recomputed but the last
one of each kind, which stands for the others; blocks that have buffers are kept, since a second run might change them twice.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

from ssdtrain.compact.feature import CompactLinear
from ssdtrain.config import PlanConfig
from ssdtrain.features import Feature, Forward, Step
from ssdtrain.messages import report
from ssdtrain.metrics import MetricSet
from ssdtrain.offload.checkpoint import Checkpoint
from ssdtrain.offload.feature import ActivationOffload
from ssdtrain.offload.tensors.tape import Tape
from ssdtrain.planner.actions import BlockActions, recomputed_meanwhile
from ssdtrain.planner.agreement import Agreement
from ssdtrain.planner.arena import ArenaCost
from ssdtrain.planner.block_times import MeasuredBlock, kind_of, problem_of, read_steps, with_compressed
from ssdtrain.planner.controller import OUTGROWN, STAYS
from ssdtrain.planner.drift import Drift
from ssdtrain.planner.execute import BlockPolicy
from ssdtrain.planner.explain import plan_table
from ssdtrain.planner.finder import PlanFinder, why_none
from ssdtrain.planner.measured import bound_stores, measured_machine, warn_of_no_writes
from ssdtrain.planner.memory_plot import PlanPlot
from ssdtrain.planner.plan_blocks import PlanBlocks
from ssdtrain.planner.plan_metrics import PeakLimit, PlanMetrics
from ssdtrain.planner.plans import NoPlan, Plan, Problem
from ssdtrain.planner.recomputations import Recomputations
from ssdtrain.planner.spans import BlockSpans, Collectives, Span, own_generators
from ssdtrain.planner.step import Machine, Pass
from ssdtrain.planner.timeline import kept_step
from ssdtrain.profile.passes import StepRecord

__all__ = ["AutoPlan"]

logger = logging.getLogger("ssdtrain")

WARM_UP = 2
"""Steps that are not recorded: the first ones have costs of their own."""

RECORDED = 3
"""Steps that a plan is made from."""

EXCLUDED = (
    "ssdtrain.plan: without recomputing the blocks that computed other values when they ran again, the limits are not kept to, "
    "and the nearest plan is followed: %s"
)

PATIENCE = 8
"""Steps after which tiers that nothing was written to (backward came before every write) are left out of the plan."""


class AutoPlan(Feature):
    """Plans for the blocks of one model.

    Args:
        plan: the section of the config.
        offload: whose engine has `policy`, and whose tiers are used if `tiers`.
        policy: of that engine; follows the plan.
        named: the blocks; each may be recomputed.
        compact: compresses inputs of linear layers in the blocks that the plan says; None: nothing lossy is chosen.
        tiers: there is an offload section.
        reports: log the plan.
        plot: where the memory of a step that follows it is drawn; None: nowhere.

    Raises:
        NoPlan: from the end of the step in which the first plan is made, where none keeps to the limits; has the smallest peak.
            Later the nearest plan is followed, with a warning: an error on one rank would leave the others waiting.
        ConfigError: from there too, where blocks are to be recomputed and none can be.
    """

    def __init__(
        self,
        plan: PlanConfig,
        offload: ActivationOffload,
        policy: BlockPolicy,
        named: PlanBlocks,
        checkpoint: Checkpoint,
        *,
        compact: CompactLinear | None = None,
        tiers: bool,
        reports: bool = False,
        plot: Path | None = None,
    ) -> None:
        self.plan: Plan | None = None
        """That is followed."""
        self.problem: Problem | None = None
        """That it was searched for."""
        self.metric = PlanMetrics()
        self._limit = PeakLimit("plan.device_limit", plan.device_limit, self.metric)
        self._config, self._offload, self._policy = plan, offload, policy
        self._blocks = blocks = named.blocks
        self._agreement = agreement = Agreement(named.group, tuple(blocks), offload.engine.eligible.device)
        self._tiers, self._reports, self._compact = tiers, reports, compact
        self._recomputations = Recomputations(agreed=agreement.several)
        self._actions = BlockActions(
            blocks, policy, checkpoint, compact, lambda: agreement.decided, self._recomputations
        )
        self._decided = self._note = ""
        self._uncompressed: list[MeasuredBlock] | None = None  # while blocks are measured with compression
        self._engine = offload.engine
        self._recorder, self._link = self._engine.recorder, self._engine.device.link_bandwidth()
        self._kinds = {name: kind_of(block) for name, block in blocks.items()}
        self._order: list[Pass] = []
        self._drift, self._arena = Drift(), ArenaCost(self._engine)
        self._finder, self._plot = PlanFinder(plan, self._engine), PlanPlot(plot, self._engine.meter)
        self._started = self._step_ended = False  # a plan was followed; a step has ended
        self._known: set[tuple[str, ...]] = set()  # plans that were followed for forwards like these
        self._spans: BlockSpans | None = None
        # By serial number of the tape: spans, small bytes outside.
        self._found: dict[int, tuple[list[Span], int]] = {}
        # Why these blocks must not run again; for good.
        off = dict.fromkeys(blocks, "plan.recompute is off")
        self._impure = off if plan.recompute == "off" else own_generators(blocks)
        self._excludes = False  # the plan is made again without blocks that differed
        self._warned = self._warned_of_size = self._unended = False
        self._warned_impure = plan.recompute == "off"
        self._larger = 0  # bytes of a forward larger than planned for
        # One has been kept, so far: there the plan has nothing to choose but recomputation.
        self._keeps = False
        self._measured: list[MeasuredBlock] = []
        self._profile_again()

    # Events

    def on_forward(self, forward: Forward) -> AbstractContextManager[Any] | None:
        if forward.keep and not self._keeps:
            self._keeps = True
            if self._tiers:
                self._profile_again()
        if self._spans is None or self._spans.tape is not None:
            return None  # it is inside of another one, or beside it on another thread: it is not measured
        if self._unended:
            return None
        return self._watching(self._spans, self._offload.tape(forward.chunk, forward.microbatch))

    @contextmanager
    def _watching(self, spans: BlockSpans, tape: Tape | None) -> Iterator[None]:
        meter = self._engine.meter
        before = meter.unoffloaded_bytes
        # Not in steps that are recorded: a mode takes time.
        watched = self._steps < WARM_UP and self._agreement.leaves_out
        with spans.forward(tape) as found, Collectives(self._communicates) if watched else nullcontext():
            yield
        for span in found:
            if span.why:
                self._impure.setdefault(span.name, span.why)
                self._ran_impure |= span.name in self._recomputed
        if self._recomputed:
            run_again = (span.name for span in found if span.plain and span.name in self._recomputed)
            self._agreement.check_same(run_again)
        if tape is not None and not self._engine.forked:
            small, serial = meter.unoffloaded_bytes - before - tape.nbytes, self._recorder.serial(tape)
            small -= sum(span.small for span in found)
            if serial is not None:
                self._found[serial] = found, max(0, small)

    def _communicates(self, group: Any) -> None:
        if self._spans is not None and not self._agreement.covers(group):
            self._spans.communicates()

    def on_step_end(self, step: Step) -> None:
        """See Note: [Steps]. A last step has no plan after it."""
        self._unended = False
        if step.closing or self._engine.forked:
            return
        if not step.failed:
            if step.forwards:
                self._ended()
        elif self._spans is not None:
            if not self._agreement.several:
                self._exclude(self._recomputations.differing)
            self._profile_again()

    def _ended(self) -> None:
        self._step_ended = True
        self._engine.drain()  # notes the end of the last backward
        self._plot.step_ended()
        self._limit.step_ended(self._engine.meter.begin_recent().alive, planned=self.plan is not None)
        self._drift.measure(self._offload.store.metrics)
        self._recomputations.step_ended()
        # Ranks that recompute the same blocks go on with them: there a difference stays an error.
        excluded = not self._agreement.several and self._exclude(self._recomputations.differing)
        if self._spans is not None:
            bound_stores(self._engine, self._link, self._policy.largest)
            self._profiled(self._spans)
        elif excluded:
            self.plan, self._excludes = None, True
            self._make(self._measured)
            self._excludes = False
        elif self._policy.shape_changed():
            logger.info("the size of what forwards save changed: profiling again")
            self._larger = max(self._larger, self._policy.largest)
            self._profile_again()
        elif self.plan is not None and self.plan.count("ssd") and self._drift.drifted():
            self._make(self._measured)

    def _exclude(self, differing: Mapping[str, str]) -> bool:
        """Blocks that differed must not run again. Returns whether one of them does so far."""
        new = {name: why for name, why in differing.items() if name not in self._impure}
        self._impure.update(new)
        self._ran_impure |= not self._recomputed.isdisjoint(new)
        return not self._actions.recomputed.isdisjoint(new)

    # Profiling

    def on_unended_step(self) -> str:
        self._unended = True
        if self._step_ended:
            self._recorder.stop("plan")
        else:
            self._recorder.request("plan", False)
            self._records.clear()
            self._found.clear()
        return "ssdtrain.plan: nothing is planned"

    def _profile_again(self) -> None:
        if self._spans is not None:
            self._spans.remove()
        self.plan = None
        self._plot.cancel()
        self._known.clear()
        self._steps, self._uncompressed = 0, None
        self._ran_impure = False  # a block that must not run again was to be recomputed
        self._records: list[StepRecord] = []
        self._found.clear()
        self._recorder.take()
        self._recorder.request("plan", False)
        agreed = self._agreement.recomputed
        meanwhile = frozenset[str]() if self._leaves else recomputed_meanwhile(self._blocks, self._impure)
        self._recomputed = meanwhile if agreed is None else agreed
        self._arena.planned(used=self._leaves)
        self._actions.profile(self._recomputed, offload=self._tiers)
        self._spans = BlockSpans(self._blocks, self._engine)

    def _profiled(self, spans: BlockSpans) -> None:
        ran_impure = self._ran_impure and self._agreement.recomputed is None
        found = [] if ran_impure else self._measure()
        again, ready = self._agreement.exchange(self._impure, ran_impure, found)
        if again:  # all ranks have run it again so far: now none does
            self._profile_again()
        elif ready and self._compact is not None and self._uncompressed is None:
            self._measure_compressed(found)
        elif ready:
            if self._uncompressed is not None:
                found = with_compressed(self._uncompressed, found)
            self._measured = found
            self._actions.compress(())  # until there is a plan that does
            self._make(found)
            spans.remove()
            self._spans, self._records = None, []
            self._recorder.request("plan", False)

    def _measure(self) -> list[MeasuredBlock]:
        """A step was profiled. Returns its blocks, or nothing where more steps are needed."""
        self._steps += 1
        if self._steps <= WARM_UP and self._uncompressed is None and not self._agreement.several:
            # In the last of these, when it is known which blocks must not run again.
            tried = self._blocks.keys() - self._recomputed - self._impure.keys()
            self._actions.profile(
                self._recomputed, offload=self._tiers, tried=tried if self._steps == WARM_UP - 1 else ()
            )
        record = self._recorder.take()
        self._recorder.request("plan", self._steps >= WARM_UP)
        if self._steps > WARM_UP:
            self._records.append(record)
        del self._records[:-RECORDED]
        recorded = {serial for one in self._records for _, serial, _ in one.order}
        self._found = {serial: self._found[serial] for serial in self._found.keys() & recorded}
        if len(self._records) < RECORDED:
            return []
        unknown = self._movable and not (self._drift.rates.write or self._link)
        if unknown and self._steps < WARM_UP + RECORDED + PATIENCE:
            return []
        device = self._engine.device
        event = device.record(device.current_stream())
        if event is not None:
            device.block(event)
        spans, known = self._found, self._measured
        least = self._engine.options.min_bytes if self._leaves else 0
        found, order = read_steps(self._records, spans, self._recomputed, self._kinds, known, least=least)
        self._order = order or self._order
        if not found:
            self._records.clear()  # no backward came
            self._found.clear()
        return found

    def _measure_compressed(self, found: list[MeasuredBlock]) -> None:
        """Profile the same number of steps with compression, after one to warm up."""
        self._uncompressed, self._steps = found, WARM_UP - 1
        self._records.clear()
        self._found.clear()
        self._recorder.request("plan", False)
        self._actions.compress(name for name in self._blocks if name not in self._recomputed)

    # Planning

    @property
    def _leaves(self) -> bool:
        """What is saved may leave memory: there are tiers, and no forward was kept (`Forward.keep`)."""
        return self._tiers and not self._keeps

    @property
    def _movable(self) -> bool:
        """Something was saved that may leave, and is large enough to."""
        return self._leaves and self._engine.prefetcher.largest >= self._engine.options.min_bytes

    def _machine(self) -> Machine:
        if not self._leaves or not (self._drift.rates.write or self._link):
            return Machine()
        return measured_machine(self._engine, self._drift.rates, self._link)

    def _agreed_problem(self, measured: Sequence[MeasuredBlock], machine: Machine) -> Problem:
        """What is searched on this rank, when the ranks that recompute the same blocks have agreed on them."""
        of = functools.partial(problem_of, measured, self._order, machine, self._impure)
        if self._agreement.recomputed is None:
            problem = of()
            self._agreement.decide(lambda: self._finder.recomputed(problem, self._impure, self._larger))
            recomputed = self._agreement.recomputed
            if recomputed is None and not self._started:
                self._finder.check_recompute(problem, self._impure)
            may_recompute = recomputed or "recompute" in problem.actions
            self._note = "" if may_recompute else self._nothing_to_recompute()
        return of(self._agreement.recomputed)

    def _make(self, measured: Sequence[MeasuredBlock]) -> None:
        """Search, and follow what is found."""
        machine = self._arena.counted(self._machine(), [[piece.block for piece in measured]])
        if self._movable and not machine.tiers:
            warn_of_no_writes(self._steps)
        self.problem = problem = self._agreed_problem(measured, machine)
        if self._compact is not None and "compress" not in problem.actions:
            logger.warning("ssdtrain.plan: compressed inputs of linear layers save nothing in any block")
        blocks, kept = problem.blocks, kept_step(problem)
        try:
            found = self._finder.find(problem, kept, self._larger)
            given = self._config.device_limit
            plans, limit = found.plans, found.limits.device if given is None else given
        except NoPlan as error:
            nearest = self._nearest(error)
            if nearest is None:
                return
            found, plans, limit = None, [nearest], self._config.device_limit
        same = self.plan is not None and self.plan.actions == plans[0].actions
        self._drift.planned(same=same, new=plans[0].actions not in self._known)
        self._known.add(plans[0].actions)
        self.plan, self._started = plans[0], True
        self._arena.planned(used=self.plan.count("ssd") > 0)
        if not same:
            self._limit.planned()
            self._actions.follow(measured, self.plan.actions, self._larger, self._agreement.recomputed)
            self._plot.planned(problem, self.plan, limit)
        chosen = [problem.actions[name] for name in self.plan.actions]
        self.metric.update(blocks, chosen, self.plan.timeline, kept)
        better = found.alternatives(problem) if found is not None and self._reports and not same else ()
        self._decided = plan_table(blocks, plans, kept, limit, better) + self._note
        if self._reports:
            report(self._decided)

    def _nearest(self, error: NoPlan) -> Plan | None:
        """The plan to follow where none keeps to the limits. None: the one of before."""
        agreed = self._agreement.recomputed is not None
        if not self._started and not agreed:
            raise error.named()
        if self.plan is None:
            if self._excludes:
                logger.warning(EXCLUDED, error)
            elif agreed:
                self._agreement.warn(error, larger=self._started)
            elif not self._warned_of_size:
                self._warned_of_size = True
                logger.warning(OUTGROWN, error)
            return error.nearest
        # Only the bandwidths have changed: what is followed is no worse than before.
        if not self._warned:
            self._warned = True
            logger.warning(STAYS, error)
        self._drift.planned(same=True, new=False)
        return None

    def _nothing_to_recompute(self) -> str:
        """No block may run again: say why, once. Returns the line of the table."""
        name, why = why_none(self._impure)
        if not self._warned_impure:
            self._warned_impure = True
            logger.warning("ssdtrain.plan: no block can be recomputed: %s: %s", name, why)
        return f"\n  no block is recomputed: {name}: {why}"

    # Everything else

    def metrics(self) -> Sequence[tuple[str, MetricSet]]:
        return [("plan", self.metric)]

    def decisions(self) -> str:
        return self._decided

    def description(self) -> str:
        limit = self._config.device_limit
        return f"plan: auto, {len(self._blocks)} blocks" + ("" if limit is None else f", {limit} bytes")

    def detach(self) -> None:
        self._actions.release()
        self._plot.cancel()
        if self._spans is not None:
            self._spans.remove()
            self._spans = None

    close = detach
