"""A transfer belongs to its slot from the moment it is submitted, also where a signal handler raises in between."""

from __future__ import annotations

import ctypes
import gc
import signal
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ssdtrain.storage import Arena, SpillStore, StoreFull, defer_signals
from ssdtrain.storage import slot as slot_module
from ssdtrain.storage import store as store_module
from ssdtrain.storage.signal_safe_lock import _native
from tests.support.bytecodes import Before
from tests.support.filesystems import eventually

pytestmark = pytest.mark.skipif(_native is None, reason="the C extension was not built")

NBYTES = 1 << 20


@pytest.fixture(autouse=True)
def ctrl_c_raises() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    defer_signals()
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("engine", ["c", "python"])
@pytest.mark.parametrize("kind", ["write", "read"])
def test_ctrl_c_at_any_bytecode_leaves_no_transfer_whose_space_is_used_again(
    kind: str, engine: str, tmp_path: Path
) -> None:
    """There is room for one slot. While a transfer of a freed one has begun, there is none."""
    with SpillStore([tmp_path], capacity=NBYTES + 4096, engine=engine) as store:
        arena = Arena(NBYTES)
        lease = arena.acquire(NBYTES)
        assert lease is not None
        submit, submitted = store.pool.submit, []

        class Recording:
            def __getattr__(self, name: str) -> Any:
                return getattr(pool, name)

            def submit(self, *args: Any) -> Any:
                submitted.append(submit(*args))
                return submitted[-1]

        pool: Any = store.pool
        store.pool = Recording()  # type: ignore[assignment]
        number, interrupted = 0, True
        while interrupted:
            number, interrupted = number + 1, False
            slot = store.reserve(NBYTES)
            store.write(slot, lease.address).wait()
            pool.hold(begun=True)
            submitted.clear()
            try:
                with Before(number, lambda: signal.raise_signal(signal.SIGINT), [store_module, slot_module]):
                    getattr(store, kind)(slot, lease.address)
            except KeyboardInterrupt:
                interrupted = True
            assert all(eventually(operation.begun) for operation in submitted)
            store.free(slot)
            if submitted:
                with pytest.raises(StoreFull):
                    store.reserve(NBYTES)
            pool.release()
            for operation in submitted:
                operation.wait()
        assert number > 20
        lease.release()
        arena.close()


@pytest.mark.parametrize("engine", ["c", "python"])
def test_memory_is_kept_until_its_read_has_ended_though_its_user_and_the_store_are_garbage(
    engine: str, tmp_path: Path
) -> None:
    """A loop may end with reads ahead, and drop the model and its runtime without closing it."""

    class Memory:
        def __init__(self) -> None:
            self.bytes = bytearray(NBYTES)
            self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.bytes))

    store = SpillStore([tmp_path], capacity=2 * NBYTES, engine=engine)
    slot, source = store.reserve(NBYTES), Memory()
    source.bytes[:] = b"x" * NBYTES
    store.write(slot, source.address).wait()
    store.pool.hold(begun=True)
    target = Memory()
    operation = store.read(slot, target.address, memory=target)
    whole: list[bool] = []
    weakref.finalize(target, lambda: whole.append(operation.done()))
    assert eventually(operation.begun)
    late = threading.Timer(0.2, store.pool.release)
    late.start()
    del target, store
    gc.collect()
    late.join()
    assert eventually(lambda: whole == [True])
