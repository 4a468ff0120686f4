"""How many bytes of stores may be under way, on the device and beyond it, from the sizes of what forwards have saved.

Note: [Two budgets]
A store takes device memory until its copy has left the device, and staging memory until its write has ended. The first is the
device limit (`Departures.limit`), the second `offload.in_flight`. Both are sized by operators, since what an operator saves
arrives at once: two of them let the next one be copied while the last one is written.

Staging memory is pinned when the arena is made, so a limit below half of the arena (the other half is for loads) frees no
memory, and only makes the host wait. Where `offload.buffer` is not given, the arena grows until each half holds two operators,
and at least the largest tensor. The size of an operator is that of the second largest of a forward: a single outlier, such as
the logits of a large vocabulary, passes through, and neither pins four times its size nor takes twice its size on the device.

To pin memory takes seconds and may wait for the device, where a collective or a send may wait for another rank of a pipeline. So
the arena grows between steps, when no forward or backward is under way; in a forward only for a tensor larger than all of it,
which would stay on the device otherwise. The engine's lock is not held meanwhile: other threads go on.

On the CPU, and with GPUDirect Storage, tensors are written from their own memory: the limit is then a part of the peak.

Note: [Departure in order]
On a CPU a tensor is in memory until its write has ended. So that the peak of a plan does not depend on when that is, a tensor
leaves when a later store needs its room among the bytes in flight, and not before; training waits there if the write still runs.
What is left of a forward when its backward begins stays in memory, and is not read back.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, NamedTuple

from ssdtrain.config.units import MiB
from ssdtrain.offload.options import EngineOptions
from ssdtrain.offload.tensors.region import Region
from ssdtrain.offload.tensors.tape import Tape
from ssdtrain.offload.transfer.state import State
from ssdtrain.storage import Operation, signals_deferred

if TYPE_CHECKING:
    from ssdtrain.offload.transfer.mover import Mover

DEVICE_SHARE = 1 / 16
"""Share of what a forward saves that may be on a GPU while it is copied off it, and again while it comes back."""

NEWEST = 2
"""Number of stores whose tensors stay on a device whatever their size, so that an outlier's copy is not waited for at once."""

PAYLOADS_MATTER = 64 * MiB
"""Bytes of a tape from which on payloads are bounded: of less the limit says little, and they are small, too."""

UNBOUNDED = 1 << 60
"""Bytes in flight where every slot is pinned host memory, which a device copies to: what is under way takes no other memory."""

IN_PLACE = 256 * MiB
"""Default of `offload.in_flight` where tensors are written from their own memory."""


class EngineLimits(NamedTuple):
    """What transfers may take, in bytes, as the cost model of a plan reads it."""

    in_flight: int
    """Stores under way."""
    prefetch: int
    """Loads ahead of their use."""
    window: int
    """Stores whose tensors are still on the device, and copies ahead of their use."""
    buffers: int
    """The arena, where it is of the memory of activations."""
    together: int
    """Writes that are queued before an idle pool is woken."""
    in_order: bool
    """Tensors leave when later stores need their room."""
    carried: float
    """Bytes that are moved of each byte that leaves, see `OffloadMetrics`."""


class TransferLimits:
    """Sets the limits of a mover, and the size of its arena. Called with the engine's lock held, `grow` without it.

    Args:
        mover: whose limits are set. See Note: [Two budgets].
        options: `in_flight`, which is left as it is where it is given.
    """

    def __init__(self, mover: Mover, options: EngineOptions) -> None:
        self._mover = mover
        self._options = options
        self._buffers = mover.transfer.buffers
        self._largest_operator = 0
        self._usual_operator = 0  # the largest that is the second largest of its forward
        self.largest_tape = 0
        """Bytes of the largest so far."""
        self._wanted = 0  # bytes that the arena should have
        self._missing = 0  # bytes that it is to have now: see `grow`
        self._growing = threading.Lock()  # one thread at a time makes an arena
        self._set_in_flight()

    def saw(self, tape: Tape, operator_bytes: int, largest: int) -> None:
        """An operator of `tape` has ended, which saved `operator_bytes` that are stored, `largest` in one tensor. Nothing follows
        from it where that is no more than `Tape.second_operator`, and the tape no more than `largest_tape`."""
        if operator_bytes > tape.second_operator:
            first = max(tape.largest_operator, operator_bytes)
            tape.second_operator = min(tape.largest_operator, operator_bytes)
            tape.largest_operator = first
        self._largest_operator = max(self._largest_operator, operator_bytes)
        self.largest_tape = max(self.largest_tape, tape.nbytes)
        self._usual_operator = max(self._usual_operator, tape.second_operator)
        self._mover.departures.limit = max(2 * self._usual_operator, int(DEVICE_SHARE * self.largest_tape))
        self._wanted = max(4 * self._usual_operator, largest)
        if largest > self._buffers.capacity:
            self._missing = max(self._missing, largest)
        self._set_in_flight()

    def between_steps(self) -> None:
        """No forward or backward is under way: `grow` makes the arena that those so far needed."""
        self._buffers.close_unused()
        if self._wanted > self._buffers.capacity:
            self._missing = max(self._missing, self._wanted)

    def grow(self, lock: AbstractContextManager[object]) -> None:
        """Make a larger arena where one is needed now. Called without the engine's lock, which is `lock`."""
        if not self._missing:
            return
        with self._growing:
            with lock:
                wanted, self._missing = self._missing, 0
                limit = self._options.buffer_limit or 0  # a fixed size does not grow
                nbytes = self._buffers.missing(wanted, limit) if wanted > self._buffers.capacity else 0
            if not nbytes:
                return
            with signals_deferred():  # else nobody has an arena that was made
                arena = self._buffers.pin(nbytes, self._options.buffer_room)
                if arena is not None:
                    with lock:
                        adopted = self._buffers.adopt(arena)
                        self._set_in_flight()
                    if not adopted:
                        arena.close()

    def _set_in_flight(self) -> None:
        if self._options.in_flight is not None:
            self._mover.stores.allowed = self._options.in_flight
        elif self._mover.transfer.unstaged:
            self._mover.stores.allowed = UNBOUNDED
        elif self._mover.transfer.copies and not self._options.by_cufile:
            self._mover.stores.allowed = self._buffers.capacity // 2
        elif self._mover.transfer.copies:
            self._mover.stores.allowed = max(IN_PLACE, 2 * self._largest_operator)
        else:
            self._mover.stores.allowed = IN_PLACE


class StoresInFlight(deque[Region]):
    """Regions being stored, in the order in which their stores began. Called with the engine's lock held, and never waits.

    Args:
        end: processes the end of the store of a region that has been taken off.
    """

    def __init__(self, end: Callable[[Region, Operation], None]) -> None:
        super().__init__()
        self.nbytes = 0
        """Bytes of all of them; the mover counts."""
        self.allowed = 0
        """Bytes that may be under way, by `TransferLimits`."""
        self.bound: int | None = None
        """The same by a plan for a CPU; with it tensors leave in order. See Note: [Departure in order]."""
        self._end = end

    @property
    def limit(self) -> int:
        """Bytes that may be under way."""
        return self.allowed if self.bound is None else min(self.allowed, self.bound)

    @property
    def in_order(self) -> bool:
        """Tensors leave when later stores need their room."""
        return self.bound is not None

    def admits(self, nbytes: int) -> bool:
        """True if there is room for one more, which `in_order` the oldest make, where they have ended. A single store always
        has room."""
        if self.bound is None:
            return not self or self.nbytes + nbytes <= self.allowed
        while self and self.nbytes + nbytes > self.limit:
            if not self._end_oldest():
                return False
        return True

    def oldest(self) -> Operation | None:
        """Return the operation of the one that began first."""
        return self[0].transfer.operation if self else None

    def under_way(self) -> int:
        """Return bytes of those that have not ended."""
        if not self.in_order:
            return self.nbytes
        transfers = (one.transfer for one in self)
        return sum(
            one.moved_bytes for one in transfers if one.operation is not None and not one.operation.done()
        )

    def reap(self) -> None:
        """Process those that have ended; `in_order` only what backward had, or is about to ask for."""
        if self.bound is None:  # each hook comes here
            while self and (operation := self[0].transfer.operation) is not None and operation.done():
                self._end(self.popleft(), operation)
            return
        for region in [
            one for one in self if one.transfer.keep_resident or one.transfer.state is State.RELEASED
        ]:
            operation = region.transfer.operation
            if operation is not None and operation.done():
                self.remove(region)
                self._end(region, operation)

    def _end_oldest(self) -> bool:
        """False: it is under way."""
        operation = self.oldest()
        if operation is None or not operation.done():
            return False
        self._end(self.popleft(), operation)
        return True


_STORING = State.STORING


class Departures:
    """The stores whose tensors are still on the device, the oldest first. Called with the engine's lock held.

    Note: [Departure of parts]
    Tensors that leave whole go when later stores have taken their place on the device. Where tensors are so large that they leave
    in part, few are stored, and that place may never be taken: those go when so many bytes were saved since, stored or not.
    Modelled in `ssdtrain/planner/model/simulation.py`: change both.

    Note: [Payloads on a device]
    A tensor that is copied as it is takes no memory while operators use it anyway. Its payload does, beside it, until the copy
    has left. So a region that is larger than all that may be on its way (`limit`: an outlier, such as the logits, which backward
    wants at once) is stored as it is: `admits_payload`.

    Args:
        depart: lets the stream of a region wait for its copy and empties the tensor, or lets go of the payload.
        leave: does the same of one whose copy has ended.
        stay: lets a pinned region stay, whose copy has ended when backward is near.
    """

    def __init__(
        self,
        depart: Callable[[Region], None],
        leave: Callable[[Region], None],
        stay: Callable[[Region], None],
    ) -> None:
        self.limit = 0
        """Bytes of stores that may still be on the device when the next one begins."""
        self._depart = depart
        self._leave = leave
        self._stay = stay
        self._regions: deque[Region] = deque()
        self._bytes = 0
        self.parting: list[Region] = []
        """Regions that leave in part. See Note: [Departure of parts]."""

    def add(self, region: Region) -> None:
        """The store of `region` has begun: let the oldest tensors go until no more than `limit` bytes of them are left. What
        backward is about to need stays."""
        self._regions.append(region)
        self._bytes += region.nbytes
        if self._bytes > self.limit:
            self._let_go()

    def add_part(self, region: Region, saved: int) -> None:
        """The store of a part of `region` has begun.

        Args:
            saved: bytes, of all regions so far.
        """
        self.parting.append(region)
        self.advance(saved)

    def admits_payload(self, region: Region) -> bool:
        """Return whether there is device memory for the payload of `region`. See Note: [Payloads on a device]."""
        return region.nbytes <= self.limit or region.tape.nbytes < PAYLOADS_MATTER

    def advance(self, saved: int) -> None:
        """So many bytes were saved so far: let regions go that leave in part. See Note: [Departure of parts]."""
        staying = []
        for region in self.parting:
            if _on_its_way(region) and saved - region.transfer.saved_before <= self.limit:
                staying.append(region)
            elif _on_its_way(region) and not region.transfer.keep_resident:
                self._depart(region)
        self.parting = staying

    def _let_go(self) -> None:
        regions, limit = self._regions, self.limit
        while self._bytes > limit and len(regions) > NEWEST:
            oldest = regions.popleft()
            self._bytes -= oldest.nbytes
            if _on_its_way(oldest) and not oldest.transfer.keep_resident:
                self._depart(oldest)

    def under_way(self) -> int:
        """Return bytes of pinned regions that have not left."""
        pinned = (region for region in (*self._regions, *self.parting) if region.transfer.pinned)
        return sum(region.transfer.moved_bytes for region in pinned if _on_its_way(region))

    def reap(self) -> None:
        """Process those at the head that are pinned and whose copies have ended. Cheap when none has."""
        regions, ended = self._regions, self._ended
        while regions and ended(regions[0]):
            self._bytes -= regions.popleft().nbytes
        if self.parting:
            self.parting = [region for region in self.parting if not ended(region)]

    def _ended(self, region: Region) -> bool:
        """False: it is on its way, and may leave only in its turn."""
        transfer = region.transfer
        if transfer.state is not _STORING or not (region.pointer or transfer.payload is not None):
            return True  # it is not on its way
        event = transfer.event
        if not transfer.pinned or not (event is None or event.query()):
            return False
        if transfer.keep_resident:
            self._stay(region)
        else:
            self._leave(region)
        return True


def _on_its_way(region: Region) -> bool:
    """Return True if the bytes are being stored, and they or their payload still on the device."""
    return region.transfer.state is _STORING and region.on_device
