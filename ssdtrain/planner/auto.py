"""`"plan": "auto"` where blocks may be recomputed: profiles some steps, searches, and carries out what was found.

Note: [Steps]
A plain loop need not announce its steps. A step ends before an optimizer runs (torch's global hook), or where the loop says so;
ends between which no forward was recorded count as one. A plan changes there only.

Note: [Memory while steps are profiled]
What cannot fit must not be tried. With tiers everything is offloaded meanwhile. Without, all blocks are recomputed but the last
one of each kind, which stands for the others; blocks that have buffers are kept, since a second run might change them twice.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any

from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ssdtrain.config import PlanConfig
from ssdtrain.features import Feature, Forward, Step
from ssdtrain.offload.checkpoint import Checkpoint
from ssdtrain.offload.feature import ActivationOffload
from ssdtrain.planner.block_times import MeasuredBlock, kind_of, measured_blocks, pieces
from ssdtrain.planner.choose import SLACK
from ssdtrain.planner.execute import BlockPolicy, recompute_modules
from ssdtrain.planner.explain import plan_table
from ssdtrain.planner.measured import Bandwidths, Profile, Rates, measured_machine
from ssdtrain.planner.plans import Limits, NoPlan, Objective, Plan, Problem, actions_for
from ssdtrain.planner.search import search
from ssdtrain.planner.step import KEEP, Machine, Pass
from ssdtrain.planner.timeline import simulate
from ssdtrain.profile.passes import StepRecord
from ssdtrain.profile.spans import BlockSpans, Span
from ssdtrain.telemetry.messages import report
from ssdtrain.telemetry.registry import MetricSet, Reduce, Unit, counter, gauge

__all__ = ["AutoPlan", "PlanMetrics"]

logger = logging.getLogger("ssdtrain")

WARM_UP = 2
"""Steps that are not recorded: the first ones have costs of their own."""

RECORDED = 3
"""Steps that a plan is made from."""

PATIENCE = 8
"""Steps after which tiers that nothing was written to (backward came before every write) are left out of the plan."""

DRIFT = 0.25
"""Of a bandwidth, in two steps in turn: plan again. It grows by half each time that the plan stays the same."""

FOREVER = 1e6
"""Seconds of running a block again that must not: no plan will."""


@dataclass
class PlanMetrics(MetricSet):
    """Of the plan that `plan` makes for blocks. Bytes and seconds of the cost model."""

    plans: int = counter(Unit.COUNT, "plans")
    """Made since the start."""
    recomputed_blocks: int = gauge(Unit.COUNT, "recomputed blocks")
    """Whose forward backward runs again."""
    offloaded_blocks: int = gauge(Unit.COUNT, "offloaded blocks")
    """Whose saved tensors go to the tiers."""
    predicted_peak_bytes: int = gauge(Unit.BYTES)
    """Of what the blocks save, at its largest."""
    predicted_step_ratio: float = gauge(Unit.COUNT, ranks=Reduce.MAX)
    """Predicted step time over that of keeping everything."""


class AutoPlan(Feature):
    """Plans for the blocks of one model.

    Args:
        plan: the section of the config.
        offload: whose engine has `policy`, and whose tiers are used if `tiers`.
        policy: what this object tells which blocks leave.
        blocks: by qualified name; each may be recomputed.
        tiers: there is an offload section.
        reports: log the plan.

    Raises:
        NoPlan: from the end of a step, where no plan keeps to the limits; has the smallest peak.
    """

    def __init__(
        self,
        plan: PlanConfig,
        offload: ActivationOffload,
        policy: BlockPolicy,
        blocks: Mapping[str, nn.Module],
        checkpoint: Checkpoint,
        *,
        tiers: bool,
        reports: bool = False,
    ) -> None:
        self.plan: Plan | None = None
        """That is followed."""
        self.problem: Problem | None = None
        """That it was searched for."""
        self.metric = PlanMetrics()
        self._config, self._offload, self._policy, self._blocks = plan, offload, policy, blocks
        self._checkpoint, self._tiers, self._reports = checkpoint, tiers, reports
        self._engine = offload.engine
        self._recorder = self._engine.recorder
        self._link = self._engine.device.link_bandwidth()
        self._kinds = {name: kind_of(block) for name, block in blocks.items()}
        self._order: list[Pass] = []
        self._bandwidths = Bandwidths()
        self._planned_rates = self._rates = Rates(None, None)
        self._drift, self._drifted = DRIFT, 0
        self._spans: BlockSpans | None = None
        self._shapes: dict[
            int, tuple[list[Span], int]
        ] = {}  # by regions of the tape: spans, small bytes outside
        self._forwards = 0  # of the step that runs
        self._key = (0, -1)
        self._measured: list[MeasuredBlock] = []
        self._undo: list[Callable[[], None]] = []
        self._hook = register_optimizer_step_pre_hook(self._ended)
        self._profile_again()

    # Events

    def on_forward(self, forward: Forward) -> AbstractContextManager[Any] | None:
        self._forwards += 1
        if self._spans is None:
            return None
        self._key = forward.chunk, forward.microbatch
        return self._watching(self._spans)

    @contextmanager
    def _watching(self, spans: BlockSpans) -> Iterator[None]:
        meter, tape = self._engine.meter, self._offload.tape(*self._key)
        before = meter.unoffloaded_bytes
        spans.begin()
        yield
        if tape is not None and not self._engine.forked:
            small = meter.unoffloaded_bytes - before - tape.nbytes - sum(span.small for span in spans.found)
            self._shapes[len(tape.regions)] = spans.found, max(0, small)

    def on_step_end(self, step: Step) -> None:
        self._ended()

    def _ended(self, *_: object) -> None:
        """See Note: [Steps]."""
        if not self._forwards or self._engine.forked:
            return
        self._forwards = 0
        self._engine.drain()  # notes the end of the last backward
        latest = self._bandwidths.since(self._offload.store.metrics)
        self._rates = Rates(latest.write or self._rates.write, latest.read or self._rates.read)
        if self._spans is not None:
            self._profiled(self._spans)
        elif self._policy.shape_changed():
            logger.info("the size of what forwards save changed: profiling again")
            self._profile_again()
        elif self._drifting(latest):
            self._make(self._measured)

    # Profiling

    def _profile_again(self) -> None:
        self._release()
        self.plan = None
        self._steps = 0
        self._records: list[StepRecord] = []
        self._shapes.clear()
        self._recorder.take()
        self._recorder.request("plan", False)
        recomputed = {} if self._tiers else self._recomputed_meanwhile()
        self._recomputed = frozenset(recomputed)
        self._undo.append(recompute_modules(recomputed, self._checkpoint))
        self._policy.follow({}, rest="offload" if self._tiers else "keep")
        self._spans = BlockSpans(self._blocks, self._engine, lambda: self._offload.tape(*self._key))

    def _recomputed_meanwhile(self) -> dict[str, nn.Module]:
        last = {self._kinds[name]: name for name in self._blocks}
        return {
            name: block
            for name, block in self._blocks.items()
            if last[self._kinds[name]] != name and next(block.buffers(), None) is None
        }

    def _profiled(self, spans: BlockSpans) -> None:
        self._steps += 1
        self._recorder.request("plan", self._steps >= WARM_UP)
        record = self._recorder.take()
        if self._steps > WARM_UP:
            self._records.append(record)
        if len(self._records) < RECORDED:
            return
        if (
            self._tiers
            and not (self._rates.write or self._link)
            and self._steps < WARM_UP + RECORDED + PATIENCE
        ):
            self._records.pop(0)
            return
        event = self._engine.device.record(None)
        if event is not None:
            self._engine.device.block(event)
        found = self._read(self._records)
        if not found:
            self._records.clear()  # no backward came
            return
        self._measured = found
        self._make(found)
        spans.remove()
        self._spans, self._records = None, []
        self._recorder.request("plan", False)

    def _read(self, records: Sequence[StepRecord]) -> list[MeasuredBlock]:
        steps: list[list[MeasuredBlock]] = []
        for record in records:
            tapes = [tape for tape in record.tapes() if tape.used and len(tape.regions) in self._shapes]
            if tapes:
                tape = max(tapes, key=lambda one: sum(region.nbytes for region in one.regions))
                spans, small = self._shapes[len(tape.regions)]
                steps.append(pieces(tape, spans, self._recomputed, small))
                self._order = Profile(record).order
        alike = [step for step in steps if [p.name for p in step] == [p.name for p in steps[-1]]]
        return measured_blocks(alike, self._kinds) if alike else []

    # Planning

    def _drifting(self, latest: Rates) -> bool:
        if self.plan is None or not self.plan.count("ssd"):
            return False
        least = 1 - self._drift
        pairs = zip(latest, self._planned_rates, strict=True)
        off = any(now and then and not least <= now / then <= 1 / least for now, then in pairs)
        self._drifted = self._drifted + 1 if off else 0
        return self._drifted >= 2

    def _machine(self) -> Machine:
        if not self._tiers or not (self._rates.write or self._link):
            return Machine()
        return measured_machine(self._engine, self._rates, self._link)

    def _make(self, measured: Sequence[MeasuredBlock]) -> None:
        """Search, and follow what is found."""
        machine = self._machine()
        if self._tiers and not machine.tiers:
            logger.warning(
                "ssdtrain.plan: nothing was written to the tiers in %d steps, because backward came before every write: "
                "nothing is offloaded",
                self._steps,
            )
        blocks = [
            piece.block if piece.pure else replace(piece.block, recompute=FOREVER, inputs=piece.block.saved)
            for piece in measured
        ]
        outside = frozenset(number for number, piece in enumerate(measured) if not piece.name)
        recompute = any(piece.pure for piece in measured)
        actions = actions_for(machine, recompute=recompute)
        self.problem = Problem([blocks], self._order, machine, actions, outside)
        kept = simulate([blocks], [[KEEP] * len(blocks)], self._order, machine)
        seconds = None
        if self._config.slowdown is not None:
            seconds = kept.seconds * (1 + max(self._config.slowdown, SLACK))
        limits = Limits(self._config.device_limit, seconds=seconds)
        try:
            found = search(self.problem, limits, Objective(0, 1) if self._config.memory else Objective())
        except NoPlan as error:
            error.args = (f"ssdtrain.plan: {error}",)
            raise
        same = self.plan is not None and self.plan.actions == found[0].actions
        self._drift = 1.5 * self._drift if same else DRIFT
        self._drifted = 0
        self._planned_rates = self._rates
        self.plan = found[0]
        if not same:
            self._follow({p.name: a for p, a in zip(measured, self.plan.actions, strict=True) if p.name})
        self.metric.plans += 1
        self.metric.recomputed_blocks = self.plan.count("recompute")
        self.metric.offloaded_blocks = self.plan.count("ssd")
        self.metric.predicted_peak_bytes = self.plan.peak
        self.metric.predicted_step_ratio = self.plan.seconds / kept.seconds
        if self._reports:
            report(plan_table(blocks, found, kept, self._config.device_limit))

    def _follow(self, actions: Mapping[str, str]) -> None:
        self._release()
        again = {name: self._blocks[name] for name, action in actions.items() if action == "recompute"}
        self._undo.append(recompute_modules(again, self._checkpoint))
        offloaded = [name for name, action in actions.items() if action == "ssd"]
        self._policy.follow(dict.fromkeys(offloaded, "offload"))

    def _release(self) -> None:
        while self._undo:
            self._undo.pop()()

    # Everything else

    def metrics(self) -> Sequence[tuple[str, MetricSet]]:
        return [("plan", self.metric)]

    def description(self) -> str:
        limit = self._config.device_limit
        return f"plan: auto, {len(self._blocks)} blocks" + ("" if limit is None else f", {limit} bytes")

    def detach(self) -> None:
        self._hook.remove()
        self._release()
        if self._spans is not None:
            self._spans.remove()
            self._spans = None

    def close(self) -> None:
        self.detach()
