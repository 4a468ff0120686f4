"""What backward gets lies at the address of what was saved modulo 64, whichever way it came back: kernels that sum in an order
that depends on the address give the same bits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F

from ssdtrain.offload.tensors import geometry
from ssdtrain.offload.tensors.geometry import bytes_at, restride
from ssdtrain.runtime import Runtime
from tests.offload.conftest import IN_PARTS, VARIANTS, MakeRuntime, Variant, stored_forward
from tests.offload.test_gpudirect import ON
from tests.support.kvikio_stand_in import install

ELEMENTS = 3000


class Watch(torch.autograd.Function):
    """Saves its input, and shows what backward gets of it."""

    seen: ClassVar[list[tuple[int, torch.Tensor]]] = []

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x.sum()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        [x] = ctx.saved_tensors
        Watch.seen.append((x.data_ptr() % 64, x.clone()))
        return grad * x


def comes_back(
    runtime: Runtime,
    offset: int,
    dtype: torch.dtype,
    *,
    thin: bool = False,
    forward: Callable[[Runtime], Any] = stored_forward,
) -> None:
    """Save a view that begins at an element, and look at what backward gets."""
    Watch.seen.clear()
    x = torch.randn(2 * ELEMENTS, requires_grad=True)
    with forward(runtime):
        whole = (x * 4).to(dtype)
        view = (
            whole[offset:].view(-1)[: 8 * 700].view(700, 8)[:, 2:3]
            if thin
            else whole[offset : offset + ELEMENTS]
        )
        values, address = view.detach().clone(), view.data_ptr() % 64
        loss = Watch.apply(view)
        del whole, view
    loss.backward()
    [(lead, restored)] = Watch.seen
    assert torch.equal(restored, values)
    assert lead == address
    Watch.seen.clear()


WAYS = [*VARIANTS, *IN_PARTS]


@pytest.mark.parametrize("codec", ["off", "lossless"])
@pytest.mark.parametrize("forward", [stored_forward, Runtime.forward], ids=["stored", "at-once"])
@pytest.mark.parametrize("variant", WAYS, ids=lambda variant: variant.name)
def test_a_view_comes_back_at_the_same_address_modulo_64(
    make_runtime: MakeRuntime, variant: Variant, forward: Callable[[Runtime], Any], codec: str
) -> None:
    """Also a thin one, whose bytes are copied together, and what backward gets before its store has ended."""
    runtime = make_runtime(variant, codec=codec)
    for offset, dtype in ((0, torch.float32), (1, torch.float32), (15, torch.float32), (3, torch.bfloat16)):
        comes_back(runtime, offset, dtype, forward=forward)
    comes_back(runtime, 13, torch.float32, thin=True, forward=forward)
    assert runtime.statistics().offload.packed_bytes


@pytest.mark.parametrize("prefetch", [0, "1MiB"])
@pytest.mark.parametrize("variant", WAYS, ids=lambda variant: variant.name)
def test_so_does_one_that_was_read_outside_of_the_arena(
    make_runtime: MakeRuntime, variant: Variant, prefetch: int | str
) -> None:
    runtime = make_runtime(variant, prefetch=prefetch)
    if not variant.staged:
        runtime.engine.buffers.acquire = lambda nbytes, lead=0: None
    comes_back(runtime, 7, torch.float32)
    comes_back(runtime, 5, torch.bfloat16)


@pytest.mark.parametrize("codec", ["off", "lossless"])
def test_so_does_what_comes_by_gpudirect(
    make_runtime: MakeRuntime, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, codec: str
) -> None:
    stand_in = install(monkeypatch, tmp_path)
    runtime = make_runtime(ON, codec=codec)
    comes_back(runtime, 9, torch.float32)
    assert stand_in.read


@pytest.mark.parametrize("codec", ["off", "lossless"])
@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.name)
def test_a_kernel_whose_order_of_sums_depends_on_the_address_gives_the_same_bits(
    make_runtime: MakeRuntime, variant: Variant, codec: str
) -> None:
    """Attention on views that begin between two vector registers."""

    def gradient(runtime: Runtime | None, rows: int, offset: int) -> torch.Tensor:
        torch.manual_seed(0)
        x = torch.randn(offset + rows * 65, requires_grad=True)

        def forward() -> torch.Tensor:
            a = (x * 1)[offset:].view(1, 1, rows, 65)
            y = F.scaled_dot_product_attention(a, a, a)
            return (y * torch.linspace(-1, 1, rows * 65).view_as(y)).sum()

        if runtime is None:
            loss = forward()
        else:
            with stored_forward(runtime):
                loss = forward()
        return torch.autograd.grad(loss, x)[0]

    runtime = make_runtime(variant, codec=codec)
    for rows, offset in ((7, 15), (8, 3), (9, 1)):
        assert torch.equal(gradient(None, rows, offset), gradient(runtime, rows, offset)), (rows, offset)


@pytest.mark.parametrize("lead", [0, 1, 4, 60, 63])
def test_memory_is_where_it_was_asked_for(lead: int) -> None:
    memory = bytes_at(lead, 100, torch.device("cpu"))
    assert memory.numel() == 100 and memory.data_ptr() % 64 == lead
    dense = torch.arange(6.0).view(2, 3)
    tensor = restride(dense, (torch.float32, (2, 3), (7, 2), 0), lead)
    assert tensor.data_ptr() % 64 == lead and tensor.stride() == (7, 2) and torch.equal(tensor, dense)
    assert not tensor._is_view()


def test_an_address_that_is_no_multiple_of_an_element_keeps_its_bytes(make_runtime: MakeRuntime) -> None:
    """Of memory that another library allocated, where such a tensor may be saved at all."""
    for variant in (Variant("c"), Variant("staged", {"buffer": "64MiB"}, staged=True)):
        runtime = make_runtime(variant)
        raw = bytearray(4 * ELEMENTS + 64)
        base = torch.frombuffer(raw, dtype=torch.float32, count=ELEMENTS, offset=3)
        base.copy_(torch.randn(ELEMENTS))
        x = base.requires_grad_()
        with stored_forward(runtime):
            loss = (x.view(-1)[5:] ** 3).sum()
        loss.backward()
        expected = torch.zeros(ELEMENTS)
        expected[5:] = 3 * x.detach()[5:] ** 2
        assert torch.equal(x.grad, expected)


@pytest.mark.parametrize("codec", ["off", "lossless"])
@pytest.mark.parametrize("variant", WAYS, ids=lambda variant: variant.name)
def test_it_may_begin_inside_of_a_storage_as_on_a_device(
    make_runtime: MakeRuntime, variant: Variant, codec: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def inside(view: torch.Tensor) -> torch.Tensor:
        typed = torch.empty(0, dtype=torch.uint8)
        return typed.set_(view.untyped_storage(), view.storage_offset(), view.shape, (1,))

    monkeypatch.setattr(geometry, "to_dlpack", inside)
    monkeypatch.setattr(geometry, "from_dlpack", lambda view: view)
    runtime = make_runtime(variant, codec=codec)
    for offset, thin in ((15, False), (13, True)):
        comes_back(runtime, offset, torch.float32, thin=thin)
