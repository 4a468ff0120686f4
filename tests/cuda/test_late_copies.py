"""What a copy still uses when all else is done with it, on a device whose copies come late."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import emulated_cuda
import pytest
import torch

from ssdtrain.config import load_config
from ssdtrain.device import CudaDevice
from ssdtrain.offload.policy import Action, OffloadPolicy
from ssdtrain.runtime import Runtime
from tests.gpu.test_streams import LATER, SavesGiven, overwrite
from tests.support.policies import Decides

COUNT = 16 << 20
"""Elements of a tensor with several pages of expandable segments (20 MiB)."""


@contextmanager
def made_runtime(
    device: torch.device, directory: Path, policy: OffloadPolicy | None = None, **section: Any
) -> Iterator[Runtime]:
    offload = {"directories": str(directory), "amount": "all", "min_bytes": 1024, **section}
    runtime = Runtime(load_config({"offload": offload}), device, policy=policy, logs=False)
    try:
        yield runtime
    finally:
        torch.cuda.synchronize()
        runtime.close()


def sleep(runtime: Runtime, stream: str) -> None:
    """Have copies of this stream of the engine, which are queued from now on, come late."""
    assert isinstance(runtime.engine.device, CudaDevice)
    with torch.cuda.stream(getattr(runtime.engine.device, stream)):
        torch.cuda._sleep(LATER)


@pytest.fixture
def expandable() -> Iterator[None]:
    """The allocator unmaps what it gives back."""
    torch.cuda.empty_cache()
    torch._C._accelerator_setAllocatorSettings("expandable_segments:True")
    yield
    torch._C._accelerator_setAllocatorSettings("expandable_segments:False")


@pytest.mark.usefixtures("expandable")
def test_what_a_cancelled_store_copies_is_not_unmapped(device: torch.device, tmp_path: Path) -> None:
    """1. The copy of a saved tensor is late. 2. Backward comes before it, cancels the store and frees the tensor. 3. The
    allocator gives back what is free: the copy would read memory that is not there, which ends the process."""
    x = torch.ones(COUNT, device=device, requires_grad=True)
    with made_runtime(device, tmp_path) as runtime:
        sleep(runtime, "_store_stream")
        with runtime.forward():
            y = SavesGiven.apply(x, torch.full_like(x, 3.0))
        with runtime.backward():
            y.backward(torch.ones_like(x))
        runtime.step_end()
        found = runtime.statistics()
        assert found.offload.avoided_write_bytes == 4 * COUNT
        torch.cuda.current_stream(device).synchronize()
        torch.cuda.empty_cache()
        torch.cuda.synchronize()
        assert x.grad is not None and bool((x.grad == 3).all())


def settle(runtime: Runtime) -> None:
    """Wait for the stores in flight."""
    while (found := runtime.statistics()) is not None and found.offload.in_flight_bytes:
        time.sleep(0.01)


def test_a_buffer_beside_the_arena_is_kept_while_it_is_copied(
    device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device reads pageable memory itself, late: freed at once, it would not be there any more."""
    x = torch.ones(COUNT, device=device, requires_grad=True)
    with (
        emulated_cuda.settings(pageable_late=1),
        made_runtime(device, tmp_path, prefetch=0, buffer="256MiB") as runtime,
    ):
        with runtime.forward():
            y = x
            for _ in range(6):
                y = SavesGiven.apply(y, torch.full_like(x, 3.0))
        settle(runtime)
        monkeypatch.setattr(runtime.engine.buffers, "acquire", lambda nbytes: None)
        sleep(runtime, "_load_stream")
        with runtime.backward():
            y.backward(torch.ones_like(x))
        torch.cuda.synchronize()
        found = runtime.statistics()
        assert found.offload.outside_bytes >= 4 * COUNT
        assert x.grad is not None and bool((x.grad == 3**6).all())


class LoadsLateInBackward(torch.autograd.Function):
    """Once its backward has run, loads come late."""

    @staticmethod
    def forward(context: Any, x: torch.Tensor, runtime: Runtime) -> torch.Tensor:
        context.runtime = runtime
        return x.clone()

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        sleep(context.runtime, "_load_stream")
        return gradient, None


class OverwritesInBackward(torch.autograd.Function):
    """Its backward takes what memory of the current stream is free, once the engine knows what has died."""

    @staticmethod
    def forward(context: Any, x: torch.Tensor, runtime: Runtime, count: int) -> torch.Tensor:
        context.runtime, context.count = runtime, count
        return x * 2

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        context.runtime.engine.drain()
        overwrite(gradient.device, context.count)
        return gradient * 2, None, None


def test_a_part_that_stayed_is_kept_while_it_is_put_back(device: torch.device, tmp_path: Path) -> None:
    """1. A branch on a stream of its own saves a tensor, and the main stream begins its store: the part that stays is in its
    memory. 2. In backward the main stream is done with its own loads; only then loads come late. The branch's stream waits for
    its load, the main stream does not. 3. Backward is done with the tensor, and the main stream uses the memory of the part for
    others."""
    count = 4 << 20
    side, main = torch.cuda.Stream(device), torch.cuda.current_stream(device)
    x, first = (torch.ones(count, device=device, requires_grad=True) for _ in range(2))
    with torch.cuda.stream(side):
        y = torch.ones(count, device=device, requires_grad=True)  # its gradient is summed up there
    half = Decides(lambda _: Action(True, part=0.5))  # the first half of each tensor leaves
    with made_runtime(device, tmp_path, half, prefetch=0) as runtime:
        for _ in range(2):
            x.grad = y.grad = first.grad = None
            torch.cuda.synchronize()
            with runtime.forward():
                total = OverwritesInBackward.apply(first, runtime, count // 2)  # in backward the last
                side.wait_stream(main)
                with torch.cuda.stream(side):
                    branch = SavesGiven.apply(y, torch.full_like(y, 5.0))
                # Younger than the branch: in backward it comes before it.
                total = LoadsLateInBackward.apply(total, runtime)
                for _ in range(8):
                    total = total + SavesGiven.apply(x, torch.full_like(x, 3.0))
                joined = total.sum()
                main.wait_stream(side)
                joined = joined + branch.sum()
            del total, branch
            settle(runtime)
            torch.cuda.synchronize()
            with runtime.backward():
                joined.backward()
            runtime.step_end()
            torch.cuda.synchronize()
            for leaf, expected in ((x, 24), (y, 5), (first, 2)):
                assert leaf.grad is not None and bool((leaf.grad == expected).all())
