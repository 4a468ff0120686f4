"""Late producers, and blocks that are reused at once, on a GPU: an order that is not enforced shows as other bits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import ssdtrain

pytestmark = pytest.mark.gpu

LATE = 50_000_000
"""Cycles: tens of milliseconds."""


class LateSquare(torch.autograd.Function):
    """Saves an intermediate that its kernel writes late, and frees it at once."""

    @staticmethod
    def forward(context: torch.autograd.function.FunctionCtx, x: torch.Tensor, late: bool) -> torch.Tensor:
        if late:
            torch.cuda._sleep(LATE)
        kept = x * 3
        context.save_for_backward(kept)
        return kept * kept

    @staticmethod
    def backward(  # type: ignore[override]
        context: torch.autograd.function.FunctionCtx, gradient: torch.Tensor
    ) -> tuple[torch.Tensor, None]:
        (kept,) = context.saved_tensors  # type: ignore[attr-defined]
        return 6 * kept * gradient, None


def gradients(directory: Path | None, device: torch.device, late: bool) -> list[torch.Tensor]:
    """A chain whose intermediates are offloaded; between the operators their memory is used again and filled with NaN."""
    torch.manual_seed(3)
    inputs = [torch.randn(1 << 20, device=device, requires_grad=True) for _ in range(6)]
    offload = ssdtrain.offload(directory, device=device, min_bytes=1024) if directory is not None else None
    try:
        for _ in range(3):
            for x in inputs:
                x.grad = None
            total = torch.zeros((), device=device)
            for x in inputs:
                if offload is None:
                    y = LateSquare.apply(x, late)
                else:
                    with offload:
                        y = LateSquare.apply(x, late)
                total = total + y.sum()
                del y
                for _ in range(4):
                    torch.empty(1 << 20, device=device).fill_(
                        float("nan")
                    )  # dropped at once: the next one gets it
            total.backward()
    finally:
        if offload is not None:
            offload.close()
    return [x.grad.clone() for x in inputs if x.grad is not None]


@pytest.mark.parametrize("late", [False, True])
def test_freed_blocks_are_reused_at_once(device: torch.device, late: bool, tmp_path: Path) -> None:
    late = late and device.type == "cuda"
    expected = gradients(None, device, late)
    found = gradients(tmp_path, device, late)
    assert len(found) == 6 and all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


def test_a_tensor_made_on_another_stream(gpu: torch.device, tmp_path: Path) -> None:
    side = torch.cuda.Stream(gpu)
    x = torch.ones(1 << 20, device=gpu, requires_grad=True)
    offload = ssdtrain.offload(tmp_path, device=gpu, min_bytes=1024)
    try:
        side.wait_stream(torch.cuda.current_stream(gpu))
        with torch.cuda.stream(side), offload:
            y = LateSquare.apply(x, True)
        torch.cuda.current_stream(gpu).wait_stream(side)
        y.sum().backward()
        assert x.grad is not None and bool((x.grad == 18).all())
    finally:
        offload.close()


def test_a_batch_that_a_loader_made_on_its_own_stream(gpu: torch.device, tmp_path: Path) -> None:
    """The loader's stream uses its memory again as soon as nobody holds it; without the engine the graph does."""
    loader = torch.cuda.Stream(gpu)
    weight = torch.ones(1 << 20, device=gpu, requires_grad=True)
    expected = torch.zeros(1 << 20, device=gpu)
    offload = ssdtrain.offload(tmp_path, device=gpu, min_bytes=1024)
    try:
        total = torch.zeros((), device=gpu)
        for number in range(6):
            with torch.cuda.stream(loader):
                batch = torch.full((1 << 20,), float(number), device=gpu)
            torch.cuda.current_stream(gpu).wait_stream(loader)
            torch.cuda._sleep(LATE)
            with offload:
                total = total + (weight * batch).sum()
            expected += number
            del batch
            with torch.cuda.stream(loader):
                for _ in range(4):
                    torch.empty(1 << 20, device=gpu).fill_(float("nan"))
        total.backward()
        assert weight.grad is not None and torch.equal(weight.grad, expected)
    finally:
        offload.close()


class TakesMemoryBack(torch.autograd.Function):
    """Its backward reads late what it saved, after the allocator has given back all that is free."""

    @staticmethod
    def forward(context: torch.autograd.function.FunctionCtx, x: torch.Tensor) -> torch.Tensor:
        kept = x * 3
        context.save_for_backward(kept)
        return kept * kept

    @staticmethod
    def backward(  # type: ignore[override]
        context: torch.autograd.function.FunctionCtx, gradient: torch.Tensor
    ) -> torch.Tensor:
        torch.cuda.empty_cache()
        (kept,) = context.saved_tensors  # type: ignore[attr-defined]
        torch.cuda._sleep(LATE)
        return 6 * kept * gradient


def test_memory_of_loads_is_not_unmapped_while_a_kernel_reads_it(gpu: torch.device, tmp_path: Path) -> None:
    """With expandable segments memory is given back when the stream that allocated it is idle, whoever reads it."""
    torch._C._accelerator_setAllocatorSettings("expandable_segments:True")
    offload = ssdtrain.offload(tmp_path, device=gpu, min_bytes=1024)
    try:
        x = torch.ones(16 << 20, device=gpu, requires_grad=True)
        for _ in range(2):
            x.grad = None
            with offload:
                total = sum(TakesMemoryBack.apply(x).sum() for _ in range(6))
            total.backward()
            torch.cuda.synchronize()
            assert x.grad is not None and bool((x.grad == 6 * 18).all())
    finally:
        offload.close()
        torch._C._accelerator_setAllocatorSettings("expandable_segments:False")
