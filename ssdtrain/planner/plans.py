"""Types of the search: a problem, limits, an objective, a plan."""

from __future__ import annotations

import copyreg
import functools
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ssdtrain import ranks
from ssdtrain.config.units import format_size
from ssdtrain.planner.model.timeline import simulate
from ssdtrain.planner.model.types import (
    COMPRESS,
    ENCODE,
    KEPT,
    RECOMPUTE,
    Block,
    Choice,
    Machine,
    Pass,
    StepTimeline,
)

if TYPE_CHECKING:
    from ssdtrain.planner.joint import StateCosts
    from ssdtrain.state.plan import StateChoice

__all__ = [
    "EQUAL",
    "HIDDEN",
    "SHARES",
    "Limits",
    "NoPlan",
    "Objective",
    "Plan",
    "SearchProblem",
    "actions_for",
    "in_part",
    "kept_step",
    "play",
    "shares_of",
    "warn_outgrown",
]

logger = logging.getLogger("ssdtrain")

HIDDEN = 0.01
"""Part of the time of a step that keeps everything which transfers may cost where the config says nothing else."""

EQUAL = 0.001
"""Part of it that counts as nothing where the shortest step is searched for: fewer bytes written are worth more."""

SHARES = 8
"""Number of equal shares in which a large tensor may be offloaded."""


def in_part(action: str, shares: Sequence[int]) -> str:
    """The name of an action that offloads some of a block's parts.

    Args:
        action: what offloads all of it.
        shares: how many eighths of each part leave.
    """
    return f"{action}:{''.join(map(str, shares))}"


def shares_of(action: str) -> tuple[float, ...]:
    """The share of each part of a block that leaves under an action of `in_part`; of another one empty."""
    return tuple(int(share) / SHARES for share in action.partition(":")[2])


@functools.lru_cache(4096)
def _in_part(choice: Choice, action: str) -> Choice:
    """The choice of an action of `in_part`, from that of the action which offloads all."""
    return replace(choice, shares=shares_of(action))


def warn_outgrown(error: NoPlan) -> None:
    """Warn that no plan is within the limits any more, with the text of `error`."""
    logger.warning(
        "ssdtrain.plan: forwards have become larger, and the plan nearest to the limits is followed, because now %s",
        error,
    )


@dataclass(frozen=True)
class SearchProblem:
    """Input of the search.

    Attributes:
        chunks: the blocks of each model chunk, in forward order.
        order: passes of one rank in a step.
        machine: bandwidths, and capacities of the tiers.
        actions: by name, what may be done with a block. Must have "keep". Lossy ones are here only where the config allows them.
        fixed: numbers (over all chunks) of blocks that are always kept.
        impure: the same, of blocks that are never recomputed. Their `recompute` is 0.
        always: the same, of blocks that are recomputed in any case.
        steps: that are simulated; the last one is judged, which begins while transfers of those before are under way.
        parts: by name, offload of ever larger shares of a block to the first tier: for blocks that are so large that all or
            nothing is too coarse.
        by_parts: which of `Block.parts` leave is a part of the question: a plan may have actions of `in_part`.
        beside: bytes that are on the device all the time, and in no block.
        after: seconds of a step after its passes: the optimizer.
        state: model state that comes and goes, which a plan decides about too (`ssdtrain.planner.joint`); None: there is none.
        chosen: what of it stays, as `beside`, `after`, the machine and the loads of blocks have it; None: it is not decided.
    """

    chunks: Sequence[Sequence[Block]]
    order: Sequence[Pass]
    machine: Machine
    actions: Mapping[str, Choice]
    fixed: frozenset[int] = frozenset()
    impure: frozenset[int] = frozenset()
    always: frozenset[int] = frozenset()
    steps: int = 1
    parts: Mapping[str, Choice] = field(default_factory=dict)
    by_parts: bool = False
    beside: int = 0
    after: float = 0.0
    state: StateCosts | None = None
    chosen: StateChoice | None = None

    def under(self, choice: StateChoice | None) -> SearchProblem:
        """Return the problem of blocks that is left under a choice of what of the model state stays."""
        if self.state is None or self.chosen is not None or choice is None:
            return self
        return self.state.applied(self, choice)

    @property
    def undecided(self) -> bool:
        """Whether what of the model state stays is a part of the question."""
        return self.state is not None and self.chosen is None

    @property
    def blocks(self) -> list[Block]:
        """Over all chunks."""
        return [block for chunk in self.chunks for block in chunk]

    def choice(self, action: str) -> Choice:
        """What the action of this name does."""
        if action in self.actions:
            return self.actions[action]
        if action in self.parts:
            return self.parts[action]
        return _in_part(self.actions[action.partition(":")[0]], action)

    def choices(self, actions: Sequence[str]) -> list[list[Choice]]:
        """[chunk][block], of the names of actions over all chunks."""
        names = iter(actions)
        return [[self.choice(next(names)) for _ in chunk] for chunk in self.chunks]

    @property
    def only_moves(self) -> bool:
        """Each block is kept or offloaded: there is no other action."""
        return not any(one.recompute or one.compress or one.encode for one in self.actions.values())

    @property
    def decided(self) -> list[int]:
        """Numbers of the blocks that are decided about. What is too small to leave may still be recomputed."""
        settled = self.fixed | self.always
        again = "recompute" in self.actions
        return [
            number
            for number, block in enumerate(self.blocks)
            if number not in settled
            and (block.saved or (again and block.small and number not in self.impure))
        ]


@dataclass(frozen=True)
class Limits:
    """Constraints of a plan; None: no limit.

    Attributes:
        device: bytes on the device of what the blocks describe, at most.
        written: bytes written in a step to the tier "ssd", at most (its endurance).
        seconds: of a step, at most.
        rate: bytes per second that the first tier is written on average over the step, at most: else each step would begin with a
            longer queue of writes, or a drive would wear faster than it may.
    """

    device: int | None = None
    written: float | None = None
    seconds: float | None = None
    rate: float | None = None

    def kept_by(self, plan: Plan) -> bool:
        """Whether the plan keeps to those of memory, bytes and time."""
        pairs = (plan.peak, self.device), (plan.written, self.written), (plan.seconds, self.seconds)
        return all(limit is None or value <= limit * (1 + 1e-9) for value, limit in pairs)


@dataclass(frozen=True)
class Objective:
    """What is made as small as possible: `time` x seconds + `memory` x peak bytes + `wear` x bytes written.

    By default the time of a step. `Objective(0, 1)` is the least memory (give `Limits.seconds`), `Objective(dollars per second,
    0, dollars per byte)` the cheapest step. Among equals fewer bytes written win where the device has a limit, else the smaller
    peak. A step that takes no more than `hidden` seconds is as good as one that takes these.
    """

    time: float = 1.0
    memory: float = 0.0
    wear: float = 0.0
    hidden: float = 0.0

    def value(self, plan: Plan) -> float:
        """Return what is made as small as possible."""
        return self.time * max(plan.seconds, self.hidden) + self.memory * plan.peak + self.wear * plan.written


@dataclass(frozen=True)
class Plan:
    """An action for each block, and the simulated step.

    Attributes:
        actions: names, one per block over all chunks.
        timeline: the simulated step.
        state: what of the model state stays; None: the plan does not say.
    """

    actions: tuple[str, ...]
    timeline: StepTimeline = field(compare=False)
    state: StateChoice | None = None

    @property
    def seconds(self) -> float:
        return self.timeline.seconds

    @property
    def peak(self) -> int:
        """Bytes."""
        return self.timeline.peak_bytes

    @property
    def written(self) -> int:
        """Bytes to SSD in a step; to host memory where there are no drives."""
        written = self.timeline.written
        return written.get("ssd", written.get("host", 0))

    def count(self, action: str) -> int:
        return self.actions.count(action)

    def summary(self) -> str:
        """Such as "5 keep, 7 ssd, 2 ssd in part"."""
        pairs = (action.partition(":") for action in self.actions)
        names = Counter(f"{name} in part" if shares else name for name, _, shares in pairs)
        return ", ".join(f"{count} {name}" for name, count in names.items())


class NoPlan(ValueError):
    """No plan keeps to the limits.

    Attributes:
        smallest: the plan with the smallest peak that was found.
        nearest: the fastest one within the limit of the device; where none is, `smallest`.
        limits: that were searched under.
        too_slow: memory is enough, and time is not.
    """

    def __init__(
        self,
        smallest: Plan,
        limits: Limits,
        blocks: Sequence[Block],
        buffers: int = 0,
        nearest: Plan | None = None,
    ) -> None:
        self.smallest, self.limits = smallest, limits
        self.nearest = smallest if nearest is None else nearest
        self.too_slow = (
            limits.seconds is not None
            and self.nearest.seconds > limits.seconds
            and (limits.device is None or smallest.peak <= limits.device)
        )
        state = 0 if smallest.state is None else smallest.state.limit
        parts = {**_parts(smallest, blocks), "buffers of loads": buffers, "model state": state}
        limited = [
            f"{format_size(limits.device)} on the device" if limits.device is not None else "",
            f"{limits.seconds:.3g} s a step" if limits.seconds is not None else "",
            f"{format_size(limits.written)} written a step" if limits.written is not None else "",
        ]
        listed = ", ".join(f"{name} {format_size(size)}" for name, size in parts.items() if size)
        remedy = "use a smaller microbatch or sequence, more tensor or pipeline parallelism, or a faster or larger tier"
        if self.too_slow:
            remedy = (
                f"the fastest plan within that memory takes {self.nearest.seconds:.3g} s; allow more time (--max-slowdown, "
                "plan.max_slowdown), or use a larger microbatch or a faster tier"
            )
        super().__init__(
            f"no plan keeps to {' and '.join(one for one in limited if one)}: the smallest peak of activations"
            f"{'' if smallest.state is None else ' and model state'} found is "
            f"{format_size(smallest.peak)} ({smallest.summary()}), of which {listed}; {remedy}"
        )

    def named(self) -> NoPlan:
        """Itself, as the training loop gets it: the text begins with the key of the config, and in a job with this rank."""
        self.args = (f"ssdtrain.plan{ranks.on_this_rank()}: {self}",)
        return self

    def __reduce__(self) -> Any:
        """Pickle it for other ranks, with the text as it is."""
        return copyreg.__newobj__, (type(self), *self.args), self.__dict__  # type: ignore[attr-defined]

    def nearer_than(self, other: NoPlan) -> bool:
        """Less is missing on the device."""
        mine, others = ((one.smallest.peak - (one.limits.device or 0)) for one in (self, other))
        return mine < others


def _parts(plan: Plan, blocks: Sequence[Block]) -> dict[str, int]:
    kept = sum(_staying(b, action) for b, action in zip(blocks, plan.actions, strict=True))
    inputs = sum(b.inputs for b, action in zip(blocks, plan.actions, strict=True) if action == "recompute")
    fixed = sum(b.fixed for b in blocks)
    known = {"kept of each microbatch": kept, "inputs of recomputed blocks": inputs, "always there": fixed}
    largest = max(blocks, key=lambda b: b.saved + b.backward_transient)
    known["the largest block while its backward runs"] = largest.saved + largest.backward_transient
    return known


def _staying(block: Block, action: str) -> int:
    """Bytes of what it saves that stay where they are."""
    if shares := shares_of(action):
        leaving = sum(round(share * part.saved) for share, part in zip(shares, block.parts, strict=False))
        return block.saved - leaving
    return block.saved if action == "keep" else 0


def actions_for(
    machine: Machine, *, recompute: bool = True, compress: bool = False, encode: bool = False
) -> dict[str, Choice]:
    """The actions that a machine has: "keep", "recompute", each of its tiers, "compress" and "encode" where they are allowed."""
    found = {"keep": KEPT}
    if recompute:
        found["recompute"] = RECOMPUTE
    found |= {tier.name: Choice(tier.name) for tier in machine.tiers}
    if compress:
        found["compress"] = COMPRESS
    if encode:
        found["encode"] = ENCODE
    return found


def play(problem: SearchProblem, actions: Sequence[str], *, memory: bool = False) -> Plan:
    """The plan with these actions, and the step under it.

    Args:
        memory: see `simulate`.
    """
    of = problem
    choices = of.choices(actions)
    step = simulate(of.chunks, choices, of.order, of.machine, steps=of.steps, memory=memory)
    step.seconds += of.after
    step.peak_bytes += of.beside
    step.memory = [(when, nbytes + of.beside) for when, nbytes in step.memory]
    return Plan(tuple(actions), step, of.chosen)


def kept_step(problem: SearchProblem) -> StepTimeline:
    """The step that keeps everything saved, and as little of the model state as possible."""
    if problem.state is not None and problem.chosen is None:
        problem = problem.under(problem.state.choice(0, 2))
    return play(problem, ["keep"] * len(problem.blocks)).timeline
