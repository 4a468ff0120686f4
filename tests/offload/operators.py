"""Every operator that PyTorch has tests for, with the engine around its forward, against autograd without hooks.

    python -m tests.offload.operators [--every N] [NAME...]

Each sample of PyTorch's own list (`op_db`) is run forward, backward twice over one graph, and backward through its backward,
with and without the engine; the bits must be the same, and where autograd raises the engine must. A process of its own: the
list imports half of PyTorch's test suite. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import sys
import tempfile
import time
import types
import unittest
import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from ssdtrain.config import load_config
from ssdtrain.runtime import Runtime, Seams

VARIANTS: dict[str, tuple[dict[str, Any], bool]] = {
    "c": ({}, False),
    "python": ({"engine": "python"}, False),
    "staged": ({"buffer": "64MiB"}, True),
    "lossless": ({"codec": "lossless"}, False),
    "host-tier": ({"host": "8MiB"}, False),
    "tight": ({"buffer": "2MiB", "in_flight": 1, "prefetch": 0}, False),
}
"""Options, and whether tensors go the way of device memory."""

SAMPLES = 6
"""Of each operator, spread over PyTorch's list."""

DIFFERENT_EVERY_TIME = {
    "empty": "shows memory that nobody has written",
    "empty_like": "shows memory that nobody has written",
    "empty_permuted": "shows memory that nobody has written",
    "empty_strided": "shows memory that nobody has written",
    "new_empty": "shows memory that nobody has written",
    "new_empty_strided": "shows memory that nobody has written",
}
"""Operators left out, and why."""


def operators() -> list[Any]:
    """PyTorch's list, without those that have no gradient."""
    if importlib.util.find_spec("expecttest") is None:
        # PyTorch's module of test tools imports it for a base class that is not used here.
        module = types.ModuleType("expecttest")
        module.TestCase = unittest.TestCase  # type: ignore[attr-defined]
        sys.modules["expecttest"] = module
    from torch.testing._internal.common_methods_invocations import op_db

    return [op for op in op_db if op.supports_autograd and op.name not in DIFFERENT_EVERY_TIME]


def tensors_of(value: Any) -> list[torch.Tensor]:
    """All tensors in nested lists, tuples and dicts."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        return [tensor for each in value for tensor in tensors_of(each)]
    return []


def copied(value: Any) -> Any:
    """The same with leaves of its own."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone().requires_grad_(value.requires_grad)
    if isinstance(value, dict):
        return {key: copied(each) for key, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(copied(each) for each in value)
    return value


def bits(tensor: torch.Tensor | None) -> Any:
    if tensor is None:
        return None
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    tensor = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return str(tensor.dtype), tuple(tensor.shape), tensor.view(-1).view(torch.uint8).numpy().tobytes()


def shown(
    call: Callable[..., Any],
    sample: Any,
    recording: Callable[[], AbstractContextManager[Any]],
    settle: Callable[[], None],
) -> list[Any]:
    """What one run of the operator shows: values, gradients, and the kind of error that ends it."""
    torch.manual_seed(0)
    given, args, kwargs = copied(sample.input), copied(sample.args), copied(sample.kwargs)
    leaves = [t for t in tensors_of([given, args, kwargs]) if t.requires_grad]
    found: list[Any] = []
    stage = "forward"
    try:
        with recording():
            # A leaf may not be written in place, and what an operator saves of a leaf never moves the way of an activation.
            out = call(*_unleafed((given, args)), **_unleafed(kwargs))
            outs = [
                t
                for t in tensors_of(out)
                if t.requires_grad and t.dtype.is_floating_point | t.dtype.is_complex
            ]
            loss = sum((_real(t) * torch.linspace(0.5, 1.5, t.numel()).view(t.shape)).sum() for t in outs)
        found += [bits(t) for t in outs]
        settle()
        if not outs:
            return found
        for each in ("backward", "second backward"):
            stage = each
            grads = torch.autograd.grad(loss, leaves, retain_graph=True, allow_unused=True)  # type: ignore[arg-type]
            found += [bits(g) for g in grads]
        stage = "double backward"
        grads = torch.autograd.grad(loss, leaves, create_graph=True, allow_unused=True)  # type: ignore[arg-type]
        again = [_real(g).square().sum() for g in grads if g is not None and g.requires_grad]
        if again:
            twice = torch.autograd.grad(sum(again), leaves, allow_unused=True)  # type: ignore[arg-type]
            found += [bits(g) for g in twice]
    except (RuntimeError, NotImplementedError, TypeError, ValueError) as error:
        found.append(f"{stage}: {type(error).__name__}")
        error.__traceback__ = None
    return found


def _real(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    return torch.view_as_real(tensor.resolve_conj()).sum(-1) if tensor.is_complex() else tensor


def _unleafed(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value * 1 if value.requires_grad else value
    if isinstance(value, dict):
        return {key: _unleafed(each) for key, each in value.items()}
    if type(value) in (list, tuple):
        # The first of (input, args) is a tensor or a list of them, the second are the other arguments.
        return type(value)(_unleafed(each) for each in value)
    return value


class Sweep:
    """Runs operators under every variant.

    Args:
        variants: names of VARIANTS.
    """

    def __init__(self, variants: list[str]) -> None:
        self.runtimes: dict[str, Runtime] = {}
        self.differ: list[str] = []
        self.counts: Counter[str] = Counter()
        self._directory = tempfile.TemporaryDirectory()
        for name in variants:
            options, staged = VARIANTS[name]
            section = {"directories": f"{self._directory.name}/{name}", "min_bytes": 1, "capacity": "64MiB"}
            config = load_config({"offload": {**section, **options}, "report": {"interval": 0}})
            self.runtimes[name] = Runtime(config, seams=Seams(staged=staged or None))

    def run(self, op: Any) -> None:
        dtypes = (
            op.supported_backward_dtypes("cpu") if hasattr(op, "supported_backward_dtypes") else op.dtypes
        )
        for dtype in (torch.float32, torch.complex64):
            if dtype in dtypes:
                self._samples(op, dtype)

    def _samples(self, op: Any, dtype: torch.dtype) -> None:
        samples = list(op.sample_inputs("cpu", dtype, requires_grad=True))
        chosen = samples[:: max(1, len(samples) // SAMPLES)][:SAMPLES]
        calls = {"": op.op, "in place ": op.inplace_variant}
        for number, sample in enumerate(chosen):
            for kind, function in calls.items():
                if function is None or (kind and not _may_be_in_place(sample)):
                    continue
                self._compare(f"{kind}{op.formatted_name}, {dtype}, sample {number}", function, sample)

    def _compare(self, name: str, function: Callable[..., Any], sample: Any) -> None:
        def call(given: Any, args: Any, **kwargs: Any) -> Any:
            return function(given, *args, **kwargs)

        plain = shown(call, sample, nullcontext, lambda: None)
        if plain != shown(call, sample, nullcontext, lambda: None):
            self.counts["not the same twice without hooks"] += 1
            return
        self.counts["samples"] += 1
        for variant, runtime in self.runtimes.items():
            ours = shown(call, sample, runtime.forward, lambda runtime=runtime: settle(runtime))  # type: ignore[misc]
            self.counts["runs"] += 1
            if ours != plain:
                where = next(
                    (i for i, (a, b) in enumerate(zip(ours, plain, strict=False)) if a != b), "length"
                )
                errors = [each for each in (*ours, *plain) if isinstance(each, str)]
                self.differ.append(f"{variant}: {name} at {where} {errors}")

    def close(self) -> None:
        """End the runtimes; they must hold nothing."""
        gc.collect()
        torch.ones(1, requires_grad=True).sum().backward()
        for name, runtime in self.runtimes.items():
            found = runtime.statistics()
            assert found is not None
            for figure in ("offloaded_bytes", "loaded_bytes", "live_regions"):
                self.counts[f"{name} {figure}"] = getattr(found.offload, figure)
            runtime.close()
        self._directory.cleanup()


def settle(runtime: Runtime) -> None:
    """Wait until every store has ended, so that backward has to read."""
    while runtime.statistics().offload.in_flight_bytes:  # type: ignore[union-attr]
        time.sleep(0.0001)


def _may_be_in_place(sample: Any) -> bool:
    return isinstance(sample.input, torch.Tensor) and not sample.broadcasts_input


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("names", nargs="*", help="operators; default: all")
    arguments.add_argument("--every", type=int, default=1, help="take one operator in so many")
    arguments.add_argument("--samples", type=int, default=SAMPLES)
    arguments.add_argument("--variants", nargs="*", default=list(VARIANTS), choices=list(VARIANTS))
    arguments.add_argument("--verbose", action="store_true", help="name each operator before it runs")
    chosen = arguments.parse_args()
    globals()["SAMPLES"] = chosen.samples
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    found = [op for op in operators() if not chosen.names or op.name in chosen.names][:: chosen.every]
    sweep = Sweep(chosen.variants)
    for op in found:
        if chosen.verbose:
            print(op.formatted_name, flush=True)
        sweep.run(op)
        sweep.counts["operators"] += 1
    sweep.close()
    print(json.dumps({**sweep.counts, "left_out": DIFFERENT_EVERY_TIME, "differ": sweep.differ}))


if __name__ == "__main__":
    main()
