"""The allocator hands no byte to two owners and forgets none."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from ssdtrain.storage.allocator import RangeAllocator

UNIT = 4096


class Allocation(RuleBasedStateMachine):
    """Any sequence of take, give and extend, against a plain list of the ranges that are out."""

    taken = Bundle("taken")

    def __init__(self) -> None:
        super().__init__()
        self.allocator = RangeAllocator(64 * UNIT, UNIT)
        self.out: dict[int, int] = {}

    def longest(self) -> int:
        """Bytes between the ranges that are out. The allocator is not asked: when somebody looks, what was given back joins."""
        longest = position = 0
        for start, length in sorted([*self.out.items(), (self.allocator.size, 0)]):
            longest = max(longest, start - position)
            position = start + length
        return longest

    @rule(target=taken, nbytes=st.integers(0, 20 * UNIT))
    def allocate(self, nbytes: int) -> int | None:
        fits = self.longest()
        offset = self.allocator.allocate(nbytes)
        length = self.allocator.rounded(nbytes)
        assert (offset is not None) == (fits >= length), "a range that fits is found, and only then"
        if offset is None:
            return None
        assert offset % UNIT == 0 and offset + length <= self.allocator.size
        overlaps = [
            start for start, other in self.out.items() if start < offset + length and offset < start + other
        ]
        assert not overlaps, "a range was handed to two owners"
        self.out[offset] = length
        return offset

    @rule(offset=consumes(taken))
    def release(self, offset: int | None) -> None:
        if offset is not None:
            assert self.allocator.free(offset) == self.out.pop(offset)

    @rule(units=st.integers(0, 8))
    def extend(self, units: int) -> None:
        self.allocator.extend(units * UNIT)

    @invariant()
    def what_is_out_is_counted(self) -> None:
        assert self.allocator.used == sum(self.out.values())

    @rule()
    def ranges_tile_the_space(self) -> None:
        free = [(start, end - start) for start, end in self.allocator.free_ranges]
        position, was_free = 0, False
        for start, length in sorted([*free, *self.out.items()]):
            assert start == position, "ranges overlap or leave a hole"
            is_free = start not in self.out
            assert length > 0 and not (is_free and was_free), "two free neighbours did not join"
            position, was_free = start + length, is_free
        assert position == self.allocator.size

    def teardown(self) -> None:
        for offset in list(self.out):
            self.allocator.free(offset)
        assert self.allocator.free_ranges == [(0, self.allocator.size)]


Allocation.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestAllocation = Allocation.TestCase


def test_the_smallest_range_that_fits_is_taken() -> None:
    allocator = RangeAllocator(10 * UNIT, UNIT)
    a, b, c, d = (allocator.allocate(n * UNIT) for n in (4, 1, 2, 3))
    assert (a, b, c, d) == (0, 4 * UNIT, 5 * UNIT, 7 * UNIT)
    allocator.free(0)
    allocator.free(5 * UNIT)
    assert allocator.free_ranges == [(0, 4 * UNIT), (5 * UNIT, 7 * UNIT)]  # looking joins them
    assert allocator.allocate(2 * UNIT) == 5 * UNIT, (
        "2 units lie in the hole of 2, not at the start of the hole of 4"
    )


def test_a_range_is_handed_out_as_it_was_given_back_until_nothing_else_fits() -> None:
    allocator = RangeAllocator(10 * UNIT, UNIT)
    first, second, third = (allocator.allocate(n * UNIT) for n in (2, 3, 4))
    assert first is not None and second is not None and third is not None
    allocator.free(first)
    allocator.free(second)
    assert allocator.allocate(2 * UNIT) == first, "not the start of 5 joined units"
    allocator.free(first)
    assert allocator.allocate(5 * UNIT) == first, "both, joined"
    allocator.free(third)
    assert allocator.allocate(5 * UNIT) == third, "joined with what was never taken"


def test_a_range_given_back_twice_is_an_error() -> None:
    allocator = RangeAllocator(2 * UNIT, UNIT)
    offset = allocator.allocate(1)
    assert offset is not None
    allocator.free(offset)
    with pytest.raises(KeyError):
        allocator.free(offset)


def test_trailing_is_what_growing_adds_to() -> None:
    allocator = RangeAllocator(0, UNIT)
    assert allocator.trailing == 0 and allocator.allocate(1) is None
    allocator.extend(3 * UNIT)
    allocator.allocate(UNIT)
    assert allocator.trailing == 2 * UNIT
    allocator.extend(UNIT)
    assert allocator.trailing == 3 * UNIT
