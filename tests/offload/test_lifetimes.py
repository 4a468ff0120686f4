"""Lifetimes follow autograd's own references: nothing lives longer than its graph, nothing is taken back too early."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import textwrap
import threading
import weakref
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

import ssdtrain
from tests.offload import zoo
from tests.offload.conftest import VARIANTS, MakeRuntime, Variant, holds_nothing, settled
from tests.support.filesystems import eventually

SIZE = 128


def graph(runtime: object, depth: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(SIZE, SIZE, requires_grad=True)
    with runtime.forward():  # type: ignore[attr-defined]
        y = x
        for _ in range(depth):
            y = y.sin()
        loss = y.sum()
    return x, loss


def test_a_dropped_loss_frees_its_slots(variant: Variant, make_runtime: MakeRuntime) -> None:
    runtime = make_runtime(variant)
    _, loss = graph(runtime)
    assert runtime.statistics().offload.live_regions > 0  # type: ignore[union-attr]
    del loss, _
    holds_nothing(runtime)


def test_an_exception_in_backward_leaves_a_graph_that_can_be_used_again(make_runtime: MakeRuntime) -> None:
    runtime = make_runtime()
    x, loss = graph(runtime)
    fail = True

    def hook(grad: torch.Tensor) -> None:
        if fail:
            raise KeyError("a hook of the user's")

    x.register_hook(hook)
    with pytest.raises(KeyError):
        loss.backward(retain_graph=True)
    fail = False
    loss.backward()
    assert x.grad is not None
    del loss
    holds_nothing(runtime)


def test_ctrl_c_while_backward_computes_is_heard(make_runtime: MakeRuntime) -> None:
    """The first Python after the computation is what handles the signal. In a finalizer the exception would be lost."""
    runtime = make_runtime()

    class Heard(Exception):
        pass

    def hear(number: int, frame: FrameType | None) -> None:
        raise Heard

    before = signal.signal(signal.SIGUSR1, hear)
    try:
        x = torch.randn(1024, 1024, requires_grad=True)
        with runtime.forward():
            y = x
            for _ in range(4):
                y = y @ y * 1e-2
            loss = y.sum()
        settled(runtime)
        del y
        main = threading.main_thread().ident
        assert main is not None
        timer = threading.Timer(0.1, signal.pthread_kill, (main, signal.SIGUSR1))
        with pytest.raises(Heard):
            timer.start()
            loss.backward()
            timer.join()
    finally:
        signal.signal(signal.SIGUSR1, before)
    del loss


def test_a_non_leaf_output_that_was_saved_does_not_hold_its_graph(make_runtime: MakeRuntime) -> None:
    """Returning a saved output itself from the pack hook makes a cycle that only the garbage collector ends."""
    runtime = make_runtime(min_bytes="1MiB")
    gc.disable()
    try:
        x = torch.randn(SIZE, SIZE, requires_grad=True)
        with runtime.forward():
            y = x.exp()  # saves its own output
        alive = weakref.ref(y)
        del y
        assert alive() is None
    finally:
        gc.enable()


def test_memory_is_let_go_when_the_store_has_ended(make_runtime: MakeRuntime) -> None:
    runtime = make_runtime()
    x = torch.randn(SIZE, SIZE, requires_grad=True)
    with runtime.forward():
        y = x.sin()
        loss = y.sin().sum()
    storage = weakref.ref(y.untyped_storage())
    del y
    settled(runtime)
    assert storage() is None
    loss.backward()


def test_a_buffer_belongs_to_the_tensor_that_was_unpacked(make_runtime: MakeRuntime) -> None:
    """Gradients that alias an unpacked buffer outlive their handle; the buffer must not be used again under them."""
    runtime = make_runtime(buffer="2MiB")
    kept = []

    class Steal(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):  # type: ignore[no-untyped-def]
            y = x + 1
            ctx.save_for_backward(y)
            return y.clone()

        @staticmethod
        def backward(ctx, grad):  # type: ignore[no-untyped-def]
            (y,) = ctx.saved_tensors
            kept.append((y, y.clone()))
            return grad

    for _ in range(3):
        x = torch.randn(SIZE, SIZE, requires_grad=True)
        with runtime.forward():
            y = x
            for _ in range(12):
                y = Steal.apply(y)
            loss = y.sum()
        settled(runtime)  # otherwise some are handed back from memory
        loss.backward()
        del loss, y
    assert len(kept) == 3 * 12 and all(torch.equal(tensor, copy) for tensor, copy in kept)
    assert runtime.statistics().offload.outside_bytes > 0  # type: ignore[union-attr] # more than the arena holds
    kept.clear()
    gc.collect()


@pytest.mark.parametrize(
    ("way", "codec", "storing"),
    [
        (VARIANTS[0], None, False),
        (VARIANTS[2], None, False),
        (VARIANTS[2], None, True),
        (VARIANTS[0], "lossless", True),
        (VARIANTS[2], "lossless", True),
    ],
    ids=["c", "staged", "staged-storing", "codec-storing", "staged-codec-storing"],
)
def test_what_backward_wrote_into_a_buffer_is_not_handed_out_again(
    way: Variant, codec: str | None, storing: bool, make_runtime: MakeRuntime
) -> None:
    """Two handles of one region: the first backward scribbles over its buffer, the second needs the saved bytes, also while
    their store is under way and the tensor is gone.
    """
    runtime = make_runtime(way, **({"codec": codec} if codec else {}))
    assert runtime.engine is not None and runtime.offload.store is not None
    pool: Any = runtime.offload.store.pool
    if storing:
        pool.hold(begun=True, reads=False)

    class Scribble(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):  # type: ignore[no-untyped-def]
            ctx.save_for_backward(x)
            return x.clone()

        @staticmethod
        def backward(ctx, grad):  # type: ignore[no-untyped-def]
            (x,) = ctx.saved_tensors
            found.append(x.clone())
            x.zero_()
            return grad

    found: list[torch.Tensor] = []
    x = torch.randn(SIZE, SIZE, requires_grad=True)
    with runtime.forward():
        y = x + 1
        loss = (Scribble.apply(y) + Scribble.apply(y)).sum()
    value = y.detach().clone()
    del y
    if storing:
        pool.flush()
        operations = [region.transfer.operation for region in runtime.engine.mover.stores]
        assert operations
        begun = eventually(lambda: all(one is not None and one.begun() for one in operations))
        assert begun, "the store never began"
        runtime.engine.drain()
        for region in runtime.engine.mover.stores:
            if not region.emptied:  # as when a later store needs the room
                runtime.engine.mover._depart(region)
    else:
        settled(runtime)
    loss.backward()
    pool.release()
    assert len(found) == 2 and torch.equal(found[0], value) and torch.equal(found[1], value)


def test_close_waits_and_makes_handles_inert(variant: Variant, make_runtime: MakeRuntime) -> None:
    runtime = make_runtime(variant)
    runtime.expects_live = True  # type: ignore[attr-defined]
    x, loss = graph(runtime)
    runtime.close()
    runtime.close()
    with pytest.raises(RuntimeError, match="after the offload engine was closed"):
        loss.backward()
    y = x.sin()  # and nothing else is harmed
    y.sum().backward()
    with runtime.forward():
        z = (x.sin() * x.cos()).sum()
    z.backward()


def test_the_context_lives_as_long_as_its_graph(tmp_path: Path) -> None:
    """`with ssdtrain.offload(...)` without a name: the graph is all that holds the engine."""
    x = torch.randn(SIZE, SIZE, requires_grad=True)
    with ssdtrain.offload(str(tmp_path / "ssdtrain"), min_bytes="1KiB"):
        loss = x.sin().sin().sum()
    gc.collect()
    loss.backward()
    plain = x.detach().clone().requires_grad_()
    plain.sin().sin().sum().backward()
    assert torch.equal(x.grad, plain.grad)  # type: ignore[arg-type]


def test_a_forked_child_neither_moves_nor_frees_anything(make_runtime: MakeRuntime) -> None:
    """Also with I/O in flight, whose operations belong to the parent."""
    runtime = make_runtime()
    pool = runtime.offload.store.pool  # type: ignore[union-attr]
    pool.hold(begun=True)
    x, loss = graph(runtime)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            with runtime.step(), runtime.forward(), runtime.backward():
                y = (x.detach().sin() * 2).sum()
            try:
                loss.backward()
            except RuntimeError as error:
                code = 0 if "forked" in str(error) and torch.isfinite(y) else 2
            runtime.close()
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    pool.release()
    assert os.waitstatus_to_exitcode(status) == 0
    loss.backward()
    assert torch.isfinite(x.grad).all()  # type: ignore[arg-type, union-attr]


# Importing torch takes minutes on a busy machine, so the limit on a hang begins after it; it prints every thread's stack.
SCRIPT = """
import faulthandler
import torch, ssdtrain
faulthandler.dump_traceback_later(100, exit=True)
x = torch.randn(512, 512, requires_grad=True)
o = ssdtrain.offload({directory!r}, min_bytes="1KiB", engine={engine!r})
with o:
    y = x
    for _ in range(50):
        y = y.sin()
    loss = y.sum()
{ending}
"""

ENDINGS = {
    "stores in flight": "",
    "a graph in a global": "graph = loss",
    "an exception": "raise SystemExit(7)",
    "loads in flight": "(t := o.runtime.offload.tape(0, -1)) is None or o.runtime.engine.prefetch(t)",
    "backward half done": (
        "class Stop(Exception): pass\n"
        "def stop(g): raise Stop\n"
        "x.register_hook(stop)\n"
        "try: loss.backward()\n"
        "except Stop: pass"
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["c", "python"])
@pytest.mark.parametrize("ending", ENDINGS)
def test_the_interpreter_ends_cleanly(ending: str, engine: str, tmp_path: Path) -> None:
    code = textwrap.dedent(SCRIPT).format(
        directory=str(tmp_path / "ssdtrain"), engine=engine, ending=ENDINGS[ending]
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == (7 if ending == "an exception" else 0), done.stderr
    assert "Traceback" not in done.stderr and "Exception ignored" not in done.stderr, done.stderr
    assert list((tmp_path / "ssdtrain").iterdir()) == []


def test_training_for_many_steps_grows_nothing(make_runtime: MakeRuntime) -> None:
    runtime = make_runtime()
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
    sizes = set()
    seen = runtime.engine.meter._seen  # type: ignore[union-attr]
    for step in range(60):
        x = zoo.noise(16 + step % 5, 64)
        with runtime.step(), runtime.forward():
            loss = model(x).square().mean()
        loss.backward()
        if step >= 20:
            sizes.add((sum(len(storage.regions) for storage in seen.values()), len(seen)))
    # What is alive between steps is the last graph at most.
    assert max(a for a, _ in sizes) <= 8 and max(b for _, b in sizes) <= 16


def test_what_a_forward_that_raised_has_saved_is_counted_as_kept(make_runtime: MakeRuntime) -> None:
    runtime = make_runtime()
    x = torch.randn(SIZE, SIZE, requires_grad=True)
    with pytest.raises(ZeroDivisionError), runtime.forward():
        y = (x * 2).sin()
        raise ZeroDivisionError
    found = runtime.statistics().offload  # type: ignore[union-attr]
    assert found.saved_bytes == found.kept_bytes + found.offloaded_bytes == y.nbytes
    y.sum().backward()
    assert torch.equal(x.grad, (x * 2).cos() * 2)  # type: ignore[arg-type]
