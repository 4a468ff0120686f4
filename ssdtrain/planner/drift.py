"""Whether the bandwidths of the tiers have moved from those that a plan was made with."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from statistics import median_high

from ssdtrain.planner.measured import Bandwidths, Rates
from ssdtrain.storage.metrics import StoreMetrics

__all__ = ["DRIFT", "MOST_DRIFT", "Backoff", "Drift", "differ"]

DRIFT = 0.25
"""Of a bandwidth, in two steps in turn: plan again. Each time that the plan stays the same, half as much more is
tolerated, up to `MOST_DRIFT`: a drive whose speed varies from step to step is no reason to plan all the time."""

MOST_DRIFT = 0.6

MEASURED = 3
"""Steps whose bandwidths a plan counts on."""

SHORTEST, LONGEST = 4, 128
"""Steps between two searches for one reason, where the first brought nothing new."""


def differ(latest: Rates, planned: Rates, tolerated: float) -> bool:
    """Whether a bandwidth that was measured in a step is another one than a plan was made with, by this part of it."""
    least = 1 - tolerated
    pairs = zip(latest, planned, strict=True)
    return any(now and then and not least <= now / then <= 1 / least for now, then in pairs)


class Backoff:
    """When a search may be made again for the same reason: where it brought nothing new, after twice as many steps as the
    time before, up to `LONGEST`. A plan that was not followed before ends that, and so do four times as many steps without a
    reason."""

    def __init__(self) -> None:
        self._wait, self._until = SHORTEST, 0

    def due(self, step: int) -> bool:
        """Whether a search may be made in this step, for which there is a reason."""
        return step >= self._until

    def searched(self, step: int, *, new: bool) -> None:
        """A search was made. `new`: its plan was not followed before."""
        if new or step > self._until + 4 * self._wait:
            self._wait = SHORTEST
        self._until = step if new else step + self._wait
        if not new:
            self._wait = min(LONGEST, 2 * self._wait)


def _median(rates: Iterable[float | None]) -> float | None:
    known = [rate for rate in rates if rate]
    return median_high(known) if known else None


class Drift:
    """The latest bandwidths, and those planned with.

    A quarter (`DRIFT`) in two steps in turn counts, see `Backoff` too.

    Attributes:
        rates: the latest known ones, medians of `MEASURED` steps: in one of them the drives may have been busy otherwise.
    """

    def __init__(self) -> None:
        self.rates = self._planned = Rates(None, None)
        self._latest = self.rates
        self._measured: deque[Rates] = deque(maxlen=MEASURED)
        self._bandwidths = Bandwidths()
        self._backoff = Backoff()
        self._tolerated, self._off, self._steps = DRIFT, 0, 0

    def measure(self, store: StoreMetrics) -> None:
        """A step has ended: its bandwidths."""
        self._latest = latest = self._bandwidths.since(store)
        self._measured.append(latest)
        self.rates = Rates(*map(_median, zip(*self._measured, strict=True))).or_else(self.rates)
        self._steps += 1

    def drifted(self) -> bool:
        """Whether it is time to plan again. Called once for each step that follows a plan with tiers."""
        self._off = self._off + 1 if differ(self._latest, self._planned, self._tolerated) else 0
        return self._off >= 2 and self._backoff.due(self._steps)

    def planned(self, *, same: bool, new: bool) -> None:
        """A plan was made with the latest bandwidths.

        Args:
            same: it is the one of before.
            new: it was not followed before, as far as is known.
        """
        self._tolerated = min(MOST_DRIFT, 1.5 * self._tolerated) if same else DRIFT
        self._backoff.searched(self._steps, new=new)
        self._off, self._planned = 0, self.rates
