"""torch.func, forward-mode AD and make_fx around and inside of an offloaded forward."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

from ssdtrain.offload import functorch
from tests.offload.conftest import VARIANTS, MakeRuntime, settled, stored_forward

SIZE = 64
PLAIN = torch.autograd.graph.disable_saved_tensors_hooks

Recording = Callable[[], AbstractContextManager[Any]]

steps_aside = pytest.mark.skipif(
    not functorch.CAN_STEP_ASIDE,
    reason="torch 2.6 does not tell whose hooks are installed, and refuses torch.func",
)


def model_and_input() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(SIZE, SIZE), nn.GELU(), nn.Linear(SIZE, SIZE))
    return model, torch.randn(SIZE, SIZE)


TRANSFORMS: dict[str, Callable[[Callable[[torch.Tensor], torch.Tensor], torch.Tensor], torch.Tensor]] = {
    "grad": lambda f, x: torch.func.grad(lambda y: f(y).square().sum())(x),
    "vjp": lambda f, x: torch.func.vjp(f, x)[1](torch.ones(SIZE, SIZE))[0],
    "jacrev": lambda f, x: torch.func.jacrev(lambda y: f(y).mean(0))(x[:2]),
    "hessian": lambda f, x: torch.func.hessian(lambda y: f(y).square().mean())(x[:1]),
    "jvp": lambda f, x: torch.func.jvp(f, (x,), (torch.ones(SIZE, SIZE),))[1],
    "vmap": lambda f, x: torch.func.vmap(f)(x),
    "grad of vmap": lambda f, x: torch.func.vmap(torch.func.grad(lambda y: f(y).sum()))(x),
    "linearize": lambda f, x: torch.func.linearize(f, x)[1](torch.ones(SIZE, SIZE)),
}


@pytest.mark.parametrize("name", TRANSFORMS)
@pytest.mark.parametrize("inside", [True, False], ids=["inside", "around"])
def test_transforms_inside_and_around_of_an_offloaded_forward(
    name: str, inside: bool, make_runtime: MakeRuntime
) -> None:
    if inside and not functorch.CAN_STEP_ASIDE and name not in ("jvp", "vmap", "linearize"):
        pytest.skip("torch 2.6 refuses it")

    def case(recording: Recording) -> list[torch.Tensor]:
        model, x = model_and_input()

        def recorded(y: torch.Tensor) -> torch.Tensor:
            with recording():
                return model(y)

        if inside:
            with recording():
                before = model(x)
                found = TRANSFORMS[name](model, x)
                loss = model(before).square().mean() + found.square().mean()
        else:
            loss = TRANSFORMS[name](recorded, x).square().mean()
        loss.backward()
        return [loss, *(p.grad for p in model.parameters() if p.grad is not None)]

    runtime = make_runtime()
    expected = case(nullcontext)
    found = case(lambda: stored_forward(runtime) if inside else runtime.forward())
    assert len(found) == len(expected)
    for mine, theirs in zip(found, expected, strict=True):
        assert torch.equal(mine, theirs)
    if inside:
        # What the transform did not save moved, before it and after.
        assert runtime.statistics().offload.offloaded_bytes > 0
    assert torch.autograd.graph.disable_saved_tensors_hooks is PLAIN


def test_where_torch_does_not_tell_whose_hooks_there_are_it_refuses(
    make_runtime: MakeRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(functorch, "CAN_STEP_ASIDE", False)
    runtime = make_runtime()
    x = torch.randn(SIZE, SIZE, requires_grad=True)
    with runtime.forward():
        loss = x.sin().sum()
        with pytest.raises(RuntimeError, match="support saved tensor hooks"):
            torch.func.grad(lambda y: y.sin().sum())(x.detach())
    loss.backward()
    assert torch.equal(x.grad, x.cos().detach())


@steps_aside
def test_one_warning(make_runtime: MakeRuntime, caplog: pytest.LogCaptureFixture) -> None:
    functorch.warn_once.cache_clear()
    runtime = make_runtime()
    x = torch.randn(SIZE, SIZE)
    with caplog.at_level(logging.WARNING, "ssdtrain"):
        for _ in range(2):
            with runtime.forward():
                torch.func.grad(lambda y: y.sin().sum())(x)
    assert len([message for message in caplog.messages if "torch.func.grad" in message]) == 1


@steps_aside
def test_the_hooks_are_back_after_a_transform_that_raised(make_runtime: MakeRuntime) -> None:
    runtime = make_runtime()
    x = torch.randn(SIZE, SIZE, requires_grad=True)

    def fails(y: torch.Tensor) -> torch.Tensor:
        raise KeyError

    with runtime.forward():
        with runtime.forward():
            with pytest.raises(KeyError):
                torch.func.grad(fails)(x.detach())
            loss = x.sin().sum()
        loss = loss + x.exp().sum()
    assert runtime.statistics().offload.saved_tensors == 2
    loss.backward()


@steps_aside
def test_hooks_of_somebody_else_are_left_to_torch(make_runtime: MakeRuntime) -> None:
    runtime = make_runtime()
    x = torch.randn(SIZE, SIZE)
    other = torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t)
    for order in ([other, runtime.forward()], [runtime.forward(), other]):
        with order[0], order[1], pytest.raises(RuntimeError, match="support saved tensor hooks"):
            torch.func.grad(lambda y: y.sin().sum())(x)


@steps_aside
def test_compiled_transforms_inside_of_an_offloaded_forward(make_runtime: MakeRuntime) -> None:
    def case(recording: Recording) -> list[torch.Tensor]:
        torch.compiler.reset()
        model, x = model_and_input()

        @torch.compile(backend="eager")
        def step(y: torch.Tensor) -> torch.Tensor:
            return model(y) + torch.func.grad(lambda z: z.sin().sum())(y)

        with recording():
            loss = step(x).square().mean()
        loss.backward()
        return [loss, *(p.grad for p in model.parameters() if p.grad is not None)]

    for mine, theirs in zip(case(make_runtime().forward), case(nullcontext), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("variant", VARIANTS[:3], ids=lambda variant: variant.name)
def test_forward_mode_ad_in_an_offloaded_forward(variant: Any, make_runtime: MakeRuntime) -> None:
    def case(recording: Recording) -> list[torch.Tensor]:
        model, x = model_and_input()
        with forward_ad.dual_level():
            with recording():
                dual = forward_ad.make_dual(x, torch.ones_like(x))
                out = forward_ad.unpack_dual(model(dual))
                loss = out.tangent.square().mean() + out.primal.square().mean()
            loss.backward()
        return [loss, *(p.grad for p in model.parameters() if p.grad is not None)]

    runtime = make_runtime(variant)
    runtime.register(nn.Linear(2, 2))
    for mine, theirs in zip(case(lambda: stored_forward(runtime)), case(nullcontext), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
def test_make_fx_in_an_offloaded_forward_records_what_computes_the_same(
    mode: str, make_runtime: MakeRuntime
) -> None:
    w = torch.randn(SIZE, SIZE, requires_grad=True)
    x = torch.randn(SIZE, SIZE)

    def gradient(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.autograd.grad(torch.nn.functional.gelu(x @ w).sum(), w)[0]

    with make_runtime().forward():
        graph = make_fx(gradient, tracing_mode=mode)(x, w)
    assert torch.equal(graph(2 * x, w), gradient(2 * x, w))


def test_make_fx_of_a_backward_whose_forward_was_offloaded(make_runtime: MakeRuntime) -> None:
    runtime = make_runtime()
    w = torch.randn(SIZE, SIZE, requires_grad=True)
    with runtime.forward():
        loss = (w.sin() * 2).sum()
    settled(runtime)
    graph = make_fx(lambda scale: torch.autograd.grad(loss, w, scale)[0])(torch.ones(()))
    assert torch.equal(graph(torch.tensor(3.0)), 6 * w.cos().detach())


@steps_aside
def test_a_function_that_somebody_put_over_ours_is_not_called_by_it(make_runtime: MakeRuntime) -> None:
    runtime = make_runtime()
    model, x = model_and_input()
    calls = 0
    try:
        with runtime.forward():
            ours = torch.autograd.graph.disable_saved_tensors_hooks

            def counted(message: str) -> AbstractContextManager[Any]:
                nonlocal calls
                calls += 1
                return ours(message)

            torch.autograd.graph.disable_saved_tensors_hooks = counted
        assert torch.autograd.graph.disable_saved_tensors_hooks is counted, "somebody else's stays"
        for _ in range(2):
            with runtime.forward():
                TRANSFORMS["grad"](model, x)
            assert torch.autograd.graph.disable_saved_tensors_hooks is counted
        with counted("no hooks"), pytest.raises(RuntimeError, match="no hooks"):
            torch.autograd.graph.saved_tensors_hooks(lambda y: y, lambda y: y).__enter__()
        assert calls == 1
    finally:
        torch.autograd.graph.disable_saved_tensors_hooks = PLAIN
