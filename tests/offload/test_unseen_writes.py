"""Bytes that are written where no version counter shows it, and bytes that are looked at as another dtype."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.offload.conftest import VARIANTS, MakeRuntime, Variant, settled, stored_forward

SIZE = 256


class Keeps(torch.autograd.Function):
    """Saves what `views` makes of a buffer of its own, and shows in backward what came back."""

    seen: tuple[torch.Tensor, ...]

    @staticmethod
    def forward(  # type: ignore[no-untyped-def]
        ctx, x, views: Callable[[], tuple[torch.Tensor, ...]]
    ):
        ctx.save_for_backward(*views())
        return x.clone()

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        Keeps.seen = tuple(saved.clone() for saved in ctx.saved_tensors)
        return grad, None


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


def shown(recording: AbstractContextManager[Any], views: Callable[[], tuple[torch.Tensor, ...]]) -> Any:
    x = torch.randn(8, requires_grad=True)
    with recording:
        loss = Keeps.apply(x, views).sum()
    loss.backward()
    seen = Keeps.seen
    del Keeps.seen
    return seen


def pairs() -> tuple[torch.Tensor, ...]:
    """A mask and a code side by side in one buffer."""
    both = torch.randint(0, 256, (SIZE, SIZE, 2), dtype=torch.uint8)
    both[..., 0] &= 1
    return both[..., 0].view(torch.bool), both[..., 1]


def code_then_mask() -> tuple[torch.Tensor, ...]:
    mask, code = pairs()
    return code, mask


def mask_of_all_and_codes() -> tuple[torch.Tensor, ...]:
    """The mask is dense, its bytes are codes."""
    codes = torch.randint(0, 256, (SIZE, SIZE), dtype=torch.uint8)
    return codes.view(torch.bool), codes


def bools_with_other_bytes() -> tuple[torch.Tensor, ...]:
    return (torch.randint(0, 256, (SIZE, SIZE), dtype=torch.uint8).view(torch.bool),)


def weights_and_rows() -> tuple[torch.Tensor, ...]:
    """Float weights and the int32 rows that they belong to."""
    work = torch.rand(2, SIZE * SIZE)
    work[1].view(torch.int32).copy_(torch.randint(0, 1000, (SIZE * SIZE,)))
    return work, work[1].view(torch.int32)


def floats_with_gaps() -> tuple[torch.Tensor, ...]:
    """Between the float values lie integers."""
    work = torch.randint(0, 1 << 30, (SIZE, SIZE, 2), dtype=torch.int32)
    work[..., 1] = torch.randint(-(1 << 31), 1 << 31, (SIZE, SIZE))  # as floats, many are infinite or NaN
    return work[..., 0].view(torch.float32), work[..., 1]


@pytest.mark.parametrize(
    "views",
    [pairs, code_then_mask, mask_of_all_and_codes, bools_with_other_bytes],
    ids=lambda views: views.__name__,
)
def test_masks_are_packed_only_where_nothing_else_is(
    views: Any, variant: Variant, make_runtime: MakeRuntime
) -> None:
    torch.manual_seed(0)
    expected = shown(nullcontext(), views)
    torch.manual_seed(0)
    found = shown(stored_forward(make_runtime(variant)), views)
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.dtype == theirs.dtype and torch.equal(bytes_of(mine), bytes_of(theirs))


@pytest.mark.parametrize("views", [weights_and_rows, floats_with_gaps], ids=lambda views: views.__name__)
@pytest.mark.parametrize("variant", [VARIANTS[0], VARIANTS[2]], ids=lambda variant: variant.name)
def test_a_codec_of_floats_leaves_integers_alone(
    views: Any, variant: Variant, make_runtime: MakeRuntime
) -> None:
    torch.manual_seed(0)
    expected = shown(nullcontext(), views)
    torch.manual_seed(0)
    found = shown(stored_forward(make_runtime(variant, codec="int8")), views)
    assert torch.equal(found[1], expected[1])
    # Nor do the integers spoil the scales by which the floats are rounded.
    assert float((found[0] - expected[0]).abs().max()) <= 0.01 * float(expected[0].abs().max())


def refilled(recording: Callable[[], AbstractContextManager[Any]], by: str) -> list[torch.Tensor]:
    """A buffer is refilled while the graph of an earlier forward over it lives."""
    torch.manual_seed(0)
    random = np.random.default_rng(0)
    model = nn.Linear(SIZE, SIZE)
    owner = torch.empty(SIZE, SIZE)
    values = torch.from_numpy(np.empty((SIZE, SIZE), np.float32)) if by == "numpy" else owner
    # Both write without moving the version of `values`.
    write = values.numpy() if by == "numpy" else np.from_dlpack(owner.data)
    losses = []
    for _ in range(2):
        write.flags.writeable or write.setflags(write=True)
        write[...] = random.standard_normal(write.shape, dtype=np.float32)
        with recording():
            losses.append(model(values).square().mean())
    losses[1].backward()
    assert model.weight.grad is not None
    return [loss.detach() for loss in losses] + [model.weight.grad]


@pytest.mark.parametrize("by", ["numpy", "data"])
def test_a_buffer_that_is_refilled_between_forwards(
    by: str, variant: Variant, make_runtime: MakeRuntime
) -> None:
    def case(recording: Callable[[], AbstractContextManager[Any]]) -> list[torch.Tensor]:
        if by == "numpy":
            return refilled(recording, by)
        torch.manual_seed(0)
        model = nn.Linear(SIZE, SIZE)
        values = torch.empty(SIZE, SIZE)
        losses = []
        for _ in range(2):
            values.data.normal_()  # moves no version
            with recording():
                losses.append(model(values).square().mean())
        losses[1].backward()
        assert model.weight.grad is not None
        return [*losses, model.weight.grad]

    runtime = make_runtime(variant)
    for mine, theirs in zip(case(lambda: stored_forward(runtime)), case(nullcontext), strict=True):
        assert torch.equal(mine, theirs)


def test_numpy_writes_between_two_saves_of_one_forward(variant: Variant, make_runtime: MakeRuntime) -> None:
    """Autograd shows what is there when backward runs."""

    def case(recording: AbstractContextManager[Any]) -> torch.Tensor:
        array = np.full((SIZE, SIZE), 2.0, np.float32)
        values = torch.from_numpy(array)
        x = torch.ones(SIZE, SIZE, requires_grad=True)
        with recording:
            loss = (x * values).sum()
            array[...] = 3.0
            loss = loss + (x * values).sum()
        array[0] = 5.0
        loss.backward()
        assert x.grad is not None
        return x.grad

    assert torch.equal(case(stored_forward(make_runtime(variant))), case(nullcontext()))


def test_noise_that_is_saved_before_it_is_drawn(variant: Variant, make_runtime: MakeRuntime) -> None:
    def case(recording: AbstractContextManager[Any]) -> torch.Tensor:
        torch.manual_seed(0)
        x = torch.randn(SIZE, SIZE, requires_grad=True)
        with recording:
            loss = F.rrelu(x * 1, training=True).sum()
        loss.backward()
        assert x.grad is not None
        return x.grad

    assert torch.equal(case(stored_forward(make_runtime(variant))), case(nullcontext()))


def test_a_thin_view_is_not_copied_before_its_operator_has_ended(
    variant: Variant, make_runtime: MakeRuntime
) -> None:
    """Its bytes are copied together; no node is made between the hook and the fill, as inside of an operator."""
    runtime = make_runtime(variant)
    engine = runtime.engine
    thin = torch.zeros(SIZE, SIZE, 10)[..., 3]
    with stored_forward(runtime) as tape:
        held = engine.pack(tape, thin)
        thin.data.fill_(7)
        again = engine.pack(tape, thin)
        torch.ones(1, requires_grad=True).sin()
        thin.data.fill_(8)
    assert torch.equal(engine.unpack(held), torch.full((SIZE, SIZE), 7.0))
    del held, again
    assert runtime.statistics().offload.packed_bytes == 4 * SIZE * SIZE  # type: ignore[union-attr]


def test_what_was_modified_before_its_store_could_begin_is_not_stored(make_runtime: MakeRuntime) -> None:
    runtime = make_runtime()
    x = torch.randn(SIZE, SIZE, requires_grad=True)
    with runtime.forward():
        y = x + 1
        loss = (y * y).sum()
        y.detach().add_(1)
    settled(runtime)
    found = runtime.statistics()
    assert found.offload.offloaded_bytes == 0 < found.offload.kept_bytes
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    del loss


def test_joining_a_region_moves_no_version(make_runtime: MakeRuntime) -> None:
    """Seen from another thread, even a counter that is put back is a modification."""
    runtime = make_runtime()
    shared = torch.randn(64, 64)
    x = torch.randn(64, 64, requires_grad=True)
    moved: list[Any] = []

    def watch(_: Any, event: str, what: Any) -> None:
        if shared._version:
            moved.append((event, what))

    with runtime.forward():
        sys.setprofile(watch)  # called before and after every function that runs on this thread
        try:
            loss = torch.stack(
                [(each * x).sum() for _ in range(3) for each in (shared, shared.detach().requires_grad_())]
            ).sum()
        finally:
            sys.setprofile(None)
    assert not moved
    assert runtime.statistics().offload.shared_tensors == 7  # type: ignore[union-attr]
    del loss


def test_close_in_the_middle_of_a_forward_of_another_thread(make_runtime: MakeRuntime) -> None:
    """What is saved after that stays in memory."""
    for turn in range(10):
        runtime = make_runtime(in_flight="32KiB")
        runtime.expects_live = True  # type: ignore[attr-defined]
        errors: list[BaseException] = []
        closed = threading.Event()

        def train(runtime: Any = runtime, errors: list[Any] = errors, closed: Any = closed) -> None:
            x = torch.randn(64, 64, requires_grad=True)
            try:
                while True:
                    last = closed.is_set()
                    with runtime.forward():
                        h = x
                        for _ in range(30):
                            h = (h * 1).sin()
                    if last:
                        h.sum().backward()
                        return
            except BaseException as error:  # noqa: BLE001 - shown below, on the thread of the test
                errors.append(error)

        thread = threading.Thread(target=train)
        thread.start()
        closed.wait(0.01 + 0.002 * turn)
        runtime.close()
        closed.set()
        thread.join(60)
        assert not thread.is_alive() and not errors, errors


def test_close_between_the_look_and_the_lock(make_runtime: MakeRuntime) -> None:
    """The lock is taken when the engine has been closed since the hook was called."""
    runtime = make_runtime()
    engine = runtime.engine
    may_move = engine.eligible.may_move

    def and_close(tensor: torch.Tensor) -> bool:
        found = may_move(tensor)
        runtime.close()
        return found

    engine.eligible.may_move = and_close  # type: ignore[method-assign]
    x = torch.randn(SIZE, SIZE, requires_grad=True)
    with runtime.forward():
        loss = x.sin().sum()
    loss.backward()
    assert x.grad is not None and torch.equal(x.grad, x.cos().detach())


def test_a_kernel_that_writes_its_gradient_over_its_input_saves_that(make_runtime: MakeRuntime) -> None:
    """As fused cross entropies do: another operator had saved the input before, and it was stored."""

    class FusedLoss(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, logits: torch.Tensor) -> torch.Tensor:
            value = logits.logsumexp(-1).sum()
            logits.detach().numpy()[...] = logits.softmax(-1).numpy()
            ctx.save_for_backward(logits.detach())
            return value

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            (saved,) = ctx.saved_tensors
            return saved * gradient

    def gradient(runtime: Any | None) -> torch.Tensor:
        x = torch.randn(64, 64, generator=torch.Generator().manual_seed(3)).requires_grad_()
        with runtime.forward() if runtime is not None else nullcontext():
            logits = x * 2
            shown = logits.sin()  # saves the logits, and nothing comes of it
            other = (x * x).sum()  # by now the logits are stored
            if runtime is not None:
                settled(runtime)
            loss = FusedLoss.apply(logits) + other
        del shown
        loss.backward()
        assert x.grad is not None
        return x.grad

    assert torch.equal(gradient(make_runtime()), gradient(None))


@pytest.mark.parametrize("variant", [VARIANTS[0], VARIANTS[2]], ids=lambda variant: variant.name)
def test_a_write_beside_a_chunk_with_a_counter_of_its_own_is_none_to_the_chunk(
    variant: Variant, make_runtime: MakeRuntime
) -> None:
    """As in a GRU: `unsafe_chunk`, one part saved, then another one changed in place, before the first has been written."""
    runtime = make_runtime(variant)
    pool = runtime.offload.store.pool  # type: ignore[union-attr]
    x = torch.randn(64, SIZE, requires_grad=True)
    if not variant.staged:
        pool.hold(begun=True, reads=False)  # type: ignore[union-attr]
    with runtime.forward():
        one, other = (x * 1).unsafe_chunk(2, 1)
        y = one.sin()
        torch.ones(1, requires_grad=True).sin()  # the operator that saved it has ended
        other.mul_(3)
        loss = y.sum()
    if not variant.staged:
        pool.release()  # type: ignore[union-attr]
    settled(runtime)
    found = runtime.statistics()
    assert found.offload.offloaded_bytes == one.nbytes
    (gradient,) = torch.autograd.grad(loss, x)
    assert torch.equal(gradient[:, : SIZE // 2], x.detach()[:, : SIZE // 2].cos())
