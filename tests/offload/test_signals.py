"""A signal handler that raises (Ctrl-C) at any bytecode of the engine: nothing is leaked, given twice or wrong afterwards."""

from __future__ import annotations

import gc
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

import ssdtrain
from ssdtrain.offload import functorch
from ssdtrain.offload.functorch import StepAside
from ssdtrain.storage.signal_safe_lock import defer_signals
from tests.offload.conftest import VARIANTS, MakeRuntime, Variant, holds_nothing
from tests.support.bytecodes import Before, count_bytecodes

SIZE = 32  # of a saved tensor, 4 KiB

PACKAGE = Path(ssdtrain.__file__).parent
# hooks.py only enters and leaves torch's own context manager, which a signal can leave entered, with the engine or without.
FILES = {
    str(path)
    for name in ("offload", "storage")
    for path in (PACKAGE / name).rglob("*.py")
    if path.name != "hooks.py"
}


class Heard(Exception):
    """What the handler raises."""


@pytest.fixture(autouse=True)
def handler() -> Iterator[None]:
    def hear(number: int, frame: FrameType | None) -> None:
        raise Heard

    before = signal.signal(signal.SIGUSR1, hear)
    recorders, replaced = functorch._recorders, torch.autograd.graph.disable_saved_tensors_hooks
    yield
    signal.signal(signal.SIGUSR1, before)
    # A signal in `StepAside` leaves a recorder entered, as one in torch's own context manager does.
    functorch._recorders = recorders
    torch.autograd.graph.disable_saved_tensors_hooks = replaced
    while functorch.CAN_STEP_ASIDE and functorch.top_hooks() is not None:  # and one in a recorder its hooks
        torch._C._autograd._pop_saved_tensors_default_hooks()


def moment(number: int) -> Before:
    """Sends the signal before this bytecode of the engine."""
    return Before(number, lambda: signal.raise_signal(signal.SIGUSR1), FILES)


def work(runtime: Any, x: torch.Tensor) -> torch.Tensor:
    """Saves that are shared, moved, strided, joined by views and dropped; two tapes; a second backward."""

    def tape(scale: float) -> torch.Tensor:
        with runtime.forward():
            y = (x * scale).sin()
            y = (y * y).reshape(-1, 2)[:, 0].exp()
            y = y + (x.cos().T.exp().sum() + x.expand(2, SIZE, SIZE).sin().sum()) * 1e-3
            return y.tanh().tanh().sum()

    first, second = tape(1.0), tape(0.5)
    tape(0.25)  # dropped
    second.backward(retain_graph=True)
    first.backward()
    second.backward()
    return x.grad


def fresh() -> torch.Tensor:
    return torch.linspace(-1, 1, SIZE * SIZE).reshape(SIZE, SIZE).requires_grad_()


class Nothing:
    """The same work without an engine."""

    def forward(self) -> Any:
        return torch.enable_grad()


def drop_what_torch_queued() -> None:
    """A backward that raised leaves the branches it did not come to in the thread's queue, until the next backward."""
    torch.ones(1, requires_grad=True).sum().backward()
    gc.collect()


def interrupt(runtime: Any, moments: Callable[[int], range]) -> None:
    """Interrupt one run of `work` at each of the moments. How many bytecodes a run takes depends on how many stores had ended
    when they were asked for: a moment that came after its end is tried again earlier."""
    expected = work(Nothing(), fresh())
    assert torch.equal(work(runtime, fresh()), expected)
    count = count_bytecodes(lambda: work(runtime, fresh()), FILES)
    assert count > 1000
    for number in moments(count):
        while not interrupted(runtime, number):
            number = 9 * number // 10
        drop_what_torch_queued()
        holds_nothing(runtime)
        assert torch.equal(work(runtime, fresh()), expected), f"after a signal at bytecode {number}"
        holds_nothing(runtime)


def interrupted(runtime: Any, number: int) -> bool:
    """Whether one run of `work` was, before its bytecode of this number."""
    try:
        with moment(number):
            work(runtime, fresh())
    except Heard:
        return True
    return False


CODED = Variant("lossless", {"codec": "lossless"})
USUAL = [variant for variant in VARIANTS if variant.name in ("c", "staged", "two-slots", "host-tier")]


@pytest.mark.slow
@pytest.mark.parametrize("variant", [*USUAL, CODED], ids=lambda variant: variant.name)
def test_an_exception_of_a_signal_at_any_moment_leaves_nothing_behind(
    variant: Variant, make_runtime: MakeRuntime
) -> None:
    interrupt(make_runtime(variant), lambda count: range(7, count, count // 100))


@pytest.mark.long
@pytest.mark.parametrize("variant", [*VARIANTS, CODED], ids=lambda variant: variant.name)
def test_an_exception_of_a_signal_at_a_thousand_moments_leaves_nothing_behind(
    variant: Variant, make_runtime: MakeRuntime
) -> None:
    interrupt(make_runtime(variant), lambda count: range(1, count, max(1, count // 1000)))


def test_a_signal_at_any_moment_leaves_the_lock_of_recorders_free() -> None:
    """All recorders of the process take it: one that stays held is a hang of the next forward."""
    defer_signals()
    recorders, replaced = functorch._recorders, torch.autograd.graph.disable_saved_tensors_hooks
    for number in range(1, 200):
        aside = StepAside()
        try:
            with moment(number) as seen:
                aside.__enter__()
                aside.__exit__()
        except Heard:
            pass
        assert functorch._lock.acquire(blocking=False), f"held after a signal at bytecode {number}"
        functorch._lock.release()
        functorch._recorders = recorders
        torch.autograd.graph.disable_saved_tensors_hooks = replaced
    assert 5 < seen.count < 200  # torch 2.6 has less to undo
