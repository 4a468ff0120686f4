"""Plans of blocks that decide what of the model state stays."""

from __future__ import annotations

import time
from collections import OrderedDict
from dataclasses import replace
from typing import Any

import psutil
import pytest
import torch
from torch import nn

import ssdtrain
from ssdtrain.config import ConfigError
from ssdtrain.planner.controller import PlanController
from ssdtrain.planner.joint import StateCosts
from ssdtrain.storage.errors import HostBudgetExceeded
from tests.state.conftest import Attach, LiveBytes
from tests.state.training import Recipe, make_model, plain, run, same
from tests.support.processes import DEVICE


@pytest.mark.parametrize("staged", [False, True], ids=["in-place", "staged"])
@pytest.mark.parametrize("optimizer_on", ["device", "cpu"])
def test_other_chunks_stay_from_step_to_step(optimizer_on: str, staged: bool, attach: Attach) -> None:
    choices = [(8, 1), (0, 1), (5, 2), (2, 1)]
    recipe = Recipe(steps=len(choices) + 1, clip=0.5)
    fused = {"fused": True} if optimizer_on == "cpu" else {}
    recipe.optimizer = lambda parameters: _adamw(parameters, **fused)
    losses, parameters, state = plain(recipe)
    model = make_model()
    optimizer = recipe.optimizer(list(model.parameters()))
    live = LiveBytes(model, optimizer)
    options: dict[str, Any] = {"staged": True} if staged else {}
    runtime = attach(model, optimizer, optimizer_on=optimizer_on, **options)
    recipe.steps, found = 1, []
    for number in range(len(choices) + 1):
        found += run(recipe, model, optimizer, runtime, first=number)
        if number < len(choices):
            costs = StateCosts(runtime.state.planned_chunks(), runtime.state.fixed)
            choice = costs.choice(*choices[number])
            runtime.state.follow(choice)
            values = runtime.statistics().values()
            assert values["state/persistent_chunks"] == choice.persistent
            assert values["state/resident_bytes"] <= choice.limit == values["state/limit_bytes"]
            if number == 2:  # while some chunks stay
                model.load_state_dict(model.state_dict())
                optimizer.load_state_dict(optimizer.state_dict())
            runtime.reset_peak()
            live.peak = 0
    assert found == losses
    assert same(dict(model.state_dict()), dict(parameters))
    assert same(optimizer.state_dict()["state"], state["state"])
    values = runtime.statistics().values()
    assert values["state/resident_peak_bytes"] <= values["state/limit_bytes"]
    if optimizer_on == "device" and DEVICE == "cpu" and not staged:
        assert live.peak <= values["state/limit_bytes"]


def _adamw(parameters: Any, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, **options)


@pytest.mark.parametrize("offload", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("optimizer_on", ["device", "cpu"])
def test_state_of_four_times_the_limit_with_activations_in_it(
    optimizer_on: str, offload: bool, tmp_path: Any
) -> None:
    """One key, and the same bits; a run that is resumed has them too."""
    steps = 16 if offload else 9
    recipe = Recipe(steps=steps, model={"layers": 16})
    fused = {"fused": True} if optimizer_on == "cpu" else {}
    recipe.optimizer = lambda parameters: _adamw(parameters, **fused)
    losses, parameters, _ = plain(recipe)
    total = 4 * sum(parameter.nbytes for parameter in make_model(layers=16).parameters())
    limit = total // 4
    section = {"directories": str(tmp_path / "state"), "device_limit": limit, "min_bytes": 256}
    if optimizer_on == "cpu":
        section["optimizer"] = "cpu"
    config: dict[str, Any] = {"plan": "auto", "state": section, "report": {"interval": 0}}
    if offload:
        config["offload"] = {"directories": str(tmp_path / "activations"), "min_bytes": 1024}

    def attached() -> tuple[Any, Any, Any]:
        model = make_model(layers=16)
        optimizer = recipe.optimizer(list(model.parameters()))
        return model, optimizer, ssdtrain.attach(model, config, optimizer=optimizer)

    first = Recipe(**{**vars(recipe), "steps": steps - 2})
    model, optimizer, runtime = attached()
    found = run(first, model, optimizer, runtime)
    saved = model.state_dict(), optimizer.state_dict()
    last = Recipe(**{**vars(recipe), "steps": 2})
    runtime.reset_peak()
    assert found + run(last, model, optimizer, runtime, first=steps - 2) == losses
    assert same(dict(model.state_dict()), dict(parameters))
    values = runtime.statistics().values()
    assert values["plan/plans"] >= 1
    assert values["plan/predicted_peak_bytes"] <= limit
    assert values["state/limit_bytes"] < limit
    assert values["state/resident_peak_bytes"] + values["activation_peak_bytes"] <= 1.04 * limit
    runtime.close()
    model, optimizer, runtime = attached()
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    assert run(last, model, optimizer, runtime, first=steps - 2) == losses[-2:]
    assert same(dict(model.state_dict()), dict(parameters))
    runtime.close()


class SlowAdamW(torch.optim.AdamW):
    """Takes as long for each chunk as a CPU that bounds the step."""

    SECONDS = 0.05

    def step(self, closure: Any = None) -> Any:
        time.sleep(self.SECONDS)
        return super().step(closure)


@pytest.mark.parametrize("clip", ["exact", "none"])
def test_a_plan_knows_that_the_cpu_bounds_the_step(clip: str) -> None:
    layers, steps = 5, 9
    model = make_model(layers=layers)
    optimizer = SlowAdamW(model.parameters(), lr=1e-2)
    half = 2 * sum(parameter.nbytes for parameter in model.parameters())
    section = {"host": "64MiB", "optimizer": "cpu", "clip": clip, "device_limit": half, "min_bytes": 256}
    config = {"plan": "auto", "state": section, "report": {"interval": 0}}
    with ssdtrain.attach(model, config, optimizer=optimizer) as runtime:
        run(Recipe(steps=steps), model, optimizer, runtime)
        [controller] = [part for part in runtime.features if isinstance(part, PlanController)]
        assert controller.plan is not None
        predicted, timeline = controller.plan.seconds, controller.plan.timeline
    asleep = (layers + 1) * SlowAdamW.SECONDS  # what is in no chunk is stepped by the loop
    # Passes may take any time on a machine that has other work, and hide as much of the steps; loads wait for memory in them.
    assert timeline.step_wait + timeline.load_stall > 0.5 * asleep - timeline.compute_seconds
    assert 0.95 * asleep < predicted < 1.5 * asleep + timeline.compute_seconds


@pytest.mark.parametrize("other", [False, True])
def test_a_plan_with_the_same_choice_of_state_leaves_it_where_it_is(
    other: bool, attach: Attach, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model(layers=5)
    optimizer = _adamw(model.parameters())
    half = 2 * sum(parameter.nbytes for parameter in model.parameters())
    section = {"host": "64MiB", "device_limit": half, "min_bytes": 256}
    config = {"plan": "auto", "state": section, "report": {"interval": 0}}
    with ssdtrain.attach(model, config, optimizer=optimizer) as runtime:
        run(Recipe(steps=9), model, optimizer, runtime)
        [controller] = [part for part in runtime.features if isinstance(part, PlanController)]
        before, problem = controller.plan, controller.problem
        assert before is not None and before.state is not None and problem is not None
        followed: list[Any] = []
        monkeypatch.setattr(runtime.state, "follow", followed.append)
        state = StateCosts(runtime.state.planned_chunks(), 0).choice(0, 1) if other else before.state
        actions = list(before.actions)
        actions[3] = "keep" if actions[3] == "recompute" else "recompute"
        plan = replace(before, actions=tuple(actions), state=state)
        assert not controller.subject.follow(before, problem, plan)
        assert followed == [state] * other


@pytest.mark.parametrize("mode", ["reconstruct", "quant"])
@pytest.mark.parametrize("optimizer_on", ["device", "cpu"])
def test_compressed_inputs_are_those_of_the_run_without_chunks(
    optimizer_on: str, mode: str, tmp_path: Any
) -> None:
    recipe = Recipe(steps=2, microbatches=2)
    ended = []
    for section in (
        {},
        {"state": {"directories": str(tmp_path), "min_bytes": 256, "optimizer": optimizer_on}},
    ):
        model = make_model(width=64)
        optimizer = _adamw(list(model.parameters()), fused=True)
        config = {"compact": {"mode": mode}, "report": {"interval": 0}, **section}
        runtime = ssdtrain.attach(model, config, optimizer=optimizer)
        losses = run(recipe, model, optimizer, runtime)
        ended.append((losses, dict(model.state_dict())))
        runtime.close()
    assert ended[0][0] == ended[1][0]
    assert same(ended[0][1], ended[1][1])


def test_there_is_one_limit(tmp_path: Any) -> None:
    model = make_model()
    section = {"directories": str(tmp_path), "min_bytes": 256}
    config = {"plan": {"device_limit": "1GiB"}, "state": section}
    with pytest.raises(ConfigError, match=r"plan\.device_limit.*section state.*state\.device_limit"):
        ssdtrain.attach(model, config, optimizer=_adamw(list(model.parameters())))


@pytest.mark.parametrize("tier", ["host", "drives"])
def test_one_key_puts_model_state_in_chunks(tier: str, tmp_path: Any) -> None:
    """State of four times the limit, in a config without the section."""
    recipe = Recipe(steps=12, model={"layers": 16, "width": 128})
    losses, parameters, _ = plain(recipe)
    model = make_model(layers=16, width=128)
    optimizer = recipe.optimizer(list(model.parameters()))
    limit = sum(parameter.nbytes for parameter in model.parameters())
    config: dict[str, Any] = {"plan": {"state_limit": limit}, "report": {"interval": 0}}
    if tier == "drives":
        config["offload"] = {"directories": str(tmp_path)}
    runtime = ssdtrain.attach(model, config, optimizer=optimizer)
    assert run(recipe, model, optimizer, runtime) == losses
    assert same(dict(model.state_dict()), dict(parameters))
    values = runtime.statistics().values()
    assert values["plan/plans"] >= 1
    assert values["state/resident_peak_bytes"] + values["activation_peak_bytes"] <= 1.04 * limit
    assert values["state/stored_bytes"] > 0
    assert runtime.config.state is not None and bool(runtime.config.state.directories) == (tier == "drives")
    runtime.close()


@pytest.mark.parametrize(
    ("config", "error"),
    [
        ({"plan": {"state_limit": "1GiB", "device_limit": "1GiB"}}, "is beside plan.device_limit"),
        ({"plan": {"state_limit": "1GiB"}, "state": {"host": "1GiB"}}, "is beside state"),
    ],
)
def test_the_one_key_is_the_one_limit(config: dict[str, Any], error: str) -> None:
    model = make_model()
    with pytest.raises(ConfigError, match=rf"ssdtrain\.plan\.state_limit: .*{error}"):
        ssdtrain.attach(model, config, optimizer=_adamw(list(model.parameters())))


def test_errors_of_the_one_key_name_it() -> None:
    with pytest.raises(
        ConfigError, match=r"ssdtrain\.plan\.state_limit: .* needs the optimizer of the model"
    ):
        ssdtrain.attach(make_model(), {"plan": {"state_limit": "1GiB"}})


def test_the_one_key_takes_the_blocks_of_the_plan_and_half_of_the_capacity(tmp_path: Any) -> None:
    model = nn.Sequential(OrderedDict({f"enc{number}": nn.Linear(256, 256) for number in range(6)}))
    config = {
        "plan": {"state_limit": "4MiB", "blocks": "enc*"},
        "offload": {"directories": str(tmp_path), "capacity": "64MiB"},
        "report": {"interval": 0},
    }
    with ssdtrain.attach(model, config, optimizer=_adamw(list(model.parameters()))) as runtime:
        assert runtime.statistics().values()["state/chunks"] == 6
        offload, state = runtime.config.offload, runtime.config.state
        assert offload is not None and state is not None
        assert offload.capacity == state.capacity == 32 << 20


def test_the_one_key_counts_host_memory_with_that_of_offload(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each alone has room, both have not."""
    model = make_model(width=128)
    monkeypatch.setattr("ssdtrain.storage.budget._mem_available", lambda _: 40 << 20)
    config: dict[str, Any] = {"plan": {"state_limit": "4MiB"}, "report": {"interval": 0}}
    optimizer = _adamw(list(model.parameters()))
    ssdtrain.attach(model, config, optimizer=optimizer).close()
    with pytest.raises(HostBudgetExceeded, match=r"plan\.state_limit without drives"):
        ssdtrain.attach(model, {**config, "offload": {"host": "30MiB"}}, optimizer=optimizer)


def test_offload_auto_leaves_room_for_the_model_state_of_the_one_key(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model(width=128)
    config: dict[str, Any] = {"plan": {"state_limit": "4MiB"}, "report": {"interval": 0}}
    optimizer = _adamw(list(model.parameters()))
    with ssdtrain.attach(model, config, optimizer=optimizer) as runtime:
        assert runtime.config.state is not None
        needed = runtime.config.state.host
    available = needed + (4 << 20)  # a quarter of it is more than state leaves
    free = psutil.virtual_memory()._replace(available=available)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: free)
    monkeypatch.setattr("ssdtrain.storage.budget._mem_available", lambda _: available)
    with ssdtrain.attach(model, {**config, "offload": "auto"}, optimizer=optimizer) as runtime:
        offload, state = runtime.config.offload, runtime.config.state
        assert offload is not None and state is not None
        assert offload.host == 2 << 20 and state.host == needed
