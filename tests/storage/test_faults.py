"""The fault layer: what it injects shows up as it should, and one seed means one course of events."""

import errno
from collections.abc import Callable
from pathlib import Path

import pytest

from ssdtrain.storage import Arena, Faults, IOFailure, SpillStore
from ssdtrain.storage.faults import DELAY_LENGTH, chance, hashed, mix
from ssdtrain.storage.pieces import WRITE
from ssdtrain.storage.pool import load_extension
from tests.storage.conftest import blank, contents, filled, payload

MiB = 1 << 20
Make = Callable[..., SpillStore]


@pytest.fixture
def engine() -> str:
    """The C engine alone injects faults."""
    return "c"


def test_the_python_engine_refuses_faults_by_name(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"injects no faults.*short=0\.5"):
        SpillStore([tmp_path], engine="python", faults=Faults(short=0.5))


def test_the_engine_and_this_module_hash_alike() -> None:
    twin = load_extension().fault_hash
    for arguments in [(0,) * 6, (1, 2, 3, 4, 5, 6), (2**64 - 1, 8, 3, 10**12, 77, 2**31)]:
        assert twin(*arguments) == hashed(*arguments)
    assert mix(0x9E3779B97F4A7C15) == 0xE220A8397B1DCDAF, (
        "SplitMix64's first output from seed 0, as published"
    )
    values = [chance(3, 1, 0, serial) for serial in range(4000)]
    assert all(0 <= value < 1 for value in values)
    assert abs(sum(value < 0.25 for value in values) / 4000 - 0.25) < 0.03


def course(directory: Path, faults: Faults, arena: Arena) -> list[tuple[str, int, int, int]]:
    """Sixty writes and reads in order; every failure as (operation, number, offset, bytes)."""
    failures: list[tuple[str, int, int, int]] = []
    store = SpillStore([directory], capacity=128 * MiB, faults=faults, threads=3)
    with store:
        for number in range(30):
            nbytes = 1000 + 613_000 * number
            source, target = (
                filled(arena, nbytes, page_offset=64, seed=number),
                blank(arena, nbytes, page_offset=64),
            )
            slot = store.reserve(nbytes)
            try:
                store.write(slot, source.address).wait(30)
                store.read(slot, target.address).wait(30)
                assert bytes(target.view()) == payload(nbytes, number)
            except IOFailure as error:
                assert error.errno == faults.error
                failures.append((error.operation, number, error.offset, error.nbytes))
            store.free(slot)
            source.release()
            target.release()
    return failures


def test_a_seed_gives_the_same_failures_every_time(tmp_path: Path, arena: Arena) -> None:
    faults = Faults(seed=11, write_failure=0.15, read_failure=0.2, short=0.3, interrupt=0.3, torn=True)
    reference = course(tmp_path, faults, arena)
    assert {operation for operation, *_ in reference} == {"read", "write"}
    assert course(tmp_path, faults, arena) == reference
    other = course(tmp_path, Faults(seed=12, write_failure=0.15, read_failure=0.2), arena)
    assert other != reference


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
def test_chosen_operations_fail_with_the_chosen_error_and_no_others(
    make_store: Make, arena: Arena, code: int
) -> None:
    store = make_store(faults=Faults(fail_writes=frozenset({1, 3}), fail_reads=frozenset({0}), error=code))
    source = filled(arena, 20 * MiB)
    slot = store.reserve(20 * MiB)
    for number in range(5):
        write = store.write(slot, source.address)
        if number in (1, 3):
            with pytest.raises(IOFailure) as raised:
                write.wait(30)
            assert raised.value.errno == code
        else:
            assert write.wait(30)
    target = blank(arena, 20 * MiB)
    with pytest.raises(IOFailure):
        store.read(slot, target.address).wait(30)
    assert store.read(slot, target.address).wait(30) and bytes(target.view()) == payload(20 * MiB)


def test_the_host_tier_never_fails(make_store: Make, arena: Arena) -> None:
    store = make_store(
        0, host_bytes=8 * MiB, faults=Faults(write_failure=1.0, read_failure=1.0, delay=1.0, max_delay=0.001)
    )
    source = filled(arena, MiB)
    slot = store.reserve(MiB)
    assert store.write(slot, source.address).wait(30)
    assert contents(store, slot, arena) == payload(MiB)


def test_a_delayed_write_takes_as_long_as_its_delay(make_store: Make, arena: Arena) -> None:
    store = make_store(faults=Faults(delay=1.0, max_delay=0.2, seed=2))
    slot = store.reserve(1)
    source = filled(arena, 1)
    write = store.write(slot, source.address)
    assert write.wait(30)
    delay = 0.2 * chance(2, DELAY_LENGTH, WRITE, 0)
    assert write.seconds >= delay > 0.05


@pytest.mark.parametrize("wrong", [{"short": 1.5}, {"delay": -0.1}, {"interrupt": 1.0}, {"max_delay": -1}])
def test_faults_that_make_no_sense_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Faults(**wrong)  # type: ignore[arg-type]
