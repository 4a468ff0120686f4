"""Handles of asynchronous collectives.

Note: [Steps]
    An algorithm is a generator that yields each message it has to wait for and goes on when it has come. On a CPU its first
    part, up to the first wait, runs when the collective is issued, and the rest when the caller waits: no thread, so that all
    ranks issue their messages in the order of the program. On a GPU all of it is issued at once, on the communication stream,
    where a wait is one of the stream and not of the host; except for what comes after flags that the host has to read (see
    `overflow`), which runs when the caller waits.

Note: [Waits in any order]
    Later messages of a collective are issued by a wait, and ranks may wait in other orders: messages of two collectives on one
    group would meet, and each be taken for the other. So what was issued on a group before is completed first. Ranks have to
    issue the same collectives between two waits.
"""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ssdtrain.comm.meter import CommMetrics, Meter
from ssdtrain.comm.overflow import Followed

MessageSteps = Generator[Any, None, None]
"""Yields what has a `wait()`."""


class CodingStreams:
    """The communication streams of a device, one per parallel dimension: coding for one does not wait for messages of another.

    Their priority is high, because what waits for a collective waits for its coding too.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._streams: dict[str, torch.cuda.Stream] = {}

    def of(self, dimension: str) -> torch.cuda.Stream | None:
        """None on a CPU."""
        if self._device.type != "cuda":
            return None
        if dimension not in self._streams:
            self._streams[dimension] = torch.cuda.Stream(self._device, priority=-1)
        return self._streams[dimension]


class UnderWay:
    """What has been issued and not completed, of each group. See Note: [Waits in any order]."""

    def __init__(self) -> None:
        self._lines: defaultdict[dist.ProcessGroup, deque[CompressedWork]] = defaultdict(deque)

    def of(self, group: dist.ProcessGroup) -> deque[CompressedWork]:
        """Return the work under way on `group`, in the order of issue."""
        return self._lines[group]

    def complete(self) -> None:
        """Wait for all that has not been waited for."""
        for line in self._lines.values():
            while line:
                line[-1].wait()


class CompressedWork(dist.Work):
    """A collective under way; what `async_op=True` returns. Of torch's Work it has the one method that frameworks call."""

    __slots__ = (
        "_after",
        "_device",
        "_done",
        "_error",
        "_event",
        "_keep_alive",
        "_line",
        "_meter",
        "_metrics",
        "_stream",
        "_waiting",
    )

    def __init__(
        self,
        steps: Sequence[MessageSteps],
        metrics: CommMetrics,
        meter: Meter,
        stream: torch.cuda.Stream | None = None,
        keep_alive: Sequence[Tensor] = (),
        after: Callable[[], None] | None = None,
        line: deque[CompressedWork] | None = None,
    ) -> None:
        """Issue what can be issued now.

        Args:
            steps: run side by side, each in its order.
            stream: the communication stream where the tensors are on a GPU.
            keep_alive: tensors that must live until the end.
            after: runs at the end, on the stream.
            line: what is under way on the same group, in the order of issue; see Note: [Waits in any order]. None: waited for at
                once.
        """
        super().__init__()
        self._metrics = metrics
        self._waiting: deque[tuple[MessageSteps, Any]] = deque()
        self._done = False
        self._error: BaseException | None = None
        self._line: deque[CompressedWork] = deque() if line is None else line
        self._event: torch.cuda.Event | None = None
        self._device = stream.device if stream is not None else None
        self._keep_alive = tuple(keep_alive)
        self._after = after
        self._stream = stream
        self._meter = meter
        if stream is not None:
            stream.wait_stream(torch.cuda.current_stream(stream.device))
        with self._on(stream):
            for messages in steps:
                self._advance(messages)
            if stream is not None:
                self._finish(blocks_host=False)
        if not self._done:
            self._line.append(self)

    @contextmanager
    def _on(self, stream: torch.cuda.Stream | None) -> Iterator[None]:
        """Work inside is issued on `stream`, where there is one, and timed there."""
        if stream is None:
            yield
            return
        with torch.cuda.stream(stream):
            begun = _mark(stream)
            yield
            self._event = _mark(stream)
            if not torch.cuda.is_current_stream_capturing():  # else it cannot be asked
                self._meter.add_device_seconds(self._metrics, _elapsed(begun, self._event))

    @property
    def done(self) -> bool:
        """Whether nothing of it is left to do on the host."""
        return self._done

    def _advance(self, steps: MessageSteps) -> None:
        begun = time.perf_counter()
        message = next(steps, None)
        self._metrics.count_codec(begun)
        if message is not None:
            self._waiting.append((steps, message))

    def _finish(self, blocks_host: bool = True) -> None:
        """Args: blocks_host: also wait for what blocks the host on a GPU, and for what comes after it."""
        held: deque[tuple[MessageSteps, Any]] = deque()
        while self._waiting:
            steps, message = self._waiting.popleft()
            if not blocks_host and isinstance(message, Followed) and message.blocks_host:
                held.append((steps, message))
                continue
            begun = time.perf_counter()
            message.wait()
            self._metrics.count_wait(begun)
            self._advance(steps)
        self._waiting = held
        if held:
            return
        if self._after is not None:
            self._after()
            self._after = None
        self._done = True

    def _complete(self) -> None:
        try:
            if self._stream is None:
                self._finish()
            else:
                # What is left reads what was issued on the communication stream for this work, and not for later ones.
                current = torch.cuda.current_stream(self._device)
                assert self._event is not None
                current.wait_event(self._event)
                with self._on(current):
                    self._finish()
                self._stream.wait_stream(current)
        except BaseException as error:
            self._error = error
            for later in self._line:
                later._error = error
            self._line.clear()
            raise

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for the result; on a GPU the current stream waits, and the host where it reads flags of exact payloads.

        Raises:
            RuntimeError: a peer is gone or a message timed out, as the process group reports it. So does every later wait, of
                this handle and of those that were issued on the group after it.
        """
        while not self._done and self._error is None:
            self._line.popleft()._complete()
        if self._error is not None:
            raise self._error
        if self._event is not None:
            torch.cuda.current_stream(self._device).wait_event(self._event)
        self._keep_alive = ()
        return True


class ChainedWork:
    """A handle with a function that runs when it has been waited for."""

    __slots__ = ("_error", "_keep_alive", "_then", "_work")

    def __init__(
        self, work: dist.Work | None, then: Callable[[], Any] | None = None, keep_alive: Sequence[Tensor] = ()
    ) -> None:
        self._work = work
        self._then = then
        self._keep_alive = tuple(keep_alive)
        self._error: BaseException | None = None

    @property
    def done(self) -> bool:
        """Whether it has been waited for."""
        return self._work is None and self._then is None

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait as torch's handle does; what was sent is kept until here. After an error, each further call raises it too."""
        if self._error is not None:
            raise self._error
        try:
            if self._work is not None:
                self._work.wait()
                self._work = None
            if self._then is not None:
                then, self._then = self._then, None
                then()
        except BaseException as error:
            self._error = error
            raise
        self._keep_alive = ()
        return True


def _mark(stream: torch.cuda.Stream | None) -> torch.cuda.Event | None:
    if stream is None:
        return None
    event = torch.cuda.Event(enable_timing=True)
    event.record(stream)
    return event


def _elapsed(begun: torch.cuda.Event | None, ended: torch.cuda.Event | None) -> Callable[[], float | None]:
    def seconds() -> float | None:
        assert begun is not None and ended is not None
        return begun.elapsed_time(ended) / 1000 if ended.query() else None

    return seconds
