"""Shares of large blocks: which part of a tensor leaves, where all or nothing is too coarse."""

from __future__ import annotations

from collections.abc import Iterator

from ssdtrain.planner.judge import Judge, written
from ssdtrain.planner.plans import Plan

__all__ = ["LargeShares"]

COARSE = 1 / 32
"""Share of a forward's saved bytes from which on a block may be offloaded in part. Smaller ones are decided as a whole."""


class LargeShares:
    """Shares of the large blocks, as numbers of steps from nothing to all, which lower the peak within a time.

    Args:
        judge: of the problem; what is tried here is no runner-up.
        begin: the plan to begin with; blocks that it has in another tier stay there.
        seconds: of a step, at most; None: no limit.
        simulations: that may be spent.
    """

    def __init__(self, judge: Judge, begin: Plan, seconds: float | None, simulations: int) -> None:
        self._judge, self._seconds, self._left = judge, seconds, simulations
        problem, blocks, decided = judge.problem, judge.blocks, judge.decided
        self._begin = [begin.actions[number] for number in decided]
        tier = next(iter(problem.parts.values())).tier
        away = next(name for name, choice in problem.actions.items() if choice.tier == tier)
        self._names = ["keep", *problem.parts, away]
        chunks = [sum(one.saved for one in blocks) for blocks in problem.chunks for _ in blocks]
        self._places = [
            place
            for place, number in enumerate(decided)
            if blocks[number].saved > COARSE * chunks[number] and self._begin[place] in self._names
        ]
        self._best: tuple[tuple[int, int], list[int], Plan] | None = None

    def lowest(self) -> Plan | None:
        """Change one share or two as long as that lowers the peak, or what is written at the same peak: from the plan to begin
        with, and from one share of all that is saved first."""
        if not self._places:
            return None
        most = len(self._names) - 1
        for count in range(len(self._places), 0, -1):
            for share in range(most, 0, -1):
                self._try([share] * count + [0] * (len(self._places) - count))
        given = [self._names.index(self._begin[place]) for place in self._places]
        self._descend(given if self._best is None else self._best[1])
        self._descend(given)
        return None if self._best is None else self._best[2]

    def _try(self, shares: list[int]) -> tuple[tuple[int, int], list[int], Plan] | None:
        """Return its peak and what it writes, the shares and the plan; None: it takes too long, or no simulation is left."""
        if self._left <= 0:
            return None
        self._left -= 1
        chosen = list(self._begin)
        for place, share in zip(self._places, shares, strict=True):
            chosen[place] = self._names[share]
        plan = self._judge.plan(chosen)
        if not self._judge.in_time(plan, self._seconds):
            return None
        found = (plan.peak, written(plan)), list(shares), plan
        if self._best is None or found[0] < self._best[0]:
            self._best = found
        return found

    def _descend(self, shares: list[int]) -> None:
        current = self._try(shares)
        while current is not None:
            lowest = current[0]
            tried = (self._try(changed) for changed in self._neighbours(current[1]))
            current = next((one for one in tried if one is not None and one[0] < lowest), None)

    def _neighbours(self, shares: list[int]) -> Iterator[list[int]]:
        most = len(self._names) - 1
        for place, share in enumerate(shares):
            for other in range(most, -1, -1):
                if other != share:
                    yield [*shares[:place], other, *shares[place + 1 :]]
        for more, share in enumerate(shares):
            for less in range(len(shares)):
                if less != more and share < most and shares[less] > 0:
                    changed = list(shares)
                    changed[more], changed[less] = share + 1, shares[less] - 1
                    yield changed
