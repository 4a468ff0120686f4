"""`ssdtrain.checkpoint` is torch's checkpoint, with its inputs offloaded and every generator restored."""

from __future__ import annotations

import gc
import random
import weakref
from contextlib import nullcontext
from contextvars import ContextVar
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint as torch_checkpoint
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from ssdtrain.config import CheckpointConfig
from ssdtrain.offload.checkpoint import Checkpoint
from tests.offload import zoo
from tests.offload.conftest import MakeRuntime, Variant, settled
from tests.offload.test_equality import same


@pytest.mark.parametrize("reentrant", [False, True])
def test_it_gives_the_bits_of_torchs(reentrant: bool, variant: Variant, make_runtime: MakeRuntime) -> None:
    def run(recording: zoo.Recording, function: Any) -> list[torch.Tensor]:
        torch.manual_seed(0)
        around = lambda block, x: function(block, x, use_reentrant=reentrant)  # noqa: E731
        return zoo.train(zoo.Gpt(layers=3, dropout=0.3), zoo.tokens(), recording, around=around)

    runtime = make_runtime(variant)
    assert same(run(nullcontext, torch_checkpoint), run(runtime.forward, Checkpoint()))
    found = runtime.statistics()
    # Two steps, three blocks: only their inputs moved, beside what embedding and head saved outside of the blocks.
    inputs = 2 * 3 * 2 * 32 * zoo.D * 4
    assert inputs <= found.offload.saved_bytes < 3 * inputs


def test_its_inputs_are_loaded_ahead_of_the_recomputation(make_runtime: MakeRuntime) -> None:
    runtime = make_runtime()
    blocks = [zoo.Block() for _ in range(4)]
    x = zoo.noise(2, 32, zoo.D).requires_grad_()
    ahead = []
    with runtime.forward():
        y = x
        for block in blocks:
            y = Checkpoint()(block, y)
        loss = y.square().mean()
    settled(runtime)
    for block in blocks:
        block.register_forward_pre_hook(lambda *_: ahead.append(runtime.engine.mover.loads.prefetched_bytes))
    loss.backward()
    assert ahead[0] > 0, "nothing was loaded ahead while the last block was recomputed"


def test_keyword_tensors_are_saved_and_offloaded(make_runtime: MakeRuntime) -> None:
    def block(x: torch.Tensor, *, scale: torch.Tensor, power: int, label: str) -> torch.Tensor:
        assert label == "a string" and power == 3
        return (x * scale).pow(power)

    def run(recording: zoo.Recording, function: Any, **more: Any) -> list[torch.Tensor]:
        x = zoo.noise(64, 64).requires_grad_()
        s = zoo.noise(64, 64).requires_grad_()
        with recording():
            scale = s.sin()
            loss = function(block, x.cos(), scale=scale, power=3, label="a string", **more).sum()
        loss.backward()
        return [x.grad, s.grad]

    runtime = make_runtime()
    ours = run(runtime.forward, Checkpoint())
    assert same(run(nullcontext, torch_checkpoint, use_reentrant=False), ours)
    assert same(run(nullcontext, lambda f, *a, **k: f(*a, **k)), ours)
    # x, s, and the two inputs of the block.
    assert runtime.statistics().offload.saved_bytes == 4 * 64 * 64 * 4


@pytest.mark.parametrize("reentrant", [False, True])
def test_registered_generators_repeat_in_the_recomputation(reentrant: bool) -> None:
    """Python's generator stands for a framework's tracker, which torch does not know."""
    generator = random.Random(7)
    drawn: list[float] = []

    def noisy(x: torch.Tensor) -> torch.Tensor:
        drawn.append(generator.random())
        return x * drawn[-1] * x

    checkpoint = Checkpoint()
    checkpoint.register_random_state("python", generator.getstate, generator.setstate)
    x = torch.randn(8, requires_grad=True)
    loss = checkpoint(noisy, x, use_reentrant=reentrant).sum()
    generator.random()
    expected_next = random.Random()
    expected_next.setstate(generator.getstate())
    loss.backward()
    assert drawn[0] == drawn[1]
    assert generator.random() == expected_next.random(), "the recomputation moved the generator of the run"
    checkpoint.unregister_random_state("python")
    drawn.clear()
    checkpoint(noisy, x, use_reentrant=reentrant).sum().backward()
    assert drawn[0] != drawn[1]


def test_a_generator_of_a_context_variable_repeats_and_goes_on() -> None:
    """Backward runs where the variable has another generator."""
    first, other = random.Random(1), random.Random(2)
    current = ContextVar("current", default=other)
    drawn: list[float] = []

    def noisy(x: torch.Tensor) -> torch.Tensor:
        drawn.append(current.get().random())
        return x * drawn[-1] * x

    checkpoint = Checkpoint()
    checkpoint.register_random_state(
        "of the context", lambda: current.get().getstate(), lambda state: current.get().setstate(state)
    )
    token = current.set(first)
    loss = checkpoint(noisy, torch.randn(8, requires_grad=True)).sum()
    current.reset(token)
    before = first.getstate(), other.getstate()
    loss.backward()
    assert drawn[0] == drawn[1]
    assert (first.getstate(), other.getstate()) == before


@pytest.mark.parametrize("reentrant", [False, True])
def test_pythons_and_numpys_numbers_repeat_in_the_recomputation(reentrant: bool) -> None:
    """As of a layer that is dropped at random; the numbers of the run go on as if nothing had been recomputed."""

    def noisy(x: torch.Tensor) -> torch.Tensor:
        return x * random.random() * torch.from_numpy(np.random.rand(8).astype(np.float32)) * x

    def run(checkpointed: bool) -> list[torch.Tensor]:
        random.seed(1)
        np.random.seed(1)
        x = torch.ones(8, requires_grad=True)
        y = Checkpoint()(noisy, x, use_reentrant=reentrant) if checkpointed else noisy(x)
        random.random()
        y.sum().backward()
        return [x.grad, torch.tensor([random.random(), np.random.rand()])]

    assert same(run(False), run(True))


def test_a_generator_that_the_block_does_not_use_is_left_alone() -> None:
    """Another thread may draw from it while backward runs."""
    x = torch.ones(8, requires_grad=True)
    runs = []

    def block(x: torch.Tensor) -> torch.Tensor:
        if runs:
            random.random()  # stands for the other thread
        runs.append(1)
        return x.sin() * x

    y = Checkpoint()(block, x)
    before = random.getstate()
    y.sum().backward()
    assert len(runs) == 2 and random.getstate() != before


def test_the_recomputation_computes_attention_by_the_kernels_of_the_first_run() -> None:
    """Others save other tensors. The flags are global, and the backward may run where they are others."""
    q = torch.randn(1, 2, 16, 8, requires_grad=True)

    def attention(q: torch.Tensor) -> torch.Tensor:
        return nn.functional.scaled_dot_product_attention(q, q, q).sin()

    def run(function: Any) -> list[torch.Tensor]:
        q.grad = None
        with sdpa_kernel(SDPBackend.MATH):
            y = function(q)
        y.sum().backward()
        assert torch.backends.cuda.flash_sdp_enabled()
        return [q.grad.clone()]

    assert same(run(attention), run(lambda q: Checkpoint()(attention, q)))


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_block_may_return_a_parameter(reentrant: bool) -> None:
    """As an MLP does that leaves the addition of its bias to a fused kernel. Torch's own reentrant function takes the Parameter
    for an output of its own: backward recurses, and with gradients off it loses its requires_grad."""
    bias = torch.nn.Parameter(torch.ones(8))

    def block(x: torch.Tensor) -> tuple[torch.Tensor, torch.nn.Parameter]:
        return x.square(), bias

    def gradients(around: Any) -> list[torch.Tensor | None]:
        x = torch.arange(8.0, requires_grad=True)
        bias.grad = None
        with torch.no_grad():
            around(x)
        y, added = around(x)
        (y * added).sum().backward()
        return [x.grad, bias.grad]

    expected = gradients(block)
    found = gradients(lambda x: Checkpoint()(block, x, use_reentrant=reentrant))
    assert bias.is_leaf and bias.requires_grad
    assert same(found, expected)


def test_recomputation_stops_early_unless_told_not_to() -> None:
    calls = []

    def block(x: torch.Tensor) -> torch.Tensor:
        y = x.sin().cos()
        calls.append("end")
        return y.detach() * 1 + y

    x = torch.randn(8, requires_grad=True)
    for early, count in ((True, 1), (False, 2)):
        calls.clear()
        Checkpoint(CheckpointConfig(early_stop=early))(block, x).sum().backward()
        assert len(calls) == count


def test_arguments_that_are_one_tensor_are_one_in_the_recomputation(make_runtime: MakeRuntime) -> None:
    """As attention asks (`query is key`): it runs other operators then."""
    torch.manual_seed(0)
    attention, runtime = nn.MultiheadAttention(64, 2, batch_first=True), make_runtime()
    calls: list[Any] = [
        lambda run, x: run(attention, x, x, x)[0],
        lambda run, x: run(attention, x, key=x, value=x)[0],
        lambda run, x: run(lambda pair, y, *, layer: layer(*pair, y)[0], (x, x), x, layer=attention),
    ]

    def gradients(recording: zoo.Recording, call: Any, run: Any) -> list[torch.Tensor]:
        attention.zero_grad()
        x = zoo.noise(4, 32, 64).requires_grad_()
        with recording():
            loss = call(run, x.cos()).square().sum()
        loss.backward()
        return [x.grad, *(p.grad for p in attention.parameters())]

    for call in calls:
        expected = gradients(nullcontext, call, lambda of, *args, **kwargs: of(*args, **kwargs))
        assert same(expected, gradients(runtime.forward, call, Checkpoint()))


def test_the_recomputation_is_called_with_containers_as_they_were(make_runtime: MakeRuntime) -> None:
    runs: list[tuple[Any, ...]] = []

    def block(x: torch.Tensor, log: list[Any], *, state: dict[str, Any]) -> torch.Tensor:
        runs.append((list(log), sorted(state), state["log"] is log, state["self"] is state))
        log.append(x)
        y = x * state["factor"]
        state["factor"], state["more"] = y, 1
        return y.square()

    def gradients(recording: zoo.Recording, run: Any) -> list[torch.Tensor]:
        x, log = zoo.noise(64, 64).requires_grad_(), list[Any]()
        state: dict[str, Any] = {"factor": zoo.noise(64, 64).cos(), "log": log}
        state["self"] = state
        with recording():
            loss = run(block, run(block, x, log, state=state), log, state=state).sum()
        assert len(log) == 2 and state["more"] == 1  # once, by the first runs
        loss.backward()
        assert len(log) == 2
        return [x.grad]

    expected = gradients(nullcontext, lambda of, *args, **kwargs: of(*args, **kwargs))
    runs.clear()
    runtime = make_runtime()
    assert same(expected, gradients(runtime.forward, Checkpoint()))
    assert len(runs) == 4 and all(one[2:] == (True, True) for one in runs)
    first, second, again_second, again_first = runs
    assert [len(one[0]) for one in (first, again_first, second, again_second)] == [0, 0, 1, 1]
    assert first[1] == again_first[1] and second[1] == again_second[1]


def test_inference_tensors_are_passed_on() -> None:
    with torch.inference_mode():
        table = torch.full((4,), 2.0)
    x = torch.ones(4, requires_grad=True)
    block = lambda x, a, more: (x + a + more["table"]).sin()  # noqa: E731
    Checkpoint()(block, x, table, {"table": table}).sum().backward()
    assert torch.equal(x.grad, torch.full((4,), 5.0).cos())


def test_a_tensor_in_a_list_that_is_changed_after_the_block_is_an_error() -> None:
    x, held = zoo.noise(4, 4).requires_grad_(), [torch.ones(4, 4)]
    y = Checkpoint()(lambda x, held: (x + held[0]).square(), x, held)
    held[0].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_a_tensor_that_bounds_a_slice_is_one_in_a_container() -> None:
    def block(x: torch.Tensor, parts: list[slice]) -> torch.Tensor:
        return x[tuple(parts)].square()

    x, parts = zoo.noise(4, 4).requires_grad_(), [slice(torch.tensor(1), None), slice(None, torch.tensor(3))]
    Checkpoint()(block, x, parts).sum().backward()
    expected = torch.zeros(4, 4)
    expected[1:, :3] = 2 * x.detach()[1:, :3]
    assert torch.equal(x.grad, expected)
    y = Checkpoint()(block, x, parts)
    parts[0].start.fill_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_nested_and_under_autocast(make_runtime: MakeRuntime) -> None:
    def run(recording: zoo.Recording, function: Any) -> list[torch.Tensor]:
        torch.manual_seed(0)
        blocks = nn.ModuleList([zoo.Block(dropout=0.1) for _ in range(3)])
        x = zoo.noise(2, 32, zoo.D).requires_grad_()

        def outer(y: torch.Tensor) -> torch.Tensor:
            for block in blocks:
                y = function(block, y, use_reentrant=False)
            return y

        with torch.autocast("cpu", dtype=torch.bfloat16), recording():
            loss = function(outer, x, use_reentrant=False).float().square().mean()
        loss.backward()
        return [loss.detach(), x.grad, *(p.grad for p in blocks.parameters())]

    assert same(run(nullcontext, torch_checkpoint), run(make_runtime().forward, Checkpoint()))


def test_a_selective_policy_is_passed_on(make_runtime: MakeRuntime) -> None:
    def run(recording: zoo.Recording, function: Any) -> list[torch.Tensor]:
        torch.manual_seed(0)
        block = zoo.Block()
        x = zoo.noise(2, 32, zoo.D).requires_grad_()
        policy = lambda: create_selective_checkpoint_contexts([torch.ops.aten.addmm.default])  # noqa: E731
        with recording():
            loss = function(block, x, use_reentrant=False, context_fn=policy).square().mean()
        loss.backward()
        return [loss.detach(), x.grad]

    assert same(run(nullcontext, torch_checkpoint), run(make_runtime().forward, Checkpoint()))


def test_what_torch_refuses_is_refused() -> None:
    with pytest.raises(ValueError, match="Unexpected keyword arguments"):
        Checkpoint()(lambda x, y: x, torch.ones(1), use_reentrant=True, y=torch.ones(1))
    with pytest.raises(ValueError, match="context_fn"):
        Checkpoint()(
            lambda x: x, torch.ones(1), use_reentrant=True, context_fn=lambda: (nullcontext(), nullcontext())
        )


def test_without_gradients_it_only_calls() -> None:
    with torch.no_grad():
        assert torch.equal(Checkpoint()(torch.sin, torch.ones(3)), torch.ones(3).sin())


def test_no_tensor_waits_for_the_collection_of_garbage() -> None:
    gc.collect()
    gc.disable()
    try:
        x = zoo.noise(4, 4).requires_grad_()
        held = [torch.ones(4, 4)]
        given = weakref.ref(held[0])
        middle = Checkpoint()(lambda x, held: (x + held[0]).square(), x, held)
        seen = weakref.ref(middle)
        middle.sin().sum().backward()
        del middle, held
        assert given() is None and seen() is None
    finally:
        gc.enable()
