"""Loops and libraries that replace an attached model's forward, call parts of it, or copy it."""

from __future__ import annotations

import copy
import functools
import gc
import logging
import types
import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ssdtrain
from ssdtrain.pytorch.attached import attach_model
from tests.offload import zoo
from tests.offload.conftest import MakeRuntime, holds_nothing
from tests.offload.test_equality import asked_for

TORCHS_CALL = nn.Module.__call__


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))
        self.head = nn.Linear(64, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.head(self.body(x))
        return found


@pytest.fixture
def x() -> torch.Tensor:
    return zoo.noise(32, 64)


@pytest.fixture(autouse=True)
def calls_are_torchs_own_afterwards() -> Iterator[None]:
    gc.collect()
    assert nn.Module.__call__ is TORCHS_CALL
    yield


def by_method(net: Net) -> None:
    """As Liger's and TRL's patches of a model."""
    net.forward = types.MethodType(lambda self, x: self.head(self.body(x)), net)


def by_rebinding(net: Net) -> None:
    """As accelerate's `extract_model_from_parallel`, which unwraps the forward that it finds and binds it to the model."""
    forward = net.forward
    while hasattr(forward, "__wrapped__"):
        forward = forward.__wrapped__
    net.forward = types.MethodType(forward.__func__, net)


def by_wrapper(net: Net) -> None:
    """As accelerate's autocast."""
    plain = net.forward
    net.forward = functools.wraps(plain)(lambda *args: plain(*args))


def nothing(net: Net) -> None:
    pass


def whole(net: Net, x: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = net(x)
    return found


def in_parts(net: Net, x: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = net.head(net.body(x))
    return found


def redirected(net: Net, x: torch.Tensor) -> torch.Tensor:
    """As Fabric's and Lightning's redirection of a method through the forward of a wrapper."""
    plain = net.forward

    def method(x: torch.Tensor) -> torch.Tensor:
        net.forward = plain
        return in_parts(net, x)

    net.forward = method
    return whole(net, x)


def gradients(net: nn.Module) -> list[torch.Tensor]:
    return [parameter.grad for parameter in net.parameters() if parameter.grad is not None]


@pytest.mark.parametrize("before", [True, False], ids=["replaced first", "attached first"])
@pytest.mark.parametrize("call", [whole, in_parts, redirected])
@pytest.mark.parametrize("replace", [nothing, by_method, by_rebinding, by_wrapper])
def test_a_forward_is_recorded_whoever_runs_it(
    replace: Callable[[Net], None],
    call: Callable[[Net, torch.Tensor], torch.Tensor],
    before: bool,
    x: torch.Tensor,
    make_runtime: MakeRuntime,
) -> None:
    net, plain = Net(), Net()
    plain.load_state_dict(net.state_dict())
    runtime = make_runtime()
    if before:
        replace(net)
    attach_model(runtime, net)
    if not before:
        replace(net)
    for _ in range(2):
        call(net, x).sum().backward()
        plain(x).sum().backward()
    assert asked_for(runtime) > 0
    assert all(map(torch.equal, gradients(net), gradients(plain)))
    holds_nothing(runtime)
    seen = asked_for(runtime)
    runtime.close()
    call(net, x).sum().backward()
    assert asked_for(runtime) == seen


def test_calls_inside_of_a_forward_belong_to_it(x: torch.Tensor, make_runtime: MakeRuntime) -> None:
    net, runtime = Net(), make_runtime()
    attach_model(runtime, net)
    forwards: list[str] = []
    plain = runtime.forward
    runtime.forward = lambda *args, **kwargs: forwards.append("") or plain(*args, **kwargs)
    net(x).sum().backward()
    assert len(forwards) == 1
    in_parts(net, x).sum().backward()
    assert len(forwards) == 3
    with torch.no_grad():
        net(x), in_parts(net, x)
    assert len(forwards) == 3
    body = net.body
    net.forward = lambda x: net.head(torch.utils.checkpoint.checkpoint(body, x, use_reentrant=False))
    net(x).sum().backward()
    assert len(forwards) == 4, "what backward runs again is no forward"


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_exception_leaves_nothing_behind(
    error: type[BaseException], x: torch.Tensor, make_runtime: MakeRuntime
) -> None:
    net, runtime = Net(), make_runtime()
    attach_model(runtime, net)
    handle = net.head.register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(error()))
    with pytest.raises(error):
        net(x)
    handle.remove()
    seen = asked_for(runtime)
    (nn.Linear(64, 64)(x).tanh().sum() * 2).backward()
    assert asked_for(runtime) == seen, "hooks of the interrupted forward are in force"
    net(x).sum().backward()
    assert asked_for(runtime) > seen


def test_a_replica_computes_with_its_own_weights(x: torch.Tensor, make_runtime: MakeRuntime) -> None:
    """As DataParallel makes them, of the `__dict__` of each module."""
    net, runtime = Net(), make_runtime()
    attach_model(runtime, net)
    replica: Any = net._replicate_for_data_parallel()
    replica.body, replica.head = copy.deepcopy(net.body), copy.deepcopy(net.head)
    with torch.no_grad():
        for parameter in replica.head.parameters():
            parameter.zero_()
    assert not replica(x).any() and net(x).any()


def test_an_attached_model_can_be_scripted(x: torch.Tensor, make_runtime: MakeRuntime) -> None:
    net, runtime = Net(), make_runtime()
    attach_model(runtime, net)
    assert torch.equal(torch.jit.script(net)(x), net(x))


def test_a_scripted_model_can_be_attached(x: torch.Tensor, make_runtime: MakeRuntime) -> None:
    runtime = make_runtime()
    net = torch.jit.script(Net())
    attach_model(runtime, net)
    net(x).sum().backward()
    assert asked_for(runtime) > 0


def test_closing_leaves_the_model_as_it_was(x: torch.Tensor, make_runtime: MakeRuntime) -> None:
    net = Net()
    before = {name: dict(module.__dict__) for name, module in net.named_modules()}
    runtime = make_runtime()
    attach_model(runtime, net)
    assert nn.Module.__call__ is not TORCHS_CALL
    net(x).sum().backward()
    runtime.close()
    assert nn.Module.__call__ is TORCHS_CALL
    assert {name: dict(module.__dict__) for name, module in net.named_modules()} == before


def in_front(calls: list[nn.Module]) -> Callable[..., torch.Tensor]:
    """Put a function of other code in front of `torch.nn.Module.__call__`, as profilers do. Returns what stood there."""
    stood = nn.Module.__call__

    def call(self: nn.Module, *args: object, **kwargs: object) -> torch.Tensor:
        calls.append(self)
        return stood(self, *args, **kwargs)  # type: ignore[no-any-return]

    nn.Module.__call__ = call  # type: ignore[method-assign]
    return stood


def test_others_replace_calls_before_and_after(x: torch.Tensor, make_runtime: MakeRuntime) -> None:
    """Whatever is undone first, a forward is recorded, and at the end torch's own call stands there."""
    net, runtime, calls = Net(), make_runtime(), list[nn.Module]()
    torchs = in_front(calls)
    attach_model(runtime, net)
    ours = in_front(calls)
    other, second = Net(), make_runtime()
    attach_model(second, other)  # ours, theirs, ours, theirs, torch's
    for model, of in ((net, runtime), (other, second)):
        calls.clear()
        seen = asked_for(of)
        model(x).sum().backward()
        assert asked_for(of) > seen and calls.count(model) == 2
    nn.Module.__call__ = ours  # type: ignore[method-assign]
    second.close()
    seen = asked_for(runtime)
    net(x).sum().backward()
    assert asked_for(runtime) > seen
    nn.Module.__call__ = torchs  # type: ignore[method-assign]
    third = make_runtime()
    attach_model(third, other)
    for model, of in ((net, runtime), (other, third)):
        seen = asked_for(of)
        model(x).sum().backward()
        assert asked_for(of) > seen
    runtime.close()
    third.close()
    assert nn.Module.__call__ is TORCHS_CALL


def test_a_call_that_others_put_back_is_replaced_again(
    x: torch.Tensor, make_runtime: MakeRuntime, caplog: pytest.LogCaptureFixture
) -> None:
    net, runtime = Net(), make_runtime()
    torchs = in_front([])
    attach_model(runtime, net)
    nn.Module.__call__ = torchs  # type: ignore[method-assign]
    train(net, lambda: net(x), 2)
    assert asked_for(runtime) == 0
    train(net, lambda: net(x), 4)
    assert asked_for(runtime) > 0 and not warnings_of(caplog)
    runtime.close()
    assert nn.Module.__call__ is TORCHS_CALL


def test_the_runtime_lives_as_long_as_the_model_which_is_freed_when_it_is_dropped(
    x: torch.Tensor, tmp_path: Path
) -> None:
    """A script may keep nothing of what `ssdtrain.attach` returns, and close nothing."""
    net = Net()
    runtime = weakref.ref(ssdtrain.attach(net, {"offload": {"directories": str(tmp_path), "min_bytes": 1}}))
    gc.collect()
    net(x).sum().backward()
    assert asked_for(runtime()) > 0
    gone = weakref.ref(net)
    del net
    gc.collect()
    assert gone() is None and nn.Module.__call__ is TORCHS_CALL


def train(net: nn.Module, step: Callable[[], torch.Tensor], steps: int) -> None:
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        step().sum().backward()
        optimizer.step()


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [text for text in caplog.messages if "no forward with gradients of the attached" in text]


def test_steps_without_a_forward_are_named_once(
    x: torch.Tensor, make_runtime: MakeRuntime, caplog: pytest.LogCaptureFixture
) -> None:
    net, runtime = Net(), make_runtime()
    attach_model(runtime, net)
    with caplog.at_level(logging.WARNING, logger="ssdtrain"):
        train(net, lambda: net.forward(x), 2)  # which is no call of the module, and calls modules inside
        assert not warnings_of(caplog)
        weights = dict(net.named_parameters())

        def functional() -> torch.Tensor:
            hidden = torch.nn.functional.linear(x, weights["body.0.weight"], weights["body.0.bias"])
            return hidden @ weights["head.weight"].t()

        train(net, functional, 2)
        assert not warnings_of(caplog)
        train(net, functional, 8)
    (warning,) = warnings_of(caplog)
    assert "Net" in warning and "runtime.forward()" in warning


def test_steps_of_other_models_are_not_named(
    x: torch.Tensor, make_runtime: MakeRuntime, caplog: pytest.LogCaptureFixture
) -> None:
    net, other, runtime = Net(), nn.Linear(64, 8), make_runtime()
    attach_model(runtime, net)
    with caplog.at_level(logging.WARNING, logger="ssdtrain"):
        train(other, lambda: other(x), 8)
        train(net, lambda: net(x), 2)
        optimizers = [torch.optim.SGD([parameter], 0.1) for parameter in net.parameters()]
        for _ in range(4):
            net(x).sum().backward()
            for optimizer in optimizers:
                optimizer.step()
    assert not warnings_of(caplog)


def test_compact_serves_a_replaced_forward(x: torch.Tensor) -> None:
    net = Net()
    config = {"compact": {"mode": "quant", "codec": "int8"}, "report": {"interval": 0}}
    with ssdtrain.attach(net, config) as runtime:
        by_method(net)
        net(x).sum().backward()
        assert runtime.compact.compression.counted.input_bytes > 0


def test_a_plan_is_made_for_a_loop_that_calls_parts(x: torch.Tensor, tmp_path: Path) -> None:
    """Bits stay equal while a plan profiles, decides and changes what blocks do."""

    class Blocks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(4))
            self.head = nn.Linear(64, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = layer(x)
            return self.head(x)

    def one(attached: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        net = Blocks()
        config = {"offload": {"directories": str(tmp_path), "min_bytes": 1}, "plan": "auto"}

        def step() -> torch.Tensor:
            hidden = x
            for layer in net.layers:
                hidden = layer(hidden)
            return net.head(hidden)

        with ssdtrain.attach(net, config | {"report": {"interval": 0}}) if attached else nullcontext():
            train(net, step, 12)
        return [parameter.detach() for parameter in net.parameters()]

    assert all(map(torch.equal, one(True), one(False)))
