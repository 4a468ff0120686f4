"""A limit that no plan meets any more ends no run; what fits on the device is a limit too; what is in flight follows forwards."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import ssdtrain
from ssdtrain.config.units import KiB, MiB
from ssdtrain.planner.blocks import RECORDED, WARM_UP, bound_stores
from ssdtrain.planner.finder import DeviceHeadroom, DeviceMemory, Goal, PlanFinder
from ssdtrain.planner.model.timeline import simulate
from ssdtrain.planner.model.types import KEPT, Block, Machine, one_after_the_other
from ssdtrain.planner.plans import Limits, NoPlan, SearchProblem, actions_for
from ssdtrain.planner.regions import Regions
from ssdtrain.planner.search import search
from ssdtrain.steps import UNENDED_FORWARDS
from tests.planner.test_plan_auto import QUIET, STEPS, auto_of, blocks_of, equal, gpt, train, train_sizes


def test_forwards_that_outgrow_the_limit_end_no_run(caplog: pytest.LogCaptureFixture) -> None:
    """The error of one rank alone would leave the others waiting in a collective."""
    batches = [2] * (WARM_UP + RECORDED + 1) + [24] * (WARM_UP + RECORDED + 3) + [2, 40] * 4
    expected = train_sizes(gpt(), batches)
    model = gpt()
    with ssdtrain.attach(model, {"plan": {"device_limit": "2MiB"}, **QUIET}) as runtime:
        assert equal(expected, train_sizes(model, batches))
        auto = auto_of(runtime)
        assert auto.plan is not None and auto.problem is not None
        assert auto.plan.peak > 2 * MiB
        with pytest.raises(NoPlan) as raised:
            search(auto.problem, Limits(2 * MiB))
        assert auto.plan.peak == raised.value.smallest.peak
    [line] = [r.getMessage() for r in caplog.records if "forwards have become larger" in r.getMessage()]
    assert "the smallest peak of activations found is" in line and "of which" in line


def test_the_plan_nearest_to_the_limits_is_within_memory_where_only_the_time_is_exceeded() -> None:
    blocks = [Block(f"block {i}", 1.0, 2.0, 100, recompute=1.0, inputs=10) for i in range(4)]
    problem = SearchProblem([blocks], one_after_the_other(), Machine(), actions_for(Machine()))
    with pytest.raises(NoPlan) as raised:
        search(problem, Limits(device=350, seconds=12.0))
    nearest = raised.value.nearest
    assert nearest.count("recompute") == 1 and nearest.peak <= 350
    assert raised.value.smallest.count("recompute") >= 3
    with pytest.raises(NoPlan) as raised:
        search(problem, Limits(device=50))
    assert raised.value.nearest is raised.value.smallest


def test_a_limit_has_to_hold_the_largest_forward_too() -> None:
    blocks = [Block(f"block {i}", 1.0, 2.0, 100, recompute=1.0, inputs=10) for i in range(4)]
    problem = SearchProblem([blocks], one_after_the_other(), Machine(), actions_for(Machine()))
    kept = simulate([blocks], [[KEPT] * 4], problem.order, Machine())
    finder = PlanFinder(Goal(kept.peak_bytes), None)  # type: ignore[arg-type]
    assert finder.find(problem, kept).plans[0].count("keep") == 4
    assert finder.find(problem, kept, 1.5).plans[0].peak <= kept.peak_bytes / 1.5


def memory_of(total: float) -> DeviceMemory:
    """Of which `total` are left for activations: a twentieth stays free."""
    return DeviceMemory(int(total / 0.95), 0, 0, 0)


def test_without_a_limit_what_fits_on_the_device_is_one(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    found = {}
    for room in (None, 0.6, 0.01):
        if room is not None:
            memory = memory_of(room * found[None])
            monkeypatch.setattr(DeviceHeadroom, "memory", lambda self, memory=memory: memory)
        model = gpt()
        with ssdtrain.attach(model, {"plan": "auto", **QUIET}) as runtime:
            train(model, STEPS - 2, microbatches=1)
            auto = auto_of(runtime)
            assert auto.plan is not None and auto.problem is not None
            found[room] = auto.plan.peak
            everything = auto.problem
    assert found[0.6] <= 0.61 * found[None]
    with pytest.raises(NoPlan) as raised:
        search(everything, Limits(1))
    assert found[0.01] == raised.value.smallest.peak  # nothing fits by the estimate: no reason not to try
    [line] = [r.getMessage() for r in caplog.records if "are left for activations" in r.getMessage()]
    assert "the smallest peak of activations found is" in line


def test_what_is_in_flight_follows_the_size_of_forwards_up_and_down(tmp_path: Path) -> None:
    section = {"directories": str(tmp_path), "in_flight": "2MiB"}
    with ssdtrain.attach(gpt(), {"offload": section, **QUIET}) as runtime:
        engine = runtime.engine
        for tape, allowed in ((16 * MiB, MiB), (64 * KiB, 4 * KiB), (16 * MiB, MiB), (64 * MiB, 2 * MiB)):
            bound_stores(engine, tape)
            assert engine.mover.stores.limit == allowed
        engine.set_plan_bound(None)  # behind a link it is no part of the peak
        assert engine.mover.stores.limit == 2 * MiB


@pytest.mark.parametrize("amount", [False, True])
def test_steps_of_many_forwards_are_recorded_as_far_as_memory_allows(
    amount: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ssdtrain.steps.UNENDED_FORWARDS", 4)
    model = torch.nn.Module()
    model.layers = torch.nn.ModuleList(torch.nn.Linear(64, 64) for _ in range(3))
    model.forward = lambda x: model.layers[2](model.layers[1](model.layers[0](x).tanh()).tanh())
    offload = {"directories": str(tmp_path), "amount": "auto", "min_bytes": "4KiB"}
    with ssdtrain.attach(
        model, {**({"offload": offload} if amount else {"plan": "auto"}), **QUIET}
    ) as runtime:
        for _ in range(WARM_UP + RECORDED + 1):
            for number in range(6):  # the last one that is recorded is the largest
                model(torch.randn(128 if number == 2 else 64, 64)).sum().backward()
            runtime.step_end()
        subject = auto_of(runtime).subject
        assert subject.profile is not None if isinstance(subject, Regions) else auto_of(runtime).plan


def test_a_plan_in_a_loop_that_ends_no_step_keeps_no_records(caplog: pytest.LogCaptureFixture) -> None:
    model = torch.nn.Module()
    model.layers = torch.nn.ModuleList(torch.nn.Linear(64, 64) for _ in range(3))
    model.forward = lambda x: model.layers[2](model.layers[1](model.layers[0](x).tanh()).tanh())
    with ssdtrain.attach(model, {"plan": "auto", **QUIET}) as runtime:
        auto = auto_of(runtime)
        for _ in range(UNENDED_FORWARDS + 5):
            model(torch.randn(64, 64)).sum().backward()
        assert not runtime.engine.recorder.active and not blocks_of(runtime)._found
        for _ in range(WARM_UP + RECORDED + 1):
            runtime.step_end()
            model(torch.randn(64, 64)).sum().backward()
        assert auto.plan is not None
    said = [r.getMessage() for r in caplog.records if "without the end of a step" in r.getMessage()]
    assert len(said) == 1
