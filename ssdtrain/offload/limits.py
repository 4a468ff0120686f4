"""How many bytes of stores may be under way, on the device and beyond it, from the sizes of what forwards have saved.

Note: [Two budgets]
A store takes device memory until its copy has left the device, and staging memory until its write has ended. The first is the
device limit (`Departures.limit`), the second `offload.in_flight`. Both are sized by operators, since what an operator saves
arrives at once: two of them let the next one be copied while the last one is written.

Staging memory is pinned when the arena is made, so a limit below half of the arena (the other half is for loads) frees no
memory, and only makes the host wait. Where `offload.buffer` is not given, the arena grows until each half holds two operators,
and at least the largest tensor. The size of an operator is that of the second largest of a forward: a single outlier, such as
the logits of a large vocabulary, passes through and does not pin four times its size.

To pin memory takes seconds and may wait for the device, where a collective or a send may wait for another rank of a pipeline. So
the arena grows between steps, when no forward or backward is under way; in a forward only for a tensor larger than all of it,
which would stay on the device otherwise. The engine's lock is not held meanwhile: other threads go on.

On the CPU, and with GPUDirect Storage, tensors are written from their own memory: the limit is then a part of the peak.
"""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager

from ssdtrain.config.units import MiB
from ssdtrain.offload.mover import Mover
from ssdtrain.offload.options import EngineOptions
from ssdtrain.offload.tape import Tape
from ssdtrain.storage import signals_deferred

__all__ = ["TransferLimits"]

DEVICE_SHARE = 1 / 16
"""Of what a forward saves: what may be on a GPU while it is copied off it, and again while it comes back."""

IN_PLACE = 256 * MiB
"""Default of `offload.in_flight` where tensors are written from their own memory."""


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
        self._largest_tape = 0
        self._wanted = 0  # bytes that the arena should have
        self._missing = 0  # bytes that it is to have now: see `grow`
        self._growing = threading.Lock()  # one thread at a time makes an arena
        self._set_in_flight()

    def saw(self, tape: Tape, operator_bytes: int, largest: int) -> None:
        """An operator of `tape` has ended, which saved `operator_bytes` that are stored, `largest` in one tensor."""
        if operator_bytes <= tape.second_operator and tape.nbytes <= self._largest_tape:
            return
        if operator_bytes > tape.second_operator:
            first = max(tape.largest_operator, operator_bytes)
            tape.second_operator = min(tape.largest_operator, operator_bytes)
            tape.largest_operator = first
        self._largest_operator = max(self._largest_operator, operator_bytes)
        self._largest_tape = max(self._largest_tape, tape.nbytes)
        self._mover.departures.limit = max(2 * self._largest_operator, int(DEVICE_SHARE * self._largest_tape))
        self._usual_operator = max(self._usual_operator, tape.second_operator)
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
                        self._buffers.adopt(arena)
                        self._set_in_flight()

    def _set_in_flight(self) -> None:
        if self._options.in_flight is not None:
            self._mover.stores.allowed = self._options.in_flight
        elif self._mover.transfer.copies and not self._options.by_cufile:
            self._mover.stores.allowed = self._buffers.capacity // 2
        elif self._mover.transfer.copies:
            self._mover.stores.allowed = max(IN_PLACE, 2 * self._largest_operator)
        else:
            self._mover.stores.allowed = IN_PLACE
