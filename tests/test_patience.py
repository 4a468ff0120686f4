"""A wait is given up when nothing ends any more, and not when all of it takes long."""

from __future__ import annotations

import threading
import time
from collections import deque
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from ssdtrain import device
from ssdtrain.offload.pacing.closing import wait_for_copies
from ssdtrain.patience import Patience
from ssdtrain.state import transfers
from ssdtrain.state.transfers import Staged
from ssdtrain.storage import Arena, SpillStore
from ssdtrain.storage.pieces import WRITE
from ssdtrain.storage.pool import ErrorMaker
from ssdtrain.storage.python_engine import PythonPool

LIMIT = 0.5
"""Seconds without an end."""
APART = 0.12
"""Seconds between two ends."""
COUNT = 6
"""Operations, which take twice the limit together."""


class Ends:
    """Events of a device that is far behind its host: one passes after the other."""

    def __init__(self, count: int = COUNT) -> None:
        self.began = time.monotonic()
        self.count = count

    def ended(self) -> int:
        return min(self.count, int((time.monotonic() - self.began) / APART))

    def event(self, number: int) -> Any:
        return Passing(self, number)


class Passing:
    def __init__(self, ends: Ends, number: int) -> None:
        self._ends, self._number = ends, number

    def query(self) -> bool:
        return self._ends.ended() > self._number


class SlowDevice(device.CpuDevice):
    def __init__(self, ends: Ends) -> None:
        self._ends = ends

    def block(self, event: Any, timeout: float | None = None) -> bool:
        assert timeout is not None
        until = time.monotonic() + timeout
        while not event.query() and time.monotonic() < until:
            time.sleep(0.005)
        return bool(event.query())


class SlowlyEnding(SlowDevice):
    def progress(self) -> int:
        return self._ends.ended()


def test_copies_that_end_one_by_one_are_waited_for_however_long_all_take() -> None:
    ends = Ends()
    copies = deque(ends.event(number) for number in range(COUNT))

    def next_copy() -> Any:
        while copies and copies[0].query():
            copies.popleft()
        return copies[0] if copies else None

    assert wait_for_copies(next_copy, SlowDevice(ends), LIMIT)
    assert not copies


def test_one_copy_behind_other_work_of_the_device_is_waited_for_while_that_ends() -> None:
    ends = Ends()
    last = ends.event(COUNT - 1)
    assert wait_for_copies(lambda: None if last.query() else last, SlowlyEnding(ends), LIMIT)
    assert last.query()


def test_what_ends_no_more_is_given_up() -> None:
    ends = Ends(2)
    never = ends.event(2)
    assert not wait_for_copies(lambda: never, SlowlyEnding(ends), LIMIT)
    assert ends.ended() == 2


def test_buffers_of_model_state_come_back_from_copies_that_end_one_by_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfers, "UNPIN_TIMEOUT", LIMIT)
    ends = Ends()
    arena = Arena(1 << 21)
    with SpillStore([tmp_path], capacity=1 << 20) as store:
        staged = Staged(store, SlowDevice(ends), arena, verify=False)
        for number in range(COUNT):
            buffer = transfers._HostBuffer(arena.acquire(4096), 4096)
            staged._busy.append((None, ends.event(number), buffer))
        staged.close()
    assert not arena.allocated
    arena.close()


def test_memory_is_unpinned_when_a_device_that_is_far_behind_has_come_to_its_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ends = Ends()
    monkeypatch.setattr(device.cuda, "raw_current_stream", lambda index: 0)
    monkeypatch.setattr(device.cuda, "UNPIN_TIMEOUT", LIMIT)
    layer: Any = object.__new__(device.CudaDevice)
    layer.device = torch.device("cuda", 0)
    layer._index = layer._store = layer._load = 0
    layer._recent = deque(ends.event(number) for number in range(COUNT))
    layer.record = lambda stream: ends.event(COUNT - 1)
    layer._wait_for_copies()
    assert ends.ended() == COUNT


def test_a_pool_closes_when_its_slow_transfers_have_ended_one_by_one(tmp_path: Path) -> None:
    """One operation of several pieces, the sum of which takes longer than the limit."""

    def slow(*_: object) -> int:
        time.sleep(APART)
        return 0

    with (tmp_path / "slab").open("w+b") as file:
        pool = PythonPool(
            [(file.fileno(), False)],
            threads=1,
            host_threads=0,
            piece=4096,
            make_error=ErrorMaker([str(tmp_path)]),
            make_transfer=lambda: slow,
        )
        data = bytearray(COUNT * 4096)
        address = torch.frombuffer(data, dtype=torch.uint8).data_ptr()
        write = pool.submit(WRITE, address, len(data), 0, [0, 0, len(data)])
        while not write.begun():
            time.sleep(0.001)
        assert pool.close_within(LIMIT) and write.done()


def test_every_wait_for_an_end_begins_the_limit_anew() -> None:
    patience, gate = Patience(LIMIT, int), threading.Event()
    for _ in range(COUNT):
        timer = threading.Timer(APART, gate.set)
        timer.start()
        assert patience.wait(gate.wait)
        gate.clear()
        timer.join()
    assert not patience.wait(partial(threading.Event().wait))
