"""Plans of jobs on published hardware against reason; against what papers report: `test_papers`."""

from dataclasses import replace
from typing import Any

import pytest

from ssdtrain.config.errors import InvalidValue
from ssdtrain.planner.plans import NoPlan
from ssdtrain.tools.whatif.cluster import best_plan, plan_job
from ssdtrain.tools.whatif.cluster_job import ClusterJob
from ssdtrain.tools.whatif.cluster_state import placements
from ssdtrain.tools.whatif.hardware import HOP_BETWEEN_NODES, HOP_IN_NODE, find_gpu, parse_ssds
from ssdtrain.tools.whatif.models import ParallelLayout, Transformer


def small(**more: Any) -> ClusterJob:
    model = Transformer.of("gpt", hidden=4096, layers=8, sequence=2048)
    given = {"ssds": parse_ssds("1 x 6GB/s, 1TB, 1 DWPD"), "node": 1, "batch": 16, **more}
    return ClusterJob(model, given.pop("layout", ParallelLayout()), find_gpu("a100-40gb"), **given)


def test_what_fits_is_kept_and_takes_the_ideal_time() -> None:
    plan = plan_job(small(), 1)
    assert set(plan.stages[0].plan.actions) == {"keep"}
    assert plan.step_seconds == pytest.approx(plan.ideal_seconds)
    assert plan.written_per_step() == 0
    assert plan.life_seconds() is None


def test_more_sequences_than_fit_are_offloaded_and_the_life_of_drives_is_known() -> None:
    plan = plan_job(small(ssds=parse_ssds("4 x 7GB/s, 1TB, 1 DWPD")), 4)
    [stage] = plan.stages
    assert stage.plan.peak <= stage.budget
    assert stage.plan.count("ssd") > 0
    written = plan.written_per_step()
    assert written > 0
    assert plan.life_seconds() == pytest.approx(4 * 1825e12 / written * plan.step_seconds)


def test_offloading_gives_more_throughput_than_recomputing_everything() -> None:
    job = small(ssds=parse_ssds("4 x 7GB/s"))
    plan = plan_job(job, 4)
    [stage] = plan.stages
    recomputed = sum(b.forward + b.backward + b.recompute for b in stage.problem.blocks)
    assert recomputed / stage.seconds(stage.plan) > 1.2


def test_the_bandwidth_for_all_is_what_a_stage_saves_in_half_of_its_time() -> None:
    job = small(layout=ParallelLayout(pp=4), batch=32)
    stages = [job.blocks(1, False), job.blocks(1, True)]
    needed = [
        2 * sum(b.saved for b in stage) / sum(b.forward + b.backward for b in stage) for stage in stages
    ]
    assert job.bandwidth_for_all(1) == pytest.approx(max(needed))
    assert needed[0] != needed[1]


def test_a_pipeline_has_a_plan_for_both_ends_and_a_bubble() -> None:
    job = small(layout=ParallelLayout(pp=4), batch=32)
    plan = plan_job(job, 1)
    first, last = plan.stages
    assert (first.alive, last.alive) == (4, 1)
    assert plan.bubble_seconds == pytest.approx(3 * plan.slowest.seconds(plan.slowest.plan))
    interleaved = plan_job(replace(job, layout=ParallelLayout(pp=4, virtual=2)), 1)
    assert interleaved.bubble_seconds == pytest.approx(plan.bubble_seconds / 2)
    assert interleaved.stages[0].alive > first.alive


def test_what_zero_3_gathers_comes_with_each_microbatch_and_overlaps_with_its_computation() -> None:
    job = small(layout=ParallelLayout(dp=16, zero=3), batch=64, ssds=None, network=1e9)
    plan = plan_job(job, 1)
    parameters = job.rank_parameters(False)
    traffic = 3 * (
        15 / 16 * 2 * parameters / 0.8e9 + 8 * 15 * HOP_BETWEEN_NODES
    )  # 8 blocks, 16 nodes of one GPU
    computing = plan.stages[0].seconds(plan.stages[0].plan)
    assert plan.microbatch_seconds == pytest.approx(
        traffic + computing / 8
    )  # all but one block's computation
    assert plan.step_seconds == pytest.approx(4 * plan.microbatch_seconds + sum(job.update_seconds()))
    fast = plan_job(replace(job, network=1000e9), 1)
    computing = fast.stages[0].seconds(fast.stages[0].plan)
    assert fast.microbatch_seconds == pytest.approx(computing + fast.job.sharding_seconds / 8)


def test_the_best_microbatch_has_the_most_tokens_a_second() -> None:
    job = small(ssds=None)
    best, largest = best_plan(job)
    assert largest >= best.microbatch
    for size in (1, 2, 4):
        assert plan_job(job, size).tokens_per_second <= best.tokens_per_second * 1.011


def test_what_cannot_fit_is_an_error_that_says_what_is_in_it() -> None:
    with pytest.raises(InvalidValue, match=r"model state per GPU \(parameters .*optimizer"):
        plan_job(small(layout=ParallelLayout(), optimizer=100), 1)
    with pytest.raises(NoPlan, match="smallest peak of activations"):
        plan_job(small(batch=512), 512)
    with pytest.raises(InvalidValue, match="divides both"):
        small(layout=ParallelLayout(tp=3))
    with pytest.raises(InvalidValue, match="a multiple"):
        plan_job(small(batch=16), 3)


def test_host_memory_over_nvlink_c2c_hides_what_pcie_cannot() -> None:
    model = Transformer.of("llama", hidden=4096, layers=8, sequence=8192)

    def share(gpu: str) -> float:
        job = ClusterJob(
            model, ParallelLayout(), find_gpu(gpu), host=400 * 2**30, node=1, batch=16, recompute=False
        )
        job = replace(job, gpu=replace(job.gpu, memory=find_gpu("h100").memory))
        plan = plan_job(job, 4)
        return plan.ideal_seconds / plan.step_seconds

    assert share("gh200") >= share("h100")
    assert share("gh200") > 0.99


def test_a_rank_with_one_expert_has_the_parameters_of_a_dense_block() -> None:
    """Experts without a gate have two matrices."""
    shape = {"hidden": 1024, "layers": 2, "sequence": 512}
    experts = Transformer.of("gpt", experts=8, **shape)
    job = ClusterJob(experts, ParallelLayout(dp=8, expert=8), find_gpu("h100"))
    assert job.block_parameters("block") == Transformer.of("gpt", **shape).block_parameters()


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_zero_splits_experts_over_the_ranks_that_have_the_same_ones(zero: int) -> None:
    """By hand: 8 ranks, experts spread over 4 of them, so that 2 have the same ones; all else is split over 8."""
    model = Transformer.of("mixtral", hidden=1024, layers=2, sequence=512)
    job = ClusterJob(model, ParallelLayout(dp=8, expert=4, zero=zero), find_gpu("h100"))
    experts = 2 * (8 / 4) * 3 * 1024 * model.ffn
    others = job.rank_parameters(False) - experts
    whole, split = others + experts, others / 8 + experts / 2
    updated = split if zero else whole
    found = job.state_bytes(False)
    assert found["parameters"] == int(2 * (split if zero == 3 else whole))
    assert found["gradients"] == int(2 * (split if zero >= 2 else whole))
    assert found["optimizer"] == int(12 * updated)
    assert zero < 3 or found["gathered parameters"] == 2 * 2 * job.block_parameters("block")
    reducing, updating = job.update_seconds()
    assert updating == pytest.approx(28 * updated / job.gpu.memory_rate)
    [place] = placements(job, False)
    assert place.optimizer_seconds(0) == pytest.approx(updating)
    passed = (others * 7 / 8 + experts / 2) * 2 / (0.8 * job.gpu.peer_rate) + 2 * 7 * HOP_IN_NODE
    assert reducing == pytest.approx(0 if zero == 3 else 2 * passed)
    assert job.sharding_seconds == pytest.approx(3 * passed if zero == 3 else 0)
