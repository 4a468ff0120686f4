"""Plans over blocks and model state, against all joint plans."""

import dataclasses
import itertools
import random

import pytest

from ssdtrain.planner import joint
from ssdtrain.planner.finder import Goal, PlanFinder
from ssdtrain.planner.joint import PassingCosts, StateCosts, StateProfile, choices_of
from ssdtrain.planner.model.types import Block, Link, Machine, Tier, one_after_the_other
from ssdtrain.planner.plans import NoPlan, SearchProblem, actions_for, kept_step, play
from ssdtrain.profile.passes import PassTimes
from ssdtrain.state.plan import StateChoice, StateChunk
from ssdtrain.state.residency import StateTimes

MB = 10**6


def problem_of(
    seed: int, count: int, *, drives: bool = False, link: bool = False, cpu: bool = False
) -> SearchProblem:
    """A problem of `count` blocks whose state takes up to thrice as long to come as they compute; `cpu`: the CPU steps it."""
    draw = random.Random(seed)
    saved, values = draw.randrange(5, 40) * MB, draw.randrange(5, 40) * MB
    rate = values / draw.uniform(0.3, 3.0)
    block = Block("", 1.0, 2.0, saved, recompute=1.0, inputs=saved // 10, fixed=saved // 20)
    blocks = [Block(**{**_fields(block), "name": f"layers.{number}"}) for number in range(count)]
    chunks = [
        StateChunk(f"layers.{number}", values, values, 4 * values, 4 * values) for number in range(count)
    ]
    tier = Tier("ssd", rate, rate)
    passing, alone = PassingCosts(step=4 / rate), PassingCosts(step=6 / rate)
    costs = StateCosts(chunks, values, tier, 0.1, 0.2 / values, passing, alone)
    if cpu:
        chunks = [dataclasses.replace(one, staying=values, stepped=values) for one in chunks]
        stepping = draw.uniform(0.3, 3.0) / values
        costs = StateCosts(chunks, values, tier, 0.1, stepping=stepping, steps_inside=draw.random() < 0.5)
    tiers = (tier,) if drives else ()
    machine = Machine(tiers, Link(4 * rate, 4 * rate) if link else None, in_flight=2 * saved)
    return SearchProblem([blocks], one_after_the_other(), machine, actions_for(machine), state=costs)


def _fields(block: Block) -> dict[str, object]:
    return {field.name: getattr(block, field.name) for field in dataclasses.fields(block)}


def brute_force(problem: SearchProblem, limit: int) -> float | None:
    """The shortest step of all joint plans within `limit`."""
    assert problem.state is not None
    best: float | None = None
    for choice in choices_of(problem.state):
        if choice.limit > limit:
            continue
        left = problem.under(choice)
        for actions in itertools.product(problem.actions, repeat=len(problem.blocks)):
            plan = play(left, actions)
            if plan.peak <= limit and (best is None or plan.seconds < best):
                best = plan.seconds
    return best


@pytest.mark.parametrize("seed", range(14))
def test_the_choice_is_within_3_percent_of_all_joint_plans(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(joint, "BETWEEN", 2)
    drives = seed % 2 == 1
    problem = problem_of(seed, 5 if drives else 8, drives=drives, link=seed % 4 > 1, cpu=seed >= 8)
    kept = kept_step(problem)
    whole = problem.under(choices_of(problem.state)[-1])
    most = kept_step(whole).peak_bytes
    least = problem.state.choice(0, 1).limit
    limit = int(least + random.Random(seed).uniform(0.3, 0.9) * (most - least))
    best = brute_force(problem, limit)
    finder = PlanFinder(Goal(limit), None)  # type: ignore[arg-type]
    if best is None:
        with pytest.raises(NoPlan, match="activations and model state"):
            finder.find(problem, kept)
        return
    plan = finder.find(problem, kept).plans[0]
    assert plan.peak <= limit
    assert plan.seconds <= 1.03 * best


def test_more_memory_is_never_slower() -> None:
    problem = problem_of(3, 8)
    kept = kept_step(problem)
    least, most = (problem.state.choice(*which).limit for which in ((0, 1), (8, 2)))
    found = []
    for part in range(1, 7):
        limit = least + part * (most + kept.peak_bytes - least) // 6
        finder = PlanFinder(Goal(limit), None)  # type: ignore[arg-type]
        found.append(finder.find(problem, kept).plans[0])
    assert [plan.seconds for plan in found] == sorted((plan.seconds for plan in found), reverse=True)
    assert found[0].state.persistent < found[-1].state.persistent


def stepped_problem(names: list[str], microbatches: int = 1) -> SearchProblem:
    """A device's blocks of these names, which the CPU steps in 1 s each."""
    chunks = [StateChunk(name, MB, MB, MB, 2 * MB, MB) for name in dict.fromkeys(names)]
    costs = StateCosts(chunks, 0, stepping=1.0 / MB, steps_inside=True)
    machine = Machine((), Link(MB, MB))
    blocks = [Block(name, 1.0, 2.0, MB) for name in names]
    order = one_after_the_other(microbatches)
    return SearchProblem([blocks], order, machine, actions_for(machine), state=costs)


@pytest.mark.parametrize("persistent", [0, 1])
def test_a_block_that_runs_several_times_is_stepped_once(persistent: int) -> None:
    problem = stepped_problem(["shared"] * 3)
    left = problem.under(problem.state.choice(persistent, 2))
    assert [block.cpu_step for block in left.blocks] == [1.0, 0, 0]
    assert [block.backward_stores for block in left.blocks] == [MB, 0, 0]
    assert [block.returns for block in left.blocks] == [persistent * MB, 0, 0]


@pytest.mark.parametrize(("microbatches", "loads"), [(1, 0), (4, MB)])
def test_gradients_of_chunks_that_stay_come_back_for_the_next_microbatch(
    microbatches: int, loads: int
) -> None:
    problem = stepped_problem(["first", "second"], microbatches)
    left = problem.under(problem.state.choice(2, 2))
    assert [block.backward_loads for block in left.blocks] == [loads, loads]
    without = [dataclasses.replace(block, backward_loads=0) for block in left.blocks]
    more = kept_step(left).seconds - kept_step(dataclasses.replace(left, chunks=[without])).seconds
    assert (more > 0) == (microbatches > 1)


class MeasuredState:
    """Stands for `ModelState`: chunks of a problem, and no seconds of the optimizer."""

    limit = fixed = 0
    steps_inside = False

    def __init__(self, problem: SearchProblem) -> None:
        self.planned_chunks = lambda: problem.state.chunks
        self.narrow = lambda limit: None
        self.times, self.tiers = StateTimes, dict


class MeasuredPasses:
    """Stands for `StepRecord`: a forward and a backward of so many seconds in all."""

    def __init__(self, seconds: float) -> None:
        self.passes = lambda: [PassTimes(kind, 0, 0.0, seconds / 2, ()) for kind in ("forward", "backward")]


@pytest.mark.parametrize("link", [False, True])
@pytest.mark.parametrize("buffers", [1, 2])
def test_passes_of_a_cpu_take_as_long_as_measured_beside_transfers(link: bool, buffers: int) -> None:
    """On a CPU transfers take cores from computation: what they took in the profiled steps is laid on the bytes that come."""
    problem = problem_of(3, 8, drives=True, link=link)
    choice, actions = problem.state.choice(0, buffers), ["recompute"] * 7 + ["keep"]

    def seconds(state: StateCosts, choice: StateChoice) -> float:
        left = state.applied(problem, choice)
        return play(dataclasses.replace(left, after=0.0), actions).seconds

    measured = {number: 1.3 * seconds(problem.state, problem.state.choice(0, number)) for number in (1, 2)}
    profile = StateProfile(MeasuredState(problem), "ssd", problem.machine.link)
    profile.begin()
    for number in range(1, 9):  # with two buffers and with one, in turn
        record = MeasuredPasses(measured[2 if number % 2 else 1])
        profile.step_ended(number, record if number > 2 else None)
    slowed = profile.slowed(problem, actions)
    if link:
        assert slowed == problem.state
        return
    assert seconds(slowed, choice) == pytest.approx(measured[buffers], rel=0.1)
    added = measured[buffers] - measured[buffers] / 1.3
    longer = [seconds(state, state.choice(4, buffers)) for state in (problem.state, slowed)]
    assert 0.3 * added < longer[1] - longer[0] < 0.7 * added  # half of the bytes come


@pytest.mark.parametrize("link", [False, True])
def test_on_a_cpu_parts_of_the_next_chunk_come_ahead_where_a_second_one_has_no_room(link: bool) -> None:
    problem = problem_of(3, 8, link=link)
    state = MeasuredState(problem)
    costs = StateCosts(problem.state.chunks, 0)
    state.limit = (costs.choice(0, 1).limit + costs.choice(0, 2).limit) // 2
    narrowed: list[int | None] = []
    state.narrow = narrowed.append
    profile = StateProfile(state, "ssd", problem.machine.link)
    profile.begin()
    for number in range(1, 9):
        profile.step_ended(number, MeasuredPasses(1.0) if number > 2 else None)
    found = profile.costs()
    assert found is not None
    assert found.several == (2 if link else 1.5)
    assert {choice.buffers for choice in choices_of(found)} == {1, found.several}
    assert set(narrowed) == {
        costs.choice(0, 1).limit,
        None,
    }  # it is measured with the limit that it would have
    state.limit += 1
    narrowed.clear()
    profile.begin()
    assert narrowed == [None if link else costs.choice(0, 1.5).limit]
