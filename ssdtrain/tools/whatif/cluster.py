"""Plans of a training job on machines that are not at hand: the search for a plan of each pipeline stage."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from operator import attrgetter, itemgetter

from ssdtrain.config.errors import InvalidValue
from ssdtrain.planner.model.types import Choice, StepTimeline, one_forward_one_backward
from ssdtrain.planner.plans import Limits, NoPlan, Objective, Plan, SearchProblem, actions_for, play
from ssdtrain.planner.search import search
from ssdtrain.tools.whatif.cluster_job import HEAD, PIECES, SHARES_OF_BLOCK, WHOLE, ClusterJob
from ssdtrain.tools.whatif.cluster_plan import ClusterPlan, Stage
from ssdtrain.tools.whatif.cluster_state import StatePlacement, placements
from ssdtrain.tools.whatif.units import in_units

__all__ = ["BRIEF", "FailedPlacements", "best_plan", "plan_job", "problem_of", "replanned", "uniform_plan"]

BRIEF = 0.07
"""Part of a search's simulations, to compare placements of model state, sizes of microbatches, and jobs with one thing better."""

IN_UNITS, LAYER_BY_LAYER = 0.5, 0.25
"""Parts of a search's simulations for equal layers taken together, and for what is left to decide layer by layer."""

NEARLY = 0.99
"""Ratio to the best value from which on a larger microbatch is preferred."""

NEAR = 1.1
"""Ratio of the smallest peak to the device's limit up to which layers taken together may be why there is no plan."""


FailedPlacements = dict[tuple[bool, int, int], tuple[int, NoPlan]]
"""The smallest microbatch for which a stage has no plan with so many blocks' state that stays and so many buffers, and why."""


def plan_job(
    job: ClusterJob,
    microbatch: int,
    limits: Limits | None = None,
    objective: Objective | None = None,
    slowdown: float | None = None,
    effort: float = 1.0,
    failed: FailedPlacements | None = None,
) -> ClusterPlan:
    """The best plan at one microbatch size.

    Args:
        limits, objective: beside the device's memory; `written`, `seconds` and `hidden` are those of a microbatch.
        slowdown: of a microbatch over keeping everything, minus 1, at most; in place of `limits.seconds`. It counts from the
            placement of model state where that takes the least time, of those that leave room for activations.
        effort: see `search`.
        failed: of questions with as much time for a sequence; larger microbatches are not tried there, and it is added to.

    Raises:
        NoPlan: activations do not fit, whatever is done.
        InvalidValue: model state alone does not fit, or the batch is no multiple of the microbatch.
    """
    count = job.microbatches(microbatch)
    if not count:
        raise InvalidValue(
            f"has a batch of {job.batch} sequences for microbatches of {microbatch} on {job.layout.dp} data-parallel ranks",
            "a multiple",
        )
    given, objective = limits or Limits(), objective or Objective()
    question = given, objective, slowdown, effort, {} if failed is None else failed
    stages = [_plan_stage(job, microbatch, last, *question) for last in job.ends]
    return ClusterPlan(job, microbatch, stages)


def uniform_plan(job: ClusterJob, microbatch: int, action: str) -> ClusterPlan:
    """The plan that does the same with every block that is decided about, with model state in the fastest place where it fits.

    Raises:
        NoPlan, InvalidValue: it fits nowhere.
    """

    def stage(last: bool) -> Stage:
        failed: NoPlan | None = None
        placed = (_Candidate.of(job, microbatch, place) for place in placements(job, last))
        for one in sorted(placed, key=attrgetter("kept")):
            plan = one.uniform(action)
            if plan.peak <= one.budget:
                return one.stage([plan])
            error = NoPlan(plan, Limits(one.budget), one.problem.blocks)
            failed = error if failed is None or error.nearer_than(failed) else failed
        assert failed is not None
        raise failed

    return ClusterPlan(job, microbatch, [stage(last) for last in job.ends])


def simulated_microbatches(job: ClusterJob, microbatch: int, last: bool) -> tuple[int, int]:
    """Return the microbatches alive at once, and those that a time line plays."""
    count = job.microbatches(microbatch)
    alive = job.alive(last, count)
    return alive, min(count, alive + 2)


def problem_of(job: ClusterJob, microbatch: int, place: StatePlacement) -> tuple[SearchProblem, int]:
    """What is searched for a pipeline stage whose model state is there, and bytes for activations on the device."""
    plain = job.blocks(microbatch, place.last)
    alive, simulated = simulated_microbatches(job, microbatch, place.last)
    machine = job.machine(plain, place.away, place.buffers)
    shares: dict[str, Choice] = {}
    if machine.tiers and len(plain) <= WHOLE:
        tier = machine.tiers[0].name
        for share in range(1, SHARES_OF_BLOCK):
            choice = Choice(tier, share=share / SHARES_OF_BLOCK)
            shares[f"{choice.share:.0%} {tier}"] = choice
    problem = SearchProblem(
        [place.blocks(plain, job.microbatches(microbatch))],
        one_forward_one_backward(simulated, alive),
        machine,
        actions_for(machine, recompute=job.recompute),
        frozenset(number for number, block in enumerate(plain) if block.name == HEAD),
        parts=shares,
    )
    return problem, job.gpu.memory - job.reserve - sum(place.device.values())


def replanned(
    plan: ClusterPlan,
    job: ClusterJob,
    limits: Limits | None = None,
    objective: Objective | None = None,
    effort: float = 1.0,
) -> ClusterPlan:
    """The plan of a job that is alike, with the same microbatch, and model state in the same place.

    Raises:
        NoPlan: see `plan_job`.
    """
    given, objective = limits or Limits(), objective or Objective()
    stages = [
        _search_stage(
            _Candidate.of(job, plan.microbatch, replace(stage.placement, job=job)),
            given,
            objective,
            stage.slowdown,
            effort,
            stage.plan.actions,
        )
        for stage in plan.stages
    ]
    return ClusterPlan(job, plan.microbatch, stages)


@dataclass(frozen=True)
class _Candidate:
    """A placement of a stage's model state.

    Attributes:
        budget: bytes for activations on the device.
    """

    microbatch: int
    place: StatePlacement
    problem: SearchProblem
    budget: int
    _played: dict[str, Plan] = field(default_factory=dict)

    @staticmethod
    def of(job: ClusterJob, microbatch: int, place: StatePlacement) -> _Candidate:
        known = _candidates(job, microbatch, place.last)
        key = place.persistent, place.buffers
        if key not in known:
            known[key] = _Candidate(microbatch, place, *problem_of(job, microbatch, place))
        return known[key]

    @property
    def kept(self) -> float:
        """Seconds with everything kept."""
        return self.uniform("keep").seconds

    @property
    def least_peak(self) -> int:
        """Bytes that no plan's peak is below: what is there while one block's backward runs, or a part's."""
        parts = (part for block in self.problem.blocks for part in block.parts or (block,))
        return max(part.saved + part.small + part.fixed + part.backward_transient for part in parts)

    def uniform(self, action: str) -> Plan:
        """The plan that does the same with every block that is decided about."""
        if action not in self._played:
            decided = set(self.problem.decided)
            names = [action if number in decided else "keep" for number in range(len(self.problem.blocks))]
            self._played[action] = play(self.problem, names)
        return self._played[action]

    def stage(self, plans: list[Plan], slowdown: float | None = None) -> Stage:
        place = self.place
        alive, simulated = simulated_microbatches(place.job, self.microbatch, place.last)
        return Stage(place.last, self.problem, plans, alive, simulated, self.budget, place, slowdown)

    def value(self, objective: Objective, plan: Plan) -> float:
        """Smaller is better."""
        stage, count = self.stage([plan]), self.place.job.microbatches(self.microbatch)
        time = stage.seconds(plan) * count + stage.optimizer_seconds
        memory = plan.peak + sum(self.place.device.values())
        return objective.time * time + objective.memory * memory + objective.wear * stage.written(count)

    def at_least(self, objective: Objective) -> float:
        """`value` with everything kept, whose memory and writes of activations count nothing."""
        kept = ("keep",) * len(self.problem.blocks)
        return self.value(objective, Plan(kept, StepTimeline(self.kept, self.kept, 0.0, 0.0, 0, 0.0)))


@lru_cache(64)
def _candidates(job: ClusterJob, microbatch: int, last: bool) -> dict[tuple[int, int], _Candidate]:
    """Candidates of a stage so far, by the blocks that stay and their buffers: several searches compare them."""
    return {}


def searched(
    problem: SearchProblem,
    limits: Limits,
    objective: Objective | None = None,
    effort: float = 1.0,
    known: Sequence[str] | None = None,
) -> list[Plan]:
    """The best plans of `search`. In a deep model equal layers are handled together first; what is left to decide layer by layer
    gets a part of the effort.

    Args:
        effort, known: see `search`. A brief search leaves layers together, where that keeps to the limits.

    Raises:
        NoPlan: none keeps to the limits.
    """
    [blocks] = problem.chunks
    brief = effort <= BRIEF
    units = in_units(problem, PIECES // 2 if brief else PIECES)
    if len(units.layers) == len(blocks):
        pieces = sum(len(block.parts) or 1 for block in blocks)
        return search(problem, limits, objective, effort=effort * len(blocks) / pieces, known=known)
    # 1. Of layers taken together.
    together = min(effort, IN_UNITS) * len(units.layers) / len(blocks)
    try:
        found = search(units.problem, limits, objective, effort=together, greedy=not brief)
    except NoPlan as error:
        decided = set(problem.decided)
        tried = [play(problem, units.expanded(plan.actions)) for plan in (error.smallest, error.nearest)]
        for name in problem.actions.keys() - {"keep"}:
            every = [name if number in decided else "keep" for number in range(len(blocks))]
            tried.append(play(problem, every))
        smallest = min(tried, key=attrgetter("peak"))
        if error.too_slow or (limits.device is not None and smallest.peak > NEAR * limits.device):
            raise NoPlan(smallest, limits, blocks, problem.machine.buffers, tried[1]) from None
    else:
        tried = [play(problem, units.expanded(plan.actions)) for plan in found]
    # 2. What was known, and what keeps to the limits layer by layer.
    if known is not None and problem.actions.keys() >= set(known):
        tried.append(play(problem, known))
    goal = objective or Objective()
    fitting = sorted(filter(limits.kept_by, tried), key=goal.value)
    if brief and fitting:
        return fitting
    # 3. Layer by layer.
    begin = (fitting or tried)[0].actions
    return search(problem, limits, objective, effort=min(effort, LAYER_BY_LAYER), known=begin, greedy=False)


def _search_stage(
    one: _Candidate,
    limits: Limits,
    objective: Objective,
    slowdown: float | None,
    effort: float,
    known: Sequence[str] | None = None,
) -> Stage:
    _, simulated = simulated_microbatches(one.place.job, one.microbatch, one.place.last)
    written = None if limits.written is None else limits.written * simulated
    seconds = None if limits.seconds is None else limits.seconds * simulated
    objective = replace(objective, hidden=objective.hidden * simulated)
    within = Limits(one.budget, written, seconds if slowdown is None else (1 + slowdown) * one.kept)
    if effort <= BRIEF and seconds is not None and slowdown is None and one.kept > seconds * (1 + 1e-9):
        raise NoPlan(one.uniform("keep"), within, one.problem.blocks)  # nothing is faster than keeping
    if one.least_peak > one.budget:
        smallest = min(map(one.uniform, one.problem.actions), key=attrgetter("peak"))
        raise NoPlan(smallest, within, one.problem.blocks)
    return one.stage(searched(one.problem, within, objective, effort=effort, known=known), slowdown)


def _plan_stage(
    job: ClusterJob,
    microbatch: int,
    last: bool,
    limits: Limits,
    objective: Objective,
    slowdown: float | None,
    effort: float,
    without: FailedPlacements,
) -> Stage:
    """The best plan of all placements of model state. Brief searches compare them; full ones where these find no plan."""
    if effort > BRIEF:
        try:
            found = _plan_stage(job, microbatch, last, limits, objective, slowdown, BRIEF, without)
        except NoPlan:
            pass
        else:
            chosen = _Candidate.of(job, microbatch, found.placement)
            return _search_stage(chosen, limits, objective, found.slowdown, effort)
    placed = (_Candidate.of(job, microbatch, place) for place in placements(job, last))
    best: tuple[float, Stage] | None = None
    failed: NoPlan | None = None
    fastest: float | None = None  # with everything kept, of those that leave room for activations
    for one in sorted(placed, key=attrgetter("kept")):
        if best is not None and one.at_least(objective) >= best[0]:
            continue
        allowed = slowdown
        if slowdown is not None and fastest is not None:
            allowed = (1 + slowdown) * fastest / one.kept - 1
            if allowed < 0:
                break
        key = last, one.place.persistent, one.place.buffers
        try:
            if key in without and without[key][0] < microbatch:
                raise without[key][1]
            stage = _search_stage(one, limits, objective, allowed, effort)
        except NoPlan as error:
            without[key] = min(without.get(key, (microbatch, error)), (microbatch, error), key=itemgetter(0))
            if error.too_slow and fastest is None:
                fastest = one.kept
            if failed is None or error.nearer_than(failed):
                failed = error
            continue
        fastest = one.kept if fastest is None else fastest
        value = one.value(objective, stage.plan)
        if best is None or value < best[0]:
            best = value, stage
    if best is None:
        assert failed is not None
        raise failed
    return best[1]


def sizes(job: ClusterJob) -> Iterator[int]:
    """Microbatch sizes that divide the batch, by about a factor of sqrt(2)."""
    given = 1
    while given <= 4096:
        if job.microbatches(given):
            yield given
        given = max(given + 1, math.ceil(given * 1.4)) if not job.batch else given + 1


def best_plan(
    job: ClusterJob,
    limits: Limits | None = None,
    objective: Objective | None = None,
    slowdown: float | None = None,
    value: Callable[[ClusterPlan], float] = attrgetter("tokens_per_second"),
) -> tuple[ClusterPlan, int]:
    """The plan of the largest `value` over all microbatch sizes (among those within 1% the largest), and the largest microbatch
    that fits at all. Brief searches compare them; full ones where these find no plan.

    Raises:
        NoPlan, InvalidValue: no microbatch fits.
    """
    found: dict[int, ClusterPlan] = {}
    # 1. The sizes that fit.
    for effort in (BRIEF, 1.0):
        fitting: list[int] = []
        failed: NoPlan | None = None
        for size in sizes(job):
            if limits is None and slowdown is None and _fits_uniformly(job, size):
                fitting.append(size)
                continue
            try:
                found[size] = plan_job(job, size, limits, objective, slowdown, effort)
            except NoPlan as error:
                if failed is None or error.too_slow:
                    failed = error
                if fitting or not error.too_slow:
                    break
            else:
                fitting.append(size)
        if fitting:
            break
    else:
        assert failed is not None
        raise failed
    # 2. Their plans, the largest first; without those that would not do if everything were kept.
    most = max(map(value, found.values()), default=0.0)
    for size in reversed(fitting):
        if size not in found and value(_unlimited(job, size)) >= NEARLY * most:
            try:
                found[size] = plan_job(job, size, limits, objective, slowdown, effort)
            except NoPlan:  # a brief search may miss what fits
                continue
            most = max(most, value(found[size]))
    if not found:
        found[fitting[0]] = plan_job(job, fitting[0], limits, objective, slowdown)
        most = value(found[fitting[0]])
    best = found[max(size for size, plan in found.items() if value(plan) >= NEARLY * most)]
    return replanned(best, job, limits, objective), fitting[-1]


def _fits_uniformly(job: ClusterJob, microbatch: int) -> bool:
    """Whether a plan fits that does the same with every block."""
    actions = ["keep", *["recompute"] * job.recompute, *["ssd"] * (job.ssds is not None)]
    for action in actions:
        try:
            uniform_plan(job, microbatch, action)
        except NoPlan:
            continue
        return True
    return False


def _unlimited(job: ClusterJob, microbatch: int) -> ClusterPlan:
    """The plan that keeps everything, in memory that may be larger than the device's, with model state in the fastest place."""
    stages = []
    for last in job.ends:
        one = min(
            (_Candidate.of(job, microbatch, place) for place in placements(job, last)), key=attrgetter("kept")
        )
        stages.append(one.stage([one.uniform("keep")]))
    return ClusterPlan(job, microbatch, stages)
