"""The memory of chunks: loads, evictions and prefetches within a limit of bytes.

Nothing here runs on a thread of its own. Where backward runs on another thread than the training loop, the loop waits for it.

Note: [Room]
    A part counts from the start of its load until its memory is freed, which in host memory is when its stores have ended. A
    load that is needed makes room: it frees what has left, evicts the chunk that was used longest ago, waits for stores, and for
    the optimizer's thread. A prefetch only takes what is free without waiting, and evicts nothing that is there ahead of its use.
    If chunks in use leave no room (their backward has not given all
    gradients), the limit is exceeded, with one warning: training goes on.

Note: [Parts after an interrupt]
    See Note: [Interrupts] in `stored`. `Part.where` changes with the tensors while signals are deferred, and what must be waited
    for is waited for before. A part whose load was interrupted is still loading: the next call begins what had not begun.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Container, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from typing import TYPE_CHECKING

import torch

from ssdtrain.state.chunk import Chunk, Part, StoredGradient, Where
from ssdtrain.state.metrics import StateMetrics
from ssdtrain.storage import IOFailure, signals_deferred
from ssdtrain.text import size_text

if TYPE_CHECKING:
    from ssdtrain.state.chunk_step import ChunkStep

logger = logging.getLogger("ssdtrain")


@dataclass
class StateTimes:
    """Seconds of the thread that trains, since the start."""

    hooks: float = 0.0
    """Seconds in hooks of blocks, without waits."""
    hook_bytes: int = 0
    """Bytes whose loads began there."""
    outside: float = 0.0
    """Seconds of the optimizer for what is in no chunk."""
    chunks: float = 0.0
    """Seconds of the optimizer for chunks, waits included."""
    computing: float = 0.0
    """Part of `chunks` in the optimizer's own code."""
    stepping: float = 0.0
    """Seconds of the optimizer's own thread, for chunks that the CPU steps."""
    stepped_bytes: int = 0
    """Bytes of their parameters."""

    def since(self, before: StateTimes) -> StateTimes:
        """Return the difference."""
        return StateTimes(*(now - then for now, then in zip(astuple(self), astuple(before), strict=True)))


class Residency:
    """The memory of all chunks that come and go.

    Args:
        chunks: those that come and go, in the order of execution.
        limit: bytes in memory at most, with `fixed`.
        fixed: bytes of what stays.

    Attributes:
        running: steps that the optimizer's thread has, the first begun first: their chunks are in memory until they are finished.
        times: of the thread that trains, for plans.
    """

    def __init__(self, chunks: Sequence[Chunk], limit: int, fixed: int, metrics: StateMetrics) -> None:
        self.chunks = chunks
        self.metrics = metrics
        self._limit = limit
        self._narrow: int | None = None
        self._recent = OrderedDict.fromkeys(chunks)  # the one used longest ago first
        self._leaving: list[Part] = []
        self.running: list[ChunkStep] = []
        self.times = StateTimes()
        self._warned = False
        metrics.limit_bytes = limit
        self._count(fixed)

    @contextmanager
    def in_a_hook(self) -> Iterator[None]:
        """Count what runs inside in `times`."""
        metrics, times = self.metrics, self.times
        began, loaded = time.perf_counter(), metrics.loaded_bytes
        waited = metrics.load_wait_seconds + metrics.store_wait_seconds + metrics.step_wait_seconds
        try:
            yield
        finally:
            waited = (
                metrics.load_wait_seconds + metrics.store_wait_seconds + metrics.step_wait_seconds - waited
            )
            times.hooks += max(0.0, time.perf_counter() - began - waited)
            times.hook_bytes += metrics.loaded_bytes - loaded

    # What callers need

    def begin(self, part: Part, chunk: Chunk, *, required: bool = True, patient: bool = True) -> bool:
        """Bring `part` into memory, or on its way.

        Args:
            required: exceed the limit rather than not load it.
            patient: wait for stores in flight to make room.

        Returns:
            Whether it is.

        Raises:
            RuntimeError: a tensor was written to, or given other data, while it was away.
        """
        self._forget_dropped(part)
        if part.where is not Where.LOADING:
            self._refuse(self._lost_writes(part))
        if part.where is Where.LEAVING:
            with signals_deferred():
                for tensor in part.tensors:
                    tensor.show()
                self._leaving.remove(part)
                part.where = Where.HERE
        if part.where is Where.HERE:
            self._apply_scales(part)
            return True
        if part.where is Where.AWAY:
            if not self._make_room(part.nbytes, chunk, required, patient):
                return False
            with signals_deferred():
                self._count(part.nbytes)
                part.where = Where.LOADING
        try:
            for tensor in part.tensors:
                self.metrics.loaded_bytes += tensor.begin_load()
        except Exception:
            self._give_up(part)
            raise
        return True

    def finish(self, part: Part) -> None:
        """Wait until the tensors of `part` are in memory.

        Raises:
            IOFailure: one could not be read.
            RuntimeError: see `begin`.
        """
        self._forget_dropped(part)
        if part.where is Where.HERE:
            self._apply_scales(part)
        if part.where is not Where.LOADING:
            return
        began = time.perf_counter()
        failed: Exception | None = None
        for tensor in part.tensors:
            try:
                self.metrics.loaded_bytes += tensor.begin_load()
                tensor.wait_for_load()
            except Exception as error:
                if tensor.loading:
                    raise  # a signal handler did
                failed = failed or error  # the others are in flight, too
        self.metrics.load_wait_seconds += time.perf_counter() - began
        if failed is not None:
            self._give_up(part)
            if isinstance(failed, IOFailure):
                logger.error("%s could not be loaded: resume from the last checkpoint", part.name)
            raise failed
        with signals_deferred():
            lost = self._lost_writes(part)
            for tensor in part.tensors:
                tensor.show()
            part.where = Where.HERE
        self._apply_scales(part)
        self._refuse(lost)  # all is in memory; what was written is not

    def _give_up(self, part: Part) -> None:
        """Leave `part` away, because it cannot be loaded."""
        for tensor in part.tensors:
            tensor.abandon()
        with signals_deferred():
            for tensor in part.tensors:
                if tensor.in_memory:
                    tensor.hide()
                    tensor.free()
            part.where = Where.AWAY
            self._count(-part.nbytes)

    @staticmethod
    def _apply_scales(part: Part) -> None:
        for tensor in part.tensors:
            if isinstance(tensor, StoredGradient):
                tensor.apply_scales()

    def load(self, chunk: Chunk, *parts: Part) -> None:
        """Bring `parts` of `chunk` into memory; it is the chunk used last."""
        self._recent.move_to_end(chunk)
        chunk.ahead = False
        if chunk.pending is not None:
            chunk.pending.finish()
        chunk.arrive()
        for part in parts:
            self.begin(part, chunk)
        for part in parts:
            self.finish(part)

    def prefetch(self, chunk: Chunk, *parts: Part, patient: bool = False) -> bool:
        """Begin to load `parts` as far as there is room. Returns whether all have begun."""
        self._recent.move_to_end(chunk)
        if chunk.pending is not None:
            return chunk.pending.begin(required=False)
        away = [part for part in parts if part.where is Where.AWAY]
        begun = all(self.begin(part, chunk, required=False, patient=patient) for part in parts)
        if not chunk.ahead and any(part.tensors and part.where is Where.LOADING for part in away):
            chunk.ahead = True
            self.metrics.prefetched_chunks += 1
        return begun

    def discard_writes(self, part: Part, replaced: Container[torch.Tensor]) -> None:
        """Forget what was written to those of `replaced` that are away: they get other values next."""
        if part.where is not Where.HERE:
            for tensor in part.tensors:
                if tensor.tensor in replaced:
                    tensor.discard_write()

    def write(self, part: Part) -> None:
        """Begin to store what has changed in `part`, which stays in memory; nothing where it is pinned."""
        if part.pinned:
            return
        flags = [tensor.differs() for tensor in part.tensors]
        known = [flag for flag in flags if flag is not None]
        # The host waits for the device once for all tensors.
        changed = iter(torch.stack(known).tolist() if known else [])
        for tensor, flag in zip(part.tensors, flags, strict=True):
            self.metrics.stored_bytes += tensor.begin_store(flag is not None and next(changed))

    def release(self, part: Part) -> None:
        """Let `part` go: its memory is freed when what has changed is stored."""
        self.finish(part)
        if part.where is not Where.HERE or part.stays or part.pinned:
            return
        self.write(part)
        self._leave(part)

    def _leave(self, part: Part) -> None:
        with signals_deferred():
            for tensor in part.tensors:
                tensor.hide()
            part.where = Where.LEAVING
            self._leaving.append(part)
        self._free_what_has_left()

    def pin(self, chunk: Chunk, *parts: Part) -> None:
        """Bring `parts` of `chunk` into memory, where they stay until `unpin_all`."""
        self.load(chunk, *parts)
        for part in parts:
            part.pinned = True

    def narrow(self, limit: int | None) -> None:
        """Make room as if the limit were `limit` until this is called with None, or parts are unpinned. What then has no room all
        the same is loaded without a warning."""
        self._narrow = limit

    def unpin_all(self, limit: int) -> None:
        """Let all parts come and go within `limit` from now on; those in memory leave it.

        Raises:
            IOFailure: a store failed.
        """
        self._limit = self.metrics.limit_bytes = limit
        self._narrow = None
        for chunk in self.chunks:
            for part in chunk.parts:
                part.pinned = False
                self.release(part)
        self.wait()

    def let_go(self, part: Part) -> None:
        """Free the memory of `part`, whose bytes others have or get, when there are no copies of it under way."""
        self._forget_dropped(part)
        if part.where is not Where.HERE or part.stays:
            self.forget(part)
            return
        for tensor in part.tensors:
            tensor.wait_for_store()
        self._leave(part)

    def forget(self, part: Part) -> None:
        """Free the memory of `part`, whose bytes nobody needs any more, or others have."""
        for tensor in part.tensors:
            tensor.abandon()
            tensor.wait_for_store()
        with signals_deferred():
            for tensor in part.tensors:
                if tensor.in_memory:
                    tensor.hide()
                    tensor.free()
            if part in self._leaving:
                self._leaving.remove(part)
            if part.counts:
                self._count(-part.nbytes)
            part.where = Where.AWAY

    def settle(self, part: Part) -> None:
        """Wait for the stores of `part`, which is in memory and will be written."""
        for tensor in part.tensors:
            tensor.wait_for_store()

    def scale_gradients(self, chunk: Chunk, factor: torch.Tensor) -> None:
        """Multiply the gradients of `chunk`: those in memory now, the others when they are loaded."""
        for gradient in chunk.stored_gradients():
            gradient.scales.append(factor)
        if chunk.gradients.where is Where.HERE:
            self._apply_scales(chunk.gradients)

    def resize(self, part: Part, nbytes: int) -> None:
        """Count `nbytes` for `part` from now on."""
        with signals_deferred():
            if part.counts:
                self._count(nbytes - part.nbytes)
            part.nbytes = nbytes

    def restore(self, part: Part, chunk: Chunk) -> None:
        """Bring `part` into memory for good, beyond the limit: training is over.

        Raises:
            IOFailure: a tensor could not be read.
            RuntimeError: see `begin`; what was only written to is back.
        """
        peak = self.metrics.resident_peak_bytes
        self._limit, self._narrow = 1 << 62, None
        if chunk.pending is not None:
            chunk.pending.finish()
        chunk.arrive()
        lost = self._lost_writes(part)
        self.begin(part, chunk)
        self.finish(part)
        self.metrics.resident_peak_bytes = peak
        self._refuse(lost)

    def count_fixed(self, nbytes: int) -> None:
        """Count `nbytes` more that stay in memory."""
        if nbytes:
            self._count(nbytes)

    def reset_peak(self) -> None:
        self.metrics.resident_peak_bytes = self.metrics.resident_bytes

    def wait(self) -> None:
        """Wait for all stores.

        Raises:
            IOFailure: one failed; a further call does not wait for it again.
        """
        while self._waiting():
            self._wait_for_oldest()

    # Room

    def _count(self, nbytes: int) -> None:
        self.metrics.resident_bytes += nbytes
        self.metrics.resident_peak_bytes = max(self.metrics.resident_peak_bytes, self.metrics.resident_bytes)

    def _make_room(self, nbytes: int, chunk: Chunk, required: bool, patient: bool) -> bool:
        """Make room as Note: [Room] says."""
        limit = self._limit if self._narrow is None else self._narrow
        while (excess := self.metrics.resident_bytes + nbytes - limit) > 0:
            if self._free_what_has_left():
                continue
            others = [each for each in self._recent if each is not chunk and _may_leave(each)]
            victim = next((each for each in others if not each.ahead), None)
            if victim is None and required and sum(part.nbytes for part in self._waiting()) < excess:
                victim = next(
                    iter(others), None
                )  # what was loaded ahead is needed before what would take its place
            if victim is not None:
                self._evict(victim)
                continue
            if patient and self._waiting():
                self._wait_for_oldest()
                continue
            if patient and self.running:
                self.running[0].finish()
                continue
            if not required:
                return False
            if self._narrow is None:
                self._warn(excess, chunk)
            break
        return True

    def _evict(self, chunk: Chunk) -> None:
        for part in chunk.parts:
            self.release(part)

    def _free_what_has_left(self) -> bool:
        left = [part for part in self._waiting() if all(tensor.may_be_freed() for tensor in part.tensors)]
        for part in left:
            self._free(part)
        return bool(left)

    def _waiting(self) -> list[Part]:
        """Return the parts whose memory is free when their stores have ended. One that failed was raised and is passed over from
        then on: it can be shown again, so that a state dict can be made of all that is left."""
        return [part for part in self._leaving if not part.failed]

    def _wait_for_oldest(self) -> None:
        began = time.perf_counter()
        try:
            self._free(self._waiting()[0])
        finally:
            self.metrics.store_wait_seconds += time.perf_counter() - began

    def _free(self, part: Part) -> None:
        try:
            for tensor in part.tensors:
                tensor.wait_to_free()
        except IOFailure:  # not what a signal handler raises in the wait: the store goes on
            part.failed = True
            raise
        with signals_deferred():
            for tensor in part.tensors:  # all or none: a part whose store failed can be shown again
                tensor.free()
            self._leaving.remove(part)
            part.where = Where.AWAY
            self._count(-part.nbytes)

    def _forget_dropped(self, part: Part) -> None:
        """Drop gradients that the training loop has dropped: others may use their slots."""
        kept = []
        for tensor in part.tensors:
            if isinstance(tensor, StoredGradient) and tensor.dropped:
                if part.where is Where.LOADING:
                    tensor.abandon()
                tensor.wait_for_store()
            else:
                kept.append(tensor)
        part.tensors = kept

    def _lost_writes(self, part: Part) -> list[RuntimeError]:
        if part.where is Where.HERE:
            return []
        errors = [tensor.lost_write() for tensor in part.tensors]
        return [error for error in errors if error is not None]

    @staticmethod
    def _refuse(lost: list[RuntimeError]) -> None:
        if lost:
            raise lost[0]

    def _warn(self, excess: int, chunk: Chunk) -> None:
        if self._warned:
            return
        self._warned = True
        used = [other.name for other in self.chunks if other.in_use and other is not chunk]
        logger.warning(
            "state.device_limit is exceeded by %s, because %s are in use while %s is needed: blocks whose parameters do not all "
            "get a gradient stay in memory until the end of the backward; raise state.device_limit, or name blocks by "
            "state.blocks that run one after the other",
            size_text(excess),
            ", ".join(used) or "the chunk itself",
            chunk.name,
        )


def _may_leave(chunk: Chunk) -> bool:
    return not chunk.in_use and any(
        part.where in (Where.HERE, Where.LOADING) and not (part.stays or part.pinned) for part in chunk.parts
    )
