"""Training under `ssdtrain.attach` on the device: bits of a run without, whatever comes late, and lower peaks."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import emulated_cuda
import pytest
import torch

import ssdtrain
from benchmarks.gpu.models import Model

WORKERS = ("ssdtrain-",)
"""Threads of the I/O pool, which may wait for the device: training does not wait for them."""

CONFIGS: dict[str, dict[str, Any]] = {
    "all": {"offload": {"amount": "all", "min_bytes": 1}},
    "auto": {"offload": {"min_bytes": 256}},
    "plan": {"plan": "auto", "offload": {"min_bytes": 256}},
    "host": {"offload": {"amount": "all", "min_bytes": 1, "host": "64MiB"}},
    "host and auto": {"offload": {"min_bytes": 256, "host": "64MiB"}},
    "recompute": {"plan": "auto"},
}


@dataclass
class Run:
    """What a run of training leaves."""

    losses: list[float] = field(default_factory=list)
    weights: torch.Tensor | None = None
    waits: list[dict[str, int]] = field(default_factory=list)
    """Host waits of each step, between its first operator and the end of backward."""
    peaks: list[int] = field(default_factory=list)
    """Bytes that each step allocated above what it began with."""
    reserved: int = 0
    """Bytes that the allocator took from the device."""
    pageable: int = 0


def trained(
    config: dict[str, Any] | None,
    directory: Path,
    device: torch.device,
    steps: int = 4,
    kind: str = "gpt",
    dtype: torch.dtype = torch.float32,
    around: Callable[[torch.nn.Module], torch.nn.Module] = lambda model: model,
    **shape: int,
) -> Run:
    """Train a small transformer with dropout, clipping and AdamW for some steps."""
    size = {"hidden": 32, "layers": 3, "heads": 2, "vocabulary": 64, "positions": 32} | shape
    torch.manual_seed(1)
    torch.cuda.empty_cache()
    model = Model(kind, device=device, dtype=dtype, **size)
    module = around(model)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, eps=1e-4)  # not 0 in float16
    attached: Any = nullcontext()
    if config is not None:
        config = {**config, "report": {"interval": 0}}
        if "offload" in config:
            config["offload"] = {**config["offload"], "directories": str(directory)}
        attached = ssdtrain.attach(module, config)
    run = Run()
    with attached:
        for step in range(steps):
            tokens = torch.randint(
                size["vocabulary"], (2, size["positions"]), generator=torch.Generator().manual_seed(step)
            ).to(device)
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before, base = emulated_cuda.counts(), torch.cuda.memory_allocated()
            loss = module(tokens, tokens)
            loss.backward()
            after = emulated_cuda.counts()
            run.waits.append(emulated_cuda.host_waits(before, after, WORKERS))
            run.pageable += after.get("pageable copies", 0) - before.get("pageable copies", 0)
            torch.cuda.synchronize()
            run.peaks.append(torch.cuda.max_memory_allocated() - base)
            run.reserved = max(run.reserved, torch.cuda.max_memory_reserved())
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            run.losses.append(loss.item())
        run.weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).cpu()
    return run


def assert_same_bits(run: Run, other: Run) -> None:
    assert run.losses == other.losses
    assert run.weights is not None and other.weights is not None and torch.equal(run.weights, other.weights)


@pytest.mark.usefixtures("late")
@pytest.mark.parametrize("name", CONFIGS)
def test_whatever_comes_late_the_bits_are_those_of_a_run_without(
    name: str, device: torch.device, tmp_path: Path
) -> None:
    steps = 8 if "plan" in CONFIGS[name] or "auto" in name else 4
    assert_same_bits(trained(None, tmp_path, device, steps), trained(CONFIGS[name], tmp_path, device, steps))


@pytest.mark.parametrize("name", ["all", "host", "auto", "host and auto"])
def test_a_step_makes_the_host_wait_for_nothing_and_copies_nothing_pageable(
    name: str, device: torch.device, tmp_path: Path
) -> None:
    trained(None, tmp_path, device, 1)  # what a process copies once, whoever trains first in it
    gc.collect()  # what earlier tests left closes now, and not in the thread that runs a backward
    for thread in threading.enumerate():
        if thread.name == "ssdtrain-close":
            thread.join()
    run = trained(CONFIGS[name], tmp_path, device, 5)
    assert run.waits[2:] == [{}] * 3
    assert run.pageable == 0


@pytest.mark.parametrize("name", ["all", "host"])
def test_the_allocators_peak_is_lower(name: str, device: torch.device, tmp_path: Path) -> None:
    shape = {"layers": 12, "hidden": 64, "positions": 64, "vocabulary": 256}
    kept = trained(None, tmp_path, device, 4, **shape)
    offloaded = trained(
        {"offload": {**CONFIGS[name]["offload"], "in_flight": "1MiB"}}, tmp_path, device, 4, **shape
    )
    assert_same_bits(kept, offloaded)
    assert max(offloaded.peaks[1:]) < 0.6 * max(kept.peaks[1:])


@pytest.mark.usefixtures("late")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_with_scaled_losses(dtype: torch.dtype, device: torch.device, tmp_path: Path) -> None:
    def run(config: dict[str, Any] | None) -> list[torch.Tensor]:
        torch.manual_seed(3)
        model = Model(
            "gpt",
            hidden=32,
            layers=2,
            heads=2,
            vocabulary=64,
            positions=32,
            device=device,
            dtype=torch.float32,
        )
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        scaler = torch.amp.GradScaler("cuda", enabled=dtype == torch.float16)
        losses = []
        with ssdtrain.attach(model, config) if config else nullcontext():
            for step in range(3):
                tokens = torch.randint(64, (2, 32), generator=torch.Generator().manual_seed(step)).to(device)
                with torch.autocast("cuda", dtype):
                    loss = model(tokens, tokens)
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
                losses.append(loss.detach().cpu())
        return [*losses, *(parameter.detach().cpu() for parameter in model.parameters())]

    config = {
        "offload": {"directories": str(tmp_path), "amount": "all", "min_bytes": 1},
        "report": {"interval": 0},
    }
    assert all(torch.equal(a, b) for a, b in zip(run(None), run(config), strict=True))


@pytest.mark.parametrize("name", ["all", "host"])
def test_expandable_segments(name: str, device: torch.device, tmp_path: Path) -> None:
    torch.cuda.empty_cache()
    torch._C._accelerator_setAllocatorSettings("expandable_segments:True")
    try:
        assert_same_bits(trained(None, tmp_path, device, 3), trained(CONFIGS[name], tmp_path, device, 3))
    finally:
        torch.cuda.empty_cache()
        torch._C._accelerator_setAllocatorSettings("expandable_segments:False")


def test_a_captured_block_in_an_offloaded_model(device: torch.device, tmp_path: Path) -> None:
    """torch's graphed callables beside offload: replays save static buffers, and the bits are those of the run without."""

    def run(directory: Path | None) -> torch.Tensor:
        torch.manual_seed(4)
        first = torch.nn.Linear(64, 64, device=device)
        block = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU()).to(device)
        x = torch.randn(128, 64, device=device)
        graphed = torch.cuda.make_graphed_callables(
            block, (torch.randn(128, 64, device=device, requires_grad=True),)
        )
        model = torch.nn.Sequential(first, graphed, torch.nn.Linear(64, 8, device=device))
        section = {"directories": str(directory), "amount": "all", "min_bytes": 1}
        config = {"offload": section, "report": {"interval": 0}}
        with ssdtrain.attach(model, config) if directory else nullcontext():
            for _ in range(3):
                model.zero_grad()
                model(x).square().sum().backward()
        return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]).cpu()

    assert torch.equal(run(None), run(tmp_path))
