"""Late producers, and blocks that are reused at once, on a GPU: an order that is not enforced shows as other bits."""

from __future__ import annotations

import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

import ssdtrain
from ssdtrain.codecs.cast import Cast
from tests.gpu.test_training import of_hardware

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
    with closing(ssdtrain.offload(tmp_path, device=gpu, min_bytes=1024)) as offload:
        side.wait_stream(torch.cuda.current_stream(gpu))
        with torch.cuda.stream(side), offload:
            y = LateSquare.apply(x, True)
        torch.cuda.current_stream(gpu).wait_stream(side)
        y.sum().backward()
        assert x.grad is not None and bool((x.grad == 18).all())


def test_a_batch_that_a_loader_made_on_its_own_stream(gpu: torch.device, tmp_path: Path) -> None:
    """The loader's stream uses its memory again as soon as nobody holds it; without the engine the graph does."""
    loader = torch.cuda.Stream(gpu)
    weight = torch.ones(1 << 20, device=gpu, requires_grad=True)
    expected = torch.zeros(1 << 20, device=gpu)
    with closing(ssdtrain.offload(tmp_path, device=gpu, min_bytes=1024)) as offload:
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


COUNT = 1 << 19
"""Elements of a tensor that the allocator keeps among the large ones, encoded in bf16 too."""

LATER = 10 * LATE
"""Cycles: longer than a host that has much to do takes for the few operators of a test."""


class Saves(torch.autograd.Function):
    """Saves what it makes of its input, late if asked to; its backward reads that, late if asked to."""

    @staticmethod
    def forward(
        context: Any, x: torch.Tensor, late: bool = False, late_backward: bool = False
    ) -> torch.Tensor:
        if late:
            torch.cuda._sleep(LATER)
        kept = x * 3
        context.save_for_backward(kept)
        context.late_backward = late_backward
        return kept * kept

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (kept,) = context.saved_tensors
        if context.late_backward:
            torch.cuda._sleep(LATER)
        return 6 * kept * gradient, None, None


class SavesGiven(torch.autograd.Function):
    """Saves the second of its inputs, and gives the first times that; its backward reads it, late if asked to."""

    @staticmethod
    def forward(
        context: Any, x: torch.Tensor, kept: torch.Tensor, late_backward: bool = False
    ) -> torch.Tensor:
        context.save_for_backward(kept)
        context.late_backward = late_backward
        return x * kept

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (kept,) = context.saved_tensors
        if context.late_backward:
            torch.cuda._sleep(LATER)
        return gradient * kept, None, None


def ones(gpu: torch.device, count: int = COUNT) -> torch.Tensor:
    return torch.ones(count, device=gpu, requires_grad=True)


def overwrite(gpu: torch.device, count: int = COUNT) -> None:
    """Take what memory of the current stream is free, and fill it."""
    taken = [torch.empty(count, device=gpu).fill_(float("nan")) for _ in range(24)]
    del taken


@pytest.mark.parametrize("host", [0, "64MiB"], ids=["drive", "host"])
def test_what_another_stream_makes_is_stored_when_it_is_made(
    host: int | str, gpu: torch.device, tmp_path: Path
) -> None:
    """The next operator, on another stream that does not wait for the first, begins the store."""
    side = torch.cuda.Stream(gpu)
    xs = [ones(gpu) for _ in range(8)]
    with closing(ssdtrain.offload(tmp_path, device=gpu, min_bytes=1024, host=host)) as offload:
        for _ in range(2):
            for x in xs:
                x.grad = None
            torch.cuda.synchronize()
            with offload:
                with torch.cuda.stream(side):
                    total = Saves.apply(xs[0], True)
                others = [Saves.apply(x) for x in xs[1:]]
                torch.cuda.current_stream(gpu).wait_stream(side)
                total.record_stream(torch.cuda.current_stream(gpu))
                for other in others:
                    total = total + other
            total.sum().backward()
            assert all(x.grad is not None and bool((x.grad == 18).all()) for x in xs)


@pytest.mark.parametrize("codec", ["off", "bf16"])
def test_memory_of_another_stream_is_kept_while_it_is_copied_or_encoded(
    codec: str, gpu: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thin view is copied together, and what has a codec encoded, on the stream of the next operator: which is late, when the
    stream that made the tensor uses its memory again. Without Triton's kernels an encoding makes the host wait: not here."""
    if not of_hardware(gpu):
        monkeypatch.setattr(Cast, "encode", _cast_alone)
        monkeypatch.setattr(
            Cast, "decode", lambda self, payload, out: out.copy_(_as_bf16(payload, out.numel()))
        )
    side = torch.cuda.Stream(gpu)
    main = torch.cuda.current_stream(gpu)
    x, z = ones(gpu), ones(gpu)
    width = 8 if codec == "off" else 1
    with closing(ssdtrain.offload(tmp_path, device=gpu, min_bytes=1024, codec=codec)) as offload:
        with offload:
            side.wait_stream(main)
            with torch.cuda.stream(side):
                made = torch.full((COUNT, width), 2.0, device=gpu)
                total = SavesGiven.apply(x, made[:, 0])
            torch.cuda._sleep(LATER)
            total = SavesGiven.apply(z, z.detach() + 1) + 0 * z + _joined(total, side, main)
            del made
            with torch.cuda.stream(side):
                overwrite(gpu, COUNT * width)
        total.sum().backward()
        assert x.grad is not None and bool((x.grad == 2).all())
        assert z.grad is not None and bool((z.grad == 2).all())


def _as_bf16(payload: torch.Tensor, count: int) -> torch.Tensor:
    return payload[: 2 * count].view(torch.bfloat16)


def _cast_alone(codec: Cast, values: torch.Tensor, payload: torch.Tensor, key: object) -> int:
    _as_bf16(payload, values.numel()).copy_(values)
    return payload.numel()


def _joined(tensor: torch.Tensor, side: torch.cuda.Stream, main: torch.cuda.Stream) -> torch.Tensor:
    main.wait_stream(side)
    tensor.record_stream(main)
    return tensor


def test_what_was_decoded_is_kept_while_another_stream_reads_it(gpu: torch.device, tmp_path: Path) -> None:
    """One operator's backward decodes it on the main stream, the other's reads it late, on its own."""
    side = torch.cuda.Stream(gpu)
    main = torch.cuda.current_stream(gpu)
    y, z = ones(gpu), ones(gpu)
    with torch.cuda.stream(side):
        x = ones(gpu)  # its gradient is summed up there: the main stream does not wait for it before the end
    fills = [ones(gpu) for _ in range(4)]
    with closing(ssdtrain.offload(tmp_path, device=gpu, min_bytes=1024, codec="bf16")) as offload:

        class Overwrites(torch.autograd.Function):
            """Its backward takes what memory is free."""

            @staticmethod
            def forward(context: Any, x: torch.Tensor) -> torch.Tensor:
                return x * 2

            @staticmethod
            def backward(context: Any, gradient: torch.Tensor) -> torch.Tensor:
                overwrite(gpu)
                return gradient * 2

        for _ in range(2):
            x.grad = y.grad = z.grad = None
            torch.cuda.synchronize()
            with offload:
                total = Overwrites.apply(z)  # in backward the last
                kept = torch.full_like(x, 5.0)
                side.wait_stream(main)
                with torch.cuda.stream(side):
                    late = SavesGiven.apply(x, kept, True)
                    kept.record_stream(side)
                total = total + SavesGiven.apply(y, kept)
                del kept
                for fill in fills:
                    total = total + Saves.apply(fill)
            (total.sum() + _joined(late, side, main).sum()).backward()
            for leaf, expected in ((x, 5), (y, 5), (z, 2)):
                assert leaf.grad is not None and bool((leaf.grad == expected).all())


def test_a_payload_is_kept_while_another_stream_decodes_it(gpu: torch.device, tmp_path: Path) -> None:
    """Its store has not begun when backward comes: it is decoded where it is, on a stream that is late."""
    side = torch.cuda.Stream(gpu)
    main = torch.cuda.current_stream(gpu)
    first, x, z = ones(gpu), ones(gpu), ones(gpu)
    with closing(ssdtrain.offload(tmp_path, device=gpu, min_bytes=1024, codec="bf16")) as offload:

        class SleepsInBackward(torch.autograd.Function):
            @staticmethod
            def forward(context: Any, x: torch.Tensor) -> torch.Tensor:
                return x * 1

            @staticmethod
            def backward(context: Any, gradient: torch.Tensor) -> torch.Tensor:
                torch.cuda._sleep(4 * LATER)
                return gradient * 1

        class OverwritesInBackward(torch.autograd.Function):
            """Its backward takes the memory that copies off the device leave free."""

            @staticmethod
            def forward(context: Any, x: torch.Tensor) -> torch.Tensor:
                context.save_for_backward(torch.full_like(x, 2.0))
                return x * 2

            @staticmethod
            def backward(context: Any, gradient: torch.Tensor) -> torch.Tensor:
                main.synchronize()
                time.sleep(0.2)
                (kept,) = context.saved_tensors
                overwrite(gpu, COUNT // 2 + 64)
                return gradient * kept

        with offload:
            total = OverwritesInBackward.apply(first)  # in backward the last
            side.wait_stream(main)
            with torch.cuda.stream(side):
                late = SleepsInBackward.apply(SavesGiven.apply(x, torch.full_like(x, 2.0)))
            torch.cuda._sleep(LATER)  # the encoding, and with it the store, come after it
            total = total + SavesGiven.apply(z, torch.full_like(z, 2.0))
        (total.sum() + _joined(late, side, main).sum()).backward()
        for leaf in (first, x, z):
            assert leaf.grad is not None and bool((leaf.grad == 2).all())
