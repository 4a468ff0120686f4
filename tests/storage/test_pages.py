"""Memory that is written from is put into huge pages, once in a while; what it holds does not change."""

from __future__ import annotations

import ctypes
import mmap
import os
import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ssdtrain.storage import SpillStore, memory

MiB = 1 << 20
SIZE = 16 * MiB
Make = Callable[..., SpillStore]

LINUX = tuple(int(part) for part in re.findall(r"\d+", os.uname().release)[:2])
needs_collapse = pytest.mark.skipif(
    LINUX < (6, 1) or not memory.huge_pages_enabled(),
    reason="needs Linux 6.1 with huge pages that are not switched off",
)


class Pages:
    """Private memory in pages of 4 KiB, as malloc's is."""

    def __init__(self) -> None:
        self._map = mmap.mmap(-1, SIZE + 4 * MiB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._first = ctypes.c_char.from_buffer(self._map)
        self.address = ctypes.addressof(self._first) + MiB + 64
        self.fill(0)

    def fill(self, seed: int) -> bytes:
        content = random.Random(seed).randbytes(SIZE)
        ctypes.memmove(self.address, content, SIZE)
        return content

    def give_back(self) -> None:
        self._map.madvise(mmap.MADV_DONTNEED)

    @property
    def huge(self) -> int:
        """Bytes of it in huge pages."""
        inside = False
        for line in Path("/proc/self/smaps").read_text().splitlines():
            if bounds := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
                inside = int(bounds[1], 16) <= self.address < int(bounds[2], 16)
            elif inside and line.startswith("AnonHugePages:"):
                return int(line.split()[1]) << 10
        raise AssertionError("the map is not in /proc/self/smaps")

    def close(self) -> None:
        del self._first
        self._map.close()


@pytest.fixture
def pages() -> Iterator[Pages]:
    made = Pages()
    if made.huge:
        pytest.skip("needs a system that gives huge pages to those who ask (`madvise`), and not to everybody")
    yield made
    made.close()


def direct_store(make_store: Make, **settings: bool) -> SpillStore:
    store = make_store(**settings)
    if not store.metrics.drives[0].direct:
        pytest.skip("needs a temporary directory whose file system takes O_DIRECT")
    return store


def stored(store: SpillStore, address: int) -> bytes:
    """What comes back of what is written from `address`."""
    slot = store.reserve(SIZE)
    assert store.write(slot, address).wait(30)
    target = ctypes.create_string_buffer(SIZE)
    assert store.read(slot, ctypes.addressof(target)).wait(30)
    store.free(slot)
    return target.raw


@needs_collapse
@pytest.mark.parametrize("engine", ["c"], indirect=True)
def test_what_is_written_from_comes_into_huge_pages_and_stays_as_it_was(
    make_store: Make, pages: Pages
) -> None:
    store = direct_store(make_store, huge_pages=True)
    content = pages.fill(1)
    assert stored(store, pages.address) == content
    assert pages.huge >= SIZE // 2, "a block that another worker was writing from may be left out"
    assert stored(store, pages.address) == content
    content = pages.fill(2)
    assert stored(store, pages.address) == content


@needs_collapse
@pytest.mark.parametrize("engine", ["c"], indirect=True)
def test_memory_that_was_given_back_is_not_put_there_again_at_once(make_store: Make, pages: Pages) -> None:
    store = direct_store(make_store, huge_pages=True)
    stored(store, pages.address)
    assert pages.huge
    pages.give_back()
    content = pages.fill(3)
    assert stored(store, pages.address) == content
    assert not pages.huge


def test_pages_stay_as_they_are_unless_asked_for(make_store: Make, pages: Pages) -> None:
    content = pages.fill(4)
    assert stored(direct_store(make_store), pages.address) == content
    assert not pages.huge


@pytest.mark.parametrize(
    ("switch", "wanted"),
    [
        ("always [madvise] never", True),
        ("[always] madvise never", True),
        ("always madvise [never]", False),
        (None, False),
    ],
)
def test_whoever_switched_huge_pages_off_gets_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, switch: str | None, wanted: bool
) -> None:
    file = tmp_path / "enabled"
    if switch is not None:
        file.write_text(switch)
    monkeypatch.setattr(memory, "HUGE_PAGES", file)
    assert memory.huge_pages_enabled() is wanted
