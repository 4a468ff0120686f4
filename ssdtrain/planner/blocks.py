"""Plans by blocks of a model, which may be recomputed: profiles some steps, and carries out what was found.

Note: [Memory while steps are profiled]
What cannot fit must not be tried. With tiers everything is offloaded meanwhile. Without, and from the first forward on that is
kept because its backward follows at once (`Forward.keep`: the last stage of a pipeline), all blocks are recomputed but the last
one of each kind, which stands for the others; blocks that have buffers are kept, since a second run might change them twice.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ssdtrain import ranks
from ssdtrain.compact.feature import CompactLinear
from ssdtrain.config import ConfigError, ConfigIssue, PlanConfig
from ssdtrain.config.codecs import OFF
from ssdtrain.features import Forward
from ssdtrain.offload.checkpoint import Checkpoint
from ssdtrain.offload.engine import OffloadEngine
from ssdtrain.offload.feature import ActivationOffload
from ssdtrain.offload.tensors.tape import Tape
from ssdtrain.planner.agreement import Agreement
from ssdtrain.planner.execute import BlockActions, BlockPolicy, recomputed_meanwhile
from ssdtrain.planner.joint import StateProfile
from ssdtrain.planner.measured_blocks import (
    MeasuredBlock,
    kind_of,
    problem_of,
    read_steps,
    with_compressed,
    with_encoded,
)
from ssdtrain.planner.model.types import DEVICE, Block, Pass
from ssdtrain.planner.plan_blocks import PlanBlocks
from ssdtrain.planner.plans import NoPlan, Plan, SearchProblem
from ssdtrain.planner.recompute.purity import Collectives, own_generators
from ssdtrain.planner.recompute.trials import Recomputations
from ssdtrain.planner.spans import BlockSpan, BlockSpans
from ssdtrain.planner.subject import UNMEASURED_STEPS, WARM_UP, PlanSubject
from ssdtrain.profile.passes import StepRecord

if TYPE_CHECKING:
    from ssdtrain.planner.controller import PlanController

__all__ = ["RECORDED", "WARM_UP", "Blocks", "bound_stores"]

logger = logging.getLogger("ssdtrain")

RECORDED = 3
"""Steps that a plan is made from."""

EXCLUDED = (
    "ssdtrain.plan: without recomputing the blocks that computed other values when they ran again, the limits are not kept to, "
    "and the nearest plan is followed: %s"
)


class Blocks(PlanSubject):
    """The blocks of one model, which a plan keeps, offloads, recomputes or compresses.

    Args:
        config: the section plan.
        offload: whose engine has `policy`, and whose tiers are used if `tiers`.
        policy: of that engine; follows the plan.
        named: the blocks; each may be recomputed.
        compact: compresses inputs of linear layers in the blocks that the plan says; None: nothing lossy is chosen.
        tiers: there is an offload section.
        state: model state that comes and goes, which plans decide about as well; None: there is none.
        codec_seconds: of `plan.encode`, for encoding and decoding a byte.

    Attributes:
        agreement: of the ranks that recompute the same blocks.
        impure: names of the blocks that must not run again, for good, with why.
    """

    TITLE, METRICS = "plan auto", "plan"

    def __init__(
        self,
        config: PlanConfig,
        offload: ActivationOffload,
        policy: BlockPolicy,
        named: PlanBlocks,
        checkpoint: Checkpoint,
        *,
        compact: CompactLinear | None = None,
        tiers: bool,
        state: StateProfile | None = None,
        codec_seconds: tuple[float, float] = (0.0, 0.0),
    ) -> None:
        super().__init__()
        self._state, self._codec_seconds, self.remedy = state, codec_seconds, named.remedy
        engine, blocks = offload.engine, named.blocks
        self.agreement = agreement = Agreement(named.group, tuple(blocks), engine.eligible.device)
        self._config, self._offload, self._policy, self._engine = config, offload, policy, engine
        self._blocks, self._tiers, self._compact = blocks, tiers, compact
        self._recomputations = Recomputations(agreed=agreement.several)
        self._actions = BlockActions(
            blocks, policy, checkpoint, compact, lambda: agreement.decided, self._recomputations
        )
        self._recorder, self._link = engine.recorder, engine.device.link_bandwidth()
        self._kinds = {name: kind_of(block) for name, block in blocks.items()}
        self._order: list[Pass] = []
        self._uncompressed: list[MeasuredBlock] | None = None  # while blocks are measured with compression
        self._measured: list[MeasuredBlock] = []
        self._records: list[StepRecord] = []
        self._spans: BlockSpans | None = None  # while steps are profiled
        # By serial number of the tape: spans, small bytes outside.
        self._found: dict[int, tuple[list[BlockSpan], int]] = {}
        off = dict.fromkeys(blocks, "plan.recompute is off")
        self.impure = off if config.recompute == "off" else own_generators(blocks)
        self._ran_impure = False  # a block that must not run again was to be recomputed
        self._excludes = False  # the plan is made again without blocks that differed
        self._warned_impure = config.recompute == "off"
        self._steps = 0  # that were profiled
        self._recomputed = frozenset[str]()  # while steps are profiled
        self._largest = 0  # bytes of a forward larger than planned for
        # One has been kept, so far: there the plan has nothing to choose but recomputation.
        self._keeps = False

    def begin(self, controller: PlanController) -> None:
        super().begin(controller)
        self._profile_again()

    # Events

    def on_forward(self, forward: Forward) -> AbstractContextManager[Any] | None:
        if forward.keep and not self._keeps:
            self._keeps = True
            if self._tiers:
                self._profile_again()
        if self._spans is None or self._spans.tape is not None:
            return None  # it is inside of another one, or beside it on another thread: it is not measured
        return self._watching(self._spans, self._offload.tape(forward.chunk, forward.microbatch))

    @contextmanager
    def _watching(self, spans: BlockSpans, tape: Tape | None) -> Iterator[None]:
        meter = self._engine.meter
        before = meter.unoffloaded_bytes
        # Not in steps that are recorded: a mode takes time.
        watched = self._steps < WARM_UP and self.agreement.leaves_out
        with spans.forward(tape) as found, Collectives(self._communicates) if watched else nullcontext():
            yield
        for span in found:
            if span.why:
                self.impure.setdefault(span.name, span.why)
                self._ran_impure |= span.name in self._recomputed
        if self._recomputed:
            run_again = (span.name for span in found if span.plain and span.name in self._recomputed)
            self.agreement.check_same(run_again)
        if tape is not None and not self._engine.forked:
            small, serial = meter.unoffloaded_bytes - before - tape.nbytes, self._recorder.serial(tape)
            small -= sum(span.small for span in found)
            if serial is not None:
                self._found[serial] = found, max(0, small)

    def _communicates(self, group: Any) -> None:
        if self._spans is not None and not self.agreement.covers(group):
            self._spans.communicates()
            self._recomputations.communicated = True

    def on_unended_step(self) -> str:
        if self.controller.steps:
            self._recorder.stop("plan")
        else:
            self._recorder.request("plan", False)
            self._records.clear()
            self._found.clear()
        return "ssdtrain.plan: nothing is planned"

    def failed(self) -> bool:
        if self._spans is not None:
            if not self.agreement.several:
                self._exclude()
            self._profile_again()
        return True

    def detach(self) -> None:
        self._actions.release()
        self._remove_spans()

    def _remove_spans(self) -> None:
        if self._spans is not None:
            self._spans.remove()
            self._spans = None

    # A step

    def step_ended(self, unoffloaded: int) -> bool:
        self._recomputations.step_ended()
        # Ranks that recompute the same blocks go on with them: there a difference stays an error.
        excluded = not self.agreement.several and self._exclude()
        self._excludes = excluded and self._spans is None
        if self._spans is None:
            return False
        if self._link is None:
            bound_stores(self._engine, self._policy.largest)
        return self._profiled()

    def _exclude(self) -> bool:
        """Have blocks that differed not run again. Returns whether one of them does so far."""
        new = {name: why for name, why in self._recomputations.differing.items() if name not in self.impure}
        self.impure.update(new)
        self._ran_impure |= not self._recomputed.isdisjoint(new)
        return not self._actions.recomputed.isdisjoint(new)

    def ready(self, fresh: bool) -> bool:
        return self._spans is None or fresh  # without profiling again, where only bandwidths are other ones

    def due(self) -> str:
        if self._excludes:
            self.controller.drop_plan()
            return "blocks computed other values when they ran again"
        if self._policy.shape_changed():
            logger.info("the size of what forwards save changed: profiling again")
            self._largest = max(self._largest, self._policy.largest)
            self._profile_again()
            return self.controller.reason
        return ""

    def moves(self) -> bool:
        plan, problem = self.controller.plan, self.controller.problem
        return plan is not None and problem is not None and _moves(problem, plan)

    # Profiling

    def _profile_again(self) -> None:
        self._remove_spans()
        self.controller.drop_plan()
        self._steps, self._uncompressed = 0, None
        self._ran_impure = False
        self._records = []
        self._found.clear()
        self._recorder.take()
        self._recorder.request("plan", False)
        agreed = self.agreement.recomputed
        meanwhile = frozenset[str]() if self._leaves else recomputed_meanwhile(self._blocks, self.impure)
        self._recomputed = meanwhile if agreed is None else agreed
        self.controller.arena_used(self._leaves)
        self._actions.profile(self._recomputed, offload=self._tiers)
        self._offload.name_modules(self._policy.needs_modules)
        if self._state is not None:
            self._state.begin()
        self._spans = BlockSpans(self._blocks, self._engine)

    def _profiled(self) -> bool:
        """A step was profiled. Returns whether it was the last one before a plan."""
        ran_impure = self._ran_impure and self.agreement.recomputed is None
        found = [] if ran_impure else self._measure()
        again, ready = self.agreement.exchange(self.impure, ran_impure, found)
        if again:  # all ranks have run it again so far: now none does
            self._profile_again()
        elif ready and self._compact is not None and self._uncompressed is None:
            self._measure_compressed(found)
        elif ready:
            if self._uncompressed is not None:
                found = with_compressed(self._uncompressed, found)
            self._measured = found if self._config.encode == OFF else self._with_encoded(found)
            self._actions.compress(())  # until there is a plan that does
            return True
        return False

    def _measure(self) -> list[MeasuredBlock]:
        """Read the steps that were profiled. Returns their blocks, or nothing where more steps are needed."""
        self._steps += 1
        if self._steps <= WARM_UP and self._uncompressed is None and not self.agreement.several:
            # In the last of these, when it is known which blocks must not run again.
            tried = self._blocks.keys() - self._recomputed - self.impure.keys()
            self._actions.profile(
                self._recomputed, offload=self._tiers, tried=tried if self._steps == WARM_UP - 1 else ()
            )
        record = self._recorder.take()
        self._recorder.request("plan", self._steps >= WARM_UP)
        if self._steps > WARM_UP:
            self._records.append(record)
        enough = RECORDED
        if self._state is not None:
            enough *= self._state.kinds
            self._state.step_ended(self._steps, record if self._steps > WARM_UP else None)
        del self._records[:-enough]
        recorded = {serial for one in self._records for _, serial, _ in one.order}
        self._found = {serial: self._found[serial] for serial in self._found.keys() & recorded}
        if len(self._records) < enough:
            return []
        unknown = self._movable and not self.controller.derating.known
        if unknown and self._steps < WARM_UP + enough + UNMEASURED_STEPS:
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

    def _with_encoded(self, pieces: list[MeasuredBlock]) -> list[MeasuredBlock]:
        """What was recomputed while it was measured has the ratio of one of its kind that was not."""
        ratios = {
            self._kinds[piece.name]: self._policy.encoded_ratio(piece.name)
            for piece in pieces
            if piece.name and not piece.recomputed
        }

        def encoded(piece: MeasuredBlock) -> Block:
            ratio = ratios.get(self._kinds[piece.name], 1.0) if piece.name else 1.0
            return with_encoded(piece.block, ratio, *self._codec_seconds)

        return [replace(piece, block=encoded(piece)) for piece in pieces]

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
        return self._leaves and self._engine.largest_region >= self._engine.options.min_bytes

    def problem(self) -> SearchProblem:
        """What is searched on this rank, when the ranks that recompute the same blocks have agreed on them."""
        controller = self.controller
        tiers = self._leaves and controller.derating.known
        machine = controller.machine([[piece.block for piece in self._measured]], tiers=tiers)
        if self._movable and not machine.tiers:
            logger.warning(
                "ssdtrain.plan: nothing was written to the tiers in %d steps, because backward came before every write: nothing "
                "is offloaded",
                self._steps,
            )
        state = None if self._state is None else self._state.costs()
        of = functools.partial(problem_of, self._measured, self._order, machine, self.impure, state=state)
        problem = of()
        if self._state is not None:
            meanwhile = [self._meanwhile(piece, problem) for piece in self._measured]
            state = self._state.slowed(problem, meanwhile)
            problem = of(state=state)
        if self.agreement.recomputed is None:
            self.agreement.decide(lambda: self._best_recomputed(problem))
            recomputed = self.agreement.recomputed
            if recomputed is None and not controller.started:
                self._check_recompute(problem)
            may_recompute = recomputed or "recompute" in problem.actions
            self.note = "" if may_recompute else self._nothing_to_recompute()
        if self.agreement.recomputed is not None:
            problem = of(self.agreement.recomputed, state=state)
        if self._compact is not None and "compress" not in problem.actions:
            logger.warning("ssdtrain.plan: compressed inputs of linear layers save nothing in any block")
        return problem

    def _meanwhile(self, piece: MeasuredBlock, problem: SearchProblem) -> str:
        """The action of a block in the steps that were profiled."""
        tiers = problem.machine.tiers
        action = "recompute" if piece.recomputed else tiers[0].name if self._leaves and tiers else "keep"
        return action if action in problem.actions else "keep"

    def _best_recomputed(self, problem: SearchProblem) -> list[str]:
        """Names of the blocks that the best plan recomputes.

        Raises:
            NoPlan, ConfigError: see `PlanController`.
        """
        self._check_recompute(problem)
        try:
            plan = self.controller.best(problem, self.larger())
        except NoPlan as error:
            raise error.named() from None
        chosen = zip(problem.blocks, plan.actions, strict=True)
        return [block.name for block, action in chosen if action == "recompute"]

    def _check_recompute(self, problem: SearchProblem) -> None:
        """Raises ConfigError: the config says that blocks are recomputed, and none can be."""
        if self._config.recompute != "on" or "recompute" in problem.actions:
            return
        text = f"can recompute no block{ranks.on_this_rank()}: {': '.join(self._why_none())}"
        raise ConfigError([ConfigIssue("ssdtrain.plan.recompute", "on", text, '"auto" or "off"')])

    def larger(self) -> float:
        saved = sum(piece.block.saved + piece.block.small for piece in self._measured)
        return max(1.0, self._largest / saved) if saved else 1.0

    def follow(self, before: Plan | None, problem: SearchProblem, plan: Plan) -> bool:
        if self._spans is not None:
            self._remove_spans()
            self._records = []
            self._recorder.request("plan", False)
        if before is not None and before == plan:
            return True
        # To follow a choice finishes all steps and loads all that stays, also where it is the one of before.
        if self._state is not None and plan.state is not None and (not before or before.state != plan.state):
            self._state.follow(plan.state)
        self._actions.follow(self._measured, plan.actions, self._largest, self.agreement.recomputed)
        encodes = any(problem.choice(name).encode for name in plan.actions)
        self._offload.name_modules(encodes or _moves(problem, plan))
        return False

    @property
    def beside(self) -> int:
        return 0 if self._state is None else self._state.limit

    @property
    def agreed(self) -> bool:
        return self.agreement.recomputed is not None

    def warn_of_limits(self, error: NoPlan, *, started: bool) -> bool:
        if self._excludes:
            logger.warning(EXCLUDED, error)
        elif self.agreed:
            self.agreement.warn(error, larger=started)
        return self._excludes or self.agreed

    def _why_none(self) -> tuple[str, str]:
        """The name of a block that must not run again, and why, of all these."""
        return next(iter(self.impure.items()), ("the model", "none of its blocks ran"))

    def _nothing_to_recompute(self) -> str:
        """Say once why no block may run again. Returns the line of the table."""
        name, why = self._why_none()
        if not self._warned_impure:
            self._warned_impure = True
            logger.warning("ssdtrain.plan: no block can be recomputed: %s: %s", name, why)
        return f"\n  no block is recomputed: {name}: {why}"

    def description(self) -> str:
        limit = self._config.device_limit
        return f"plan: auto, {len(self._blocks)} blocks" + ("" if limit is None else f", {limit} bytes")


def _moves(problem: SearchProblem, plan: Plan) -> bool:
    """Whether something leaves the device under `plan`."""
    return any(problem.choice(name).tier != DEVICE for name in plan.actions)


def bound_stores(engine: OffloadEngine, tape_bytes: int) -> None:
    """Let tensors leave in order on a CPU, with at most two of the largest tensors or a sixteenth of a forward in flight: they
    are a part of the peak. Called at the end of each step that is profiled: the bound follows the size of forwards, up and down.

    Args:
        tape_bytes: saved by the largest of the latest forwards.
    """
    if tape_bytes:
        engine.set_plan_bound(max(2 * engine.largest_region, tape_bytes // 16))
