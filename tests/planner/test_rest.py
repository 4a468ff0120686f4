"""`offload.amount: "auto"` where nothing is worth moving: forwards run without hooks, until that may have changed."""

from __future__ import annotations

import copy
import itertools
import logging
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ssdtrain
from ssdtrain.config.units import KiB, MiB
from ssdtrain.planner.controller import PlanController
from ssdtrain.planner.plan_metrics import PlanMetrics
from ssdtrain.planner.regions import PROBE_PERIOD
from ssdtrain.runtime import Runtime

QUIET = {"report": {"interval": 0}}


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(64, 64), nn.Tanh())))


def train(model: nn.Module, steps: int, rows: int = 64, seen: list[int] | None = None) -> list[torch.Tensor]:
    """Losses and weights; `seen` gets the number of saved tensors with hooks after each step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    losses = []
    for step in range(steps):
        torch.manual_seed(step)
        optimizer.zero_grad()
        loss = model(torch.randn(rows, 64)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
        if seen is not None:
            seen.append(saved_by(model))
    return [*losses, *(p.detach().clone() for p in model.parameters())]


_runtimes: dict[int, Runtime] = {}


def saved_by(model: nn.Module) -> int:
    engine = _runtimes[id(model)].engine
    return engine.snapshot().saved_tensors


def attach(model: nn.Module, path: Path, **offload: Any) -> Runtime:
    runtime = ssdtrain.attach(model, {"offload": {"directories": str(path), **offload}, **QUIET})
    _runtimes[id(model)] = runtime
    return runtime


def train_until_resting(model: nn.Module, seen: list[int] | None = None) -> None:
    engine = _runtimes[id(model)].engine
    assert engine is not None
    for _ in range(40):
        train(model, 1, seen=seen)
        if engine.resting:
            return
    raise AssertionError("it never rests")


def auto_of(runtime: Runtime) -> PlanController:
    [found] = [feature for feature in runtime.features if isinstance(feature, PlanController)]
    return found


def rests(seen: list[int]) -> list[bool]:
    """Of each step from the second on, whether its forward had no hooks."""
    return [now == before for before, now in itertools.pairwise(seen)]


@pytest.mark.parametrize("min_bytes", ["4KiB", "1MiB"], ids=["kept by the plan", "too small"])
def test_a_model_of_which_nothing_is_worth_moving_runs_without_hooks(
    min_bytes: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    steps, seen = 80, list[int]()
    expected = train(make_model(), steps)
    model = make_model()
    with (
        caplog.at_level(logging.WARNING, "ssdtrain"),
        attach(model, tmp_path, min_bytes=min_bytes) as runtime,
    ):
        found = train(model, steps, seen=seen)
        [metric] = [of for name, of in auto_of(runtime).metrics() if name == "auto"]
    assert all(map(torch.equal, expected, found))
    resting = rests(seen)
    assert sum(resting[-PROBE_PERIOD * 3 :]) >= PROBE_PERIOD * 3 - 8
    assert not all(resting[12:])  # now and then a step is profiled again
    assert len([line for line in caplog.messages if "without saved-tensor hooks" in line]) == 1
    assert isinstance(metric, PlanMetrics) and metric.idle_steps >= sum(resting) - 1


def test_a_forward_with_larger_inputs_has_hooks_and_a_plan_of_its_own(tmp_path: Path) -> None:
    model, seen = make_model(), list[int]()
    with attach(model, tmp_path, min_bytes="4KiB") as runtime:
        train_until_resting(model, seen)
        train(model, 1, seen=seen)
        assert rests(seen)[-1]
        engine = runtime.engine
        assert engine.resting
        train(model, 1, rows=128, seen=seen)
        assert not rests(seen)[-1] and not engine.resting
        offloaded = engine.snapshot()
        assert offloaded.offloaded_bytes + offloaded.avoided_write_bytes > 0


def test_a_forward_as_large_as_the_first_one_has_hooks_though_small_ones_came_between(tmp_path: Path) -> None:
    """Trainers that run their largest batch first."""
    model, seen = make_model(), list[int]()
    with attach(model, tmp_path, min_bytes="4KiB") as runtime:
        train(model, 1, rows=256, seen=seen)
        train_until_resting(model, seen)
        train(model, 32)
        engine = runtime.engine
        train_until_resting(model, seen)
        assert engine.resting
        train(model, 1, rows=256, seen=seen)
        assert not engine.resting


def test_small_growth_of_inputs_adds_up(tmp_path: Path) -> None:
    model = make_model()
    with attach(model, tmp_path, min_bytes="4KiB") as runtime:
        train_until_resting(model)
        engine = runtime.engine
        assert engine.resting
        train(model, 1, rows=72)
        assert engine.resting
        train(model, 1, rows=80)
        assert not engine.resting


def test_the_arena_of_a_small_model_is_smaller_than_a_huge_page(tmp_path: Path) -> None:
    with attach(make_model(), tmp_path, amount="all") as runtime:
        buffers = runtime.engine.buffers
        buffers.fit(300 * KiB, away=200 * KiB)
        assert not buffers.capacity
        buffers.fit(300 * KiB, away=MiB)
        assert buffers.capacity == 300 * KiB
        buffers.fit(3 * MiB, away=8 * MiB)
        assert buffers.capacity == 4 * MiB


def test_the_arena_is_no_larger_than_what_has_left_memory(tmp_path: Path) -> None:
    with attach(make_model(), tmp_path, amount="all") as runtime:
        buffers = runtime.engine.buffers
        buffers.fit(3 * MiB, away=3 * MiB)
        assert not buffers.capacity  # it would have 4 MiB
        buffers.fit(3 * MiB, away=4 * MiB)
        assert buffers.capacity == 4 * MiB
        buffers.close_unused()
        assert buffers.capacity == 4 * MiB
        buffers.fit(3 * MiB, away=MiB)  # of one microbatch so much had left, of another one not
        buffers.fit(3 * MiB, away=5 * MiB)
        buffers.close_unused()
        assert buffers.capacity == 4 * MiB
        buffers.fit(3 * MiB, away=MiB)
        buffers.close_unused()
        assert not buffers.counted_bytes


def test_a_limit_is_watched_with_hooks(tmp_path: Path) -> None:
    model, seen = make_model(), list[int]()
    with attach(model, tmp_path, min_bytes="4KiB", device_budget="1GiB"):
        train(model, 40, seen=seen)
    assert not any(rests(seen))


def test_the_peak_of_a_step_with_hooks_stays_known_while_none_is_counted(tmp_path: Path) -> None:
    model = make_model()
    with attach(model, tmp_path, min_bytes="4KiB") as runtime:
        train_until_resting(model)
        runtime.reset_peak()
        train(model, 1)
        statistics = runtime.statistics()
        assert statistics.offload.activation_peak_bytes > 0


def test_the_hook_on_the_model_is_gone_afterwards_and_a_copy_has_none(tmp_path: Path) -> None:
    model = make_model()
    with attach(model, tmp_path):
        copied = copy.deepcopy(model)
        pickle.dumps(model.state_dict())
        train(copied, 2)
    assert not model._forward_pre_hooks
