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
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ssdtrain.compact.feature import CompactLinear
from ssdtrain.config import ConfigError, PlanConfig
from ssdtrain.config import Problem as Wrong
from ssdtrain.features import Feature, Forward, Step
from ssdtrain.offload.checkpoint import Checkpoint
from ssdtrain.offload.feature import ActivationOffload
from ssdtrain.planner.block_times import MeasuredBlock, kind_of, measured_blocks, pieces, with_compressed
from ssdtrain.planner.controller import STAYS
from ssdtrain.planner.drift import Drift
from ssdtrain.planner.execute import BlockPolicy, recompute_modules
from ssdtrain.planner.explain import alternatives, plan_table
from ssdtrain.planner.measured import Profile, bound_stores, measured_machine
from ssdtrain.planner.plan_metrics import PlanMetrics
from ssdtrain.planner.plans import Limits, NoPlan, Objective, Plan, Problem, actions_for
from ssdtrain.planner.search import search
from ssdtrain.planner.step import COMPRESS, KEEP, Machine, Pass
from ssdtrain.planner.step_ends import OptimizerHook
from ssdtrain.planner.timeline import simulate
from ssdtrain.profile.passes import StepRecord
from ssdtrain.profile.spans import BlockSpans, Collectives, Span
from ssdtrain.telemetry.messages import report
from ssdtrain.telemetry.registry import MetricSet

__all__ = ["AutoPlan"]

logger = logging.getLogger("ssdtrain")

WARM_UP = 2
"""Steps that are not recorded: the first ones have costs of their own."""

RECORDED = 3
"""Steps that a plan is made from."""

PATIENCE = 8
"""Steps after which tiers that nothing was written to (backward came before every write) are left out of the plan."""

ALIKE = 0.9
"""Of the bytes of the largest recorded forward: others as large as that count for its times."""


class AutoPlan(Feature):
    """Plans for the blocks of one model.

    Args:
        plan: the section of the config.
        offload: whose engine has `policy`, and whose tiers are used if `tiers`.
        policy: of that engine; follows the plan.
        blocks: by qualified name; each may be recomputed.
        compact: compresses inputs of linear layers in the blocks that the plan says; None: nothing lossy is chosen.
        tiers: there is an offload section.
        reports: log the plan.

    Raises:
        NoPlan: from the end of a step, where no plan keeps to the limits, and none was followed so far; has the smallest peak.
        ConfigError: from there too, where blocks are to be recomputed and none can be.
    """

    def __init__(
        self,
        plan: PlanConfig,
        offload: ActivationOffload,
        policy: BlockPolicy,
        blocks: Mapping[str, nn.Module],
        checkpoint: Checkpoint,
        *,
        compact: CompactLinear | None = None,
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
        self._decided = ""
        self._compact = compact
        self._uncompressed: list[MeasuredBlock] | None = None  # while blocks are measured with compression
        self._engine = offload.engine
        self._recorder = self._engine.recorder
        self._link = self._engine.device.link_bandwidth()
        self._kinds = {name: kind_of(block) for name, block in blocks.items()}
        self._order: list[Pass] = []
        self._drift = Drift()
        self._spans: BlockSpans | None = None
        # By serial number of the tape: spans, small bytes outside.
        self._found: dict[int, tuple[list[Span], int]] = {}
        # Why these blocks must not run again; for good.
        self._impure = dict.fromkeys(blocks, "plan.recompute is off") if plan.recompute == "off" else {}
        self._ran_impure = False  # one of them was recomputed
        self._warned, self._warned_impure = False, plan.recompute == "off"
        self._larger = 0  # bytes of a forward that was larger than planned for
        self._forwards = 0  # of the step that runs
        self._key = (0, -1)
        self._measured: list[MeasuredBlock] = []
        self._undo: list[Callable[[], None]] = []
        self._hook = OptimizerHook(self._ended)
        for block in blocks.values():
            self._hook.attach(block)
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
        # Not in steps that are recorded: a mode takes time.
        watch = Collectives(spans.communicates) if self._steps < WARM_UP and _ranks() > 1 else nullcontext()
        with watch:
            yield
        for span in spans.found:
            if span.why:
                self._impure.setdefault(span.name, span.why)
                self._ran_impure |= span.plain and span.name in self._recomputed
        if tape is not None and not self._engine.forked:
            small = meter.unoffloaded_bytes - before - tape.nbytes - sum(span.small for span in spans.found)
            serial = self._recorder.serial(tape)
            if serial is not None:
                self._found[serial] = spans.found, max(0, small)

    def on_step_end(self, step: Step) -> None:
        self._ended()

    def _ended(self) -> None:
        """See Note: [Steps]."""
        if not self._forwards or self._engine.forked:
            return
        self._forwards = 0
        self._engine.drain()  # notes the end of the last backward
        self._drift.measure(self._offload.store.metrics)
        bound_stores(self._engine, self._link, self._policy.largest)
        if self._spans is not None:
            self._profiled(self._spans)
        elif self._policy.shape_changed():
            logger.info("the size of what forwards save changed: profiling again")
            self._larger = max(self._larger, self._policy.largest)
            self._profile_again()
        elif self.plan is not None and self.plan.count("ssd") and self._drift.drifted():
            self._make(self._measured)

    # Profiling

    def _profile_again(self) -> None:
        self._release()
        if self._spans is not None:
            self._spans.remove()
        self.plan = None
        self._steps = 0
        self._uncompressed = None
        self._compress(())
        self._ran_impure = False
        self._records: list[StepRecord] = []
        self._found.clear()
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
            if last[self._kinds[name]] != name
            and next(block.buffers(), None) is None
            and name not in self._impure
        }

    def _profiled(self, spans: BlockSpans) -> None:
        if self._ran_impure:  # all ranks have run it again so far: now none does
            self._profile_again()
            return
        self._steps += 1
        self._recorder.request("plan", self._steps >= WARM_UP)
        record = self._recorder.take()
        if self._steps > WARM_UP:
            self._records.append(record)
        if len(self._records) < RECORDED:
            return
        if (
            self._tiers
            and not (self._drift.rates.write or self._link)
            and self._steps < WARM_UP + RECORDED + PATIENCE
        ):
            self._records.pop(0)
            return
        device = self._engine.device
        event = device.record(device.current_stream())
        if event is not None:
            device.block(event)
        found = self._read(self._records)
        if not found:
            self._records.clear()  # no backward came
            self._found.clear()
            return
        if self._compact is not None and self._uncompressed is None:
            self._measure_compressed(found)
            return
        if self._uncompressed is not None:
            found = with_compressed(self._uncompressed, found)
        self._measured = found
        self._compress(())  # until there is a plan that does
        self._make(found)
        spans.remove()
        self._spans, self._records = None, []
        self._recorder.request("plan", False)

    def _measure_compressed(self, found: list[MeasuredBlock]) -> None:
        """Profile the same number of steps with compression, after one to warm up."""
        self._uncompressed, self._steps = found, WARM_UP - 1
        self._records.clear()
        self._found.clear()
        self._recorder.request("plan", False)
        self._compress(name for name in self._blocks if name not in self._recomputed)

    def _compress(self, names: Iterable[str]) -> None:
        """Only in these blocks."""
        if self._compact is not None:
            self._compact.compress_in(self._blocks[name] for name in names)

    def _read(self, records: Sequence[StepRecord]) -> list[MeasuredBlock]:
        steps: list[list[MeasuredBlock]] = []
        for record in records:
            tapes = [tape for tape in record.tapes() if tape.used and tape.serial in self._found]
            if tapes:
                tape = max(tapes, key=lambda one: sum(region.nbytes for region in one.regions))
                spans, small = self._found[tape.serial]
                steps.append(pieces(tape, spans, self._recomputed, small))
                self._order = Profile(record).order
        if not steps:
            return []
        steps.sort(key=_saved)
        names, least = [piece.name for piece in steps[-1]], ALIKE * _saved(steps[-1])
        alike = [step for step in steps if [p.name for p in step] == names and _saved(step) >= least]
        return measured_blocks(alike, self._kinds)

    # Planning

    def _machine(self) -> Machine:
        if not self._tiers or not (self._drift.rates.write or self._link):
            return Machine()
        return measured_machine(self._engine, self._drift.rates, self._link)

    def _make(self, measured: Sequence[MeasuredBlock]) -> None:
        """Search, and follow what is found."""
        machine = self._machine()
        if self._tiers and not machine.tiers:
            logger.warning(
                "ssdtrain.plan: nothing was written to the tiers in %d steps, because backward came before every write: "
                "nothing is offloaded",
                self._steps,
            )
        pure = [piece.pure and piece.name not in self._impure for piece in measured]
        blocks = [
            piece.block if may else replace(piece.block, recompute=0.0)
            for piece, may in zip(measured, pure, strict=True)
        ]
        # A block that runs several times in a forward has one action for all of them.
        times = Counter(piece.name for piece in measured)
        fixed = frozenset(n for n, piece in enumerate(measured) if not piece.name or times[piece.name] > 1)
        if not any(pure):
            self._nothing_to_recompute()
        compress = COMPRESS if any(block.compressed is not None for block in blocks) else None
        if self._compact is not None and compress is None:
            logger.warning("ssdtrain.plan: compressed inputs of linear layers save nothing in any block")
        actions = actions_for(machine, recompute=any(pure), compress=compress)
        impure = frozenset(number for number, may in enumerate(pure) if not may)
        self.problem = Problem([blocks], self._order, machine, actions, fixed, impure)
        kept = simulate([blocks], [[KEEP] * len(blocks)], self._order, machine)
        slowdown = self._config.slowdown
        seconds = None if slowdown is None else kept.seconds * (1 + slowdown)
        limits = Limits(self._config.device_limit, seconds=seconds)
        try:
            objective = Objective(0, 1) if self._config.memory else Objective()
            found = search(self.problem, limits, objective)
        except NoPlan as error:
            if self.plan is None:
                error.args = (f"ssdtrain.plan: {error}",)
                raise
            # Only the bandwidths have changed: what is followed is no worse than before.
            if not self._warned:
                self._warned = True
                logger.warning(STAYS, error)
            self._drift.planned(same=True)
            return
        same = self.plan is not None and self.plan.actions == found[0].actions
        self._drift.planned(same=same)
        self.plan = found[0]
        if not same:
            self._follow(measured, self.plan.actions)
        self.metric.update(blocks, [actions[name] for name in self.plan.actions], self.plan.timeline, kept)
        better = alternatives(self.problem, limits, objective) if self._reports and not same else ()
        self._decided = plan_table(blocks, found, kept, self._config.device_limit, better)
        if self._reports:
            report(self._decided)

    def _nothing_to_recompute(self) -> None:
        """No block may run again: say why."""
        name, why = next(iter(self._impure.items()), ("the model", "none of its blocks ran"))
        if self._config.recompute == "on":
            text = f"can recompute no block: {name}: {why}"
            raise ConfigError([Wrong("ssdtrain.plan.recompute", "on", text, '"auto" or "off"')])
        if not self._warned_impure:
            self._warned_impure = True
            logger.warning("ssdtrain.plan: no block can be recomputed: %s: %s", name, why)

    def _follow(self, measured: Sequence[MeasuredBlock], chosen: Sequence[str]) -> None:
        self._release()
        pairs = list(zip(measured, chosen, strict=True))
        actions = {piece.name: action for piece, action in pairs if piece.name}
        again = {name: self._blocks[name] for name, action in actions.items() if action == "recompute"}
        self._undo.append(recompute_modules(again, self._checkpoint))
        offloaded = [name for name, action in actions.items() if action == "ssd"]
        self._compress(name for name, action in actions.items() if action == "compress")
        expected = sum(piece.saved_by(action) for piece, action in pairs)
        self._policy.follow(dict.fromkeys(offloaded, "offload"), expected=max(expected, self._larger))

    def _release(self) -> None:
        while self._undo:
            self._undo.pop()()

    # Everything else

    def metrics(self) -> Sequence[tuple[str, MetricSet]]:
        return [("plan", self.metric)]

    def decisions(self) -> str:
        return self._decided

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


def _saved(pieces: Sequence[MeasuredBlock]) -> int:
    return sum(piece.block.saved for piece in pieces)


def _ranks() -> int:
    distributed = torch.distributed
    return distributed.get_world_size() if distributed.is_available() and distributed.is_initialized() else 1
