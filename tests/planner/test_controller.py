"""What the controller does with a plan that does not fit, a machine that changed, and forwards that have become larger."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import ssdtrain
from ssdtrain.config import load_config
from ssdtrain.features import Step
from ssdtrain.planner.controller import PlanController
from ssdtrain.planner.derating import DRIFTED, BandwidthDerating, Rates
from ssdtrain.planner.finder import DeviceHeadroom, DeviceMemory, Goal
from ssdtrain.planner.model.types import KEPT, Block, Machine, one_after_the_other
from ssdtrain.planner.plans import Limits, NoPlan, SearchProblem, actions_for, play
from ssdtrain.planner.profile import Profile
from ssdtrain.planner.regions import SEVERAL, AdaptivePolicy, Regions
from ssdtrain.runtime import Runtime
from tests.offload.conftest import settled
from tests.planner import test_auto
from tests.planner.test_auto import make_model, set_times
from tests.support.policies import FakeDrive

# With an arena of one size: one that follows what was loaded so far may be a reason to keep everything.
config = functools.partial(test_auto.config, buffer="4MiB")

FAST = Rates(1e12, 1e12)


@contextmanager
def controlled(
    directory: Path, goal: Goal, monkeypatch: pytest.MonkeyPatch, **more: Any
) -> Iterator[tuple[PlanController, Runtime]]:
    """A controller of an engine whose tiers are fast, and whose times are set."""
    monkeypatch.setattr(BandwidthDerating, "known", True)
    monkeypatch.setattr("ssdtrain.planner.derating.RecentRates.with_step", lambda *_: FAST)
    monkeypatch.setattr("ssdtrain.planner.regions.Profile", _Timed)
    with Runtime(load_config(config(directory)), logs=False) as runtime:
        assert runtime.engine is not None and runtime.offload is not None
        regions = Regions(runtime.engine, AdaptivePolicy())
        yield PlanController(runtime.engine, runtime.offload.store, regions, goal, **more), runtime


class _Timed(Profile):
    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        set_times(self)


def run_step(
    runtime: Runtime, controller: PlanController | None, rows: int = 256, seconds: float = 1.0
) -> None:
    """A step of which the runtime's features see only the engine."""
    with runtime.forward():
        loss = make_model()(torch.randn(rows, 64)).square().sum()
    with runtime.backward():
        loss.backward()
    if controller is not None:
        controller.on_step_end(Step(0, seconds, forwards=1, elapsed=seconds))


def planned(runtime: Runtime, controller: PlanController) -> None:
    for _ in range(2):
        run_step(runtime, controller)
    assert controller.plan is not None


def again(runtime: Runtime, controller: PlanController, why: str = "", **more: bool) -> None:
    """Plan once more."""
    controller.request(why or "a test wants it", **more)
    run_step(runtime, controller)


def test_a_plan_that_does_not_fit_is_an_error_at_first_and_later_no_reason_to_stop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with controlled(tmp_path, Goal(1 << 30, slowdown=0.02), monkeypatch) as (controller, runtime):
        planned(runtime, controller)
        before = controller.plan
        controller._finder.goal = Goal(1, slowdown=0.02)
        for _ in range(3):
            again(runtime, controller)
            assert controller.plan is before
        assert caplog.text.count("the plan of before is followed") == 1
    with controlled(tmp_path, Goal(1), monkeypatch) as (controller, runtime):
        with pytest.raises(NoPlan, match=r"^ssdtrain\.plan: no plan keeps to"):
            planned(runtime, controller)


@pytest.mark.parametrize("drives", [True, False])
def test_a_plan_names_drives_only_where_there_are_some(
    drives: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tier: dict[str, Any] = {"directories": str(tmp_path)} if drives else {"host": "64MiB"}
    model = torch.nn.Module()
    model.layers = torch.nn.ModuleList(torch.nn.Linear(64, 64) for _ in range(4))
    model.forward = lambda x: functools.reduce(lambda y, layer: layer(y).tanh(), model.layers, x)
    with ssdtrain.attach(model, {"offload": {**tier, "min_bytes": 1024}, "plan": "auto"}) as runtime:
        for _ in range(7):
            model(torch.randn(256, 64)).square().sum().backward()
            runtime.step_end()
        controller = next(one for one in runtime.features if isinstance(one, PlanController))
        name = "ssd" if drives else "host"
        assert {"ssd", "host"} & set(controller.problem.actions) == {name}
        assert f"with {'drives' if drives else 'host memory'} twice as fast" in caplog.text


def test_several_profiled_steps_that_leave_no_plan_are_searched_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reasons: list[str] = []
    searched = Regions.problem

    def problem(regions: Regions) -> SearchProblem:
        reasons.append(regions.controller.reason)
        return searched(regions)

    monkeypatch.setattr(Regions, "problem", problem)
    with controlled(tmp_path, Goal(1 << 30, slowdown=0.02), monkeypatch) as (controller, runtime):
        planned(runtime, controller)
        before = controller.plan
        controller._finder.goal = Goal(1, slowdown=0.02)
        for _ in range(8):
            run_step(runtime, controller)
        assert controller.plan is before and reasons.count(SEVERAL) == 1


def test_the_limit_has_to_hold_the_largest_forward_too(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the start an error for the limit as given, a warning where only a larger forward exceeds it."""
    with controlled(tmp_path, Goal(1 << 30), monkeypatch) as (controller, runtime):
        planned(runtime, controller)
        peak = controller.plan.peak
    with controlled(tmp_path, Goal(2 * peak), monkeypatch) as (controller, runtime):
        monkeypatch.setattr(Profile, "outgrown", lambda *_: 40.0)
        planned(runtime, controller)
        assert caplog.text.count("forwards have become larger") == 1


def test_a_drive_that_changed_and_leaves_no_plan_keeps_the_margin_of_the_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with controlled(tmp_path, Goal(1 << 30), monkeypatch) as (controller, runtime):
        margin = controller.derating.margin
        margin.value = 0.5
        planned(runtime, controller)
        controller._finder.goal = Goal(1)
        margin.value = 1.0
        again(runtime, controller, DRIFTED)
        assert margin.value == 0.5


def test_what_does_not_fit_beside_the_model_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DeviceHeadroom, "memory", lambda self: DeviceMemory(100, 1 << 40, 0, 0))
    monkeypatch.setattr(Regions, "remedy", "; another batch")
    with controlled(tmp_path, Goal.of_budget(None), monkeypatch) as (controller, runtime):
        planned(runtime, controller)
        again(runtime, controller)
        assert controller.metric.plans == 2
    [line] = [r.getMessage() for r in caplog.records if "are left for activations" in r.getMessage()]
    assert "the smallest peak of activations found is" in line
    assert line.endswith("; another batch")


def test_more_memory_is_no_remedy_where_time_or_endurance_is_missing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    machine = Machine(())
    block = Block("", 1.0, 2.0, 100)
    problem = SearchProblem([[block]], one_after_the_other(), machine, actions_for(machine))
    smallest = play(problem, ["keep"])
    for device, remedy in ((smallest.peak - 1, True), (smallest.peak, False)):
        caplog.clear()
        headroom = DeviceHeadroom(None, "; another batch")  # type: ignore[arg-type]
        # The search was under the room for the forward of the profile: the largest one takes half as much again.
        headroom.exceeded(3 * device // 2, NoPlan(smallest, Limits(device, seconds=0.1), [block]))
        assert ("; another batch" in caplog.text) == remedy


def test_tapes_that_outgrow_the_limit_end_no_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with controlled(tmp_path, Goal(1 << 30), monkeypatch) as (controller, runtime):
        planned(runtime, controller)
        controller._finder.goal = Goal(1)
        for _ in range(2):
            again(runtime, controller, reshaped=True)
        assert controller.plan is not None and controller.problem is not None and controller.plan.peak > 1
        assert {controller.problem.choice(name) for name in controller.plan.actions} != {KEPT}
    [line] = [r.getMessage() for r in caplog.records if "forwards have become larger" in r.getMessage()]
    assert "the smallest peak of activations found is" in line and "of which" in line


def test_a_peak_of_a_larger_step_before_is_not_taken_for_one_of_this_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with controlled(tmp_path, Goal.of_budget(None), monkeypatch) as (controller, runtime):
        run_step(runtime, None, rows=4096)
        settled(runtime)  # a store that had begun holds its tensor until it ends
        runtime.engine.recorder.take()
        for _ in range(3):
            run_step(runtime, controller)
        assert controller.problem is not None and controller.problem.beside < 1 << 20  # 4096 rows save 8 MiB


@pytest.mark.parametrize(("rate", "bound"), [(1e11, False), (1.0, True)])
def test_a_rate_that_is_not_reached_is_not_said_to_bind(
    rate: float,
    bound: bool,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    drive: Any = FakeDrive(1e11)
    drive.rate = rate
    with controlled(tmp_path, Goal.of_budget(None), monkeypatch, endurance=drive) as (controller, runtime):
        planned(runtime, controller)
        again(runtime, controller)
    assert ("less is offloaded than could be hidden" in caplog.text) is bound
