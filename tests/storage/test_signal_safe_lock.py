"""Sections: a lock within which the main thread hears of no signal, and after which it hears of every one."""

from __future__ import annotations

import ctypes
import faulthandler
import functools
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from ssdtrain.storage.signal_safe_lock import SignalSafeLock, _native, defer_signals, make_signal_safe_lock

pytestmark = pytest.mark.skipif(_native is None, reason="the C extension was not built")


class Heard(Exception):
    pass


@pytest.fixture(autouse=True)
def heard() -> Iterator[list[int]]:
    """SIGUSR1 raises Heard, SIGUSR2 is only noted here, as both are found by `defer_signals`."""
    noted: list[int] = []

    def hear(number: int, frame: FrameType | None) -> None:
        raise Heard

    before = [
        (number, signal.signal(number, handler))
        for number, handler in (
            (signal.SIGUSR1, hear),
            (signal.SIGUSR2, lambda number, frame: noted.append(number)),
        )
    ]
    defer_signals()
    yield noted
    for number, handler in before:
        signal.signal(number, handler)


@pytest.fixture
def lock() -> SignalSafeLock:
    return make_signal_safe_lock()


@pytest.mark.parametrize("inner", [nullcontext, make_signal_safe_lock], ids=["one section", "inner section"])
def test_a_signal_inside_is_heard_right_after_the_outermost_section(
    inner: Callable[[], AbstractContextManager[Any]], lock: SignalSafeLock
) -> None:
    done = []
    with pytest.raises(Heard):
        with lock:
            with inner():
                signal.raise_signal(signal.SIGUSR1)
            done.append("inside")
        done.append("after")
    assert done == ["inside"]
    with lock:
        pass


def test_every_signal_that_came_inside_is_heard(lock: SignalSafeLock, heard: list[int]) -> None:
    with pytest.raises(Heard):
        with lock:
            signal.raise_signal(signal.SIGUSR1)
            signal.raise_signal(signal.SIGUSR2)
    assert heard == [signal.SIGUSR2]


def test_a_signal_that_came_just_before_is_heard_before_anything_is_locked(lock: SignalSafeLock) -> None:
    """The interpreter knows of it and has not yet run the handler: no bytecode lies between the two calls."""
    send = functools.partial(getattr(ctypes.CDLL(None), "raise"), int(signal.SIGUSR1))
    enter = functools.partial(lock.__enter__)
    entered: list[object] = []
    with pytest.raises(Heard):
        entered.extend(map(functools.partial.__call__, [send, enter]))
    assert lock.acquire(blocking=False)
    lock.release()


def test_an_exception_inside_goes_on_and_the_signal_is_heard_after_it(lock: SignalSafeLock) -> None:
    """Or while it goes on: Python 3.10 runs handlers before the `except` is reached."""
    caught = []
    with pytest.raises(Heard) as raised:
        try:
            with lock:
                signal.raise_signal(signal.SIGUSR1)
                raise KeyError
        except KeyError:
            caught.append(KeyError)
            caught.append(Heard)
    assert caught[:1] == [KeyError] or isinstance(raised.value.__context__, KeyError)


def test_entering_twice_is_an_error_and_no_hang(lock: SignalSafeLock) -> None:
    with lock:
        with pytest.raises(RuntimeError, match="already holding"):
            lock.acquire()
    with pytest.raises(RuntimeError, match="not holding"):
        lock.release()
    signal.raise_signal(signal.SIGUSR2)


def test_a_section_of_another_thread_holds_up_no_signal(lock: SignalSafeLock) -> None:
    inside, leave = threading.Event(), threading.Event()

    def hold() -> None:
        with lock:
            inside.set()
            leave.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    inside.wait()
    assert not lock.acquire(blocking=False)
    with pytest.raises(Heard):
        signal.raise_signal(signal.SIGUSR1)
    leave.set()
    with lock:
        thread.join()


def test_what_has_no_handler_of_pythons_is_left_alone(lock: SignalSafeLock) -> None:
    assert not _native.defer(signal.SIGTERM)
    with pytest.raises(ValueError, match="no signal"):
        _native.defer(0)
    with pytest.raises(Heard), lock:
        signal.raise_signal(signal.SIGUSR1)
    assert signal.signal(signal.SIGUSR1, signal.SIG_IGN) is not signal.SIG_DFL
    with lock:
        signal.raise_signal(signal.SIGUSR1)


def test_only_one_thread_is_inside_and_no_exception_of_a_storm_of_signals_comes_out_there(
    lock: SignalSafeLock,
) -> None:
    """Two threads and the main one change two figures together, while a fourth sends signals."""
    figures = [0, 0]
    stop = threading.Event()
    armed = False  # the handler raises, once
    heard = raised = 0

    def hear(number: int, frame: FrameType | None) -> None:
        nonlocal armed, heard
        heard += 1
        if armed:
            armed = False
            raise Heard

    def change() -> None:
        with lock:
            figures[0] += 1
            figures[1] += 1

    def work() -> None:
        while not stop.is_set():
            change()

    def storm() -> None:
        sent = 0
        while sent < 500 or (raised <= 20 and sent < 100_000):  # a busy machine hears many of them as one
            signal.pthread_kill(main, signal.SIGUSR1)
            time.sleep(0.0002)
            sent += 1
        stop.set()

    main = threading.get_ident()
    signal.signal(signal.SIGUSR1, hear)
    defer_signals()
    threads = [threading.Thread(target=target) for target in (work, work, storm)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    for thread in threads:
        thread.start()
    while not stop.is_set():
        try:
            armed = True
            change()
            armed = False
        except Heard:
            raised += 1
    for thread in threads:
        thread.join()
    sys.setswitchinterval(interval)
    assert figures[0] == figures[1]
    assert heard >= raised > 20  # those that come together are one
    before = heard
    with lock:
        signal.raise_signal(signal.SIGUSR1)
        assert heard == before
    assert heard == before + 1


def test_a_child_forked_by_another_thread_hears_its_signals(lock: SignalSafeLock) -> None:
    """The main thread, which was inside, does not exist there."""
    status: list[int] = []

    def fork() -> None:
        child = os.fork()
        if child == 0:
            try:
                signal.raise_signal(signal.SIGUSR1)
            except Heard:
                os._exit(7)
            os._exit(1)
        status.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))

    thread = threading.Thread(target=fork)
    with lock:
        thread.start()
        thread.join()
    assert status == [7]


def test_a_thread_that_forks_inside_hears_its_signals_in_the_child(
    lock: SignalSafeLock, heard: list[int]
) -> None:
    status: list[int] = []

    def fork() -> None:
        with lock:
            child = os.fork()
            if child == 0:
                signal.raise_signal(signal.SIGUSR2)
                heard.append(0)
        if child == 0:
            try:
                signal.raise_signal(signal.SIGUSR1)
            except Heard:
                for _ in range(
                    1000
                ):  # some interpreters run the handlers of both in one go, others one after the other
                    pass
                os._exit(7 if heard == [0, signal.SIGUSR2] else 1)
            os._exit(2)
        status.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))

    thread = threading.Thread(target=fork)
    thread.start()
    thread.join()
    assert status == [7]


def test_a_library_that_chains_to_the_handler_before_it_makes_no_circle(
    lock: SignalSafeLock, tmp_path: Path
) -> None:
    with (tmp_path / "stacks").open("w") as file:
        faulthandler.register(signal.SIGUSR2, file=file, chain=True)
        try:
            defer_signals()
            for _ in range(2):
                signal.raise_signal(signal.SIGUSR2)
                defer_signals()
        finally:
            faulthandler.unregister(signal.SIGUSR2)
    assert "test_a_library_that_chains" in (tmp_path / "stacks").read_text()


def test_a_handler_that_runs_where_a_section_begins_hears_other_signals(
    lock: SignalSafeLock, heard: list[int]
) -> None:
    """It may wait for one."""
    found = []

    def hear(number: int, frame: FrameType | None) -> None:
        signal.raise_signal(signal.SIGUSR2)
        found.extend(heard)

    signal.signal(signal.SIGUSR1, hear)
    defer_signals()
    send = functools.partial(getattr(ctypes.CDLL(None), "raise"), int(signal.SIGUSR1))
    list(map(functools.partial.__call__, [send, functools.partial(lock.__enter__)]))
    lock.release()
    assert found == [signal.SIGUSR2]


def test_a_child_forked_inside_leaves_the_section_and_hears_what_came_there(lock: SignalSafeLock) -> None:
    """A finalizer of somebody else's may fork anywhere."""
    child = -1
    try:
        with lock:
            child = os.fork()
            if child == 0:
                signal.raise_signal(signal.SIGUSR1)
    except Heard:
        free = lock.acquire(blocking=False)
        os._exit(7 if child == 0 and free else 1)
    if child == 0:
        os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
