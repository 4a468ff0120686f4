"""Storages that somebody frees after they were saved (`storage.resize_(0)`): never stored, or never handed out as if right."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from ssdtrain.runtime import Runtime
from ssdtrain.storage import Faults
from tests.offload.conftest import VARIANTS, MakeRuntime, Variant, offload_parts, settled

# Small enough that malloc keeps the pages of what is freed: a store may read them.
SIZE = 64

IN_PLACE = [variant for variant in VARIANTS if variant.name in ("c", "python", "host-tier")]
"""The pool reads the tensor where it is, at a time of its own."""


unseen = torch.autograd._unsafe_preserve_version_counter
"""Inside, autograd does not notice that this tensor is written to."""


@contextmanager
def stores_wait(runtime: Runtime) -> Iterator[None]:
    """Inside, no store begins."""
    pool: Any = runtime.offload.store.pool
    pool.hold(reads=False)
    try:
        yield
    finally:
        pool.release()


def saved(runtime: Runtime) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A leaf, what `sin` saves of it, and the loss."""
    x = torch.randn(SIZE, SIZE, requires_grad=True)
    with runtime.forward():
        y = x * 2
        loss = y.sin().sum()
    return x, y, loss


def refill(y: torch.Tensor, x: torch.Tensor) -> None:
    with unseen(y):
        y.untyped_storage().resize_(x.nbytes)
        y.detach().copy_(x.detach() * 2)


def test_what_is_free_when_backward_needs_it_is_an_error(make_runtime: MakeRuntime, variant: Variant) -> None:
    runtime = make_runtime(variant)
    with stores_wait(runtime):
        _, y, loss = saved(runtime)
        y.untyped_storage().resize_(0)
        with pytest.raises(RuntimeError, match=r"saved tensor \[torch.float32 \[64, 64\]\] was freed"):
            loss.backward()


@pytest.mark.parametrize("variant", VARIANTS[:2], ids=lambda variant: variant.name)
def test_what_its_owner_filled_again_in_time_is_right(make_runtime: MakeRuntime, variant: Variant) -> None:
    runtime = make_runtime(variant)
    with stores_wait(runtime):
        x, y, loss = saved(runtime)
        y.untyped_storage().resize_(0)
        refill(y, x)
        loss.backward()
    assert torch.equal(x.grad, (x * 2).cos() * 2)


def test_what_was_freed_under_a_store_is_never_read_back(make_runtime: MakeRuntime, variant: Variant) -> None:
    """It is what its owner makes of it, as without the engine: lost, until it is filled again."""
    runtime = make_runtime(variant)
    with stores_wait(runtime):
        x, y, loss = saved(runtime)
        y.untyped_storage().resize_(0)
    settled(runtime)
    with pytest.raises(RuntimeError, match="was freed"):
        loss.backward(retain_graph=True)
    assert x.grad is None
    refill(y, x)
    loss.backward()
    assert torch.equal(x.grad, (x * 2).cos() * 2)
    assert runtime.engine.snapshot().loaded_bytes == 0


@pytest.mark.parametrize("part", [1, 0.5])
def test_what_was_freed_under_a_store_is_counted_neither_as_offloaded_nor_as_kept(
    make_runtime: MakeRuntime, part: float
) -> None:
    runtime = make_runtime()
    offload_parts(runtime, part)
    with stores_wait(runtime):
        _, y, loss = saved(runtime)
        assert runtime.engine.snapshot().offloaded_bytes == part * y.nbytes
        y.untyped_storage().resize_(0)
    settled(runtime)
    found = runtime.engine.snapshot()
    assert (found.offloaded_bytes, found.kept_bytes) == (0, 0)
    del loss


@pytest.mark.parametrize(
    "variant", [*IN_PLACE, Variant("two-drives", drives=2)], ids=lambda variant: variant.name
)
def test_what_was_freed_and_used_again_at_the_same_address_is_an_error(
    make_runtime: MakeRuntime, variant: Variant
) -> None:
    """At the end of the store, which fails where there are two drives, address, size and bytes are as they were at its begin:
    only what was stored is not."""
    faults = Faults(fail_writes=frozenset({0})) if variant.drives > 1 else None
    runtime = make_runtime(variant, faults=faults)
    with stores_wait(runtime):
        x, y, loss = saved(runtime)
        kept = y.detach().clone()
        with unseen(y):
            y.detach().fill_(0.5)  # as who got its memory meanwhile
    settled(runtime)
    with unseen(y):
        y.detach().copy_(kept)
    assert runtime.engine.snapshot().failed_stores == (faults is not None)
    for _ in range(2):
        with pytest.raises(
            RuntimeError, match="overwritten" if faults else "overwritten before it was offloaded"
        ):
            loss.backward(retain_graph=True)
    assert x.grad is None


@pytest.mark.parametrize("variant", IN_PLACE, ids=lambda variant: variant.name)
def test_what_was_stored_while_it_was_free_is_an_error(make_runtime: MakeRuntime, variant: Variant) -> None:
    """1. saved; 2. freed: the allocator links it into its list by the first word; 3. stored; 4. back, with the old bytes."""
    runtime = make_runtime(variant)
    with stores_wait(runtime):
        x, y, loss = saved(runtime)
        first = y.detach().view(-1)[:2]
        with unseen(y):
            kept = first.clone()
            first.view(torch.int64).fill_(0x7F0000001000)
    settled(runtime)
    with unseen(y):
        first.copy_(kept)
    with pytest.raises(RuntimeError, match="overwritten before it was offloaded"):
        loss.backward()
    assert x.grad is None


@pytest.mark.parametrize("variant", IN_PLACE, ids=lambda variant: variant.name)
def test_memory_that_is_unmapped_under_a_store_is_an_error(
    make_runtime: MakeRuntime, variant: Variant
) -> None:
    """What malloc gives back to the system at once: a worker that copied it would end the process."""
    runtime = make_runtime(variant, **({"host": "128MiB"} if "host" in variant.options else {}))
    x = torch.linspace(0, 3, 10 << 20).requires_grad_()
    with stores_wait(runtime):
        with runtime.forward():
            y = x * 2
            loss = y.sin().sum()
        y.untyped_storage().resize_(0)
    settled(runtime)
    with pytest.raises(RuntimeError, match="was freed"):
        loss.backward(retain_graph=True)
    refill(y, x)
    loss.backward()
    assert torch.equal(x.grad, (x * 2).cos() * 2)


def test_what_has_left_memory_may_be_freed(make_runtime: MakeRuntime, variant: Variant) -> None:
    runtime = make_runtime(variant)
    x, y, loss = saved(runtime)
    settled(runtime)
    y.untyped_storage().resize_(0)
    loss.backward()
    assert torch.equal(x.grad, (x * 2).cos() * 2)


class Freed(torch.autograd.Function):
    """One whose outputs are freed."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.factors = x * 2
        return x * 2, (x * 3).view(-1)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        return grads[0] * 2 + grads[1].view(SIZE, SIZE) * 3


def test_outputs_that_will_be_freed_stay_and_so_do_all_their_views(make_runtime: MakeRuntime) -> None:
    runtime = make_runtime()
    runtime.engine.eligible.add_freed_function("FreedBackward")
    x = torch.randn(SIZE, SIZE, requires_grad=True)
    with runtime.forward():
        one, other = Freed.apply(x)
        # The second is a view of a tensor that no gradient knows of.
        total = one.t().sin().sum() + other.view(SIZE, SIZE)[1:].sin().sum() + (x * one.detach()).sum()
    assert runtime.engine.snapshot().saved_bytes == 0
    total.backward()


class Saving(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(factor)
        return x * 2

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grads[0] * ctx.saved_tensors[0], None


def test_what_is_free_when_it_is_saved_stays(make_runtime: MakeRuntime) -> None:
    runtime = make_runtime()
    x, y = torch.randn(SIZE, SIZE, requires_grad=True), torch.empty(SIZE, SIZE)
    y.untyped_storage().resize_(0)
    with runtime.forward():
        loss = Saving.apply(x, y).sum()
    assert runtime.engine.snapshot().saved_bytes == 0
    refill(y, x)
    loss.backward()
    assert torch.equal(x.grad, y)


@pytest.mark.parametrize("freed", [True, False])
def test_memory_that_is_gone_under_a_write_is_no_fault_of_the_drive(
    make_runtime: MakeRuntime, freed: bool
) -> None:
    """Freed memory may be unmapped, and the write that reads it fails."""
    runtime = make_runtime(faults=Faults(fail_writes=frozenset({0}), error=errno.EFAULT))
    with stores_wait(runtime):
        x, y, loss = saved(runtime)
        if freed:
            y.untyped_storage().resize_(0)
    settled(runtime)
    found = runtime.statistics()
    assert found.offload.failed_stores == 1 and not found.store.drives[0].retired
    if freed:
        with pytest.raises(RuntimeError, match="was freed"):
            loss.backward()
    else:
        loss.backward()
        assert torch.equal(x.grad, (x * 2).cos() * 2)
