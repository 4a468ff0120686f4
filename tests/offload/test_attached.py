"""A model that a runtime is attached to: its copies, several runtimes, the compiler."""

from __future__ import annotations

import copy
import inspect
import io
import itertools
import pickle
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

from ssdtrain.pytorch.attached import attach_model
from tests.offload import zoo
from tests.offload.conftest import MakeRuntime, holds_nothing
from tests.offload.test_equality import asked_for
from tests.support.tiers import tiered


class Scaled(nn.Module):
    """A model whose forward says which instance computes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
        return scale * torch.tanh(self.linear(x)).sum()


def doubled(model: Scaled, x: torch.Tensor) -> torch.Tensor:
    return 2 * type(model).forward(model, x)


def by_pickle(model: nn.Module) -> nn.Module:
    written = pickle.dumps(model)
    assert b"ssdtrain." not in written, "whoever reads it has to have ssdtrain"
    copied: nn.Module = pickle.loads(written)
    return copied


def by_save(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    copied: nn.Module = torch.load(file, weights_only=False)
    return copied


def twice(model: nn.Module) -> nn.Module:
    return copy.deepcopy(copy.deepcopy(model))


@pytest.fixture
def x() -> torch.Tensor:
    return zoo.noise(32, 64)


@pytest.mark.parametrize("own", [False, True], ids=["of the class", "of the instance"])
@pytest.mark.parametrize("copied", [copy.deepcopy, twice, by_pickle, by_save])
def test_a_copy_computes_with_its_own_weights(
    copied: Callable[[nn.Module], nn.Module], own: bool, x: torch.Tensor, make_runtime: MakeRuntime
) -> None:
    model = Scaled()
    if own:
        model.forward = partial(doubled, model)
    runtime = make_runtime()
    attach_model(runtime, model)
    # A part of a larger model, as in a training script that keeps an average of all.
    holder = nn.Sequential(model)
    average = copied(holder)
    expected = model(x).detach()
    assert torch.equal(average(x), expected)
    seen = runtime.statistics().offload.saved_tensors
    with torch.no_grad():
        for parameter in average.parameters():
            parameter.zero_()
    assert average(x).item() == 0.0 and torch.equal(model(x), expected)
    holds_nothing(runtime)
    runtime.close()
    average(x).backward()
    assert all(parameter.grad is not None for parameter in average.parameters())
    assert all(parameter.grad is None for parameter in model.parameters())
    again = make_runtime()
    attach_model(again, average)
    average(x).backward()
    assert again.statistics().offload.saved_tensors > 0
    assert seen > 0


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_runtimes_are_closed_in_any_order(
    order: tuple[int, ...], x: torch.Tensor, make_runtime: MakeRuntime, caplog: pytest.LogCaptureFixture
) -> None:
    model = Scaled()
    runtimes = [make_runtime() for _ in range(3)]
    for runtime in runtimes:
        attach_model(runtime, model)
    said = "ssdtrain.attach was called again with a model (Scaled)"
    assert sum(said in text for text in caplog.messages) == 2
    alive = list(runtimes)
    for number in order:
        # The innermost one records: that which was attached first.
        before = asked_for(alive[0])
        model(x).backward()
        assert asked_for(alive[0]) > before
        holds_nothing(runtimes[number])
        runtimes[number].close()
        alive.remove(runtimes[number])
    assert "forward" not in model.__dict__
    attach_model(make_runtime(), model)
    assert sum(said in text for text in caplog.messages) == 2, "the earlier ones are closed"


def test_what_somebody_puts_in_front_stays(x: torch.Tensor, make_runtime: MakeRuntime) -> None:
    model = Scaled()
    runtime = make_runtime()
    attach_model(runtime, model)
    wrapped = model.forward
    assert list(inspect.signature(wrapped).parameters) == ["x", "scale"]

    def in_front(*args: object, **kwargs: object) -> torch.Tensor:
        return 3 * wrapped(*args, **kwargs)

    model.forward = in_front
    model(x, scale=2.0).backward()
    seen = runtime.statistics().offload.saved_tensors
    assert seen > 0
    holds_nothing(runtime)
    runtime.close()
    assert model.forward is in_front
    assert torch.equal(model(x), 3 * Scaled.forward(model, x))
    assert runtime.statistics().offload.saved_tensors == seen


@pytest.mark.slow
@pytest.mark.parametrize(
    "after", tiered([False, True], quick=[True]), ids=["compiled before", "compiled after"]
)
def test_a_model_compiled_in_place_is_compiled_whole(
    after: bool, x: torch.Tensor, make_runtime: MakeRuntime
) -> None:
    torch._dynamo.reset()
    model, plain = Scaled(), Scaled()
    plain.load_state_dict(model.state_dict())
    counter = CompileCounterWithBackend("aot_eager")
    runtime = make_runtime()
    if not after:
        model.compile(backend=counter)
    attach_model(runtime, model)
    if after:
        model.compile(backend=counter)
    for _ in range(2):
        model(x).backward()
        plain(x).backward()
    assert counter.frame_count == 1 and runtime.statistics().offload.saved_tensors > 0
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)


@pytest.mark.skipif(
    not hasattr(torch.compiler, "is_exporting"), reason="torch 2.6 does not tell of an export"
)
@pytest.mark.parametrize("strict", [False, True])
def test_an_attached_model_can_be_exported(x: torch.Tensor, strict: bool, make_runtime: MakeRuntime) -> None:
    """In the middle of training, as it would be without; the next forward is offloaded again."""
    model, runtime = Scaled(), make_runtime()
    attach_model(runtime, model)
    exported = torch.export.export(model, (x,), {"scale": 2.0}, strict=strict)
    assert torch.equal(exported.module()(x, scale=2.0), Scaled.forward(model, x, scale=2.0))
    before = asked_for(runtime)
    model(x).backward()
    assert asked_for(runtime) > before
