"""`"plan": "auto"` in plain PyTorch: bits of the run without it, a plan within its limits, and what it must not recompute."""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

import ssdtrain
from examples.support.model import GPT, GPTConfig
from ssdtrain.config import ConfigError, load_config
from ssdtrain.planner.blocks import RECORDED, WARM_UP, Blocks
from ssdtrain.planner.controller import PlanController
from ssdtrain.planner.execute import BlockPolicy
from ssdtrain.planner.model.timeline import simulate
from ssdtrain.planner.plans import NoPlan
from ssdtrain.runtime import Runtime
from tests.support.ranks import on_ranks
from tests.support.tensors import all_equal as equal
from tests.support.tiers import tiered

LAYERS = 6
STEPS = WARM_UP + RECORDED + 3
QUIET = {"report": {"interval": 0}}


def gpt() -> GPT:
    torch.manual_seed(0)
    return GPT(GPTConfig(layers=LAYERS, hidden=64, heads=2, sequence=64, dropout=0.1))


def train(
    model: nn.Module, steps: int = STEPS, microbatches: int = 2, sequence: int = 64
) -> list[torch.Tensor]:
    """Losses of all steps, and the weights after them."""
    torch.manual_seed(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        for _ in range(microbatches):
            tokens = torch.randint(256, (4, sequence))
            loss = model(tokens, tokens)
            loss.backward()
            losses.append(loss.detach())
        optimizer.step()
    return [*losses, *(p.detach().clone() for p in model.parameters())]


def train_sizes(model: nn.Module, batches: list[int]) -> list[torch.Tensor]:
    """The weights after a step of each of these batches."""
    torch.manual_seed(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    for batch in batches:
        tokens = torch.randint(256, (batch, 32))
        model(tokens, tokens).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach().clone() for p in model.parameters()]


def auto_of(runtime: Runtime) -> PlanController:
    (found,) = [feature for feature in runtime.features if isinstance(feature, PlanController)]
    return found


def blocks_of(runtime: Runtime) -> Blocks:
    subject = auto_of(runtime).subject
    assert isinstance(subject, Blocks)
    return subject


@pytest.mark.parametrize(
    "tiers", tiered([False, True], quick=[False]), ids=["recompute", "offload and recompute"]
)
def test_a_limit_is_kept_to_and_no_bit_changes(tiers: bool, tmp_path: Path) -> None:
    expected = train(gpt())
    model = gpt()
    limit = 8 << 20 if tiers else 4 << 20  # the buffers of loads take 2 or 4 MiB of it
    config: dict[str, Any] = {"plan": {"device_limit": limit}, **QUIET}
    if tiers:
        config["offload"] = {"directories": str(tmp_path), "min_bytes": "4KiB"}
    with ssdtrain.attach(model, config) as runtime:
        found = train(model)
        plan = auto_of(runtime).plan
        metrics = runtime.statistics()
        engine = runtime.engine
        assert engine is not None and (not tiers or engine.mover.stores.limit < limit)
    assert equal(expected, found)
    assert plan.peak <= limit
    assert tiers or 0 < plan.count("recompute") < LAYERS
    assert metrics.offload.activation_peak_bytes > 0
    assert not any("forward" in block.__dict__ for block in model.blocks)
    assert "forward" not in model.__dict__


def test_the_peak_of_offloading_everything_is_as_predicted_whatever_the_drive_does(tmp_path: Path) -> None:
    model = gpt()
    offload = {"directories": str(tmp_path), "min_bytes": "4KiB"}
    with ssdtrain.attach(model, {"plan": {"max_slowdown": 0.5}, "offload": offload, **QUIET}) as runtime:
        train(model, microbatches=1)
        auto, engine = auto_of(runtime), runtime.engine
        assert auto.problem is not None and isinstance(engine.policy, BlockPolicy)
        auto.detach()
        engine.modules.watch(model, owner=auto)
        names = {f"blocks.{number}" for number in range(LAYERS)}
        auto.arena_used(True)
        engine.policy.follow({name: "offload" for name in names})
        train(model, 1, microbatches=1)
        runtime.reset_peak()
        train(model, 1, microbatches=1)
        metrics = runtime.statistics()
        # The arena is that of these steps: in the step that the plan was made from it may have been larger.
        machine = replace(auto.problem.machine, buffers=engine.limits().buffers)
    of = auto.problem
    choices = of.choices(["ssd" if block.name in names else "keep" for block in of.blocks])
    predicted = simulate(of.chunks, choices, of.order, machine, steps=2)
    assert metrics.offload.activation_peak_bytes == pytest.approx(predicted.peak_bytes, rel=0.02)


def test_the_arena_counts_where_something_leaves_only(tmp_path: Path) -> None:
    offload = {"directories": str(tmp_path), "min_bytes": "4KiB"}

    def peak_within(limit: str | int) -> int:
        """Predicted and measured, where everything is kept."""
        model = gpt()
        plan = {"device_limit": limit}
        with ssdtrain.attach(model, {"plan": plan, "offload": offload, **QUIET}) as runtime:
            engine, auto = runtime.engine, auto_of(runtime)
            engine.buffers.fit(8 << 20)  # more than this model saves
            train(model, microbatches=1)
            assert set(auto.plan.actions) == {"keep"}
            assert not engine.buffers.counted_bytes
            runtime.reset_peak()
            train(model, 1, microbatches=1)
            metrics = runtime.statistics()
        assert metrics.offload.activation_peak_bytes == metrics.offload.unoffloaded_peak_bytes
        assert metrics.offload.activation_peak_bytes == pytest.approx(auto.plan.peak, rel=0.02)
        return auto.plan.peak

    peak = peak_within("1GiB")
    assert peak_within(peak + (1 << 20)) == peak


def test_auto_by_itself_lowers_the_peak_at_little_cost() -> None:
    model = gpt()
    with ssdtrain.attach(model, {"plan": "auto", **QUIET}) as runtime:
        assert equal(train(gpt()), train(model))
        auto = auto_of(runtime)
    assert auto.plan is not None and auto.problem is not None
    assert auto.metric.predicted_step_ratio <= 1.02 + 1e-9


def test_a_limit_that_no_plan_meets_is_an_error_with_the_smallest_peak() -> None:
    model = gpt()
    with ssdtrain.attach(model, {"plan": {"device_limit": "64KiB"}, **QUIET}):
        with pytest.raises(NoPlan, match=r"ssdtrain\.plan: .*smallest peak .* of which") as raised:
            train(model)
    assert raised.value.smallest.peak > 64 << 10


class Counts(nn.Module):
    """Has a side effect: a buffer of how often it ran."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)
        self.register_buffer("runs", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.runs += 1
        return self.linear(x).tanh()


class Caches(nn.Module):
    """Has a side effect on what it is called with."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor, cache: Any) -> torch.Tensor:
        cache.ran += 1
        return self.linear(x).tanh()


class Cache:
    ran = 0


class Stack(nn.Module):
    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.cache = Cache() if kind is Caches else None
        self.layers = nn.ModuleList(kind() for _ in range(4))

    def forward(self, x: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        x = torch.nn.functional.one_hot(x, 256).float()[..., :64]
        for layer in self.layers:
            x = layer(x) if self.cache is None else layer(x, self.cache)
        return x.square().mean()


@pytest.mark.parametrize("kind", [Counts, Caches])
def test_a_block_with_side_effects_is_never_recomputed(kind: type[nn.Module]) -> None:
    torch.manual_seed(0)
    model = Stack(kind)
    with ssdtrain.attach(model, {"plan": {"device_limit": "1KiB"}, **QUIET}):
        with pytest.raises(NoPlan):
            train(model, microbatches=1)
    ran = WARM_UP + RECORDED
    if kind is Counts:
        assert [float(layer.runs) for layer in model.layers] == [ran] * 4
    else:
        assert model.cache is not None and model.cache.ran == 4 * (ran + 1)  # profiling began anew


@pytest.mark.slow
def test_copies_of_a_planned_model_are_plain() -> None:
    model = gpt()
    with ssdtrain.attach(model, {"plan": {"device_limit": "4MiB"}, **QUIET}):
        for steps in (1, STEPS):  # while steps are profiled, and under the plan
            train(model, steps)
            others = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
            plain = gpt()
            plain.load_state_dict(model.state_dict())
            expected = train(plain, 1)
            for other in others:
                assert equal(train(other, 1), expected)
                assert not any(
                    "forward" in block.__dict__ and block.forward.__self__ is not block
                    for block in other.blocks
                )


@pytest.mark.slow
def test_a_longer_sequence_is_planned_for_again() -> None:
    model, plain = gpt(), gpt()

    with ssdtrain.attach(model, {"plan": {"device_limit": "2MiB"}, **QUIET}) as runtime:
        for batch in (2, 6):
            batches = [batch] * (STEPS + 8)
            assert equal(train_sizes(plain, batches), train_sizes(model, batches))
        auto = auto_of(runtime)
        assert auto.metric.plans >= 2
        assert auto.plan.peak <= 2 << 20


def test_where_nothing_can_be_chosen_the_error_says_so() -> None:
    model = nn.Linear(4, 4)
    for recompute, key in (("on", "ssdtrain.plan.recompute"), ("auto", "ssdtrain.plan")):
        with pytest.raises(ConfigError, match="can recompute no block here") as raised:
            ssdtrain.attach(model, {"plan": {"recompute": recompute}, **QUIET})
        assert raised.value.problems[0].path == key


def test_without_blocks_the_amount_is_planned(tmp_path: Path) -> None:
    config = {"plan": {"device_limit": "1MiB"}, "offload": {"directories": str(tmp_path)}, **QUIET}
    with ssdtrain.attach(nn.Linear(4, 4), config) as runtime:
        assert [type(feature).__name__ for feature in runtime.features] == [
            "ActivationOffload",
            "PlanController",
            "InnerHooks",
            "BypassedModel",
        ]


@pytest.mark.parametrize(
    ("offload", "key"),
    [
        ({"amount": 0.5}, "offload.amount"),
        ({"amount": "auto", "device_budget": "1GiB"}, "offload.device_budget"),
        ({"include": ["*.mlp"]}, "offload.include"),
    ],
)
def test_what_the_plan_decides_is_not_fixed_beside_it(offload: dict[str, Any], key: str) -> None:
    section = {"host": "1GiB", **offload}
    with pytest.raises(ConfigError) as raised:
        load_config({"plan": "auto", "offload": section})
    assert [problem.path for problem in raised.value.problems] == [f"ssdtrain.{key}"]
    load_config({"plan": "off", "offload": section})


def _sharded(rank: int, directory: str) -> list[bool]:
    def sharded() -> nn.Module:
        model = gpt()
        for block in model.blocks:
            fully_shard(block)
        return fully_shard(model)

    def full(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        return [t.full_tensor() if hasattr(t, "full_tensor") else t for t in tensors]

    expected = full(train(sharded()))
    found = []
    for config in ({}, {"offload": {"directories": f"{directory}/{{rank}}", "min_bytes": "4KiB"}}):
        model = sharded()
        with ssdtrain.attach(model, {"plan": {"device_limit": "8MiB"}, **QUIET, **config}) as runtime:
            found.append(equal(expected, full(train(model))))
            plan = auto_of(runtime).plan
            found.append(plan is not None and plan.peak <= 8 << 20)
    return found


@pytest.mark.slow
@pytest.mark.distributed
def test_fsdp2_with_a_plan_has_the_bits_of_fsdp2_without(tmp_path: Path) -> None:
    for found in on_ranks(2, _sharded, str(tmp_path)):
        assert found == [True] * 4


@pytest.mark.parametrize("limit", [4 << 20, 1 << 30], ids=["recompute", "keep"])
def test_a_plan_that_moves_nothing_has_no_hooks_on_modules(limit: int) -> None:
    """What is done with a saved tensor does not depend on who saved it; where steps are profiled again, hooks come back."""
    model = gpt()
    with ssdtrain.attach(model, {"plan": {"device_limit": limit}, **QUIET}) as runtime:
        assert runtime.engine is not None
        modules = runtime.engine.modules
        assert modules.watching
        train(model)
        plan = auto_of(runtime).plan
        assert plan is not None and ("recompute" in plan.actions) == (limit < 1 << 30)
        assert not modules.watching
        for _ in range(2):
            model(torch.randint(256, (16, 64)), torch.randint(256, (16, 64))).backward()
            torch.optim.SGD(model.parameters()).step()
        assert modules.watching  # for forwards of another size
