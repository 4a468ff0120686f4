"""Leases of host memory: alignment, lifetime, who may release them, and when the map goes."""

import gc
import logging
import os
import threading
from typing import Any

import pytest
import torch

from ssdtrain.storage import ALIGNMENT, Arena, StoreClosed, memory
from tests.storage.conftest import payload

MiB = 1 << 20


@pytest.mark.parametrize("huge_pages", [True, False])
@pytest.mark.parametrize("page_offset", [0, 64, 4095])
def test_a_lease_has_the_lead_that_was_asked_for_and_its_own_bytes(
    page_offset: int, huge_pages: bool
) -> None:
    arena = Arena(4 * MiB, huge_pages=huge_pages)
    leases = [arena.acquire(n, page_offset=page_offset) for n in (1, 4096, 5000, 100_000, MiB)]
    for seed, lease in enumerate(leases):
        assert lease.address % ALIGNMENT == page_offset
        lease.view()[:] = payload(lease.nbytes, seed)
    for seed, lease in enumerate(leases):
        assert bytes(lease.view()) == payload(lease.nbytes, seed), "leases overlap"
        lease.release()
    assert arena.allocated == 0
    arena.close()


def test_a_full_arena_gives_none_and_gives_again_after_a_release(arena: Arena) -> None:
    lease = arena.acquire(arena.capacity)
    assert lease is not None and arena.acquire(1) is None
    assert arena.peak == arena.allocated == arena.capacity
    lease.release()
    again = arena.acquire(arena.capacity)
    again.release()


def test_releasing_twice_releases_once(arena: Arena) -> None:
    first = arena.acquire(MiB)
    first.release()
    second = arena.acquire(MiB)
    assert second.address == first.address
    first.release()
    third = arena.acquire(MiB)
    assert third.address != second.address
    second.release()
    third.release()


def test_threads_racing_to_release_release_once(arena: Arena) -> None:
    for _ in range(50):
        lease = arena.acquire(MiB)
        assert lease is not None
        threads = [threading.Thread(target=lease.release) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert arena.allocated == 0


def test_a_given_lease_lives_as_long_as_the_last_tensor_of_its_storage(arena: Arena) -> None:
    lease = arena.acquire(4096)
    tensor = torch.frombuffer(lease.owning_view(), dtype=torch.uint8)
    address = lease.address
    del lease
    gc.collect()
    assert tensor.data_ptr() == address and arena.allocated == 4096
    view = tensor[100:].view(torch.int32)
    storage = view.untyped_storage()
    del tensor
    assert arena.allocated == 4096
    del view
    assert arena.allocated == 4096
    del storage
    assert arena.allocated == 0


def test_a_lease_whose_tensor_dies_in_a_cyclic_collection_under_the_arenas_lock_comes_back(
    arena: Arena,
) -> None:
    lease = arena.acquire(4096)
    cycle: list[object] = [torch.frombuffer(lease.owning_view(), dtype=torch.uint8)]
    cycle.append(cycle)
    del lease, cycle
    with arena._lock:  # where a collection may strike: the finalizer must not wait for this lock
        gc.collect()
    assert arena.allocated == 0


def test_a_closed_arena_leases_nothing_and_unmaps_with_its_last_lease() -> None:
    arena = Arena(2 * MiB)
    lease = arena.acquire(10)
    view = lease.owning_view()
    arena.close()
    with pytest.raises(StoreClosed, match="closed"):
        arena.acquire(1)
    view[:] = b"still here"
    assert mapped(arena.address)
    del view
    assert not mapped(arena.address)
    arena.close()


def test_a_tensor_that_dies_while_another_comes_back_unmaps_a_closed_arena_too() -> None:
    """As a cyclic collection may have it die, with the arena's lock held."""
    arena = Arena(MiB)
    leases = [arena.acquire(4096), arena.acquire(4096)]
    tensors = [torch.frombuffer(one.owning_view(), dtype=torch.uint8) for one in leases if one is not None]
    arena.close()
    unmap = arena._unmap

    def unmap_late(force: bool) -> None:
        if len(tensors) == 1:
            tensors.clear()
        unmap(force)

    arena._unmap = unmap_late  # type: ignore[method-assign]
    del leases, tensors[0]
    assert not tensors and not arena.mapped


def test_registering_happens_once_and_is_undone_before_unmapping() -> None:
    calls: list[object] = []

    def register(address: int, nbytes: int):  # type: ignore[no-untyped-def]
        calls.append((address, nbytes))
        return lambda: calls.append(("undone", mapped(address)))

    arena = Arena(2 * MiB, register=register)
    assert calls == [(arena.address, 2 * MiB)]
    arena.close()
    arena.close()
    assert calls[1:] == [("undone", True)]


def test_memory_that_cannot_be_unpinned_stays_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    """The device may still write there: nothing else may be mapped at these addresses."""

    def register(address: int, nbytes: int) -> Any:
        def unregister() -> None:
            raise TimeoutError("the device is busy")

        return unregister

    arena = Arena(2 * MiB, register=register)
    address = arena.address
    with caplog.at_level(logging.WARNING):
        arena.close()
        arena.close()
    assert mapped(address) and caplog.text.count("the device is busy") == 1
    assert memory._libc.munmap(address, 2 * MiB) == 0


def test_a_failing_registration_leaves_no_map() -> None:
    seen: list[int] = []

    def register(address: int, nbytes: int):  # type: ignore[no-untyped-def]
        seen.append(address)
        raise RuntimeError("refused")

    with pytest.raises(RuntimeError, match="refused"):
        Arena(2 * MiB, register=register)
    assert not mapped(seen[0])


def test_released_bytes_are_poisoned_when_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSDTRAIN_POISON", "1")
    arena = Arena(2 * MiB)
    lease, neighbour = arena.acquire(4100, page_offset=64), arena.acquire(4100)
    lease.view()[:] = bytes(4100)
    neighbour.view()[:] = bytes(4100)
    lease.release()
    assert arena.allocated == 8192
    assert torch.frombuffer(lease.view()[:4096], dtype=torch.float32).isnan().all()
    assert bytes(lease.view()) == b"\xff" * 4100 and bytes(neighbour.view()) == bytes(4100)
    neighbour.release()
    arena.close()


def test_an_arena_asks_for_huge_pages_and_is_kept_from_children() -> None:
    arena = Arena(4 * MiB)
    flags = flags_at(arena.address)
    assert "dc" in flags, "VM_DONTCOPY: MADV_DONTFORK"
    if os.path.exists("/sys/kernel/mm/transparent_hugepage/enabled"):
        assert "hg" in flags, "VM_HUGEPAGE: MADV_HUGEPAGE"
    arena.close()


@pytest.mark.parametrize("nbytes", [0, -1])
def test_an_arena_without_bytes_is_refused(nbytes: int) -> None:
    with pytest.raises(ValueError, match=str(nbytes)):
        Arena(nbytes)


def test_more_memory_than_there_can_be_is_an_error_that_says_so() -> None:
    with pytest.raises(MemoryError, match="cannot map"):
        Arena(1 << 60)


def mapped(address: int) -> bool:
    with open("/proc/self/maps") as maps:
        for line in maps:
            start, end = (int(part, 16) for part in line.split()[0].split("-"))
            if start <= address < end:
                return True
    return False


def flags_at(address: int) -> list[str]:
    with open("/proc/self/smaps") as maps:
        inside = False
        for line in maps:
            head = line.split()[0]
            if not head.endswith(":"):
                start, end = (int(part, 16) for part in head.split("-"))
                inside = start <= address < end
            elif inside and head == "VmFlags:":
                return line.split()[1:]
    raise AssertionError(f"{address:#x} is not mapped")


def test_pages_are_preferred_on_the_node_that_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int | None] = []
    monkeypatch.setattr(memory, "_prefer_node", lambda address, nbytes, node: asked.append(node))
    monkeypatch.setattr(memory, "numa_node", lambda: 0)
    for node in (1, None):
        Arena(MiB, node=node).close()
    assert asked == [1, 0], "the GPU's, or the caller's"
