"""What `AdaptiveOffload` does with a plan that does not fit, a machine that changed, and forwards that have become larger."""

import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ssdtrain.config import load_config
from ssdtrain.features import Step
from ssdtrain.planner.adaptive import AdaptivePolicy
from ssdtrain.planner.controller import DRIFTED, AdaptiveOffload
from ssdtrain.planner.plans import NoPlan
from ssdtrain.planner.room import DeviceMemory, Room
from ssdtrain.planner.step import KEEP, Machine, Tier
from ssdtrain.runtime import Runtime
from tests.offload.conftest import settled
from tests.planner import test_auto
from tests.planner.test_auto import make_model, set_times

# With an arena of one size: one that follows what was loaded so far may be a reason to keep everything.
config = functools.partial(test_auto.config, buffer="4MiB")


def controller_of(runtime: Runtime, machine: Machine, **more: Any) -> AdaptiveOffload:
    """With a profile of one step, on a machine of its own."""

    class Controller(AdaptiveOffload):
        def machine(self) -> Machine:
            return machine

    assert runtime.engine is not None and runtime.offload is not None
    found = Controller(runtime.engine, runtime.offload.store, AdaptivePolicy(), **more)
    run_step(runtime, found)
    assert found._profile is not None
    set_times(found._profile)
    return found


def run_step(runtime: Runtime, controller: AdaptiveOffload | None, rows: int = 256) -> None:
    """Of the runtime's features only the engine sees it."""
    with runtime.forward():
        loss = make_model()(torch.randn(rows, 64)).square().sum()
    with runtime.backward():
        loss.backward()
    if controller is not None:
        controller.on_step_end(Step(0, 1.0))


FAST = Machine((Tier("ssd", 1e12, 1e12),), prefetch=1)


def test_a_plan_that_takes_longer_than_allowed_is_an_error(tmp_path: Path) -> None:
    with Runtime(load_config(config(tmp_path)), logs=False) as runtime:
        found = controller_of(runtime, FAST, device_budget=1 << 30, must_fit=True, most_slowdown=0.02)
        profile = found._profile
        assert profile is not None
        found._plan(profile)
        before = found.chosen
        assert before is not None
        slower = replace(before, predicted=replace(before.predicted, seconds=1.1 * before.kept.seconds))
        assert "s a step" in str(found._misfit(profile, slower))
        found._device_budget = 1  # where a drive is slower by now: no reason to stop
        found._plan(profile)
        assert found.chosen is before
        found.chosen = None
        with pytest.raises(NoPlan):
            found._plan(profile)


def test_the_limit_has_to_hold_the_largest_forward_too(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """At the start an error for the limit as given, a warning where only a larger forward exceeds it."""
    with Runtime(load_config(config(tmp_path)), logs=False) as runtime:
        found = controller_of(runtime, FAST, device_budget=1 << 30, must_fit=True)
        profile = found._profile
        assert profile is not None
        found._plan(profile)
        assert found.chosen is not None
        found._device_budget = 2 * found.chosen.predicted.peak_bytes
        found._policy.largest = {0: 40 * sum(block.saved for block in profile.blocks[0])}
        found.chosen = None
        found._plan(profile)
        assert "forwards have become larger" in caplog.text
        found.chosen, found._device_budget = None, 1
        with pytest.raises(NoPlan, match=r"^ssdtrain\.plan: no plan keeps to"):
            found._plan(profile)


def test_a_drive_that_changed_and_leaves_no_plan_keeps_the_margin_of_the_plan(tmp_path: Path) -> None:
    with Runtime(load_config(config(tmp_path)), logs=False) as runtime:
        found = controller_of(runtime, FAST, device_budget=1 << 30, must_fit=True)
        profile = found._profile
        assert profile is not None
        found._margin.value = 0.5
        found._plan(profile)
        found._device_budget, found._replan_reason = 1, DRIFTED
        found._margin.reset()
        found._plan(profile)
        assert found._margin.value == 0.5


def test_what_does_not_fit_beside_the_model_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Room, "memory", lambda self: DeviceMemory(100, 1 << 40, 0, 0))
    with Runtime(load_config(config(tmp_path)), logs=False) as runtime:
        found = controller_of(runtime, FAST)
        profile = found._profile
        assert profile is not None
        for _ in range(2):
            found._plan(profile)
        assert found.chosen is not None
    [line] = [r.getMessage() for r in caplog.records if "are left for activations" in r.getMessage()]
    assert "the smallest peak of activations found is" in line


def test_tapes_that_outgrow_the_limit_end_no_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with Runtime(load_config(config(tmp_path)), logs=False) as runtime:
        found = controller_of(runtime, FAST, device_budget=1 << 30, must_fit=True)
        profile = found._profile
        assert profile is not None
        found._plan(profile)
        found._device_budget = 1
        for _ in range(2):
            found._reshaped = True
            found._plan(profile)
        assert found.chosen is not None and found.chosen.predicted.peak_bytes > 1
        every = {choice for chunk in found.chosen.choices for choice in chunk}
        assert every != {KEEP}  # the smallest peak
    [line] = [r.getMessage() for r in caplog.records if "forwards have become larger" in r.getMessage()]
    assert "the smallest peak of activations found is" in line and "of which" in line


def test_a_peak_of_a_larger_step_before_is_not_taken_for_one_of_this_plan(tmp_path: Path) -> None:
    with Runtime(load_config(test_auto.config(tmp_path)), logs=False) as runtime:
        run_step(runtime, None, rows=4096)
        settled(runtime)  # a store that had begun holds its tensor until it ends
        assert runtime.engine is not None
        runtime.engine.recorder.take()
        found = controller_of(runtime, FAST)
        run_step(runtime, found)
        assert found._profile is not None
        assert found._other_bytes(found._profile) < 1 << 20  # 4096 rows save 8 MiB


def test_a_rate_that_is_not_reached_is_not_said_to_bind(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Limit:
        rate = 1e11

        def observe(self, *_: object) -> None: ...

        def planned(self, *, bound: bool, new: bool) -> None:
            self.bound = bound

    with Runtime(load_config(config(tmp_path)), logs=False) as runtime:
        for rate, bound in ((1e11, False), (1.0, True)):
            found, limit = controller_of(runtime, FAST), Limit()
            limit.rate = rate
            found._wear = limit  # type: ignore[assignment]
            assert found._profile is not None
            found._plan(found._profile)
            assert limit.bound is bound
