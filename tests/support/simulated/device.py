"""A device with asynchronous streams: work is queued by the host and happens later, in the order that streams and events enforce.

Note: [Captures]
While a CUDA graph is captured, asking an event, and waiting for one or copying on another stream, is an error that also spoils
the capture. Here it is an error.

Note: [Reuse at once]
As a caching allocator does, memory that the host has let go of is handed out again at once by the stream that allocated it: what
is queued there next may overwrite it. Here it is poisoned at that point of that stream, so that a copy on another stream which
has not read it by then, and for which nothing waits, brings poison; and one that is reading it at that point is reported. Memory
that `record_use` was called for on another stream is free when that stream has done what was queued when the host let go of it.
"""

from __future__ import annotations

import ctypes
import itertools
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from tests.support.simulated.timeline import Timeline

__all__ = ["POISON", "Interval", "SimulatedDevice", "SimulatedEvent", "Stream"]

POISON = 0xDB
_ROUND = 512  # bytes: blocks are handed out in multiples


@dataclass(frozen=True)
class Interval:
    """One piece of work on a stream: [start, end) in seconds, what it was, and its bytes."""

    start: float
    end: float
    label: str
    nbytes: int


@dataclass(eq=False)
class _Block:
    """Memory of the device, the stream that allocated it, and others that used it."""

    memory: Any
    stream: Stream
    users: list[Stream]


class SimulatedEvent:
    """A point in a stream's work."""

    def __init__(self, device: SimulatedDevice) -> None:
        self.handle = next(device.handles)
        self.done = False
        self.when: float | None = None
        self.waiters: list[Callable[[], None]] = []
        self._device = device
        device.events[self.handle] = self

    def query(self) -> bool:
        self._device.check_not_capturing()
        return self.done

    def seconds(self) -> float | None:
        """When it was complete, in virtual time."""
        return self.when

    def synchronize(self) -> None:
        """Blocks the host, which is what the engine should never do: counted."""
        self._device.check_not_capturing()
        began = self._device.timeline.now
        self._device.timeline.wait_for(lambda: self.done)
        self._device.host_syncs += 1
        self._device.host_sync_seconds += self._device.timeline.now - began

    def complete(self) -> None:
        self.done = True
        self.when = self._device.timeline.now
        waiters, self.waiters = self.waiters, []
        for waiter in waiters:
            waiter()

    def when_done(self, action: Callable[[], None]) -> None:
        if self.done:
            action()
        else:
            self.waiters.append(action)


class Stream:
    """Work in order: each item begins when the one before has ended and its channel is free."""

    def __init__(self, device: SimulatedDevice, name: str) -> None:
        self.device = device
        self.name = name
        self.log: list[Interval] = []
        self._queue: deque[tuple[str, Any]] = deque()
        self._busy = False

    @property
    def idle(self) -> bool:
        return not self._busy and not self._queue

    @property
    def depth(self) -> int:
        """Items queued and not begun."""
        return len(self._queue)

    def work(
        self,
        seconds: float,
        *,
        label: str = "",
        nbytes: int = 0,
        begin: Callable[[], None] | None = None,
        end: Callable[[], None] | None = None,
    ) -> None:
        """Queue work of `seconds`; `begin` and `end` act on memory when it starts and when it is over."""
        self._queue.append(("work", (seconds, label, nbytes, begin, end)))
        self._advance()

    def record(self) -> SimulatedEvent:
        """An event that is complete when what is queued now is."""
        event = SimulatedEvent(self.device)
        self._queue.append(("record", event))
        self._advance()
        return event

    def wait(self, event: SimulatedEvent) -> None:
        """What is queued from now on begins after `event`."""
        self._queue.append(("wait", event))
        self._advance()

    def _advance(self) -> None:
        while self._queue and not self._busy:
            kind, item = self._queue[0]
            if kind == "record":
                self._queue.popleft()
                item.complete()
            elif kind == "wait":
                self._queue.popleft()
                if not item.done:
                    self._busy = True
                    item.when_done(self._resume)
            else:
                self._queue.popleft()
                self._start(*item)

    def _resume(self) -> None:
        self._busy = False
        self._advance()

    def _start(
        self,
        seconds: float,
        label: str,
        nbytes: int,
        begin: Callable[[], None] | None,
        end: Callable[[], None] | None,
    ) -> None:
        self._busy = True
        timeline = self.device.timeline
        start = timeline.now
        if begin is not None:
            begin()

        def over() -> None:
            if end is not None:
                end()
            if seconds:
                self.log.append(Interval(start, timeline.now, label, nbytes))
            self._resume()

        timeline.at(start + seconds, over)


def _at(address: int, nbytes: int) -> torch.Tensor:
    """The bytes at an address, which the tensor does not keep alive."""
    return torch.frombuffer((ctypes.c_ubyte * nbytes).from_address(address), dtype=torch.uint8)


class SimulatedDevice:
    """The engine's device layer in virtual time. Tensors of the device are CPU tensors over memory that this object hands out.

    Args:
        timeline: the clock.
        pcie: bytes per second, each way; both ways at once.
        memory: bytes per second of a copy within the device's memory; None: not known to the engine, and it takes no time.
        launch_seconds: what queueing one copy costs the host.
        jitter: a function (seconds) -> seconds for the duration of each copy, or None.
    """

    kind = "simulated"

    def __init__(
        self,
        timeline: Timeline,
        *,
        pcie: float,
        memory: float | None = None,
        launch_seconds: float = 5e-6,
        jitter: Callable[[float], float] | None = None,
    ) -> None:
        self.timeline = timeline
        self.pcie = pcie
        self.memory = memory
        self.launch_seconds = launch_seconds
        self.handles = itertools.count(1)
        self.events: weakref.WeakValueDictionary[int, SimulatedEvent] = weakref.WeakValueDictionary()
        self.compute = Stream(self, "compute")
        self.store = Stream(self, "device to host")
        self.load = Stream(self, "host to device")
        self.streams = [self.compute, self.store, self.load]
        self.host_syncs = 0
        self.host_sync_seconds = 0.0
        self.violations: list[str] = []
        """Memory that was used on one stream while another had it."""
        self._jitter = jitter or (lambda seconds: seconds)
        self._current = self.compute
        self._capturing = False
        self.blocked_seconds = 0.0
        """That the host waited for buffers to come back."""
        self._free: dict[tuple[Stream, int], list[_Block]] = {}
        self._used: dict[int, _Block] = {}  # by address
        self._unmapped: list[_Block] = []

    # What the engine needs

    def copy_bandwidth(self) -> float | None:
        return self.memory

    def clone(self, source: torch.Tensor) -> torch.Tensor:
        target = self.empty(source.numel())
        self._copy(self._current, source, target, "clone", self.memory)
        return target

    def free_bytes(self) -> None:
        return None

    def load_target(self, nbytes: int) -> torch.Tensor:
        return self._allocate(nbytes, self.load)

    def copy_to_host(self, source: int, target: int, nbytes: int) -> SimulatedEvent:
        self.check_not_capturing()
        self.store.wait(self._current.record())
        return self._copy(self.store, _at(source, nbytes), _at(target, nbytes), "D2H", self.pcie)

    def copy_to_device(
        self, source: int, target: int, nbytes: int, after: Sequence[Any] = (), *, within: bool = False
    ) -> SimulatedEvent:
        self.check_not_capturing()
        for event in after:
            self.load.wait(event)
        label, bandwidth = ("D2D", self.memory) if within else ("H2D", self.pcie)
        return self._copy(self.load, _at(source, nbytes), _at(target, nbytes), label, bandwidth)

    def current_stream(self) -> Stream:
        return self._current

    def timestamp(self) -> SimulatedEvent:
        self.check_not_capturing()
        return self._current.record()

    def link_bandwidth(self) -> tuple[float, float]:
        return self.pcie, self.pcie

    def wait_stream(self, stream: Stream | None) -> None:
        self.check_not_capturing()
        if stream is not None and stream is not self._current:
            self._current.wait(stream.record())

    def record_use(self, tensor: torch.Tensor) -> None:
        block = self._used.get(tensor.untyped_storage().data_ptr())
        if block is not None and self._current not in (block.stream, *block.users):
            block.users.append(self._current)

    def record(self, stream: Stream | None) -> SimulatedEvent | None:
        self.check_not_capturing()
        return None if stream is None else stream.record()

    def event_handle(self, event: SimulatedEvent | None) -> int:
        return 0 if event is None or event.done else event.handle

    def wait(self, event: SimulatedEvent, stream: Stream | None = None) -> None:
        self.check_not_capturing()
        (stream or self._current).wait(event)

    def block(self, event: SimulatedEvent, timeout: float | None = None) -> bool:
        self.check_not_capturing()
        began = self.timeline.now
        passed = self.timeline.wait_for(lambda: event.done, timeout)
        self.blocked_seconds += self.timeline.now - began
        return passed

    def progress(self) -> int:
        return 0

    def capturing(self) -> bool:
        return self._capturing

    def check_not_capturing(self) -> None:
        """See Note: [Captures]."""
        if self._capturing:
            raise RuntimeError("operation not permitted when stream is capturing")

    def writes_pinned(self) -> bool:
        return False

    def host_register(self) -> Callable[[int, int], Callable[[], None]]:
        return lambda address, nbytes: lambda: None

    def numa_node(self) -> None:
        return None

    def event_functions(self) -> dict[str, int]:
        return {}

    # What the simulated program needs

    @contextmanager
    def stream(self, stream: Stream) -> Any:
        """Work of the host goes to `stream` meanwhile."""
        before, self._current = self._current, stream
        try:
            yield
        finally:
            self._current = before

    @contextmanager
    def capture(self) -> Any:
        """A graph is being captured meanwhile."""
        self._capturing = True
        try:
            yield
        finally:
            self._capturing = False

    def empty(self, nbytes: int) -> torch.Tensor:
        """Uninitialised bytes of the device. See Note: [Reuse at once]."""
        return self._allocate(nbytes, self._current)

    def empty_cache(self, stream: Stream) -> None:
        """The allocator gives back the free memory of a stream, as with expandable segments: when that stream is idle."""
        self.timeline.wait_for(lambda: stream.idle)
        for (owner, _), blocks in self._free.items():
            if owner is stream:
                for block in blocks:
                    ctypes.memset(ctypes.addressof(block.memory), POISON, len(block.memory))
                self._unmapped += blocks  # a kernel that reads it finds poison, and no fault
                blocks.clear()

    def _allocate(self, nbytes: int, stream: Stream) -> torch.Tensor:
        rounded = -(-max(nbytes, 1) // _ROUND) * _ROUND
        free = self._free.setdefault((stream, rounded), [])
        block = free.pop() if free else _Block((ctypes.c_ubyte * rounded)(), stream, [])
        self._used[ctypes.addressof(block.memory)] = block
        view = (ctypes.c_ubyte * nbytes).from_buffer(block.memory)
        weakref.finalize(view, self._freed, block)
        return torch.frombuffer(view, dtype=torch.uint8)

    def _freed(self, block: _Block) -> None:
        del self._used[ctypes.addressof(block.memory)]
        users, block.users = block.users, []
        self._reuse_after([user.record() for user in users], block)

    def _reuse_after(self, events: list[SimulatedEvent], block: _Block) -> None:
        if events:
            events[0].when_done(lambda: self._reuse_after(events[1:], block))
            return

        def poison() -> None:
            ctypes.memset(ctypes.addressof(block.memory), POISON, len(block.memory))

        if block.stream is not self.load:  # what lies there is overwritten by loads alone
            block.stream.work(0.0, label="reuse", begin=poison)
        self._free[block.stream, len(block.memory)].append(block)

    def synchronize(self) -> None:
        """The program, not the engine, waits for all that is queued."""
        self.timeline.wait_for(lambda: all(stream.idle for stream in self.streams))

    def _copy(
        self, stream: Stream, source: torch.Tensor, target: torch.Tensor, label: str, bandwidth: float | None
    ) -> SimulatedEvent:
        self.timeline.spend(self.launch_seconds)
        # Addresses only, as a device has them: who lets go of memory too early is to be found out.
        nbytes, read, written = source.numel(), source.data_ptr(), target.data_ptr()
        buffer = (ctypes.c_ubyte * nbytes)()

        def begin() -> None:
            ctypes.memmove(buffer, read, nbytes)

        def end() -> None:
            if ctypes.string_at(read, nbytes) != bytes(buffer):
                self.violations.append(f"{label}: the source changed during the copy")
            ctypes.memmove(written, buffer, nbytes)

        seconds = self._jitter(nbytes / bandwidth if bandwidth else 0.0)
        stream.work(seconds, label=label, nbytes=nbytes, begin=begin, end=end)
        return stream.record()
