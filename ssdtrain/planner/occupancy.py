"""The bytes on the device over the time of the cost model."""

from __future__ import annotations

from ssdtrain.planner.queues import Saved

__all__ = ["Occupancy"]


class Occupancy:
    """What comes and goes, in any order of time.

    Note: [What the program has too]
    The engine lets go of a tensor when it has left. Its memory is free then only if nobody else has the tensor: whoever called a
    block has what the block was called with, and the output of an encoder is there for all of a decoder. So what a step that was
    profiled found to be there all the same (`Block.held`) is counted until forward is past that block.
    """

    def __init__(self) -> None:
        self._changes: list[tuple[float, bool, int]] = []  # when, after all others of that time, bytes
        self._place = 0.0  # the block in which forward is
        self._held: list[
            tuple[int, int]
        ] = []  # past which block the program lets go of how many bytes that have left

    def hold(self, when: float, nbytes: int, *, late: bool = False) -> None:
        """`nbytes` more (negative: fewer) from `when` on. `late`: after all others of that time."""
        if nbytes:
            self._changes.append((when, late, nbytes))

    def leave(self, saved: Saved, when: float, *, late: bool = False) -> None:
        """The engine lets go of a tensor. See Note: [What the program has too]."""
        saved.departed = True
        held = saved.held if saved.held_to >= self._place else 0
        if held:
            self._held.append((saved.held_to, held))
        self.hold(when, held - saved.nbytes, late=late)

    def past(self, place: float, now: float) -> None:
        """Forward has come to the block `place`."""
        self._place = place
        free = sum(nbytes for until, nbytes in self._held if until < place)
        if free:
            self._held = [one for one in self._held if one[0] >= place]
            self.hold(now, -free)

    def peak(self) -> tuple[int, float]:
        """The most bytes, and since when."""
        live = peak = 0
        when = 0.0
        for time, _, change in sorted(self._changes):
            live += change
            if live > peak:
                peak, when = live, time
        return peak, when

    def line(self, began: float) -> list[tuple[float, int]]:
        """(seconds since `began`, bytes from then on), and the bytes at the beginning of all, at 0.0."""
        found, live = [(0.0, 0)], 0
        for time, _, change in sorted(self._changes):
            live += change
            if time >= began:
                found.append((time - began, live))
        return found
