"""Hooks lose autograd's check that a saved tensor was not modified in place. The engine makes it up."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from tests.offload.conftest import MakeRuntime, Variant, settled
from tests.offload.zoo import Recording

Modify = Callable[[torch.Tensor], object]

MODIFICATIONS: dict[str, Modify] = {
    "itself": lambda y: y.add_(1),
    "through a view": lambda y: y[0].zero_(),
    "through a detached alias": lambda y: y.detach().mul_(2),
    "by out=": lambda y: torch.add(y.detach(), 1, out=y.detach()),
}


def loss_over_modified(recording: Recording, modify: Modify, size: int) -> torch.Tensor:
    x = torch.randn(size, size, requires_grad=True)
    with recording():
        y = x.sin()
        z = (y * y).sum()
    modify(y)
    return z


@pytest.mark.parametrize("size", [4, 128], ids=["kept", "offloaded"])
@pytest.mark.parametrize("how", MODIFICATIONS)
def test_modified_after_saving_raises_what_autograd_raises(
    how: str, size: int, variant: Variant, make_runtime: MakeRuntime
) -> None:
    with pytest.raises(RuntimeError, match="modified by an inplace operation") as plain:
        loss_over_modified(nullcontext, MODIFICATIONS[how], size).backward()
    runtime = make_runtime(variant)
    with pytest.raises(RuntimeError, match="modified by an inplace operation") as ours:
        loss_over_modified(runtime.forward, MODIFICATIONS[how], size).backward()
    opening = "one of the variables needed for gradient computation has been modified by an inplace operation"
    assert str(plain.value).startswith(opening) and str(ours.value).startswith(opening)
    assert "is at version" in str(ours.value) and "expected version" in str(ours.value)


def test_a_parameter_stepped_between_forward_and_backward_raises(make_runtime: MakeRuntime) -> None:
    weight = torch.nn.Parameter(torch.randn(64, 64))
    x = torch.randn(64, 64, requires_grad=True)
    with make_runtime().forward():
        loss = (x @ weight).sum()
    with torch.no_grad():
        weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


class WritesToWhatItSaved(torch.autograd.Function):
    """As Megatron's vocabulary-parallel cross entropy."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        with torch.no_grad():
            x.mul_(2)
        return grad.clone()


def gradient_of_gradient(recording: Recording, settle: Callable[[], object]) -> torch.Tensor:
    weight = torch.full((4096,), 3.0, requires_grad=True)
    with recording():
        h = weight * 1.0
        written = WritesToWhatItSaved.apply(h)
        loss = (h * h * h).sum() + written.sum()
    settle()
    (grad,) = torch.autograd.grad(loss, h, create_graph=True)
    return torch.autograd.grad((grad * grad).sum(), h)[0]


def test_a_write_to_the_last_handle_is_seen_by_who_saved_an_earlier_one_again(
    variant: Variant, make_runtime: MakeRuntime
) -> None:
    """Several handles of one region are handed tensors over one buffer: the first is saved again, the last is written to."""
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        gradient_of_gradient(nullcontext, lambda: None)
    runtime = make_runtime(variant)
    runtime.expects_live = True  # torch keeps such a graph, under any hooks
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        gradient_of_gradient(runtime.forward, lambda: settled(runtime))


def test_a_packed_view_watches_the_original(make_runtime: MakeRuntime) -> None:
    runtime = make_runtime()
    x = torch.randn(64, 64, 64, requires_grad=True)
    with runtime.forward():
        y = x.sin()
        thin = y[:, ::16, :8]
        z = (thin * thin.cos()).sum()
    found = runtime.statistics()
    assert found.offload.packed_bytes > 0
    y.detach().add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        z.backward()


def test_modified_while_the_store_is_in_flight_raises(make_runtime: MakeRuntime) -> None:
    """The bytes on the drive may be torn then: they must not be used."""
    runtime = make_runtime()
    pool = runtime.offload.store.pool
    pool.hold(begun=True)
    x = torch.randn(128, 128, requires_grad=True)
    with runtime.forward():
        y = x.sin()
        z = (y * y).sum()
    y.detach().add_(1)
    pool.release()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        z.backward()


@pytest.mark.parametrize("settle", [False, True], ids=["in-flight", "stored"])
def test_an_alias_with_its_own_counter_is_no_reason_to_share(settle: bool, make_runtime: MakeRuntime) -> None:
    """`.data` shares the bytes and not the counter: a write to the original would not be seen through the alias."""
    runtime = make_runtime()

    def run(recording: Recording) -> torch.Tensor:
        x = torch.randn(128, 128, generator=torch.Generator().manual_seed(0), requires_grad=True)
        with recording():
            y = x.sin()
            first = (y * y).sum()
            if settle:
                settled(runtime)  # the bytes of the first save are on the drive, as they were
            alias = y.data
            alias.add_(1)  # autograd does not see this
            fresh = y.data.requires_grad_()
            second = (fresh * fresh).sum()
        second.backward()
        del first
        return fresh.grad

    assert torch.equal(run(nullcontext), run(runtime.forward))


def test_modified_between_two_saves_is_saved_twice(make_runtime: MakeRuntime) -> None:
    """The second save must see the new bytes, and only the first is an error."""
    runtime = make_runtime()
    x = torch.randn(128, 128, requires_grad=True)
    with runtime.forward():
        y = x.clone()
        y.sigmoid_()  # saves its result
        y.mul_(2)
        z = y.exp()  # saves its own
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        z.sum().backward()


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_tensor_without_sizes_that_was_modified_raises_the_same(make_runtime: MakeRuntime) -> None:
    """A nested tensor stays in memory, and its version is compared all the same."""
    x = torch.nested.nested_tensor([torch.rand(200), torch.rand(300)], requires_grad=True)
    with make_runtime().forward():
        y = x.clone()
        z = y * y
    y.detach().add_(y.detach())
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        z.backward(torch.nested.nested_tensor([torch.ones(200), torch.ones(300)]))


@pytest.mark.parametrize("settle", [False, True], ids=["in-flight", "stored"])
def test_a_save_after_a_modification_does_not_get_the_bytes_of_before(
    settle: bool, variant: Variant, make_runtime: MakeRuntime
) -> None:
    """The graph of the first save is alive and never used: without hooks no error, and neither with them."""
    runtime = make_runtime(variant)
    x = torch.randn(128, 128, requires_grad=True)
    with runtime.forward():
        y = x.clone()
        first = (y * y).sum()
        if settle:
            settled(runtime)
        y.detach().mul_(2)
        second = (y * y).sum()
    (found,) = torch.autograd.grad(second, x)
    assert torch.equal(found, 4 * x.detach())
    del first
