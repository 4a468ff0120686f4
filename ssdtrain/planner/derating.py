"""What plans count on of the bandwidths of the tiers, and when these have changed so much that a plan is due.

Note: [Stalls that a margin does not end]
What makes transfers wait may be over, or come in every step: another job on the drive, a checkpoint, work on the processors. So a
margin is taken back, one reduction after the other, each time after twice as many calm steps. At the smallest margin stalls do
not count against calm steps: they have another cause. And a reduction that brought no other plan is tried again after a growing
number of steps only (`Backoff`).
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable
from statistics import median_high
from typing import NamedTuple

from ssdtrain.offload.engine import OffloadEngine
from ssdtrain.planner.model.types import Link, Machine, Tier
from ssdtrain.planner.recent import STEPS
from ssdtrain.storage import Endurance, StoreMetrics
from ssdtrain.storage.metrics import TierMetrics
from ssdtrain.text import size_text

__all__ = [
    "DRIFTED",
    "Backoff",
    "BandwidthDerating",
    "Bandwidths",
    "Rates",
    "RecentRates",
    "StallMargin",
    "WearLimit",
]

logger = logging.getLogger("ssdtrain")

ALL_BEGUN = 1 << 30
"""Writes that are taken to be under way at once: a plan must not count on stores that are cancelled."""

AT_ONCE = 1e15
"""Bytes per second of what takes no time."""

DRIFT = 0.25
"""Change of a bandwidth, in two steps in turn, that makes a plan due. Each time that the plan stays the same, half as much more
is tolerated, up to `MOST_DRIFT`: a drive whose speed varies from step to step is no reason to plan all the time."""

MOST_DRIFT = 0.6

SHORTEST, LONGEST_BACKOFF = 4, 128
"""Steps between two searches for one reason, where the first brought nothing new."""

STALL = 0.02
"""Part of a step's time, more than predicted, in two steps in turn, that makes a plan with a margin due."""

REDUCTION = 0.85
"""Factor by which the bandwidths that are counted on are reduced each time."""

LEAST = 0.1

CALM_STEPS = 64
"""Steps without stalls after which one reduction is taken back. Twice as many each time that stalls come again, up to
`MOST_CALM_STEPS`."""

MOST_CALM_STEPS = 4096

_WEAR_SLACK = 1.05
"""Factor over the allowed rate of the drives, in two steps in turn, that makes a plan due."""

WEAR_MARGIN = 0.9
"""Factor by which the rate of the next plan is reduced then."""

DRIFTED = "the bandwidth of the tiers changed"
STALLS = "transfers were waited for"
CALM = "transfers were not waited for any more"
WORE = "the drives wore faster than their budget"


class Rates(NamedTuple):
    """Bytes per second of all tiers together; None where nothing was moved."""

    write: float | None
    read: float | None

    def or_else(self, other: Rates) -> Rates:
        """Return these rates, with those of `other` where nothing was moved."""
        return Rates(self.write or other.write, self.read or other.read)

    def after(self, before: Rates) -> Rates:
        """Return these rates, with those of `before` where nothing was moved. Where only writes were measured, reads are taken to
        have changed as much: what backward needs so soon that it comes from memory is not read."""
        read = before.read
        if self.write and before.write and read:
            read *= self.write / before.write
        return Rates(self.write or before.write, self.read or read)


class RecentRates:
    """The medians of the latest `STEPS` steps, which a plan counts on: in one of them the drives may have been busy otherwise."""

    def __init__(self) -> None:
        self._steps: deque[Rates] = deque(maxlen=STEPS)
        self._latest = Rates(None, None)

    def with_step(self, measured: Rates) -> Rates:
        """The medians when a step has ended. For what was not moved in it see `Rates.after`."""
        self._latest = measured.after(self._latest)
        self._steps.append(self._latest)
        return Rates(*map(_median, zip(*self._steps, strict=True)))


def _median(rates: Iterable[float | None]) -> float | None:
    known = [rate for rate in rates if rate]
    return median_high(known) if known else None


class Bandwidths:
    """Measures tiers under load, from the store's counters: bytes over the seconds in which at least one transfer was under way.

    Args:
        drives, host: count these.
    """

    def __init__(self, *, drives: bool = True, host: bool = True) -> None:
        self._drives, self._host = drives, host
        self._before: dict[str, TierMetrics] = {}

    def since(self, store: StoreMetrics) -> Rates:
        """The rates since the last call."""
        tiers = list(store.drives) if self._drives else []
        if self._host and store.host is not None:
            tiers.append(store.host)
        written = read = 0.0
        for tier in tiers:
            old = self._before.get(tier.path)
            if old is not None:
                written += _rate(
                    tier.bytes_written - old.bytes_written, tier.write_seconds - old.write_seconds
                )
                read += _rate(tier.bytes_read - old.bytes_read, tier.read_seconds - old.read_seconds)
        self._before = {tier.path: tier for tier in tiers}
        return Rates(written or None, read or None)


def _rate(nbytes: int, seconds: float) -> float:
    return nbytes / seconds if nbytes and seconds > 0 else 0.0


def differ(latest: Rates, planned: Rates, tolerated: float) -> bool:
    """Whether a bandwidth that was measured in a step is another one than a plan was made with, by this part of it."""
    least = 1 - tolerated
    pairs = zip(latest, planned, strict=True)
    return any(now and then and not least <= now / then <= 1 / least for now, then in pairs)


class Backoff:
    """When a search may be made again for the same reason: where it brought nothing new, after twice as many steps as the
    time before, up to `LONGEST_BACKOFF`. A plan that was not followed before ends that, and so do four times as many steps
    without a reason."""

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
            self._wait = min(LONGEST_BACKOFF, 2 * self._wait)


class StallMargin:
    """See Note: [Stalls that a margin does not end].

    Attributes:
        value: the part of the measured bandwidths that the next plan counts on.
    """

    def __init__(self) -> None:
        self.value = self._followed = 1.0
        self._stalled = 0  # steps in turn
        self._calm, self._calm_since = CALM_STEPS, 0
        self._backoff = Backoff()

    def reset(self) -> None:
        """The bandwidths are other ones now."""
        self.value = 1.0

    def observe(self, stalled: float, predicted: float) -> None:
        """A step waited for transfers for this part of its time, where the plan says `predicted`."""
        self._stalled = self._stalled + 1 if stalled > predicted + STALL else 0

    def changed(self, step: int) -> str:
        """Change `value` if it is time to.

        Returns:
            Why it is another one; "": it is not.
        """
        floored = self.value <= LEAST
        if self._stalled and not floored:
            self._calm_since = step
            if self._stalled < 2 or not self._backoff.due(step):
                return ""
            self.value = max(LEAST, self.value * REDUCTION)
            self._calm = min(MOST_CALM_STEPS, 2 * self._calm)
            return STALLS
        if self.value < 1 and step >= self._calm_since + self._calm:
            self.value, self._calm_since = min(1.0, self.value / REDUCTION), step
            return CALM
        return ""

    def requested(self) -> None:
        """A plan was requested, for whatever reason: stalls are counted from the next one on."""
        self._stalled = 0

    def planned(self, step: int, why: str, *, new: bool) -> None:
        """A plan was made with `value`, because of `why`. `new`: it was not followed before."""
        self._followed = self.value
        if why == STALLS:
            self._backoff.searched(step, new=new)

    def restore(self) -> None:
        """No plan was found with `value`: the one before is followed, with the margin that it was made with."""
        self.value = self._followed

    def failed(self, step: int) -> None:
        """Because of stalls a plan was searched for, and none was found: see `restore`."""
        self.restore()
        self._backoff.searched(step, new=False)


class WearLimit:
    """The bytes per second that may be offloaded, from the rating of the drives and the bytes that reach them.

    Args:
        endurance: of the drives of this rank.
    """

    def __init__(self, endurance: Endurance) -> None:
        self.rate: float | None = None
        """Bytes per second of saved tensors; None: the drives have no known rating."""
        self._endurance = endurance
        self._written: dict[str, int] = {}
        self._allowed: float | None = None
        self._over = 0  # steps in turn
        self._margin = self._followed = 1.0
        self._steps, self._backoff = 0, Backoff()
        self._lowered = False  # since the latest plan
        self._warned = self._warned_of_life = False

    def observe(self, store: StoreMetrics, offloaded: int, seconds: float) -> None:
        """A step of `seconds` has ended, after `offloaded` bytes of saved tensors in all."""
        self._steps += 1
        written = {drive.path: drive.bytes_written for drive in store.drives}
        step = {path: nbytes - self._written.get(path, 0) for path, nbytes in written.items()}
        self._allowed = self._endurance.allowed_rate(written)
        total = sum(step.values())
        # Of what is offloaded a part goes to the host tier, a codec makes it smaller, and stores are cancelled.
        share = offloaded / sum(written.values()) if any(written.values()) else 1.0
        self._written = written
        if self._allowed is None:
            return
        self._over = self._over + 1 if seconds and total / seconds > _WEAR_SLACK * self._allowed else 0
        self.rate = self._margin * self._allowed * max(share, 0.1)

    def exceeded(self) -> bool:
        """The drives were written faster than allowed, in two steps in turn: the next plan writes less. Where that
        brought nothing new, True comes after ever more steps (`Backoff`)."""
        if self._over < 2 or not self._backoff.due(self._steps):
            return False
        self._over, self._lowered = 0, True
        self._margin *= WEAR_MARGIN
        if self.rate is not None:
            self.rate *= WEAR_MARGIN
        return True

    def failed(self) -> bool:
        """No plan was found, and the one before is followed, with its rate. True: it was searched for because the drives wear too
        fast, which they go on doing; logged once."""
        self._over, self._margin = 0, self._followed
        if not self._lowered:
            return False
        self._lowered = False
        self._backoff.searched(self._steps, new=False)
        if not self._warned_of_life and self._allowed is not None:
            self._warned_of_life = True
            logger.warning(
                "offload.endurance: more than the allowed %s/s are written to %s, which wear out before %g years, because no "
                "plan within the limits writes less",
                *self._budget(),
            )
        return True

    def _budget(self) -> tuple[str, str, float]:
        """Return the budget in the words of the warnings: bytes per second, the drives, years."""
        return size_text(self._allowed or 0), ", ".join(self._endurance.devices), self._endurance.years

    def planned(self, *, bound: bool, new: bool) -> None:
        """A plan begins.

        Args:
            bound: it offloads less than could be hidden, which is logged once.
            new: it was not followed before.
        """
        if self._lowered:
            self._backoff.searched(self._steps, new=new)
        self._over, self._followed, self._lowered = 0, self._margin, False
        if bound and not self._warned and self._allowed is not None:
            self._warned = True
            logger.warning(
                "offload.endurance: at most %s/s are written to %s, for a life of %g years: less is offloaded than could be "
                "hidden",
                *self._budget(),
            )


class BandwidthDerating:
    """The bandwidths of a store's tiers as measured, less what stalls, wear and drift take off them.

    Args:
        split: host memory and drives are a tier each in the model, where there are both.
        link: bytes per second between device and host, each way; None: a CPU.
        endurance: of the drives, which are not to wear faster than it says; None: they are written as fast as they can.

    Attributes:
        rates: bandwidths of the tiers that have no tier of their own in the model, see `RecentRates`.
        both: there are a tier for host memory and one for drives.
        margin, wear: what plans leave of the bandwidths.
    """

    def __init__(
        self,
        store: StoreMetrics,
        link: tuple[float, float] | None,
        endurance: Endurance | None = None,
        *,
        split: bool = False,
    ) -> None:
        self.both = split and store.host is not None and bool(store.drives)
        self.margin = StallMargin()
        self.wear = None if endurance is None else WearLimit(endurance)
        self.rates = self._planned = self._latest = Rates(None, None)
        self._host_rates = self.rates
        self._link, self._capacity = link, store.host.capacity if store.host is not None else 0
        self._bandwidths, self._host = Bandwidths(host=not self.both), Bandwidths(drives=False)
        self._recent, self._backoff = RecentRates(), Backoff()
        self._tolerated, self._drifted = DRIFT, 0  # the latter: steps in turn

    @property
    def known(self) -> bool:
        """Something was written so far, or copies to the host take the time of a known link."""
        return bool(self.rates.write or self._host_rates.write or self._link)

    @property
    def rate(self) -> float | None:
        """Bytes per second of saved tensors that the drives bear; None: no limit."""
        return None if self.wear is None else self.wear.rate

    def step_ended(self, store: StoreMetrics, offloaded: int, elapsed: float) -> None:
        """Measure a step of `elapsed` seconds, after `offloaded` bytes of saved tensors in all."""
        self._latest = self._bandwidths.since(store)
        if self.wear is not None:
            self.wear.observe(store, offloaded - (store.host_bytes_written if self.both else 0), elapsed)
        self.rates = self._recent.with_step(self._latest)
        self._host_rates = self._host.since(store).or_else(self._host_rates)

    def machine(self, engine: OffloadEngine) -> Machine:
        """The machine that the next plan counts on: a tier "ssd", one "host" where there are both, and the limits of `engine`."""
        link, margin, rates, limits = self._link, self.margin.value, self.rates, engine.limits()
        host = []
        if self.both:
            # Nothing was written to a drive where all fits into host memory. Behind a link that memory is pinned: a transfer is
            # over with its copy.
            rates = rates.or_else(self._host_rates)
            write, read = (
                rate / limits.carried if rate and link is None else AT_ONCE for rate in self._host_rates
            )
            host = [Tier("host", write, read, depth=ALL_BEGUN, capacity=self._capacity)]
        # Copies into a pinned host tier take the time of the link alone.
        write = rates.write or (link[0] if link is not None else 1.0)
        read = rates.read or write  # everything so far was taken from its staging buffer
        margin /= limits.carried  # the model counts saved bytes
        return Machine(
            (Tier("ssd", margin * write, margin * read, depth=ALL_BEGUN), *host),
            Link(*(margin * rate for rate in link)) if link is not None else None,
            limits.in_flight,
            limits.prefetch,
            limits.window,
            limits.buffers,
            limits.together if link is None else 0,
            copies=engine.device.copy_bandwidth(),
            in_order=limits.in_order,
        )

    def drifted(self, step: int) -> bool:
        """Whether a plan is due because of other bandwidths. Called once for each step."""
        self._drifted = self._drifted + 1 if differ(self._latest, self._planned, self._tolerated) else 0
        if self._drifted < 2 or not self._backoff.due(step):
            return False
        self.margin.reset()
        return True

    def reason(self, step: int) -> str:
        """Why else a plan is due: what it may count on changes with that. Empty: none is."""
        if why := self.margin.changed(step):
            return why
        return WORE if self.wear is not None and self.wear.exceeded() else ""

    def requested(self) -> None:
        """A plan was requested, for whatever reason."""
        self._drifted = 0
        self.margin.requested()

    def planned(
        self, step: int, why: str, *, same: bool, new: bool, bound: bool = False, settles: bool = False
    ) -> None:
        """A plan was made because of `why`.

        Args:
            same: it is the one of before.
            new: it was not followed before, as far as is known.
            bound: it offloads less than could be hidden, because of wear.
            settles: that it is the same says nothing of the bandwidths.
        """
        self.margin.planned(step, why, new=new)
        if why == DRIFTED:
            self._backoff.searched(step, new=new)
        if self.wear is not None:
            self.wear.planned(bound=bound, new=new)
        if not (same and settles):
            self._tolerated = min(MOST_DRIFT, 1.5 * self._tolerated) if same else DRIFT
        self._drifted, self._planned = 0, self.rates

    def failed(self, step: int, why: str) -> bool:
        """No plan was found, and the one of before is followed, with what it counts on. True: the drives wear too fast, which was
        said."""
        if why == STALLS:
            self.margin.failed(step)
        else:
            self.margin.restore()
        if why == DRIFTED:
            self._backoff.searched(step, new=False)
        self._drifted, self._planned = 0, self.rates
        return self.wear is not None and self.wear.failed()
