"""`"plan": "auto"` where a second run of a block, or a new plan, would do harm: what is refused, and what is said."""

from __future__ import annotations

import gc
import logging
import random
import weakref
from collections import OrderedDict, defaultdict, namedtuple
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, distribute_tensor

import ssdtrain
from ssdtrain.config import ConfigError, PlanConfig, load_config
from ssdtrain.planner.controller import PlanController
from ssdtrain.planner.execute import BlockPolicy
from ssdtrain.planner.finder import Goal
from ssdtrain.planner.model.types import Block, Machine, one_after_the_other
from ssdtrain.planner.plan_blocks import PlanBlocks, recomputable_blocks
from ssdtrain.planner.plans import Objective, SearchProblem, actions_for
from ssdtrain.planner.recompute.purity import may_run_again
from ssdtrain.planner.recompute.trials import Proven
from ssdtrain.planner.search import search
from ssdtrain.runtime import Runtime
from ssdtrain.steps import Step
from tests.planner.test_plan_auto import (
    LAYERS,
    QUIET,
    STEPS,
    Cache,
    Caches,
    Stack,
    auto_of,
    blocks_of,
    equal,
    gpt,
    train,
)
from tests.support.ranks import on_ranks

LEAST = {"plan": {"objective": "memory", "max_slowdown": 0.99}, **QUIET}
"""Whatever may be recomputed is."""


class Sum(torch.autograd.Function):
    """Of all ranks, as a layer of tensor parallelism by hand makes it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, kind: str) -> torch.Tensor:
        if kind == "functional":
            return functional.all_reduce(x, "sum", dist.group.WORLD)
        if kind == "messages":
            other = torch.empty_like(x)
            peer = 1 - dist.get_rank()
            pair = [dist.P2POp(dist.isend, x.contiguous(), peer), dist.P2POp(dist.irecv, other, peer)]
            for work in dist.batch_isend_irecv(pair):
                work.wait()
            return x + other
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient, None


class Communicates(nn.Module):
    kind = ""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(x).tanh()
        return Sum.apply(x, self.kind).tanh() if self.kind else x


def _by_hand(rank: int) -> list[Any]:
    found: list[Any] = []
    for kind in ("", "all_reduce", "functional", "messages"):
        Communicates.kind = kind
        torch.manual_seed(0)
        expected = train(Stack(Communicates))
        torch.manual_seed(0)
        model = Stack(Communicates)
        with ssdtrain.attach(model, LEAST) as runtime:
            same = equal(expected, train(model))
            plan = auto_of(runtime).plan
        found.append((same, plan is not None and plan.count("recompute") > 0))
    mesh = init_device_mesh("cpu", (2,))
    for layer in model.layers:
        layer.linear.weight = nn.Parameter(distribute_tensor(layer.linear.weight.data, mesh, [Replicate()]))
    found.append(recomputable_blocks(model, PlanConfig()))
    return found


@pytest.mark.slow
@pytest.mark.distributed
def test_a_block_that_communicates_is_never_recomputed() -> None:
    for found in on_ranks(2, _by_hand):
        assert found == [(True, True), (True, False), (True, False), (True, False), None]


def _seen_apart(rank: int) -> bool:
    """To one rank a tensor of each block looks given away, as one does that the thread of a collective still holds."""
    Communicates.kind = "all_reduce"
    torch.manual_seed(0)
    expected = train(Stack(Communicates))
    torch.manual_seed(0)
    model = Stack(Communicates)
    with patch.object(Proven, "_gives_away", lambda proven, known: rank == 1), ssdtrain.attach(model, LEAST):
        return equal(expected, train(model))


@pytest.mark.slow
@pytest.mark.distributed
def test_a_block_that_communicates_is_tried_by_no_rank() -> None:
    """The second run of one rank would pair with the next message of the other."""
    assert on_ranks(2, _seen_apart) == [True, True]


def test_an_impure_block_is_never_recomputed_though_its_small_tensors_would_go() -> None:
    blocks = [Block(f"block {i}", 1.0, 2.0, 100, recompute=0.0, small=1000) for i in range(12)]
    impure = frozenset({1, 5, 11})
    problem = SearchProblem(
        [blocks], one_after_the_other(), Machine(), actions_for(Machine()), frozenset({0}), impure
    )
    best = search(problem, objective=Objective(0, 1), exact=1)[0]
    assert best.count("recompute") == 8
    assert {number for number, action in enumerate(best.actions) if action == "keep"} >= impure


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x.relu_())


class State(nn.Module):
    """Reads what the block before has left in a container, and leaves its own there, with gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: torch.Tensor, state: Any) -> torch.Tensor:
        if isinstance(state, Kept):
            h = self.first(x) + state.tensors.pop()
            state.tensors.append(h)
        elif isinstance(state, tuple):
            [inner] = state[0]["inner"]
            h = self.first(x) + inner
            state[0]["inner"] = [h]
            state[1].append(h.detach())
        elif isinstance(state, list):
            h = self.first(x) + state[-1]
            state.append(h)
        else:
            h = self.first(x) + state["before"]
            state["before"] = h
        return x + self.last(h.tanh().sin().cos().exp())


class Kept:
    """A cache whose class is registered with torch's pytrees, as some libraries do."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self.tensors = tensors


torch.utils._pytree.register_pytree_node(
    Kept, lambda kept: (list(kept.tensors), None), lambda tensors, _: Kept(list(tensors))
)


class States(nn.Module):
    def __init__(self, state: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.state = state
        self.blocks = nn.ModuleList(State() for _ in range(LAYERS))

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = torch.nn.functional.one_hot(tokens % 64, 64).float()
        state = self.state(torch.zeros_like(x))
        for block in self.blocks:
            x = block(x, state)
        return (x - targets[..., None] / 256).square().mean()


def test_a_cache_stays_an_object_once_it_is_registered_for_export() -> None:
    transformers = pytest.importorskip("transformers")
    executorch = pytest.importorskip("transformers.integrations.executorch")
    executorch.register_dynamic_cache_export_support()
    assert not may_run_again(((torch.ones(1),), {"past_key_values": transformers.DynamicCache()}))
    pair = namedtuple("pair", "x more")
    plain = pair(torch.ones(1), [{"a": (None, 1, 1.0, 1j, "a", b"a", slice(1), torch.Size([1]))}])
    assert may_run_again((plain, torch.channels_last, torch.float32, torch.strided, torch.device("cpu")))
    assert not may_run_again([{"a": (defaultdict(int),)}])
    assert may_run_again(slice(torch.tensor(1), None, 2)) and not may_run_again([slice(None, object())])


class Average(nn.Module):
    """Keeps a moving average by assignment: the tensor of before is not changed."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)
        self.register_buffer("average", torch.zeros(64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # Before the last tensor that is saved, where a recomputation stops.
        self.average = 0.9 * self.average + 0.1 * x.detach().flatten(0, -2).mean(0)
        return self.linear(x).tanh()


def test_what_is_kept_for_a_backward_at_once_is_not_planned_to_leave(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As on the last stage of a pipeline, beside a device whose bandwidth is known though nothing was written.
    monkeypatch.setattr("ssdtrain.device.CpuDevice.link_bandwidth", lambda _: (1e10, 1e10))
    limit = 4 << 20
    config = {"plan": {"device_limit": limit}, "offload": {"directories": str(tmp_path)}, **QUIET}
    model = gpt()
    blocks = {f"blocks.{n}": block for n, block in enumerate(model.blocks)}
    with Runtime(load_config(config), plan_blocks=PlanBlocks(blocks)) as runtime:
        runtime.register(model)
        runtime.step_begin()
        for step in range(STEPS):
            tokens = torch.randint(256, (4, 64))
            with runtime.forward(keep=True):
                loss = model(tokens, tokens)
            if not step:  # what cannot fit is not tried, in the first step either
                assert sum("forward" in block.__dict__ for block in model.blocks) == LAYERS - 1
                first = runtime.statistics()
            with runtime.backward():
                loss.backward()
            model.zero_grad()
            runtime.step_end()
        plan = auto_of(runtime).plan
        problem = auto_of(runtime).problem
        assert not runtime.engine.metrics.offloaded_bytes
    assert first.offload.activation_peak_bytes <= limit < sum(block.saved for block in problem.blocks)
    assert plan.peak <= limit
    assert set(plan.actions) == {"keep", "recompute"}


class Draws(nn.Module):
    """Drops by a generator that torch's checkpoint does not know."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.dropout = nn.Linear(64, 64), nn.Dropout(0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.dropout(self.linear(x * (1 + random.random())).tanh())


class OwnGenerator(Draws):
    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).tanh() * torch.rand(64, generator=self.generator)


KINDS: dict[str, tuple[Callable[[], nn.Module], bool | None]] = {
    "changes its input": (partial(Stack, InPlace), False),
    "replaces a buffer": (partial(Stack, Average), None),
    "draws by Python's generator": (partial(Stack, Draws), True),
    "has a generator of its own": (partial(Stack, OwnGenerator), False),
    "writes into a dict": (partial(States, lambda x: {"before": x}), True),
    "writes into an ordered dict": (partial(States, lambda x: OrderedDict(before=x)), True),
    "writes into a list": (partial(States, lambda x: [x]), True),
    "writes into nested containers": (partial(States, lambda x: ({"inner": [x]}, [])), True),
    "is called with a registered pytree": (partial(States, lambda x: Kept([x])), False),
}
"""Models by what their blocks do, and whether a plan recomputes these; None: the one that backward runs first at most."""


@pytest.mark.parametrize("tiers", [False, True], ids=["recompute", "offload and recompute"])
@pytest.mark.parametrize("kind", KINDS)
def test_no_bit_changes_and_a_block_is_recomputed_only_where_its_second_run_is_the_first(
    kind: str, tiers: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Containers are given again as they were, and random numbers drawn again, whatever the config says of them."""
    make, recomputes = KINDS[kind]

    def run(config: dict[str, Any] | None) -> list[torch.Tensor]:
        random.seed(0)
        torch.manual_seed(0)
        model = make()
        with nullcontext() if config is None else ssdtrain.attach(model, config) as runtime:
            found = train(model)
            if runtime is not None and recomputes is not None:
                plan = auto_of(runtime).plan
                found_recomputed = plan is not None and plan.count("recompute") > 0
                assert found_recomputed == recomputes or (
                    recomputes and tiers
                )  # a drive may be the better way
        return [*found, *(buffer.clone() for buffer in model.buffers())]

    config = {**LEAST, "checkpoint": {"preserve_rng_state": False, "use_reentrant": True}}
    offload = {"offload": {"directories": str(tmp_path), "min_bytes": "4KiB"}} if tiers else {}
    assert equal(run(None), run({**config, **offload}))
    assert kind != "has a generator of its own" or "it has a random generator of its own" in caplog.text


def test_calls_with_other_parameters_are_not_recomputed(caplog: pytest.LogCaptureFixture) -> None:
    """As in meta-learning, which also asks for gradients of gradients."""

    def run(attached: bool) -> list[torch.Tensor]:
        model = gpt()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        found = []
        with ssdtrain.attach(model, LEAST) if attached else nullcontext():
            torch.manual_seed(1)
            for _ in range(STEPS):
                own, tokens = dict(model.named_parameters()), torch.randint(256, (2, 64))
                loss = torch.func.functional_call(model, own, (tokens, tokens))
                steps = torch.autograd.grad(loss, list(own.values()), create_graph=True)
                adapted = {name: one - step for (name, one), step in zip(own.items(), steps, strict=True)}
                torch.func.functional_call(model, adapted, (tokens, tokens)).backward()
                found += [one.grad.clone() for one in own.values() if one.grad is not None]
                optimizer.step()
                optimizer.zero_grad()
        return found

    assert equal(run(False), run(True))
    assert "blocks.0: it is called with other tensors in the place of its parameters" in caplog.text


def test_where_the_bandwidth_leaves_no_plan_the_old_one_is_followed(caplog: pytest.LogCaptureFixture) -> None:
    model = gpt()
    with ssdtrain.attach(model, {"plan": {"device_limit": "4MiB"}, **QUIET}) as runtime:
        train(model)
        auto = auto_of(runtime)
        before = auto.plan
        auto._finder.goal = Goal(1)
        for _ in range(8):
            auto.request("a test wants one")
            auto.on_step_end(Step(0, 1.0, forwards=1))
        assert auto.plan is before is not None and not auto.reason
        train(model, 1)
    lines = [r.getMessage() for r in caplog.records if "the plan of before is followed" in r.getMessage()]
    assert len(lines) == 1 and "no plan keeps to" in lines[0]


def test_where_no_block_can_be_recomputed_somebody_is_told(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "ssdtrain")
    model = Stack(Caches)
    with ssdtrain.attach(model, {"plan": "auto", **QUIET}):
        train(model)
    [line] = [r.getMessage() for r in caplog.records if "ssdtrain.plan" in r.getMessage()]
    assert "no block can be recomputed: layers.0: it is called with an object" in line
    assert "use_cache=False" in line
    with (
        ssdtrain.attach(model, {"plan": {"recompute": "on"}, **QUIET}),
        pytest.raises(ConfigError, match=r"can recompute no block: layers\.0"),
    ):
        train(model)
    assert model.cache is not None and isinstance(model.cache, Cache)


def test_a_layer_that_is_in_the_list_several_times_is_no_block() -> None:
    model = nn.Module()
    model.layers = nn.ModuleList([nn.Linear(4, 4)] * 3)
    assert recomputable_blocks(model, PlanConfig()) is None


def test_scripted_blocks_are_none(tmp_path: Path) -> None:
    """They take no hooks."""
    model = nn.Sequential(
        nn.Linear(64, 64), nn.ModuleList(torch.jit.script(nn.Linear(64, 64)) for _ in range(2))
    )
    assert recomputable_blocks(model, PlanConfig()) is None
    model.forward = lambda x: model[1][0](model[0](x))  # type: ignore[method-assign,index]
    offload = {"directories": str(tmp_path), "min_bytes": "4KiB", "include": ["*"]}
    with ssdtrain.attach(model, {"offload": offload, **QUIET}) as runtime:
        model(torch.randn(64, 64)).sum().backward()
        found = runtime.statistics()
    assert found.offload.offloaded_bytes + found.offload.avoided_write_bytes


class Nested(nn.Module):
    """Calls itself: the inner forward has the blocks, and the outer one saves more bytes in fewer tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64)) for _ in range(4)
        )

    def forward(self, x: torch.Tensor, inner: bool = False) -> torch.Tensor:
        if not inner:
            return (x.repeat(256, 1) * self(x, inner=True).mean()).sin().sum()
        for layer in self.layers:
            x = layer(x)
        return x


def test_a_forward_inside_of_another_is_not_measured() -> None:
    """Nor is one beside another on a second thread: regions have their numbers on another tape."""
    model = Nested()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with ssdtrain.attach(model, LEAST) as runtime:
        for _ in range(STEPS):
            model(torch.randn(64, 64, requires_grad=True)).backward()
            optimizer.step()
        assert auto_of(runtime).plan is not None


def test_a_forward_larger_than_the_profiled_ones_is_noticed_at_once() -> None:
    from ssdtrain.offload.policy import ForwardProfile

    policy = BlockPolicy({})
    policy.follow({}, expected=100)
    policy.observe(ForwardProfile(0, 0, 110, 0.0, 0.0))
    assert not policy.shape_changed()
    policy.observe(ForwardProfile(0, 0, 130, 0.0, 0.0))
    assert policy.shape_changed()


def test_the_largest_recorded_forward_is_planned_for() -> None:
    model = gpt()
    sizes = [4, 4, 4, 12, 4, 2] + [12] * 10
    with ssdtrain.attach(model, {"plan": {"device_limit": "16MiB"}, **QUIET}) as runtime:
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        for size in sizes:
            tokens = torch.randint(256, (size, 32))
            model(tokens, tokens).backward()
            optimizer.step()
            optimizer.zero_grad()
        auto = auto_of(runtime)
        assert auto.metric.plans == 1 and auto.problem is not None
        assert (
            sum(block.saved for block in auto.problem.blocks) >= blocks_of(runtime)._policy.largest > 1 << 20
        )


def test_a_plan_that_nobody_holds_is_gone() -> None:
    def attached() -> tuple[weakref.ref[Any], weakref.ref[Any]]:
        model = gpt()
        runtime = ssdtrain.attach(model, {"plan": "auto", **QUIET})
        train(model, STEPS)
        return weakref.ref(model), weakref.ref(auto_of(runtime))

    model, plan = attached()
    gc.collect()
    found = plan()
    assert found is None or isinstance(found, PlanController)
    assert model() is None and found is None


def test_a_pipeline_stage_without_blocks_has_nothing_to_plan_for() -> None:
    config = load_config({"plan": {"recompute": "on"}, **QUIET})
    stage = nn.Linear(64, 64)
    blocks = PlanBlocks({"layers.0": nn.Linear(64, 64)})
    with Runtime(config, plan_blocks=PlanBlocks(why="it is empty", empty_stage=True)) as runtime:
        runtime.register(stage)
        for _ in range(STEPS):
            runtime.step_begin()
            with runtime.forward():
                loss = stage(torch.randn(4, 64)).square().mean()
            with runtime.backward():
                loss.backward()
            runtime.step_end()
        found = runtime.statistics()
        assert found is not None
    # Metrics are reduced over all ranks.
    with Runtime(config, plan_blocks=blocks) as other:
        full = other.statistics()
        assert [m.name for m in found.declared()] == [m.name for m in full.declared()]
    with pytest.raises(ConfigError, match="can recompute no block here: it is empty"):
        Runtime(config, plan_blocks=PlanBlocks(why="it is empty"))
