"""One way of training one model for some steps: its memory, its time and its loss."""

from __future__ import annotations

import gc
import os
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

import ssdtrain
from benchmarks.gpu.models import Model
from ssdtrain.planner.controller import PlanController

__all__ = ["CUBLAS", "WAYS", "Geometry", "Measured", "be_deterministic", "measure"]

WAYS = ("keep", "recompute", "save_on_cpu", "host", "ssd", "host_auto", "ssd_auto")
"""Keep activations; recompute every layer; torch.autograd.graph.save_on_cpu; SSDTrain with everything to host memory, and to the
drive; the same with the default amount, which is as much as transfers can be hidden for.

A value may follow: "recompute:4" recomputes the first four layers, "host:exact" (or "host_auto:exact") offloads by a codec, and
"plan:20.5" follows a plan by which saved tensors take at most 20.5 GiB of the device, to host memory where it offloads; with
"plan_exact:20.5" it offloads nothing, and may keep blocks encoded.
"""

SETTLING = 8
"""Steps until the default amount, a plan or the codec "auto" is chosen and followed. Only their losses count, and the peaks of
those that have no plan."""
TRIAL = 12
"""The same of the codec "auto"."""

LONGEST = 40.0
CUBLAS = "CUBLAS_WORKSPACE_CONFIG"


def be_deterministic() -> None:
    """Let two runs of the same steps have the same bits, or fail. With `warn_only` fused attention still adds in any order."""
    os.environ.setdefault(CUBLAS, ":4096:8")  # without it matrix products raise
    torch.use_deterministic_algorithms(True)


@dataclass(frozen=True)
class Geometry:
    """A model and its input."""

    kind: str
    hidden: int
    layers: int
    sequence: int
    microbatch: int
    vocabulary: int = 50304

    @property
    def saved_bytes(self) -> int:
        """About what a forward saves, and a quarter more: 34 bytes per hidden unit and layer for each token, and the logits."""
        tokens = self.microbatch * self.sequence
        return tokens * (43 * self.hidden * self.layers + 12 * self.vocabulary) + (256 << 20)

    @property
    def name(self) -> str:
        return f"{self.kind} {self.hidden}x{self.layers}, {self.microbatch}x{self.sequence} tokens"


@dataclass
class Measured:
    """What one way came to."""

    way: str
    step_seconds: float
    """Median over the steps after the first two."""
    peak_bytes: int | None
    """Highest allocation beyond parameters and gradients; None where the device does not say (CPU)."""
    reserved_bytes: int | None
    """The same of what the allocator has reserved, in use or not: what the device must have."""
    losses: list[float]
    """Of each step: the same bits for every way."""
    offloaded_bytes: int = 0
    """Per step."""
    store_wait_seconds: float = 0.0
    load_wait_seconds: float = 0.0
    """Per step."""
    saved_peak_bytes: int = 0
    """Highest bytes of saved tensors on the device, by the engine's own count."""
    predicted_peak_bytes: int = 0
    predicted_seconds: float = 0.0
    """What the plan that was followed last predicted for `saved_peak_bytes` and `step_seconds`."""
    plan: str = ""
    """Its actions, such as "2 keep, 4 host"."""


def measure(
    geometry: Geometry, way: str, *, device: torch.device, directory: str, host_bytes: int, steps: int = 6
) -> Measured:
    """Train a new model with the seed of all others.

    Args:
        host_bytes: size of the host tier for "host" at most; it has what the model saves, for pinning takes time.
        steps: at least 3; the first two are left out of the time. No further one after `LONGEST` seconds. Where the amount is
            chosen while training, `SETTLING` more come before them.

    Raises:
        torch.OutOfMemoryError: it does not fit.
    """
    torch.manual_seed(1)
    dtype = torch.bfloat16
    model = Model(
        geometry.kind, hidden=geometry.hidden, layers=geometry.layers, heads=max(1, geometry.hidden // 128),
        vocabulary=geometry.vocabulary, positions=geometry.sequence,
        recomputed_blocks=_recomputed(way, geometry.layers), device=device, dtype=dtype,
    )  # fmt: skip
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    tokens = torch.randint(geometry.vocabulary, (geometry.microbatch, geometry.sequence), device=device)
    runtime = _runtime(model, way, device, directory, min(host_bytes, geometry.saved_bytes))
    try:
        return _train(model, tokens, way, runtime, device, steps, _settling(way))
    finally:
        if runtime is not None:
            runtime.close()
        del model, tokens
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()


def _recomputed(way: str, layers: int) -> int:
    kind, _, value = way.partition(":")
    return int(value or layers) if kind == "recompute" else 0


def _settling(way: str) -> int:
    name, _, value = way.partition(":")
    if value == "auto":
        return TRIAL
    return SETTLING if name.endswith("_auto") or name.startswith("plan") else 0


def _runtime(model: Model, way: str, device: torch.device, directory: str, host_bytes: int) -> Any:
    name, _, value = way.partition(":")
    kind, _, option = name.partition("_")
    if kind not in ("host", "ssd", "plan"):
        return None
    tier: dict[str, Any] = {"directories": directory} if kind == "ssd" else {"host": host_bytes}
    config: dict[str, Any] = {"offload": tier, "report": {"interval": 0}}
    if kind == "plan":
        config["plan"] = {"device_limit": int(float(value) * (1 << 30))}
        if option:
            del config["offload"]
            config["plan"]["encode"] = option
    else:
        tier |= {"codec": value} if value else {}
        tier |= {} if option == "auto" else {"amount": "all"}
    if device.type == "cpu" and "offload" in config:
        tier["min_bytes"] = 1024  # of the dry run, whose tensors are tiny
    return ssdtrain.attach(model, config)


def _train(
    model: Model,
    tokens: torch.Tensor,
    way: str,
    runtime: Any,
    device: torch.device,
    steps: int,
    settling: int,
) -> Measured:
    saved: Callable[[], AbstractContextManager[Any]] = nullcontext
    if way == "save_on_cpu":
        pinned = device.type == "cuda"

        def saved() -> AbstractContextManager[Any]:
            return torch.autograd.graph.save_on_cpu(pin_memory=pinned)

    seconds: list[float] = []
    peak = reserved = 0
    losses: list[float] = []
    before: Any = None  # statistics at the end of the settling steps
    started = time.perf_counter()
    for step in range(settling + max(3, steps)):
        if step == settling and runtime is not None:
            before = runtime.statistics()
            if way.startswith("plan"):
                peak = reserved = 0  # a plan's limit does not bind the steps that it is made from
                runtime.reset_peak()
                if device.type == "cuda":
                    torch.cuda.empty_cache()
        if step >= settling + 3 and time.perf_counter() - started > LONGEST:
            break
        base = _begin(device)
        began = time.perf_counter()
        with saved():
            loss = model(tokens, tokens)
        loss.backward()
        with torch.no_grad():
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter.sub_(parameter.grad, alpha=1e-3)
                parameter.grad.zero_()
        if runtime is not None:
            runtime.step_end()
        _settle(device)
        seconds.append(time.perf_counter() - began)
        losses.append(float(loss.detach()))
        if device.type == "cuda":
            peak = max(peak, torch.cuda.max_memory_allocated(device) - base)
            reserved = max(reserved, torch.cuda.max_memory_reserved(device) - base)
    memory = (peak, reserved) if device.type == "cuda" else (None, None)
    found = Measured(way, statistics.median(seconds[settling + 2 :]), *memory, losses)
    if runtime is not None:
        metrics, counted = runtime.statistics(), len(seconds) - settling
        found.offloaded_bytes = (metrics.store.bytes_written - before.store.bytes_written) // counted
        waits, waited = metrics.offload, before.offload
        found.store_wait_seconds = (waits.store_wait_seconds - waited.store_wait_seconds) / counted
        found.load_wait_seconds = (waits.load_wait_seconds - waited.load_wait_seconds) / counted
        found.saved_peak_bytes = waits.activation_peak_bytes
        for feature in runtime.features:
            if isinstance(feature, PlanController) and feature.plan is not None:
                found.predicted_peak_bytes, found.predicted_seconds = feature.plan.peak, feature.plan.seconds
                found.plan = feature.plan.summary()
    return found


def _begin(device: torch.device) -> int:
    _settle(device)
    if device.type != "cuda":
        return 0
    torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.memory_allocated(device)


def _settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
