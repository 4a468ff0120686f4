"""Equal layers handled together, and blocks cut into parts, say of a step what layers and blocks one by one say."""

from dataclasses import replace
from typing import Any

import pytest

from ssdtrain.planner.plans import Limits, Objective, SearchProblem, kept_step, play
from ssdtrain.planner.search import search
from ssdtrain.tools.whatif.cluster import problem_of, searched
from ssdtrain.tools.whatif.cluster_job import PIECES, ClusterJob
from ssdtrain.tools.whatif.cluster_state import placements
from ssdtrain.tools.whatif.hardware import find_gpu, parse_ssds
from ssdtrain.tools.whatif.models import ParallelLayout, Transformer
from ssdtrain.tools.whatif.units import in_units


def problem(layers: int, family: str = "gpt", hidden: int = 2048, **more: Any) -> SearchProblem:
    model = Transformer.of(family, hidden=hidden, layers=layers, sequence=1024)
    given = {"ssds": parse_ssds("4 x 7GB/s"), "node": 1, "batch": 4, "reserve": 0, **more}
    job = ClusterJob(model, ParallelLayout(), replace(find_gpu("h100"), memory=10**13), **given)
    return problem_of(job, 4, placements(job, False)[0])[0]


@pytest.mark.parametrize("family", ["gpt", "t5"])
def test_units_hold_all_layers_in_their_order_and_kinds_do_not_mix(family: str) -> None:
    whole = problem(96, family)
    units = in_units(whole, 16)
    assert sum(units.layers) == len(whole.blocks)
    assert len(units.layers) <= 16 + 3
    for field in ("forward", "backward", "saved", "recompute", "inputs"):
        total = sum(getattr(block, field) for block in whole.blocks)
        assert sum(getattr(block, field) for block in units.problem.blocks) == pytest.approx(total)
    names = units.expanded([str(number) for number in range(len(units.layers))])
    first_of_kind = {
        names[number] for number, block in enumerate(whole.blocks) if block.name.startswith("decoder")
    }
    assert not first_of_kind & {
        names[n] for n, block in enumerate(whole.blocks) if block.name.startswith("block")
    }


@pytest.mark.parametrize("action", ["keep", "recompute"])
def test_a_step_of_units_that_stay_is_that_of_its_layers(action: str) -> None:
    whole = problem(96)
    units = in_units(whole, 16)
    actions = [*[action] * (len(units.layers) - 1), "keep"]
    joined, apart = play(units.problem, actions), play(whole, units.expanded(actions))
    assert joined.peak == apart.peak
    assert joined.seconds == pytest.approx(apart.seconds)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gpt", "t5"])
@pytest.mark.parametrize("recompute", [True, False])
def test_layers_searched_together_are_planned_as_well_as_one_by_one(family: str, recompute: bool) -> None:
    whole = problem(48, family, recompute=recompute)
    kept = kept_step(whole)
    for limits, objective in (
        (Limits(kept.peak_bytes // 3), Objective()),
        (Limits(seconds=1.05 * kept.seconds), Objective(0, 1)),
    ):
        alone, together = (find(whole, limits, objective)[0] for find in (search, searched))
        assert len(together.actions) == len(whole.blocks)
        assert limits.kept_by(together)
        assert objective.value(together) <= 1.02 * objective.value(alone)


def test_a_stage_of_few_blocks_is_cut_into_parts_that_add_up() -> None:
    for layers in (2, 4, 12):
        blocks = [block for block in problem(layers).blocks if block.name != "head"]
        assert all(1 < len(block.parts) <= max(16, PIECES // layers) for block in blocks)
        for block in blocks:
            assert sum(part.saved for part in block.parts) == block.saved
            assert sum(part.forward for part in block.parts) == pytest.approx(block.forward)
            assert sum(part.backward for part in block.parts) == pytest.approx(block.backward)
    assert not any(block.parts for block in problem(16).blocks)


def test_all_model_state_passes_through_blocks_with_parts() -> None:
    cut = problem(4, state="host", host=10**12)
    assert cut.machine.link is not None
    streamed = [block for block in cut.blocks if block.forward_loads]
    loads = sum(block.forward_loads + block.backward_loads for block in streamed)
    passes = sum(one.kind == "forward" for one in cut.order)
    stay = cut.machine.state_buffers * max(
        block.forward_loads for block in streamed
    )  # in each turn of passes
    apart = play(cut, ["keep"] * len(cut.blocks))
    whole = replace(cut, chunks=[[replace(block, parts=()) for block in cut.blocks]])
    alone = play(whole, apart.actions)
    assert apart.seconds >= passes * (loads - 2 * stay) / cut.machine.link.to_device
    assert 0.8 * alone.seconds <= apart.seconds <= alone.seconds


def test_parts_leave_while_their_block_computes() -> None:
    cut = problem(2, hidden=12288)
    whole = replace(cut, chunks=[[replace(block, parts=()) for block in cut.blocks]])
    actions = ["ssd", "ssd", "keep"]
    apart, alone = play(cut, actions), play(whole, actions)
    assert apart.peak <= alone.peak
    assert apart.seconds < 0.8 * alone.seconds


def test_a_block_leaves_in_shares_where_a_drive_takes_no_more() -> None:
    slow = problem(4, hidden=8192, recompute=False)
    limits = Limits(seconds=1.02 * kept_step(slow).seconds)
    best = searched(slow, limits, Objective(0, 1))[0]
    whole = searched(replace(slow, parts={}), limits, Objective(0, 1))[0]
    assert limits.kept_by(best)
    assert set(best.actions) & set(slow.parts)
    assert best.peak < 0.97 * whole.peak
