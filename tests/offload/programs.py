"""Random programs over autograd: saves, views, in-place writes, dropped losses, exceptions, evaluation, several tapes, GC.

A program is a list of instructions (name, a, b); every number is taken modulo what there is, so that any list is a program. It
is run the same way with and without the engine, and what it shows (values, gradients, kinds of error) must be the same.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch

Instruction = tuple[str, int, int]
Shown = list[tuple[str, Any]]

ROWS, COLUMNS = 48, 64  # 12 KiB: above the smallest size that moves


def beside(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Parts of one storage with counters of their own: one is saved, then the other is written, as in a GRU."""
    saved = one.sin()
    return torch.cat([saved, other.mul_(2) * saved], -1)


UNARY: list[Callable[[torch.Tensor], torch.Tensor]] = [
    torch.sin,  # saves its input
    torch.tanh,  # saves its output
    torch.exp,
    lambda t: t.sigmoid() * t,
    lambda t: t.clone().relu_(),
    lambda t: t.softmax(-1),
    lambda t: torch.nn.functional.layer_norm(t, t.shape[-1:]),
]
# Each gives back the full shape, through views that share storage.
VIEWS: list[Callable[[torch.Tensor], torch.Tensor]] = [
    lambda t: torch.cat([a * b for a, b in [t.chunk(2, -1)] * 2], -1),
    lambda t: torch.cat([t[:24] * t[24:], t[24:].sin()], 0),
    lambda t: t.t().contiguous().t() * t,
    lambda t: t * t[:, :1].expand(-1, COLUMNS),
    lambda t: t + (t[::7, ::9] * t[::7, ::9].cos()).sum(),
    lambda t: t.view(ROWS, 4, 16).transpose(0, 1).sin().transpose(0, 1).reshape(ROWS, COLUMNS),
    lambda t: t * t.reshape(-1).unfold(0, COLUMNS, COLUMNS),
    lambda t: beside(*(t * 1).unsafe_chunk(2, -1)),
]

# How often each comes up: a backward that frees its graph ends the story of every loss that shares it.
WEIGHTS = {
    "unary": 6,
    "binary": 4,
    "view": 4,
    "matmul": 2,
    "write": 2,
    "drop": 2,
    "loss": 5,
    "retain": 4,
    "backward": 1,
}
WEIGHTS |= {
    "forget": 1,
    "cycle": 2,
    "settle": 2,
    "evaluate": 1,
    "infer": 1,
    "raise": 1,
    "tape": 1,
    "collect": 1,
    "freeze": 1,
    "numpy": 2,
    "dtypes": 2,
    "refill": 2,
    "free": 2,
    "elsewhere": 2,
    "close": 1,
}
NAMES = [name for name, weight in WEIGHTS.items() for _ in range(weight)]


# Autograd words the first error in another way where one of several views that one function returned was saved.
ERRORS = {
    "modified by an inplace": "modified",
    "has been modified inplace": "modified",
    "a second time": "freed",
}
# What only the engine raises, where the promise of docs/storage.md says so: its bytes are never handed out instead.
FREED = ("was freed (storage.resize_)", "was overwritten before it was offloaded")
CLOSED = "needed after the offload engine was closed"


class Bits(torch.autograd.Function):
    """Saves one buffer as floats, as their integers, and as a mask beside codes."""

    @staticmethod
    def forward(ctx, x, order):  # type: ignore[no-untyped-def]
        values = x * 1
        pairs = torch.stack([x > 0, x > 1], -1).to(torch.uint8)
        pairs[..., 1] += 7
        saved = [values, values.view(torch.int32), pairs[..., 0].view(torch.bool), pairs[..., 1], pairs]
        ctx.order = order % len(saved)
        ctx.save_for_backward(*saved[ctx.order :], *saved[: ctx.order])
        return x * 1

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        saved = ctx.saved_tensors
        start = len(saved) - ctx.order
        values, integers, mask, code, _ = [*saved[start:], *saved[:start]]
        grad = grad * mask * code.float() + values * 0.01
        return grad + (integers & 1), None


class Fault(Exception):
    """Raised by a program in the middle of a forward."""


class Machine:
    """Runs one program.

    Args:
        recording: entered for each tape.
        seed: of the leaves.
        settle: waits until every store has ended, so that backward has to read.
        close: closes what records.
        copied: waits until no copy reads saved memory any more: what it brings of memory that is freed meanwhile is wrong, and
            goes unseen where that memory comes back at the same address (docs/storage.md).
        keeps: no backward frees its graph. So it is after `close` and after memory was freed, where the engine may raise in the
            middle of a backward: which graphs are left then would differ.
        device: of the tensors. On another than the CPU no program has the instruction "numpy".
    """

    def __init__(
        self,
        recording: Callable[[], AbstractContextManager[Any]],
        seed: int,
        settle: Callable[[], None] = lambda: None,
        close: Callable[[], None] = lambda: None,
        copied: Callable[[], None] = lambda: None,
        keeps: bool = False,
        device: torch.device | str = "cpu",
    ) -> None:
        self.device = torch.device(device)
        generator = torch.Generator().manual_seed(seed)
        self.recording = recording
        self.settle = settle
        self.close = close
        self.copied = copied
        self.keeps = keeps
        self.leaves = [
            torch.randn(ROWS, COLUMNS, generator=generator).to(self.device).requires_grad_() for _ in range(2)
        ]
        self.values: list[torch.Tensor] = [leaf * 0.5 for leaf in self.leaves]
        self.array = np.zeros((ROWS, COLUMNS), np.float32)
        self.buffers = [torch.from_numpy(self.array), torch.zeros(ROWS, COLUMNS, device=self.device)]
        self.losses: list[torch.Tensor] = []
        self.shown: Shown = []
        self.context: AbstractContextManager[Any] | None = None

    def run(self, program: list[Instruction]) -> Shown:
        self._open()
        try:
            for name, a, b in program:
                getattr(self, f"do_{name}")(a, b)
            while self.losses:
                self._backward(0, retain=True)
                self.losses.pop(0)
        finally:
            self._close()
            self.values.clear()
            self.losses.clear()
            gc.unfreeze()
            _empty_queue()
        return self.shown

    def _open(self) -> None:
        self.context = self.recording()
        self.context.__enter__()

    def _close(self) -> None:
        if self.context is not None:
            self.context.__exit__(None, None, None)
            self.context = None

    def _pick(self, index: int) -> torch.Tensor:
        return self.values[index % len(self.values)]

    def _push(self, value: torch.Tensor) -> None:
        # Bounded, so that no program overflows to Inf and hides a difference behind NaN.
        self.values.append(value.clamp(-3, 3))

    def do_unary(self, a: int, b: int) -> None:
        self._push(UNARY[b % len(UNARY)](self._pick(a)))

    def do_binary(self, a: int, b: int) -> None:
        self._push(self._pick(a) * self._pick(b))

    def do_view(self, a: int, b: int) -> None:
        self._push(VIEWS[b % len(VIEWS)](self._pick(a)))

    def do_matmul(self, a: int, b: int) -> None:
        self._push(self._pick(a) @ (self._pick(b).t() @ self._pick(b)) * 0.01)

    def do_write(self, a: int, b: int) -> None:
        """In place, through a detached alias: what was saved before is stale from now on."""
        if b % 4 == 0:
            self._pick(a).detach().mul_(0.5)

    def do_drop(self, a: int, b: int) -> None:
        if len(self.values) > 2:
            del self.values[a % len(self.values)]

    def do_loss(self, a: int, b: int) -> None:
        self.losses.append((self._pick(a) * self._pick(b)).sum())

    def do_forget(self, a: int, b: int) -> None:
        if self.losses:
            del self.losses[a % len(self.losses)]

    def do_cycle(self, a: int, b: int) -> None:
        """A graph that only the garbage collector can free, wherever it happens to run next."""
        held: list[Any] = [(self._pick(a).sin() * self._pick(b)).exp().sum()]
        held.append(held)

    def do_retain(self, a: int, b: int) -> None:
        self._backward(a, retain=True)

    def do_backward(self, a: int, b: int) -> None:
        self._backward(a, retain=False)

    def do_elsewhere(self, a: int, b: int) -> None:
        """A backward on another thread, while this one saves."""

        def run() -> None:
            self._backward(a, True)
            _empty_queue()  # `join` returns before what belongs to the thread is gone

        thread = threading.Thread(target=run)
        thread.start()
        for turn in range(1 + b % 3):
            self.do_unary(a + turn, b)
        thread.join()

    def _backward(self, a: int, retain: bool) -> None:
        if not self.losses:
            return
        index = a % len(self.losses)
        retain = retain or self.keeps
        loss = self.losses[index] if retain else self.losses.pop(index)
        try:
            found = torch.autograd.grad(loss, self.leaves, retain_graph=retain, allow_unused=True)
        except RuntimeError as error:
            text = str(error)
            self.shown.append(
                ("error", next((kind for words, kind in ERRORS.items() if words in text), text))
            )
            return
        self.shown.append(("gradients", [None if g is None else g.clone() for g in found]))

    def do_evaluate(self, a: int, b: int) -> None:
        with torch.no_grad():
            self.shown.append(("value", UNARY[b % len(UNARY)](self._pick(a)).sum()))

    def do_infer(self, a: int, b: int) -> None:
        with torch.inference_mode():
            self.shown.append(("value", VIEWS[b % len(VIEWS)](self._pick(a)).sum().clone()))

    def do_settle(self, a: int, b: int) -> None:
        self.settle()

    def do_raise(self, a: int, b: int) -> None:
        try:
            with self.recording():
                UNARY[b % len(UNARY)](self._pick(a)).exp().sum()
                raise Fault
        except Fault:
            self.shown.append(("fault", None))

    def do_tape(self, a: int, b: int) -> None:
        self._close()
        self._open()

    def do_numpy(self, a: int, b: int) -> None:
        """NumPy refills memory that was saved, and it is saved again."""
        self.array[...] = np.random.default_rng(b).standard_normal(self.array.shape)
        self._push(self._pick(a) * self.buffers[0])

    def do_dtypes(self, a: int, b: int) -> None:
        self._push(Bits.apply(self._pick(a), b))

    def do_refill(self, a: int, b: int) -> None:
        """A buffer is refilled for the next forward without moving its version. Losses over what it held are dropped, and so are
        values: autograd would compute them from the new bytes."""
        self.losses.clear()
        self.values = [leaf * 0.5 for leaf in self.leaves]
        self.do_tape(a, b)
        buffer = self.buffers[1]
        self.copied()
        if b % 2:
            storage = buffer.untyped_storage()
            nbytes = storage.nbytes()
            storage.resize_(0)
            storage.resize_(nbytes)
        buffer.data.fill_(b / 50)
        self._push(self._pick(a) * buffer)

    def do_free(self, a: int, b: int) -> None:
        """Memory of a saved tensor is freed, used by others, and filled again with the bytes that it had."""
        self.keeps = True
        value = self._pick(a).sigmoid() * 1
        self._push(UNARY[b % len(UNARY)](value))
        kept = value.detach().clone()
        storage = value.untyped_storage()
        nbytes = storage.nbytes()
        self.copied()
        storage.resize_(0)
        others = [torch.full((ROWS, COLUMNS), float(b), device=self.device) for _ in range(a % 3)]
        if b % 5 == 0:
            self.settle()
        if a % 2:
            others.clear()
        storage.resize_(nbytes)
        value.data.copy_(kept)  # has a counter of its own

    def do_close(self, a: int, b: int) -> None:
        """What records is closed in the middle of a forward; now and then, so that most programs do not end here."""
        if b % 4 == 0:
            self.keeps = True
            self.close()

    def do_collect(self, a: int, b: int) -> None:
        gc.collect(0)

    def do_freeze(self, a: int, b: int) -> None:
        gc.freeze()


def _empty_queue() -> None:
    """After a backward that raised, torch holds nodes of its graph in this thread's queue until the next backward."""
    torch.ones(1, requires_grad=True).sum().backward()


def same(one: Shown, other: Shown, *, freed: bool = False, closed: bool = False) -> str | None:
    """Where `other`, with the engine, differs from `one`, without; None if nowhere.

    Args:
        freed, closed: memory was freed, or the engine was closed, so that it may raise what says so.
    """
    allowed = (*(FREED if freed else ()), *((CLOSED,) if closed else ()))
    for at, ((kind, mine), (theirs_kind, theirs)) in enumerate(zip(one, other, strict=True)):
        if theirs_kind == "error" and any(words in theirs for words in allowed):
            continue
        if kind != theirs_kind:
            return f"at {at}: {kind} {mine!r:.200} against {theirs_kind} {theirs!r:.200}"
        if kind == "error" and mine != theirs:
            return f"at {at}: {mine} against {theirs}"
        if kind == "value" and not torch.equal(mine, theirs):
            return f"at {at}: values differ"
        if kind == "gradients":
            for leaf, (a, b) in enumerate(zip(mine, theirs, strict=True)):
                if (a is None) != (b is None) or (a is not None and not torch.equal(a, b)):
                    return f"at {at}: the gradients of leaf {leaf} differ"
    return None
