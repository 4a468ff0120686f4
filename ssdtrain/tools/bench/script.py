"""A training step of the user's own model, with and without SSDTrain, in turn in one process."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import ssdtrain
from ssdtrain.config import Config
from ssdtrain.planner.controller import PlanController
from ssdtrain.runtime import Runtime
from ssdtrain.tools.bench.ratios import interval, synchronize

Build = Callable[[int], tuple[nn.Module, Callable[[], torch.Tensor]]]
"""Function from a batch size to a model and a function that runs its forward and returns the loss."""

_WARM_UP = 3
"""Steps of each that do not count."""
PLANNED_WARM_UP = 8
"""The same where a plan is made from the first steps, which run otherwise."""
MOST_WARM_UP = 16
"""After which steps count even if no plan was made."""


def measure_script(
    build: Build, batch: int, steps: int, config: Config, *, note: Callable[[str], None] = lambda _: None
) -> dict[str, Any]:
    """Runs forward and backward of two equal models in turn, one of them attached. Optimizers are not run.

    Args:
        build: called twice, after the same seed.
        config: of the attached model.

    Raises:
        ValueError: the two models do not compute the same loss from one seed, so that nothing can be compared.
    """
    sides = []
    for _ in range(2):
        torch.manual_seed(0)
        sides.append(build(batch))
    (plain, plain_loss), (model, model_loss) = sides
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    seconds: dict[str, list[float]] = {"plain": [], "ssdtrain": []}
    equal = True
    runtime = ssdtrain.attach(model, config)
    try:
        warmup, before, step = _WARM_UP if _planned(runtime) else PLANNED_WARM_UP, None, 0
        while len(seconds["plain"]) < steps:
            if before is None and step >= warmup and (_planned(runtime) or step >= MOST_WARM_UP):
                runtime.reset_peak()
                before, warmup = runtime.statistics(), step
            order = [("plain", plain, plain_loss), ("ssdtrain", model, model_loss)]
            losses = {}
            for name, one, loss_of in order if step % 2 == 0 else order[::-1]:
                if name == "ssdtrain":
                    runtime.step_begin()
                losses[name], taken = _step(one, loss_of, device, step)
                if name == "ssdtrain":
                    runtime.step_end()
                if before is not None:
                    seconds[name].append(taken)
            lossy = config.compact is not None or (config.offload is not None and config.offload.lossy)
            if step == 0 and losses["plain"] != losses["ssdtrain"] and not lossy:
                raise ValueError(
                    f"computes the loss {losses['plain']} without SSDTrain and {losses['ssdtrain']} with it at its first step: "
                    "build(batch) must return the same model and data after torch.manual_seed, and must not share them"
                )
            equal = equal and _same_gradients(plain, model)
            step += 1
            note(f"step {step} of {warmup + steps}")
        found = runtime.statistics()
    finally:
        runtime.close()
    assert found is not None and before is not None
    plain_peak = _activation_peak(plain, plain_loss, device)
    ratios = [a / b for a, b in zip(seconds["ssdtrain"], seconds["plain"], strict=True)]
    return {
        "batch": batch,
        "steps": steps,
        "warmup_steps": warmup,
        "plain_seconds": statistics.median(seconds["plain"]),
        "ssdtrain_seconds": statistics.median(seconds["ssdtrain"]),
        "step_ratio": statistics.median(ratios),
        "step_ratio_interval": list(interval(ratios)),
        "plain_activation_peak_bytes": plain_peak,
        "activation_peak_bytes": found.offload.activation_peak_bytes,
        "offloaded_bytes_per_step": (found.offload.offloaded_bytes - before.offload.offloaded_bytes) / steps,
        "wait_seconds_per_step": (found.offload.stall_seconds - before.offload.stall_seconds) / steps,
        "gradients_equal": equal,
    }


def _planned(runtime: Runtime) -> bool:
    """What plans from the first steps has done so, or nothing does."""
    controllers = (one for one in runtime.features if isinstance(one, PlanController))
    return all(one.plan is not None for one in controllers)


def _activation_peak(model: nn.Module, loss_of: Callable[[], torch.Tensor], device: torch.device) -> int:
    """Bytes that a step of `model` keeps alive for backward at most: of an engine that moves nothing. That of the attached model
    does not see what recomputation drops."""
    config = {"offload": {"amount": 0}, "report": {"interval": 0}}
    with ssdtrain.attach(model, config) as runtime:
        _step(model, loss_of, device, 0)
        found = runtime.statistics()
    assert found is not None
    return int(found.offload.unoffloaded_peak_bytes)


def _step(
    model: nn.Module, loss_of: Callable[[], torch.Tensor], device: torch.device, seed: int
) -> tuple[float, float]:
    """(loss, seconds) of a forward and a backward."""
    model.zero_grad()
    torch.manual_seed(seed)
    synchronize(device)
    began = time.perf_counter()
    loss = loss_of()
    loss.backward()
    synchronize(device)
    taken = time.perf_counter() - began
    return float(loss.detach()), taken


def _same_gradients(one: nn.Module, other: nn.Module) -> bool:
    """Whether both are equal to the bit; NaN is equal to itself."""
    return all(
        (a.grad is None and b.grad is None)
        or (a.grad is not None and b.grad is not None and torch.equal(_bits(a.grad), _bits(b.grad)))
        for a, b in zip(one.parameters(), other.parameters(), strict=True)
    )


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)
