"""An I/O pool in virtual time, behind a real `SpillStore`: drives and host memory of set bandwidths."""

from __future__ import annotations

import ctypes
import errno
from collections.abc import Callable, Sequence

from ssdtrain.storage import IOCancelled, IOFailure
from ssdtrain.storage.pieces import COPY_IN, COPY_OUT, READ, WRITE
from tests.support.simulated.device import SimulatedDevice
from tests.support.simulated.timeline import Timeline

__all__ = ["Channel", "SimulatedOperation", "SimulatedPool"]

_QUEUED, _WAITING, _RUNNING, _DONE, _CANCELLED, _FAILED = range(6)


class Channel:
    """One direction of a drive: transfers pass one after the other.

    Args:
        bandwidth: bytes per second; may be changed at any time, for what begins later.
        latency: seconds that each transfer takes on top, overlapped with others.
    """

    def __init__(self, bandwidth: float, latency: float = 0.0) -> None:
        self.bandwidth = bandwidth
        self.latency = latency
        self.nbytes = 0
        self.seconds = 0.0  # with a transfer under way
        self._free_at = 0.0

    def take(self, now: float, nbytes: int) -> float:
        """When a transfer of `nbytes` that is handed over now has ended."""
        self._free_at = max(now, self._free_at) + nbytes / self.bandwidth
        self.seconds += nbytes / self.bandwidth
        self.nbytes += nbytes
        return self._free_at + self.latency


class SimulatedOperation:
    """A transfer that was queued."""

    def __init__(
        self, pool: SimulatedPool, kind: int, address: int, nbytes: int, extents: Sequence[int]
    ) -> None:
        self.nbytes = nbytes
        self.seconds = 0.0
        self.checksum = self.digest = 0
        self.kind = kind
        self.address = address
        self.extents = tuple(extents)
        self.state = _QUEUED
        self._pool = pool

    def done(self) -> bool:
        return self.state >= _DONE

    def begun(self) -> bool:
        return self.state >= _RUNNING

    def wait(self, timeout: float | None = None) -> bool:
        self._pool.flush()
        if not self._pool.timeline.wait_for(self.done, timeout):
            return False
        error = self.failed()
        if error is not None:
            raise error
        return True

    def cancel(self) -> bool:
        if self.state in (_QUEUED, _WAITING):
            self.state = _CANCELLED
            return True
        return self.state == _CANCELLED

    def failed(self) -> IOFailure | IOCancelled | None:
        if self.state == _CANCELLED:
            return IOCancelled("the operation was cancelled")
        if self.state != _FAILED:
            return None
        operation = "read" if self.kind & 1 else "write"
        return IOFailure(errno.EIO, "injected", "simulated drive", operation, 0, self.nbytes, errno.EIO)


class SimulatedPool:
    """Serves a store's transfers in virtual time; given to `SpillStore` as its pool.

    Args:
        timeline, device: whose events writes wait for.
        drives: (write, read) channel of each drive of the store.
        host: the channel that copies to and from the host tier share.
        fails: called with each operation when it ends; True fails it.
    """

    engine = "simulated"

    def __init__(
        self,
        timeline: Timeline,
        device: SimulatedDevice,
        drives: Sequence[tuple[Channel, Channel]],
        host: Channel,
        fails: Callable[[SimulatedOperation], bool] | None = None,
    ) -> None:
        self.timeline = timeline
        self.drives = list(drives)
        self.host = host
        self._device = device
        self._fails = fails
        self._later: list[tuple[SimulatedOperation, int]] = []
        self._bytes: dict[tuple[int, int], bytes] = {}
        self._moved = [[0, 0] for _ in drives]

    def submit(
        self,
        kind: int,
        address: int,
        nbytes: int,
        page_offset: int,
        extents: Sequence[int],
        event: int = 0,
        defer: bool = False,
        checksum: int = 0,
        digest: int = 0,
    ) -> SimulatedOperation:
        operation = SimulatedOperation(self, kind, address, nbytes, extents)
        if defer:
            self._later.append((operation, event))
            return operation
        self.flush()
        self._begin(operation, event)
        return operation

    def flush(self) -> None:
        later, self._later = self._later, []
        for operation, event in later:
            self._begin(operation, event)

    def _begin(self, operation: SimulatedOperation, event: int) -> None:
        awaited = self._device.events.get(event) if event else None
        if awaited is not None and not awaited.done:
            if operation.state == _QUEUED:
                operation.state = _WAITING
            awaited.when_done(lambda: self._run(operation))
        else:
            self._run(operation)

    def _run(self, operation: SimulatedOperation) -> None:
        if operation.state == _CANCELLED:
            return
        operation.state = _RUNNING
        began = self.timeline.now
        if operation.kind in (COPY_IN, COPY_OUT):
            end = self.host.take(began, operation.nbytes)
        else:
            direction = 0 if operation.kind == WRITE else 1
            end = began
            left = operation.nbytes
            for at in range(0, len(operation.extents), 3):
                queue, _, length = operation.extents[at : at + 3]
                share = min(length, left)
                left -= share
                end = max(end, self.drives[queue][direction].take(began, share))
                self._moved[queue][direction] += share
        self.timeline.at(end, lambda: self._end(operation, began))

    def _end(self, operation: SimulatedOperation, began: float) -> None:
        operation.seconds = self.timeline.now - began
        if self._fails is not None and self._fails(operation):
            operation.state = _FAILED
            return
        place = (operation.extents[0], operation.extents[1])
        if operation.kind == WRITE:
            self._bytes[place] = ctypes.string_at(operation.address, operation.nbytes)
        elif operation.kind == READ:
            ctypes.memmove(operation.address, self._bytes[place], operation.nbytes)
        elif operation.kind == COPY_IN:
            ctypes.memmove(operation.extents[1], operation.address, operation.nbytes)
        else:
            ctypes.memmove(operation.address, operation.extents[1], operation.nbytes)
        operation.state = _DONE

    def hold(self, *, begun: bool = False, writes: bool = True, reads: bool = True) -> None:
        raise NotImplementedError("virtual time stands still by itself")

    def release(self) -> None:
        raise NotImplementedError("virtual time stands still by itself")

    def counters(self) -> tuple[list[tuple[int, int, float, float]], int]:
        figures = zip(self._moved, self.drives, strict=True)
        return [(moved[0], moved[1], write.seconds, read.seconds) for moved, (write, read) in figures], 0

    def close(self) -> None:
        self._bytes.clear()
