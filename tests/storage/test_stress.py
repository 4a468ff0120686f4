"""Several threads write, read, cancel and free at once, under delays, short transfers and torn order: every byte is right."""

import random
import threading
from collections.abc import Callable

import pytest

from ssdtrain.storage import Arena, Faults, IOCancelled, IOFailure, SpillStore, StoreFull
from tests.storage.conftest import payload

MiB = 1 << 20
BLOCKS = [payload(2 * MiB, seed) for seed in range(4)]


def churn(store: SpillStore, arena: Arena, seed: int, rounds: int) -> dict[str, int]:
    """One thread's work: slots live for a while in random order; all that is read is compared."""
    draw = random.Random(seed)
    counts = dict.fromkeys(("written", "read", "cancelled", "failed", "full"), 0)
    live: list[tuple[object, int, int]] = []
    for _ in range(rounds):
        nbytes, which = draw.choice([1, 700, 4096, 50_000, MiB, 2 * MiB]), draw.randrange(4)
        lease = arena.acquire(nbytes, page_offset=draw.choice([0, 64, 1000]))
        if lease is None:
            continue
        lease.view()[:] = BLOCKS[which][:nbytes]
        try:
            slot = store.reserve(nbytes)
        except StoreFull:
            counts["full"] += 1
            lease.release()
            continue
        write = store.write(slot, lease.address)
        if draw.random() < 0.3:
            store.free(slot)  # in flight or not
        try:
            write.wait(60)
            counts["written"] += 1
            if hasattr(slot, "_held"):
                live.append((slot, nbytes, which))
        except IOCancelled:
            counts["cancelled"] += 1
        except IOFailure:
            counts["failed"] += 1
            store.free(slot)
        lease.release()
        while len(live) > draw.randrange(6):
            stored, nbytes, which = live.pop(draw.randrange(len(live)))
            target = arena.acquire(nbytes, page_offset=draw.choice([0, 64, 1000]))
            if target is not None:
                read = store.read(stored, target.address)  # type: ignore[arg-type]
                try:
                    if draw.random() < 0.2 and read.cancel():
                        counts["cancelled"] += 1
                    elif read.wait(60):
                        assert target.view() == BLOCKS[which][:nbytes], f"seed {seed}: other bytes came back"
                        counts["read"] += 1
                except IOFailure:
                    counts["failed"] += 1
                target.release()
            store.free(stored)  # type: ignore[arg-type]
    for stored, _, _ in live:
        store.free(stored)  # type: ignore[arg-type]
    return counts


@pytest.mark.parametrize("poison", ["0", "1"])
def test_threads_at_random_work_keep_every_byte(
    make_store: Callable[..., SpillStore], engine: str, monkeypatch: pytest.MonkeyPatch, poison: str
) -> None:
    monkeypatch.setenv("SSDTRAIN_POISON", poison)
    arena = Arena(24 * MiB)
    faults = Faults(
        seed=1,
        delay=0.1,
        max_delay=0.002,
        short=0.2,
        interrupt=0.1,
        torn=True,
        write_failure=0.15,
        read_failure=0.15,
    )
    injected = faults if engine == "c" else None
    store = make_store(2, host_bytes=2 * MiB, capacity=8 * MiB, stripe=512 << 10, faults=injected, threads=2)
    totals: dict[str, int] = {}
    errors: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            for key, count in churn(store, arena, seed, 120).items():
                totals[key] = totals.get(key, 0) + count
        except BaseException as error:  # noqa: BLE001 handed to the main thread
            errors.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    assert all(totals[key] for key in ("written", "read", "cancelled")), totals
    assert bool(totals["failed"]) == (engine == "c")
    assert arena.allocated == 0 and store.metrics.live_slots == 0
    for slab in store._slabs:
        assert slab.allocator.free_ranges == [(0, slab.allocator.size)], (
            "the free space is in one piece again"
        )
    arena.close()
