"""Plans of clusters whose model state is in host memory or on SSD."""

from dataclasses import replace
from typing import Any

import pytest

from ssdtrain.config.errors import InvalidValue
from ssdtrain.planner.plans import Limits, NoPlan, Objective, Plan, SearchProblem, kept_step
from ssdtrain.tools.whatif import cluster
from ssdtrain.tools.whatif.cluster import BRIEF, best_plan, plan_job, problem_of, replanned, searched
from ssdtrain.tools.whatif.cluster_job import ClusterJob
from ssdtrain.tools.whatif.cluster_plan import ClusterPlan
from ssdtrain.tools.whatif.cluster_state import placements
from ssdtrain.tools.whatif.hardware import find_gpu, parse_ssds
from ssdtrain.tools.whatif.models import ParallelLayout, Transformer

GB = 10**9


def job(**more: Any) -> ClusterJob:
    """A model of 16 GB of state, a GPU of 24 GiB. Without recomputation, so that searches are short."""
    model = Transformer.of("gpt", hidden=4096, layers=4, sequence=1024)
    given = {"host": 100 * GB, "node": 1, "batch": 4, "reserve": 4 * GB, "recompute": False, **more}
    return ClusterJob(model, given.pop("layout", ParallelLayout()), find_gpu("rtx4090"), **given)


def large(**more: Any) -> ClusterJob:
    """Twice as deep: its state does not fit on the device."""
    given = job(**more)
    return replace(given, model=replace(given.model, layers=8))


def test_state_that_does_not_fit_on_the_device_passes_through_it() -> None:
    with pytest.raises(InvalidValue, match=r"of model state per GPU.*--state"):
        plan_job(large(), 1)
    plan = plan_job(large(state="host"), 1)
    [stage] = plan.stages
    place = stage.placement
    assert 0 <= place.persistent < 8
    assert stage.plan.peak + sum(place.device.values()) <= plan.job.gpu.memory - plan.job.reserve
    assert sum(place.device.values()) + place.away >= sum(plan.job.state_bytes(False).values()) - 1000


def _moved(plan: ClusterPlan) -> float:
    """Seconds in which the link to the device is busy with model state in a step."""
    loads = sum(each["parameters"] for each in plan.stages[0].placement.passing)
    return loads * plan.microbatches / plan.job.link_rate


def test_a_step_takes_no_less_than_the_link_needs_for_state() -> None:
    plan = plan_job(large(state="host"), 1)
    assert plan.step_seconds > _moved(plan)
    assert plan.update_seconds[1] >= plan.stages[0].placement.away / plan.job.link_rate


def test_more_sequences_at_once_hide_more_of_the_loads() -> None:
    few, many = (plan_job(large(state="host", batch=16), size) for size in (1, 4))
    assert many.tokens_per_second > 1.5 * few.tokens_per_second


def test_host_memory_bounds_model_state_and_activations_together() -> None:
    with pytest.raises(
        InvalidValue, match=r"needs .* in the host memory of a node for model state, .*--host"
    ):
        plan_job(large(state="host", host=10 * GB), 1)
    place = placements(large(state="host"), False)[0]
    machine = large(state="host").machine(large().blocks(1, False), place.away, place.buffers)
    [tier] = machine.tiers
    assert tier.capacity == 100 * GB - place.away
    with pytest.raises(InvalidValue, match="in the drives of a node"):
        plan_job(large(state="ssd", ssds=parse_ssds("1 x 7GB/s, 10GB")), 1)


def test_an_optimizer_on_cpus_runs_while_backward_does_and_keeps_its_state_there() -> None:
    fast, slow = (plan_job(large(state="host", cpu_rate=rate), 4) for rate in (1000e9, 20e9))
    assert fast.step_seconds < slow.step_seconds
    [stage] = slow.stages
    parameters = 8 * slow.job.block_parameters("block")
    backward = sum(block.backward for block in stage.problem.blocks)
    assert slow.update_seconds[1] < 28 * parameters / 20e9
    assert slow.update_seconds[1] >= 28 * parameters / 20e9 - 2 * backward
    assert stage.placement.away >= 12 * parameters - 1000


def test_state_on_drives_wears_them() -> None:
    drives = parse_ssds("4 x 7GB/s, 1TB, 1 DWPD")
    plan = plan_job(large(state="ssd", ssds=drives, host=0), 1)
    [stage] = plan.stages
    gradients = sum(each["gradients"] for each in stage.placement.passing)
    assert plan.written_per_step() >= gradients * plan.microbatches + stage.placement.away - gradients
    assert plan.life_seconds() == pytest.approx(4 * 1825e12 / plan.written_per_step() * plan.step_seconds)


def test_state_on_the_device_is_planned_as_without_host_memory_for_it() -> None:
    plan = plan_job(job(), 1)
    assert plan.stages[0].placement.away == 0
    assert plan.update_seconds == plan.job.update_seconds()


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"state": "host", "host": 0}, "no host memory; allowed: --host"),
        ({"state": "ssd"}, "no drives; allowed: --ssd"),
        ({"cpu_rate": 1e9}, "allowed: --state host"),
    ],
)
def test_a_placement_that_cannot_be_is_an_error(given: dict[str, Any], why: str) -> None:
    with pytest.raises(InvalidValue, match=why):
        job(**given)


def test_with_an_optimizer_on_cpus_gradients_leave_and_parameters_return_of_blocks_that_stay_too() -> None:
    infinite = job(state="host", cpu_rate=1e18)
    stays = placements(infinite, False)[-1]
    assert stays.persistent == 4
    each = [infinite.block_state(kind) for kind in infinite.stage_kinds(False)]
    moved = sum(one["gradients"] + one["parameters"] for one in each)
    assert stays.optimizer_seconds(0.0) == pytest.approx(moved / infinite.link_rate)
    for size in (1, 4):
        plan = plan_job(replace(infinite, gpu=replace(infinite.gpu, memory_rate=1e9)), size)
        assert plan.ideal_seconds <= plan.step_seconds * (1 + 1e-9)


def test_the_least_wear_counts_what_the_optimizer_writes() -> None:
    """Without bytes of gradients nothing but the optimizer writes, and the most blocks stay."""
    drives = large(state="ssd", ssds=parse_ssds("4 x 7GB/s"), host=0, gradient=0)
    [stage] = plan_job(drives, 1, objective=Objective(0, 0, 1)).stages
    assert stage.placement.persistent == max(place.persistent for place in placements(drives, False)) > 0


def test_a_slowdown_is_over_keeping_everything_with_state_where_it_passes() -> None:
    plan = plan_job(large(state="host", batch=1), 1, slowdown=0.0)
    assert plan.step_seconds > 1.5 * plan.ideal_seconds


def kept_seconds(given: ClusterJob, microbatch: int) -> list[float]:
    """With everything kept, by the number of blocks whose state stays on the device."""
    return [kept_step(problem_of(given, microbatch, place)[0]).seconds for place in placements(given, False)]


@pytest.mark.parametrize("slowdown", [0.02, 0.2])
def test_the_least_memory_takes_no_longer_than_allowed_over_the_fastest_place_of_model_state(
    slowdown: float,
) -> None:
    given = large(state="host", batch=1)
    slowest, *_, fastest = kept_seconds(given, 1)
    assert slowest > (1 + slowdown) * fastest
    [stage] = plan_job(given, 1, None, Objective(0, 1), slowdown).stages
    assert stage.plan.seconds <= (1 + slowdown) * fastest * (1 + 1e-9)


def test_a_place_of_model_state_that_leaves_activations_no_room_is_not_counted_from() -> None:
    given = job(state="host", batch=8, reserve=6 * GB)
    given = replace(given, gpu=replace(given.gpu, host_rate=4e9))
    *_, next_one, fastest = kept_seconds(given, 8)
    assert next_one > fastest
    [stage] = plan_job(given, 8, None, Objective(0, 1), 0.2).stages
    assert 1.2 * fastest < stage.plan.seconds <= 1.2 * next_one * (1 + 1e-9)


def test_what_is_compared_is_searched_briefly_and_what_is_chosen_in_full(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    efforts: list[float] = []

    def recorded(*given: Any, effort: float, **named: Any) -> list[Plan]:
        efforts.append(effort)
        return searched(*given, effort=effort, **named)

    monkeypatch.setattr(cluster, "searched", recorded)
    plan_job(large(state="host"), 1)
    assert efforts[-1] == 1
    assert efforts[:-1]
    assert set(efforts[:-1]) == {BRIEF}
    efforts.clear()
    best, _ = best_plan(large(state="host"))
    assert efforts[-1] == 1
    assert set(efforts[:-1]) == {BRIEF}
    assert best.stages[0].plan.peak <= best.stages[0].budget


@pytest.mark.parametrize(
    "given", [{}, {"recompute": True}, {"state": "host"}, {"host": 0, "recompute": True}]
)
def test_as_much_memory_as_the_lowest_peak_is_enough(given: dict[str, Any]) -> None:
    lowest = Objective(0, 1)
    plan = plan_job(job(**given), 4, None, lowest, 10.0)
    [stage] = plan.stages
    gpu = replace(plan.job.gpu, memory=plan.job.gpu.memory - stage.budget + stage.plan.peak)
    [again] = replanned(plan, replace(plan.job, gpu=gpu), None, lowest).stages
    assert again.plan.peak == again.budget == stage.plan.peak


def test_where_brief_searches_find_no_plan_there_are_full_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    def late(problem: SearchProblem, limits: Limits, *given: Any, effort: float, **named: Any) -> list[Plan]:
        return searched(problem, limits if effort == 1 else Limits(1), *given, effort=effort, **named)

    monkeypatch.setattr(cluster, "searched", late)
    expected = plan_job(large(state="host"), 1)
    assert expected.stages[0].plan.peak > 1
    assert best_plan(large(state="host"))[1] >= 1


def test_where_time_is_short_larger_microbatches_are_tried_and_the_error_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(NoPlan, match=r"allow more time \(--max-slowdown.*larger microbatch") as caught:
        plan_job(job(), 1, Limits(seconds=1e-3))
    assert caught.value.too_slow
    with pytest.raises(NoPlan, match="smaller microbatch") as caught:
        plan_job(job(batch=512), 512, Limits(seconds=1e-3))
    assert not caught.value.too_slow

    def slow_at_first(job: ClusterJob, size: int, *more: Any) -> ClusterPlan:
        return plan_job(job, size, Limits(seconds=1e-3) if size == 1 else None)

    monkeypatch.setattr(cluster, "plan_job", slow_at_first)
    assert best_plan(job())[0].microbatch > 1
    monkeypatch.setattr(cluster, "plan_job", lambda job, size, *more: plan_job(job, 1, Limits(seconds=1e-3)))
    with pytest.raises(NoPlan, match="--max-slowdown"):
        best_plan(job())
