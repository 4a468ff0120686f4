"""Every byte comes back: engine x size x alignment of source and target x tier x drives, aligned and buffered."""

import errno
import os
from collections.abc import Callable
from unittest.mock import Mock

import pytest

from ssdtrain.storage import ALIGNMENT, Arena, Faults, IOFailure, SpillStore
from ssdtrain.storage.pieces import cut, image_bytes
from tests.storage.conftest import blank, contents, filled, payload
from tests.support.tiers import tiered

MiB = 1 << 20
STRIPE = MiB
SIZES = [0, 1, 511, 4096, 4097, 77_777, MiB - 1, 3 * STRIPE + 12_345, 9 * MiB + 1]
ROUGH = Faults(seed=7, short=0.3, interrupt=0.2, torn=True)


@pytest.mark.parametrize(
    ("engine", "faults"),
    tiered([("c", None), ("c", ROUGH), ("python", None)], quick=[("c", None), ("c", ROUGH)]),
    ids=["c", "c-rough", "python"],
    indirect=["engine"],
)
@pytest.mark.parametrize("direct", ["auto", "off"])
@pytest.mark.parametrize(
    ("drives", "host"), [(1, 0), (3, 0), (0, 64 * MiB)], ids=["drive", "striped", "host"]
)
def test_bytes_come_back_whatever_the_alignments(
    make_store: Callable[..., SpillStore],
    arena: Arena,
    drives: int,
    host: int,
    direct: str,
    faults: Faults | None,
) -> None:
    store = make_store(drives, host_bytes=host, direct=direct, stripe=STRIPE, faults=faults)
    for nbytes in SIZES:
        for source_page_offset, target_leads in ((0, (0, 64)), (64, (64, 0, 100)), (4095, (4095, 1))):
            source = filled(arena, nbytes, page_offset=source_page_offset)
            slot = store.reserve(nbytes)
            assert store.write(slot, source.address).wait(30)
            source.view()[:] = bytes(nbytes)
            for target_page_offset in target_leads:
                # A byte of each neighbour shows a transfer that goes beyond its ends.
                target = blank(arena, nbytes + 2, page_offset=(target_page_offset - 1) % ALIGNMENT)
                assert store.read(slot, target.address + 1).wait(30)
                expected = b"\xaa" + payload(nbytes) + b"\xaa"
                assert bytes(target.view()) == expected, (nbytes, source_page_offset, target_page_offset)
                target.release()
            source.release()
            store.free(slot)
    assert store.metrics.live_bytes == 0


def test_a_slot_may_be_written_again_from_another_alignment(
    make_store: Callable[..., SpillStore], arena: Arena
) -> None:
    store = make_store()
    slot = store.reserve(10_000)
    for seed, page_offset in enumerate((64, 0, 4000)):
        lease = filled(arena, 10_000, page_offset=page_offset, seed=seed)
        assert store.write(slot, lease.address).wait(30)
        assert contents(store, slot, arena) == payload(10_000, seed)
        lease.release()


def test_an_unaligned_buffer_costs_two_extra_blocks_at_most() -> None:
    for nbytes in (1, 4096, 5 * MiB + 3):
        assert nbytes <= image_bytes(nbytes) <= nbytes + 2 * ALIGNMENT


@pytest.mark.parametrize("page_offset", [0, 1, 4095])
@pytest.mark.parametrize("nbytes", [1, 4096, 4097, 100_000])
def test_pieces_tile_an_operation_and_begin_at_blocks(nbytes: int, page_offset: int) -> None:
    extents = (0, 0, 8192, 1, 40_960, 4096, 0, 81_920, image_bytes(100_000))
    covered = page_offset
    for piece in cut(extents, page_offset, nbytes, 12_288):
        assert piece.start % ALIGNMENT == 0 and piece.offset % ALIGNMENT == 0
        assert max(piece.start, page_offset) == covered and piece.end - piece.start <= 12_288
        covered = piece.end
    assert covered == page_offset + nbytes


def test_direct_writes_bypass_the_page_cache_even_from_an_unaligned_buffer(
    make_store: Callable[..., SpillStore], arena: Arena, tmp_path: object
) -> None:
    store = make_store(direct="auto")
    slab = store._slabs[0]
    if not slab.direct:
        pytest.skip(f"{slab.directory} refuses O_DIRECT")
    source = filled(arena, 4 * MiB, page_offset=64)
    slot = store.reserve(source.nbytes)
    assert store.write(slot, source.address).wait(30)
    assert os.pread(slab.fd, 0, 0) == b""
    with open(f"/proc/self/fdinfo/{slab.fd}") as info:
        flags = int(next(line for line in info if line.startswith("flags:")).split()[1], 8)
    assert flags & os.O_DIRECT and flags & os.O_CLOEXEC


def test_no_bytes_of_another_buffer_lie_beside_the_data(
    make_store: Callable[..., SpillStore], arena: Arena
) -> None:
    store = make_store(threads=1)
    slab = store._slabs[0]
    if not slab.direct:
        pytest.skip(f"{slab.directory} refuses O_DIRECT: nothing is bounced")
    block = arena.acquire(2 * ALIGNMENT)
    assert block is not None
    for page_offset, nbytes in ((4000, 4096), (64, 1000)):
        source = filled(arena, nbytes, page_offset=page_offset)
        slot = store.reserve(nbytes)
        assert store.write(slot, source.address).wait(30)
        length = -(-(page_offset + nbytes) // ALIGNMENT) * ALIGNMENT
        os.preadv(slab.fd, [block.view()[:length]], slot._extents[1])
        assert bytes(block.view()[:length]) == bytes(page_offset) + payload(nbytes) + bytes(
            length - page_offset - nbytes
        )
        store.free(slot)
        source.release()


@pytest.mark.parametrize("engine", ["python"], indirect=True)
@pytest.mark.parametrize("direct", ["auto", "off"])
def test_short_calls_are_continued_and_a_failing_one_is_an_error(
    make_store: Callable[..., SpillStore], arena: Arena, direct: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system may transfer less than asked, of O_DIRECT in sectors, and a bug of a worker must reach whoever waits."""
    store = make_store(direct=direct)
    unit = 512 if store.metrics.drives[0].direct else 1
    source, target = filled(arena, 70_001, page_offset=64), blank(arena, 70_001)
    slot = store.reserve(70_001)
    for name in ("pwritev", "preadv"):
        whole = getattr(os, name)
        monkeypatch.setattr(
            os,
            name,
            lambda fd, parts, at, whole=whole: whole(
                fd, [parts[0][: 9 * unit + len(parts[0]) // 3 // unit * unit]], at
            ),
        )
    assert store.write(slot, source.address, verify=True).wait(30)
    assert store.read(slot, target.address).wait(30) and bytes(target.view()) == payload(70_001)
    for error, message in ((OSError(errno.ENOSPC, "full"), "ENOSPC"), (ZeroDivisionError(), "EIO")):
        monkeypatch.setattr(os, "pwritev", Mock(side_effect=error))
        with pytest.raises(IOFailure, match=message):
            store.write(slot, source.address).wait(30)
    monkeypatch.undo()
    assert store.write(slot, source.address).wait(30), "the worker lives on"
