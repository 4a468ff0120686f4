"""Losses, gradients and buffers are those of the same run without the plugin, to the bit."""

from __future__ import annotations

import gc
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from ssdtrain.runtime import Runtime
from tests.offload import zoo
from tests.offload.conftest import MIN_BYTES, MakeRuntime, Variant
from tests.offload.reference import SynchronousOffload

# Of these nothing is of a size or kind that may move.
NOTHING_TO_MOVE: set[str] = set()


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return len(one) == len(other) and all(
        a.dtype == b.dtype and torch.equal(a, b) and a.shape == b.shape
        for a, b in zip(one, other, strict=True)
    )


def asked_for(runtime: Runtime) -> int:
    """Bytes whose store was asked for. On a busy machine one may not have begun when backward wants them, and is cancelled."""
    found = runtime.statistics()
    return found.offload.offloaded_bytes + found.offload.avoided_write_bytes


@pytest.mark.parametrize("case", zoo.CASES, ids=lambda case: case.__name__)
def test_offload_changes_no_bit(case: zoo.Case, variant: Variant, make_runtime: MakeRuntime) -> None:
    plain = zoo.run(case, nullcontext)
    runtime = make_runtime(variant)
    offloaded = zoo.run(case, runtime.forward)
    assert same(plain, offloaded)
    gc.collect()
    found = runtime.statistics()
    moved = found.offload.offloaded_bytes + found.offload.avoided_write_bytes
    assert moved > 0 or case.__name__ in NOTHING_TO_MOVE


@pytest.mark.parametrize("case", zoo.CASES, ids=lambda case: case.__name__)
def test_the_synchronous_reference_agrees(case: zoo.Case, tmp_path: Path) -> None:
    plain = zoo.run(case, nullcontext)
    reference = SynchronousOffload(tmp_path, MIN_BYTES)
    assert same(plain, zoo.run(case, reference.hooks))
    assert reference.count > 0


@pytest.mark.parametrize("amount", ["0.5", "16KiB", "0.0"])
def test_any_amount_changes_no_bit(amount: str, make_runtime: MakeRuntime) -> None:
    plain = zoo.run(zoo.gpt, nullcontext)
    runtime = make_runtime(amount=amount)
    assert same(plain, zoo.run(zoo.gpt, runtime.forward))
