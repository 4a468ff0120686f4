"""Whether the bandwidths of the tiers have moved from those that a plan was made with."""

from __future__ import annotations

from ssdtrain.planner.measured import Bandwidths, Rates, RecentRates
from ssdtrain.storage.metrics import StoreMetrics

__all__ = ["DRIFT", "MOST_DRIFT", "Backoff", "Drift", "differ"]

DRIFT = 0.25
"""Of a bandwidth, in two steps in turn: plan again. Each time that the plan stays the same, half as much more is
tolerated, up to `MOST_DRIFT`: a drive whose speed varies from step to step is no reason to plan all the time."""

MOST_DRIFT = 0.6

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


class Drift:
    """The latest bandwidths, and those planned with.

    A quarter (`DRIFT`) in two steps in turn counts, see `Backoff` too.

    Attributes:
        rates: the latest known ones, see `RecentRates`.
    """

    def __init__(self) -> None:
        self.rates = self._planned = Rates(None, None)
        self._latest = self.rates
        self._bandwidths, self._recent = Bandwidths(), RecentRates()
        self._backoff = Backoff()
        self._tolerated, self._off, self._steps = DRIFT, 0, 0

    def measure(self, store: StoreMetrics) -> None:
        """A step has ended: its bandwidths."""
        self._latest = latest = self._bandwidths.since(store)
        self.rates = self._recent.with_step(latest)
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
