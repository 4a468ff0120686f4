"""Training under `ssdtrain.attach` on the device: bits of a run without, whatever comes late, and lower peaks."""

from __future__ import annotations

from collections.abc import Callable
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
    runtime = None
    if config is not None:
        config = {**config, "report": {"interval": 0}}
        if "offload" in config:
            config["offload"] = {**config["offload"], "directories": str(directory)}
        runtime = ssdtrain.attach(module, config)
    run = Run()
    try:
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
    finally:
        if runtime is not None:
            runtime.close()
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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", ["bert", "t5"])
def test_other_models_and_half_precision(
    kind: str, dtype: torch.dtype, device: torch.device, tmp_path: Path
) -> None:
    expected = trained(None, tmp_path, device, 3, kind, dtype)
    assert_same_bits(expected, trained(CONFIGS["all"], tmp_path, device, 3, kind, dtype))


@pytest.mark.parametrize("name", ["all", "host", "auto", "host and auto"])
def test_a_step_makes_the_host_wait_for_nothing_and_copies_nothing_pageable(
    name: str, device: torch.device, tmp_path: Path
) -> None:
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
