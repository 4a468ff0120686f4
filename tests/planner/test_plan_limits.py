"""`plan.device_limit` beside an `offload` section: tiers never make the answer worse, and a limit that is not kept to is said."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

import ssdtrain
import ssdtrain.planner.search as searching
from ssdtrain.device import device_for
from ssdtrain.planner.finder import Goal, PlanFinder
from ssdtrain.planner.model.types import Block, Machine, Tier, one_after_the_other
from ssdtrain.planner.plan_metrics import PeakLimit, PlanMetrics
from ssdtrain.planner.plans import NoPlan, SearchProblem, actions_for, kept_step
from tests.planner.test_plan_auto import QUIET, auto_of, equal, gpt, train

STEPS = 16


def outcome(limit: str, offload: dict[str, Any] | None) -> tuple[str, int]:
    """What is done with the blocks under the limit, and the predicted peak; or the error, and the smallest peak."""
    config: dict[str, Any] = {"plan": {"device_limit": limit}, **QUIET}
    if offload is not None:
        config["offload"] = offload
    model = gpt()
    with ssdtrain.attach(model, config) as runtime:
        try:
            train(model, STEPS, microbatches=1)
        except NoPlan as error:
            return "NoPlan", error.smallest.peak
        plan = auto_of(runtime).plan
    return plan.summary(), plan.peak


@pytest.mark.parametrize("limit", ["4MiB", pytest.param("1MiB", marks=pytest.mark.slow)])
def test_an_offload_section_whose_tensors_are_too_small_to_leave_gives_the_plan_of_none(
    limit: str, tmp_path: Path
) -> None:
    offload = {"directories": str(tmp_path), "min_bytes": "8MiB"}
    assert outcome(limit, offload) == outcome(limit, None)


@pytest.mark.slow
def test_what_is_too_small_to_leave_counts_where_its_block_is_recomputed(tmp_path: Path) -> None:
    expected = train(gpt(), STEPS, microbatches=1)
    model = gpt()
    config = {"plan": {"device_limit": "3MiB"}, "offload": {"directories": str(tmp_path)}, **QUIET}
    with ssdtrain.attach(model, config) as runtime:
        assert equal(expected, train(model, STEPS, microbatches=1))
        runtime.reset_peak()
        train(model, 1, microbatches=1)
        auto, metrics = auto_of(runtime), runtime.statistics()
    assert auto.plan.count("recompute") and metrics is not None
    assert metrics.offload.activation_peak_bytes <= 3 << 20
    assert auto.metric.over_limit_bytes == 0


def test_of_many_blocks_the_best_plan_without_tiers_is_among_those_searched(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    blocks = [
        Block(f"block {n}", 0.01 * (1 + n % 3), 0.02, 100 + n, recompute=0.01, inputs=10) for n in range(20)
    ]
    machine = Machine((Tier("ssd", 1.0, 1.0, depth=1 << 30),))  # too slow for anything
    with_tiers = SearchProblem([blocks], one_after_the_other(), machine, actions_for(machine))
    without = SearchProblem([blocks], one_after_the_other(), machine, actions_for(Machine()))
    # A search that may try few plans finds none that fits among those of three actions.
    monkeypatch.setattr(searching, "BLOCK_PASSES", 1)
    found = PlanFinder(Goal(900), _engine())
    kept = kept_step(with_tiers)
    plans = [found.find(problem, kept).plans[0] for problem in (without, with_tiers)]
    assert plans[1].seconds <= plans[0].seconds and plans[1].peak <= 900


def _engine() -> Any:
    class Engine:
        device = device_for(torch.device("cpu"))

    return Engine()


def test_a_limit_that_is_not_kept_to_is_in_the_figures_of_every_step_and_in_the_log_once_a_plan(
    caplog: pytest.LogCaptureFixture,
) -> None:
    metric = PlanMetrics()
    limit = PeakLimit("plan.device_limit", 100, metric)
    over = []
    with caplog.at_level(logging.WARNING, "ssdtrain"):
        for planned, peak in ((False, 300), (True, 300), (True, 150), (True, 160), (True, 90), (True, 170)):
            limit.step_ended(peak, planned=planned)
            over.append(metric.over_limit_bytes)
        assert len(caplog.messages) == 1
        limit.planned()
        for peak in (150, 150, 150):
            limit.step_ended(peak, planned=True)
    assert over == [200, 200, 50, 60, 0, 70]
    assert len(caplog.messages) == 2 and "plan.device_limit of 100B is not kept to" in caplog.messages[0]


@pytest.mark.slow
def test_forwards_that_grow_beyond_the_limit_are_said_in_the_figures_of_the_step() -> None:
    model = gpt()
    with ssdtrain.attach(model, {"plan": {"device_limit": "3MiB"}, **QUIET}) as runtime:
        train(model, 8, microbatches=1)
        tokens = torch.randint(256, (32, 64))
        model(tokens, tokens).backward()
        torch.optim.SGD(model.parameters(), lr=0.0).step()
        model(tokens[:1], tokens[:1])  # the step is over
        assert auto_of(runtime).metric.over_limit_bytes > 3 << 20
