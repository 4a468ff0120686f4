"""A device whose copies lag behind: two threads do them, late and in order, while the host computes.

Computation is the host's own, so a stream that waits for an event makes the host wait. What the engine does not order is seen: a
tensor that was freed before its copy was waited for is overwritten by what reuses its memory, and one that is read before its
copy is waited for has not arrived.
"""

from __future__ import annotations

import ctypes
import random
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Any

import torch

from ssdtrain.device import CpuDevice, Event

__all__ = ["LaggingDevice"]

_libc = ctypes.CDLL(None)


class _Event:
    """Its handle is the address of a number in decimal digits, which `atoi` reads: 600 is cudaErrorNotReady."""

    def __init__(self) -> None:
        self._digits = ctypes.create_string_buffer(b"600")
        self._passed = threading.Event()
        self.handle = ctypes.addressof(self._digits)

    def query(self) -> bool:
        return self._passed.is_set()

    def synchronize(self) -> None:
        assert self._passed.wait(60), "a copy never came"

    def complete(self) -> None:
        self._digits.raw = b"000\0"
        self._passed.set()


class _Stream:
    """Copies, one after the other, each after a delay."""

    def __init__(self, name: str, delay: Callable[[], float]) -> None:
        self._delay = delay
        self._queue: SimpleQueue[tuple[Any, ...] | None] = SimpleQueue()
        self.last: _Event | None = None
        """The end of what was queued so far."""
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def copy(
        self, source: int, target: int, nbytes: int, after: Sequence[Event], held: torch.Tensor | None
    ) -> _Event:
        event = self.last = _Event()
        self._queue.put((after, source, target, nbytes, event, held))
        return event

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            after, source, target, nbytes, event, _ = item
            for awaited in after:
                awaited.synchronize()
            time.sleep(self._delay())
            ctypes.memmove(target, source, nbytes)
            event.complete()
            del item, event, after

    def close(self) -> None:
        self._queue.put(None)
        self._thread.join()


class LaggingDevice(CpuDevice):
    """Copies to what is called the host, and back, are late.

    Args:
        seed: of the delays.
        most: seconds of one copy.
    """

    kind = "lagging"

    def __init__(self, seed: int, most: float = 0.001) -> None:
        generator = random.Random(seed)
        self._store = _Stream("device to host", lambda: generator.uniform(0, most))
        self._load = _Stream("host to device", lambda: generator.uniform(0, most))
        self._blocks: weakref.WeakSet[torch.Tensor] = weakref.WeakSet()  # that `load_target` made

    def close(self) -> None:
        """End the threads, when no copy is under way."""
        self._store.close()
        self._load.close()

    def storing(self) -> bool:
        """True while a copy to the host is under way."""
        return self._store.last is not None and not self._store.last.query()

    def wait_for_stores(self) -> None:
        """Wait for the copies to the host that were queued so far."""
        if self._store.last is not None:
            self._store.last.synchronize()

    def copy_bandwidth(self) -> None:
        return None

    def free_bytes(self) -> None:
        return None

    def load_target(self, nbytes: int) -> torch.Tensor:
        block = torch.empty(nbytes, dtype=torch.uint8)
        self._blocks.add(block)
        return block

    def copy_to_host(self, source: int, target: int, nbytes: int) -> _Event:
        return self._store.copy(source, target, nbytes, (), None)

    def copy_to_device(
        self, source: int, target: int, nbytes: int, after: Sequence[Event] = (), *, within: bool = False
    ) -> _Event:
        # What `load_target` made is not reused before what is queued on the load stream has passed.
        around = (one for one in self._blocks if 0 <= target - one.data_ptr() < one.numel())
        return self._load.copy(source, target, nbytes, after, next(around, None))

    def event_handle(self, event: Any) -> int:
        return 0 if event is None else event.handle

    def wait(self, event: Event, stream: Any | None = None) -> None:
        event.synchronize()

    def block(self, event: Event, timeout: float | None = None) -> bool:
        event.synchronize()
        return True

    def current_stream(self) -> str:
        return "the host"

    def host_register(self) -> Callable[[int, int], Callable[[], None]]:
        return lambda address, nbytes: lambda: None

    def event_functions(self) -> dict[str, int]:
        return {"event_query": ctypes.cast(_libc.atoi, ctypes.c_void_p).value or 0}
