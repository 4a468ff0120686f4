"""Time spans of the host: what a thread or the I/O pool did, and from when to when.

The engine and the communicator already measure each wait, transfer and codec for their metrics. Where a `Spans` is given
to them, they add the same measurement to it; otherwise nothing is recorded.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch

MOST = 500_000
"""Spans of one step; later ones are dropped, and counted. A loop that never announces its steps must not fill memory."""


class Span(NamedTuple):
    """One interval. Seconds of `time.perf_counter`."""

    track: str | int
    """The identifier of the thread, or the name of a queue whose spans may overlap: "stores", "loads"."""
    kind: str
    """"step", "forward", "backward", "module", "collective" (a message was waited for), "store", "load", "codec"; or
    "wait", whose name begins with the cause: admission (the limit of bytes in flight), store (a staging buffer), load,
    event (a copy of the device)."""
    name: str
    """Name of the module or the parallel dimension, of the step or microbatch."""
    began: float
    ended: float
    nbytes: int = 0


class Spans:
    """Collects spans. May be called from any thread, also with locks held: it takes none and never waits.

    Args:
        nvtx: also mark what is opened and closed as NVTX ranges, which a profiler of the vendor shows.
    """

    def __init__(self, *, nvtx: bool = False) -> None:
        self.found: list[Span] = []
        self.dropped = 0
        self._nvtx = nvtx

    def add(self, kind: str, name: str, began: float, ended: float) -> None:
        """A span of this thread."""
        self._append(Span(threading.get_ident(), kind, name, began, ended))

    def waited(self, cause: str, name: str, seconds: float) -> None:
        """This thread has waited for so long until now, for a region of the module `name`."""
        now = time.perf_counter()
        self.add("wait", f"{cause} wait: {name}", now - seconds, now)

    def moved(self, track: str, name: str, nbytes: int, began: float, seconds: float) -> None:
        """A transfer of the I/O pool is over.

        Args:
            track: "stores" or "loads".
            name: of the module that saved the bytes.
            began: of its first piece, on the clock of `time.perf_counter`.
        """
        self._append(Span(track, track[:-1], name, began, began + seconds, nbytes))

    def _append(self, span: Span) -> None:
        if len(self.found) < MOST:
            self.found.append(span)
        else:
            self.dropped += 1

    def opened(self, name: str) -> float:
        """Something begins on this thread: the time now. It ends with `closed`."""
        if self._nvtx:
            torch.cuda.nvtx.range_push(name)
        return time.perf_counter()

    def closed(self, kind: str, name: str, began: float) -> None:
        """What `opened` gave the begin of is over."""
        self.add(kind, name, began, time.perf_counter())
        if self._nvtx:
            torch.cuda.nvtx.range_pop()

    @contextmanager
    def span(self, kind: str, name: str) -> Iterator[None]:
        """A span around what runs inside."""
        began = self.opened(name)
        try:
            yield
        finally:
            self.closed(kind, name, began)
