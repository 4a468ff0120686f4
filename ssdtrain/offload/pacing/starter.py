"""Begins the stores of a forward: after the operator that saved the tensor, and when the stores in flight leave room.

Note: [After the operator]
Autograd calls the pack hook for some tensors before the operator's kernel has run, and kernels fill some of them afterwards
without moving a version counter (the noise of `rrelu`). So nothing of a saved tensor is read, copied or encoded while its
operator may still run: the store begins at the first hook that is called under another sequence number (autograd numbers the
nodes of a thread, and the kernel of an operator makes none), or at the end of the forward. A tensor whose version has moved
by then is not stored, since its unpack raises; nor is one that backward had meanwhile.

Note: [Memory of another stream]
Without the engine a graph holds what it saved until its backward. The engine lets go of it earlier, when operators that read it
may still be queued on the stream that saved it, and its copy on the store stream. What a stream allocated is reused in the order
of that stream: so memory of another stream, a batch that a loader's stream made or an input from a branch of the model, is
declared to be used by the stream that saves it (`Device.record_use`), for each save, and that stream waits for the copy.
"""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager
from typing import Any

import torch

from ssdtrain.config.units import MiB
from ssdtrain.device import Device
from ssdtrain.offload.metrics import OffloadMetrics
from ssdtrain.offload.options import EngineOptions
from ssdtrain.offload.pacing.closing import wait_quietly
from ssdtrain.offload.pacing.limits import TransferLimits
from ssdtrain.offload.tensors.meter import ActivationMeter
from ssdtrain.offload.tensors.region import Region
from ssdtrain.offload.tensors.tape import Tape
from ssdtrain.offload.transfer.mover import Mover
from ssdtrain.offload.transfer.state import State

TOGETHER = 16 * MiB  # stores of the CPU that begin together, at most

operator_number = torch.autograd._get_sequence_nr
"""Sequence number of the operator that this thread is in."""


logger = logging.getLogger("ssdtrain")

_RESIDENT = State.RESIDENT

STORE_TIMEOUT = (
    "stores in flight did not end within offload.deadline=%gs: a saved tensor of %d bytes stays in memory "
    "(counted in the report; faster drives, a lower offload.amount or more offload.buffer help)"
)
TOO_LARGE = (
    "a saved tensor of %d bytes is larger than offload.buffer (%d bytes), which all that is stored passes through: it "
    "stays in memory, and so does every other as large (counted in the report; more offload.buffer helps)"
)
BUFFER_FULL = (
    "a saved tensor of %d bytes finds no room in offload.buffer (%d bytes), where tensors for backward are, and stays in "
    "memory (counted in the report; more offload.buffer helps)"
)


class WarnOnce:
    """Logs each message the first time it is given."""

    def __init__(self) -> None:
        self._logged: set[str] = set()

    def __call__(self, message: str, *values: float) -> None:
        """Log `message`, formatted with `values`."""
        if message not in self._logged:
            self._logged.add(message)
            logger.warning(message, *values)


class StoreStarter:
    """Starts the stores of a tape's regions.

    Args:
        mover: begins them.
        metrics: counters to keep.
        meter: sees the copies of thin views.
        device: whose streams run the operators.
        options: bytes in flight, deadline.
    """

    def __init__(
        self,
        mover: Mover,
        metrics: OffloadMetrics,
        meter: ActivationMeter,
        device: Device,
        options: EngineOptions,
    ) -> None:
        self.closed = False
        self._mover = mover
        self._stores = mover.stores
        self._copies = mover.transfer.copies
        self._computes = device.kind == "cpu"  # the host does, and the time of a hook is missing there
        self._metrics = metrics
        self._meter = meter
        self._device = device
        self._options = options
        self._warn_once = WarnOnce()
        self.limits = TransferLimits(mover, options)
        self.largest = 0
        """Bytes of the largest region so far whose store has begun."""

    # With the lock held

    def begin(
        self, tape: Tape, stream: Any | None, following: torch.UntypedStorage | None = None
    ) -> list[Region]:
        """Begin the stores of `tape`, whose operator has ended. Returns those that find no room now. While the current stream is
        captured this must not be called: nothing may be queued or asked of other streams meanwhile.

        Args:
            stream: the current one.
            following: what the next operator saves first. It is in memory before the tensors leave that make room.

        Raises:
            StoreFull: no tier has room, and the config says to raise.
        """
        first, *others = regions = tape.unstored
        tape.unstored = []
        began = 0.0
        if self._computes:
            began = self._options.clock()
            if following is not None and self._stores.bound is not None:
                self._meter.see(following)
        nbytes = largest = first.nbytes
        if others:
            sizes = [region.nbytes for region in regions]
            nbytes, largest = sum(sizes), max(sizes)
        if largest > self.largest:
            self.largest = largest
            self._mover.batch_bytes = min(TOGETHER, self._stores.limit // 4, largest)
        if self._copies:
            if nbytes > tape.second_operator or tape.nbytes > self.limits.largest_tape:
                self.limits.saw(tape, nbytes, self.largest)
            if regions[-1].stream != stream:
                self._device.wait_stream(regions[-1].stream)
        postponed = []
        for region in regions:
            if not self._begin(region):
                postponed.append(region)
        if self._computes:
            self._metrics.storing_seconds += self._options.clock() - began
        return postponed

    def abandon(self, tape: Tape) -> None:
        """Keep what was saved on `tape` and not stored yet: its forward is over."""
        for region in tape.unstored:
            if region.transfer.state is State.RESIDENT:
                self._mover.abandon(region)
        tape.unstored.clear()

    def _begin(self, region: Region) -> bool:
        mover = self._mover
        if region.transfer.state is not _RESIDENT:
            return True  # released
        storage = region.tensor.untyped_storage()
        if (
            region.probe._version != region.version  # it was modified in place
            or storage.nbytes() < region.start + region.nbytes  # or lost
            or region.last_pass >= 0
            or self.closed
        ):
            mover.keep(region)
            return True
        region.pointer = storage.data_ptr()
        if region.origin is not None and region.packed is None:
            self._copy_together(region)
        return (not self._stores or mover.admits(region)) and mover.begin_store(region)

    def _copy_together(self, region: Region) -> None:
        self._device.record_use(region.probe)  # the copy is made on this stream
        region.copy_together()
        region.stream = self._device.current_stream()  # which allocated the copy
        self._metrics.packed_bytes += region.nbytes
        self._meter.see_own(region.tensor.untyped_storage())

    # Without the lock

    def wait(self, region: Region, lock: AbstractContextManager[object]) -> None:
        """Begin the store of `region` as soon as the stores in flight leave room, or keep it past
        the deadline; `lock` is the engine's."""
        self.limits.grow(lock)
        deadline: float | None = None
        full = False  # no staging buffer: one store at least has to end first
        while True:
            with lock:
                self._mover.reap()
                oldest = self._stores.oldest()
                if not (full and oldest is not None) and self._begin(region):
                    return
                full = full or self._mover.admits(region)
                transfer = self._mover.transfer
                size, limit = region.transfer.staged_bytes, transfer.largest
                # How large an encoded one is is known when its store was tried.
                large = limit is not None and size > limit and (full or not region.transfer.codec)
                passing = transfer.returning()
                if large or (full and oldest is None and passing is None):
                    self._keep(region, TOO_LARGE if large else BUFFER_FULL, size, transfer.buffers.capacity)
                    return
            now = self._options.clock()
            deadline = now + self._options.deadline if deadline is None else deadline
            ended = now < deadline
            cause = "event" if oldest is None else "store" if full else "admission"
            if oldest is not None:
                ended = ended and wait_quietly(oldest, deadline - now)
            elif passing is not None:
                self._device.block(passing)  # every buffer is in use by copies that are under way
            with lock:
                self._metrics.count_store_wait(cause, region.name, self._options.clock() - now)
                full = False
                if not ended:
                    self._keep(region, STORE_TIMEOUT, self._options.deadline, region.nbytes)
                    return

    def _keep(self, region: Region, message: str, *values: float) -> None:
        self._warn_once(message, *values)
        self._metrics.kept_late_bytes += region.nbytes
        self._mover.keep(region)
