"""Training on a GPU: the bits of a run without SSDTrain, no host synchronisation in a step, copies beside computation."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

import ssdtrain
from benchmarks.gpu.models import KINDS, Model
from ssdtrain.device import device_for

pytestmark = pytest.mark.gpu

SMALL = {"hidden": 256, "layers": 4, "heads": 4, "vocabulary": 1024, "positions": 256}
TINY = {"hidden": 32, "layers": 2, "heads": 2, "vocabulary": 64, "positions": 32}
"""On the CPU, which takes minutes for a small model in float16; it computes for an emulated device too."""
WAYS = ("attach", "with", "host")
Steps = list[tuple[torch.Tensor, list[torch.Tensor]]]


def trained(
    model: Model, around: Callable[[], AbstractContextManager[Any]], ended: Callable[[], Any], steps: int = 3
) -> Steps:
    """Loss and gradients of each step; dropout is on, and the weights move."""
    found: Steps = []
    for step in range(steps):
        torch.manual_seed(step)
        tokens = torch.randint(
            len(model.embedding.weight), (4, len(model.position.weight)), device=model.head.weight.device
        )
        with around():
            loss = model(tokens, tokens)
        (loss * 128.0).backward()
        gradients = []
        with torch.no_grad():
            for parameter in model.parameters():
                assert parameter.grad is not None
                gradients.append(parameter.grad.clone())
                parameter.sub_(parameter.grad, alpha=1e-6)
                parameter.grad = None
        found.append((loss.detach().clone(), gradients))
        ended()
    return found


def model_of(kind: str, device: torch.device, dtype: torch.dtype) -> Model:
    torch.manual_seed(7)
    return Model(kind, device=device, dtype=dtype, **(SMALL if of_hardware(device) else TINY))


def of_hardware(device: torch.device) -> bool:
    return device.type == "cuda" and not torch.cuda.get_device_name(device).startswith("Emulated")


@contextmanager
def offloading(model: Model, way: str, directory: Path) -> Iterator[tuple[Callable[[], Any], Any]]:
    tier: dict[str, Any] = {"host": "1GiB"} if way == "host" else {"directories": str(directory)}
    if way == "with":
        with closing(ssdtrain.offload(model=model, min_bytes=256, **tier)) as offload:
            yield lambda: offload, offload.runtime
        return
    with ssdtrain.attach(
        model, {"offload": {"min_bytes": 256, **tier}, "report": {"interval": 0}}
    ) as runtime:
        yield nullcontext, runtime


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", WAYS)
def test_losses_and_gradients_have_the_bits_of_a_run_without(
    way: str, kind: str, dtype: torch.dtype, device: torch.device, tmp_path: Path
) -> None:
    expected = trained(model_of(kind, device, dtype), nullcontext, lambda: None)
    model = model_of(kind, device, dtype)
    with offloading(model, way, tmp_path) as (around, runtime):
        found = trained(model, around, runtime.step_end)
        counted = runtime.statistics().offload
        # Of a device that is behind its host nothing may be written yet, and a store that backward overtakes never is.
        assert counted.offloaded_bytes + counted.avoided_write_bytes > 0
    for (loss, gradients), (other, others) in zip(expected, found, strict=True):
        assert torch.equal(loss, other)
        assert all(torch.equal(a, b) for a, b in zip(gradients, others, strict=True))


def test_a_step_makes_the_host_wait_for_nothing(gpu: torch.device, tmp_path: Path) -> None:
    model = model_of("gpt", gpu, torch.bfloat16)
    with offloading(model, "attach", tmp_path) as (around, runtime):
        trained(model, around, runtime.step_end)  # sizes are known, kernels are there
        torch.cuda.synchronize()
        tokens = torch.zeros(4, len(model.position.weight), dtype=torch.int64, device=gpu)
        torch.cuda.set_sync_debug_mode("warn")
        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                model(tokens, tokens).backward()
                runtime.step_end()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    waits = [str(warning.message) for warning in caught if "synchroniz" in str(warning.message)]
    assert not waits


def test_copies_run_beside_computation(gpu: torch.device) -> None:
    """Of the time of copies, most is during kernels. The model is large enough for copies to take longer than launches."""
    if not of_hardware(gpu):
        pytest.skip("times of hardware, from CUPTI: an emulated device has neither")
    torch.manual_seed(7)
    model = Model(
        "gpt",
        hidden=4096,
        layers=6,
        heads=32,
        vocabulary=1024,
        positions=1024,
        device=gpu,
        dtype=torch.bfloat16,
    )
    tokens = torch.zeros(8, 1024, dtype=torch.int64, device=gpu)
    with ssdtrain.attach(model, {"offload": {"host": "16GiB"}, "report": {"interval": 0}}) as runtime:
        for _ in range(6):  # the plan is made from a step that the device has passed
            model(tokens, tokens).backward()
            torch.cuda.synchronize()
            runtime.step_end()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            model(tokens, tokens).backward()
            torch.cuda.synchronize()
    kernels, copies = [], []
    for event in profile.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            span = event.time_range.start, event.time_range.end
            (
                copies
                if "Memcpy" in event.name and ("DtoH" in event.name or "HtoD" in event.name)
                else kernels
            ).append(span)
    assert copies, "nothing was offloaded"
    assert overlapped(copies, kernels) >= 0.8


def overlapped(spans: list[tuple[float, float]], others: list[tuple[float, float]]) -> float:
    """The share of `spans` during which one of `others` runs."""
    busy: list[tuple[float, float]] = []
    for start, end in sorted(others):
        if busy and start <= busy[-1][1]:
            busy[-1] = busy[-1][0], max(end, busy[-1][1])
        else:
            busy.append((start, end))
    total = sum(end - start for start, end in spans)
    beside = sum(max(0.0, min(end, b) - max(start, a)) for start, end in spans for a, b in busy)
    return beside / total


def test_the_share_of_overlap() -> None:
    assert overlapped([(0, 4), (10, 12)], [(1, 2), (1, 3), (11, 20)]) == pytest.approx(0.5)


def test_the_layer_below_is_that_of_the_device(device: torch.device) -> None:
    assert device_for(device).kind == device.type
