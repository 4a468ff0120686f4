"""Whether the bandwidths of the tiers have moved from those that a plan was made with."""

from __future__ import annotations

from ssdtrain.planner.controller import DRIFT, MOST_DRIFT
from ssdtrain.planner.measured import Bandwidths, Rates
from ssdtrain.storage.metrics import StoreMetrics

__all__ = ["Drift"]


class Drift:
    """The latest bandwidths, and those planned with.

    A quarter (`DRIFT`) in two steps in turn counts. Each time that the same plan came out half as much more is tolerated, up to
    `MOST_DRIFT`: a drive whose speed varies from step to step is no reason to plan all the time.

    Attributes:
        rates: the latest known ones.
    """

    def __init__(self) -> None:
        self.rates = self._planned = Rates(None, None)
        self._latest = self.rates
        self._bandwidths = Bandwidths()
        self._tolerated, self._steps = DRIFT, 0

    def measure(self, store: StoreMetrics) -> None:
        """A step has ended: its bandwidths."""
        self._latest = latest = self._bandwidths.since(store)
        self.rates = Rates(latest.write or self.rates.write, latest.read or self.rates.read)

    def drifted(self) -> bool:
        """Whether it is time to plan again. Called once for each step that follows a plan with tiers."""
        least = 1 - self._tolerated
        pairs = zip(self._latest, self._planned, strict=True)
        off = any(now and then and not least <= now / then <= 1 / least for now, then in pairs)
        self._steps = self._steps + 1 if off else 0
        return self._steps >= 2

    def planned(self, *, same: bool) -> None:
        """A plan was made with the latest bandwidths. `same`: it is the one of before."""
        self._tolerated = min(MOST_DRIFT, 1.5 * self._tolerated) if same else DRIFT
        self._steps, self._planned = 0, self.rates
