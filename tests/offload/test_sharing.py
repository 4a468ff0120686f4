"""Bytes that several saved tensors view are kept once, and come back with each one's own geometry."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import nn

from ssdtrain import versions as counters
from ssdtrain.offload.tensors.sharing import extent_of
from tests.offload.conftest import MakeRuntime


def saved(runtime: object) -> object:
    gc.collect()
    found = runtime.statistics()
    return found.offload


def test_a_tensor_saved_by_many_is_stored_once(make_runtime: MakeRuntime) -> None:
    runtime = make_runtime()
    layers = nn.ModuleList([nn.Linear(64, 64) for _ in range(5)])
    x = torch.randn(128, 64, requires_grad=True)
    with runtime.forward():
        y = x.tanh()  # saves y too
        loss = sum(layer(y).sum() for layer in layers)
    found = saved(runtime)
    assert found.saved_bytes == y.nbytes
    assert found.shared_tensors == 5
    loss.backward()
    assert saved(runtime).loaded_bytes <= y.nbytes


@pytest.mark.parametrize("known", [True, False], ids=["known", "unknown"])
def test_detached_tensors_join_where_their_counter_is_known(
    known: bool, make_runtime: MakeRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As ZeRO-3 hands each module a detached input."""

    class HandedOn(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.detach()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            return gradient

    if not known:
        monkeypatch.setattr(counters, "_OFFSET", None)
    runtime = make_runtime()
    layers = nn.ModuleList([nn.Linear(64, 64) for _ in range(3)])
    y = torch.randn(128, 64, requires_grad=True)

    def losses() -> torch.Tensor:
        inputs = [HandedOn.apply(y), HandedOn.apply(y)[:], y.detach().requires_grad_()]
        return torch.stack([layer(each).sum() for layer, each in zip(layers, inputs, strict=True)]).sum()

    expected = torch.autograd.grad(losses(), list(layers.parameters()))
    with runtime.forward():
        loss = losses()
    assert saved(runtime).saved_bytes == (1 if known else 3) * y.nbytes
    found = torch.autograd.grad(loss, list(layers.parameters()))
    assert all(map(torch.equal, expected, found))


def test_a_write_to_a_detached_tensor_that_joined_is_an_error(make_runtime: MakeRuntime) -> None:
    runtime = make_runtime()
    x = torch.randn(128, 64, requires_grad=True)
    with runtime.forward():
        y = x * 2
        loss = (y.detach() * x).sum() + (y * y).sum()
    y.detach().add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    del loss
    # After a backward that raised, torch holds nodes of its graph in this thread's queue until the next backward.
    torch.ones(1, requires_grad=True).sum().backward()


def test_counters_are_told_apart_by_reading() -> None:
    x = torch.randn(8, 8)
    same = [x, x.detach(), x[2:], x.t(), x.detach().view(-1), x.detach().requires_grad_()]
    others = [x.data, x.clone(), x.detach().data, torch.randn(8, 8)]
    assert all(counters.same_counter(x, tensor) and counters.same_counter(tensor, x) for tensor in same)
    assert not any(counters.same_counter(x, tensor) or counters.same_counter(tensor, x) for tensor in others)
    with torch.inference_mode():
        without = torch.ones(3), torch.ones(3)
    assert not counters.same_counter(*without)
    assert x._version == 0


def test_the_two_halves_of_a_chunk_are_told_apart(make_runtime: MakeRuntime) -> None:
    """FlashTrain's silent fault: an id without the storage offset confuses them."""
    runtime = make_runtime()
    x = torch.randn(64, 256, requires_grad=True)
    with runtime.forward():
        y = x.sin()
        left, right = y.chunk(2, dim=-1)
        loss = (left * right).sum()
    assert saved(runtime).saved_bytes == 2 * y.nbytes  # x and y, each once
    loss.backward()
    gradient = torch.cat([y.chunk(2, -1)[1], y.chunk(2, -1)[0]], -1) * x.cos()
    assert torch.equal(x.grad, gradient.detach())


def test_overlapping_views_become_one_region_over_their_storage(make_runtime: MakeRuntime) -> None:
    runtime = make_runtime()
    x = torch.randn(16, 8, 96, requires_grad=True)
    with runtime.forward():
        mixed = x * 2  # saves nothing of x
        q, k, v = mixed.split(32, dim=-1)
        loss = (q.sigmoid() * k.tanh() * v).sum()
        views = {
            q.untyped_storage().data_ptr(),
            k.untyped_storage().data_ptr(),
            v.untyped_storage().data_ptr(),
        }
    assert len(views) == 1
    found = saved(runtime)
    # Also saved: sigmoid(q), tanh(k) and their product.
    assert found.saved_bytes == mixed.nbytes + 3 * q.numel() * 4
    loss.backward()


def test_a_thin_view_does_not_take_its_storage_along(make_runtime: MakeRuntime) -> None:
    runtime = make_runtime()
    x = torch.randn(256, 64, 16, requires_grad=True)
    with runtime.forward():
        y = x + 1
        thin = y[:, ::16, :4]
        loss = (thin * thin).sum()
    found = saved(runtime)
    assert found.saved_bytes == thin.numel() * 4 == found.packed_bytes
    loss.backward()
    expected = torch.zeros_like(x)
    expected[:, ::16, :4] = 2 * (x + 1).detach()[:, ::16, :4]
    assert torch.equal(x.grad, expected)


class Remember(torch.autograd.Function):
    """Saves its input and shows in backward what came back."""

    seen: torch.Tensor

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        (Remember.seen,) = ctx.saved_tensors
        return grad


SHAPES = {
    "contiguous": lambda x: x,
    "transposed": lambda x: x.transpose(0, 2),
    "offset": lambda x: x[3:],
    "every other": lambda x: x[:, ::2],
    "thin": lambda x: x[:, ::16, 2:5],
    "expanded": lambda x: x[:, :1].expand(-1, 64, -1),
    "diagonal": lambda x: torch.diagonal(x, dim1=0, dim2=1),
    "windows": lambda x: x.view(-1).unfold(0, 128, 64),
    "thin and expanded": lambda x: x[::8, 0, ::16].unsqueeze(1).expand(-1, 500, -1),
    "one": lambda x: x.view(-1)[7:8].expand(2000),
    "channels last": lambda x: x.view(16, 4, 32, 32).to(memory_format=torch.channels_last),
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_what_comes_back_has_the_same_bits_sizes_strides_and_is_no_view(
    shape: str, dtype: torch.dtype, make_runtime: MakeRuntime
) -> None:
    x = torch.randn(64, 32, 32).to(dtype).requires_grad_()
    with make_runtime().forward():
        y = SHAPES[shape](x + 1)
        out = Remember.apply(y)
    size, stride, value = y.size(), y.stride(), y.detach().clone()
    del y
    out.sum().backward()
    back = Remember.seen
    del Remember.seen
    assert back.dtype == dtype and back.size() == size and back.stride() == stride
    assert torch.equal(back, value)
    assert back._base is None


@pytest.mark.parametrize("shape", SHAPES)
def test_an_extent_spans_exactly_the_bytes_of_its_tensor(shape: str) -> None:
    base = torch.arange(64 * 32 * 32, dtype=torch.float32).view(64, 32, 32)
    tensor = SHAPES[shape](base)
    storage = tensor.untyped_storage()
    start, end, own = extent_of(tensor)
    # The oracle: which elements of the storage a write through the view touches.
    marks = torch.zeros(storage.nbytes() // 4)
    marks.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset()).fill_(1)
    touched = marks.nonzero().view(-1)
    assert start == int(touched[0]) * 4
    assert end == int(touched[-1]) * 4 + 4
    assert own >= touched.numel() * 4 or shape == "windows"


def test_a_view_of_another_dtype_joins_where_it_is_aligned(make_runtime: MakeRuntime) -> None:
    runtime = make_runtime()
    x = torch.randn(64, 64, requires_grad=True)
    with runtime.forward():
        y = x + 1
        real = (y * y).sum()
        imaginary = torch.view_as_complex(y.view(64, 32, 2))
        both = real + (imaginary * imaginary).real.sum()
    assert saved(runtime).saved_bytes == y.nbytes
    both.backward()
