"""Slots are divided among drives by measured speed."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ssdtrain.storage import ALIGNMENT, Arena, Faults, SpillStore, StoreFull
from ssdtrain.storage.pieces import image_bytes
from ssdtrain.storage.slab import Slab
from ssdtrain.storage.striping import WINDOW, StripedDrives
from tests.storage.conftest import contents, filled, only_c, payload
from tests.support.filesystems import eventually

MiB = 1 << 20


class Trained:
    """Steps that write slots and read them back in reverse, on drives whose counters say that they have set speeds."""

    def __init__(self, tmp_path: Path, drives: int, stripe: int = 8 * MiB, capacity: int = 1 << 30) -> None:
        self.slabs = [Slab(tmp_path, index, capacity, direct="off") for index in range(drives)]
        self.striped = StripedDrives(self.slabs, stripe, None)
        self.speeds = [1e9] * drives
        self.counters = [[0, 0, 0.0, 0.0] for _ in range(drives)]

    def step(self, slots: int = 128, nbytes: int = MiB) -> list[int]:
        """Bytes that each drive was written."""
        held = []
        before = [row[0] for row in self.counters]
        for _ in range(slots):
            if self.striped.window_over:
                self.striped.observe([tuple(row) for row in self.counters])  # type: ignore[misc]
            extents = self.striped.reserve(nbytes)
            assert extents is not None
            self.move(extents, 0)
            held.append(extents)
        for extents in reversed(held):
            self.move(extents, 1)
            self.striped.release(extents)
        return [row[0] - old for row, old in zip(self.counters, before, strict=True)]

    def move(self, extents: tuple[int, ...], direction: int) -> None:
        for at in range(0, len(extents), 3):
            row = self.counters[extents[at]]
            row[direction] += extents[at + 2]
            row[2 + direction] += extents[at + 2] / self.speeds[extents[at]]


@pytest.fixture
def made(tmp_path: Path) -> Iterator[Callable[..., Trained]]:
    trained = []

    def make(drives: int, **settings: int) -> Trained:
        trained.append(Trained(tmp_path, drives, **settings))
        return trained[-1]

    yield make
    for one in trained:
        for slab in one.slabs:
            slab.close()


def test_drives_hold_bytes_in_proportion_to_their_speed(made: Callable[..., Trained]) -> None:
    run = made(2)
    assert run.step()[0] == run.step()[1] == 64 * image_bytes(MiB)
    run.speeds[1] /= 4
    for _ in range(3):
        fast, slow = run.step()
    assert 3.6 <= fast / slow <= 4.4


@pytest.mark.parametrize("slower", [4, 1000])
def test_a_drive_that_recovers_has_its_share_again(made: Callable[..., Trained], slower: int) -> None:
    run = made(2)
    run.speeds[1] /= slower
    for _ in range(3):
        fast, slow = run.step()
    assert fast > 3 * slow
    run.speeds[1] *= slower
    for _ in range(6):
        one, other = run.step()
    assert 0.8 <= one / other <= 1.25


def test_a_drive_of_a_thousandth_is_tried_once_in_a_while(made: Callable[..., Trained]) -> None:
    """Or it would never be seen to have recovered; and not more often than that, since each try is waited for."""
    run = made(2)
    run.speeds[1] /= 1000
    for _ in range(3):
        run.step()
    tried = [run.step()[1] // image_bytes(MiB) for _ in range(8)]
    assert 0 < sum(tried) <= 8


def test_the_parts_of_a_large_slot_are_in_proportion_too(made: Callable[..., Trained]) -> None:
    run = made(3, stripe=MiB)
    run.speeds[2] /= 4
    for _ in range(3):
        run.step()
    extents = run.striped.reserve(9 * MiB)
    lengths = dict(zip(extents[::3], extents[2::3], strict=True))
    assert sum(lengths.values()) == image_bytes(9 * MiB)
    assert all(length > 0 and length % ALIGNMENT == 0 for length in lengths.values())
    assert 3.6 <= lengths[0] / lengths[2] <= 4.4 and 0.9 <= lengths[0] / lengths[1] <= 1.1


def test_a_fast_drive_with_less_room_than_its_share_leaves_more_to_the_others(
    made: Callable[..., Trained],
) -> None:
    run = made(2, stripe=MiB, capacity=24 * MiB)
    run.speeds[1] /= 10
    for _ in range(6):
        run.step(slots=16)
    assert max(run.striped.costs) > 5
    extents = run.striped.reserve(40 * MiB)  # its share of this is more than the fast drive has
    assert set(extents[::3]) == {0, 1}
    assert run.striped.reserve(40 * MiB) is None


def test_unequal_parts_come_back_bit_for_bit(make_store: Callable[..., SpillStore], arena: Arena) -> None:
    store = make_store(3, stripe=MiB)
    store._drives.costs = [1.0, 7.3, 2.1]
    for seed, nbytes in enumerate((5 * MiB + 1, 3 * MiB, 2 * ALIGNMENT, MiB + 17)):
        source = filled(arena, nbytes, page_offset=64, seed=seed)
        slot = store.reserve(nbytes)
        assert store.write(slot, source.address).wait(30)
        assert contents(store, slot, arena) == payload(nbytes, seed)
        store.free(slot)
        source.release()


@only_c
def test_time_counts_while_a_transfer_is_under_way(
    make_store: Callable[..., SpillStore], arena: Arena
) -> None:
    """A drive that hangs must not look as if it had not been used."""
    store = make_store(2, faults=Faults(seed=1, delay=1.0, max_delay=2.0))
    source = filled(arena, MiB)
    slot = store.reserve(MiB)

    def seconds_go_on() -> bool:
        """While one write is under way; a busy machine may let this thread look too late."""
        operation = store.write(slot, source.address)
        seen = set()
        while not operation.done():
            seen.add(store.pool.counters()[0][slot.drive][2])
            time.sleep(0.01)
        assert operation.wait(30)
        return len(seen) > 2

    assert eventually(seconds_go_on)


def test_a_store_measures_its_drives_itself(make_store: Callable[..., SpillStore], arena: Arena) -> None:
    store = make_store(2)
    source = filled(arena, MiB)
    for _ in range(5 * WINDOW):
        slots = [store.reserve(MiB) for _ in range(2)]
        for slot in slots:
            assert store.write(slot, source.address).wait(30)
            store.free(slot)
    assert min(store._drives.costs) == 1.0 < max(store._drives.costs), "no two measurements are the same"


def test_host_memory_without_drives_can_be_full(engine: str) -> None:
    with SpillStore([], host_bytes=4 * MiB, engine=engine) as store:
        slots = []
        with pytest.raises(StoreFull):
            while len(slots) < 100:
                slots.append(store.reserve(MiB))
        assert slots
        for slot in slots:
            store.free(slot)
