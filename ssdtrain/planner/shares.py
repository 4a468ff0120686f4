"""Parts of blocks: where saved tensors are few and large, which share of each is offloaded.

All or nothing of a tensor that is a tenth of a forward leaves a drive idle, or the peak higher than it has to be. What stays of a
block costs copies and is there twice meanwhile, which the cost model counts: a share is taken where the peak sinks by more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from ssdtrain.planner.step import KEEP, Block, Choice, StepTimeline

__all__ = ["COARSE", "Play", "coarse_blocks", "with_shares"]

COARSE = 1 / 32
"""Of what a forward saves: a block of more bytes may be offloaded in part. Finer ones are decided as a whole."""

STEPS = 8
"""Shares are multiples of one part in so many."""

Play = Callable[[Sequence[Sequence[Choice]]], StepTimeline | None]
"""The step with these choices; None: it takes too long, or gives a drive too much."""

_Place = tuple[int, int]


def coarse_blocks(chunks: Sequence[Sequence[Block]]) -> list[_Place]:
    """Chunk and index of the blocks that may be offloaded in part."""
    return [
        (number, index)
        for number, blocks in enumerate(chunks)
        for index, block in enumerate(blocks)
        if block.saved > COARSE * sum(one.saved for one in blocks)
    ]


def with_shares(
    choices: Sequence[Sequence[Choice]], places: Sequence[_Place], away: Choice, play: Play, most: int
) -> tuple[list[list[Choice]], StepTimeline] | None:
    """Choices of a lower peak, by shares of the blocks at `places`; None: there are none that can be played.

    From two beginnings, `choices` and one share of what is saved first, one share or two are changed as long as that lowers the
    peak, or what is written at the same peak.

    Args:
        away: offload to the tier whose shares are chosen; blocks that `choices` has in another tier stay there.
        most: calls of `play`.
    """
    search = _Search([list(chosen) for chosen in choices], places, away, play, most)
    search.descend(search.level())
    search.descend(search.given())
    if search.best is None:
        return None
    _, shares, step = search.best
    return search.choices(shares), step


_Found = tuple[tuple[int, int], list[int], StepTimeline]
"""(peak, bytes written) of shares, and their step."""


class _Search:
    """Shares of the places, in steps of `STEPS`."""

    def __init__(
        self, given: list[list[Choice]], places: Sequence[_Place], away: Choice, play: Play, most: int
    ) -> None:
        self._given, self._away, self._play, self._left = given, away, play, most
        self._places = [place for place in places if self._at(place) in (KEEP, away)]
        self.best: _Found | None = None

    def _at(self, place: _Place) -> Choice:
        return self._given[place[0]][place[1]]

    def given(self) -> list[int]:
        """The shares of the choices to begin with."""
        return [0 if self._at(place) == KEEP else STEPS for place in self._places]

    def choices(self, shares: Sequence[int]) -> list[list[Choice]]:
        found = [list(chosen) for chosen in self._given]
        for (number, index), share in zip(self._places, shares, strict=True):
            found[number][index] = replace(self._away, share=share / STEPS) if share else KEEP
        return found

    def _try(self, shares: list[int]) -> _Found | None:
        """None: these cannot be had."""
        if self._left <= 0:
            return None
        self._left -= 1
        step = self._play(self.choices(shares))
        if step is None:
            return None
        found = (step.peak_bytes, sum(step.written.values())), list(shares), step
        if self.best is None or found[0] < self.best[0]:
            self.best = found
        return found

    def level(self) -> list[int]:
        """The best of one share for all that is saved first, up to some place."""
        for count in range(len(self._places), 0, -1):
            for share in range(STEPS, 0, -1):
                self._try([share] * count + [0] * (len(self._places) - count))
        return self.given() if self.best is None else self.best[1]

    def descend(self, shares: list[int]) -> None:
        """Change one share or two, as long as it gets better."""
        current = self._try(shares)
        while current is not None:
            lowest = current[0]
            tried = (self._try(changed) for changed in self._neighbours(current[1]))
            current = next((one for one in tried if one is not None and one[0] < lowest), None)

    def _neighbours(self, shares: list[int]) -> Iterator[list[int]]:
        for place, share in enumerate(shares):
            for other in range(STEPS, -1, -1):
                if other != share:
                    yield [*shares[:place], other, *shares[place + 1 :]]
        for more, share in enumerate(shares):
            for less in range(len(shares)):
                if less != more and share < STEPS and shares[less] > 0:
                    changed = list(shares)
                    changed[more], changed[less] = share + 1, shares[less] - 1
                    yield changed
