"""What plans count on of the bandwidths of the tiers, and when these have changed so much that a plan is due.

Note: [Stalls that a margin does not end]
What makes transfers wait may be over, or come in every step: another job on the drive, a checkpoint, work on the processors. So a
margin is taken back, one reduction after the other, each time after twice as many calm steps. At the smallest margin stalls do
not count against calm steps: they have another cause. And a reduction that brought no other plan is tried again after a growing
number of steps only (`Cause`).

Note: [An arena that costs more than it gives]
On a CPU what comes back from a tier lies in an arena of the same memory, sized by what forwards save, which stays between steps.
Of a small model it takes more than offloading saves. So the cost model has it only where something leaves, and a plan that keeps
everything needs none: the one tensor that such a plan offloads all the same, to see whether the tiers are faster now, comes back
into memory of its own.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import replace
from statistics import median_high
from typing import NamedTuple

from ssdtrain.offload.engine import OffloadEngine
from ssdtrain.planner.model.types import Block, Link, Machine, Tier
from ssdtrain.planner.recent import STEPS
from ssdtrain.storage import Endurance, StoreMetrics
from ssdtrain.storage.metrics import TierMetrics
from ssdtrain.text import size_text

__all__ = [
    "DRIFTED",
    "ArenaCost",
    "BandwidthDerating",
    "Bandwidths",
    "Cause",
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
    """Measures tiers under load, from their counters: bytes over the seconds in which at least one transfer was under way."""

    def __init__(self) -> None:
        self._before: dict[str, TierMetrics] = {}

    def since(self, tiers: Sequence[TierMetrics]) -> Rates:
        """The rates of all these together since the last call."""
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


class Cause:
    """A reason for another plan: something that was seen in two steps in turn.

    Where a search for it brought nothing new, the next one is made after twice as many steps as the time before, up to
    `LONGEST_BACKOFF`. A plan that was not followed before ends that, and so do four times as many steps without the cause.

    Args:
        why: the reason in words.

    Attributes:
        seen: steps in turn in which it was seen since the latest plan.
    """

    def __init__(self, why: str) -> None:
        self.why, self.seen = why, 0
        self._wait, self._until = SHORTEST, 0

    def observe(self, seen: bool) -> None:
        """A step is over."""
        self.seen = self.seen + 1 if seen else 0

    def due(self, step: int) -> bool:
        """Whether a search for it may be made in this step."""
        return self.seen >= 2 and step >= self._until

    def requested(self) -> None:
        """A plan is due, for whatever reason."""
        self.seen = 0

    def searched(self, step: int, why: str, *, new: bool) -> None:
        """A search was made because of `why`. `new`: its plan was not followed before."""
        self.seen = 0
        if why != self.why:
            return
        if new or step > self._until + 4 * self._wait:
            self._wait = SHORTEST
        self._until = step if new else step + self._wait
        if not new:
            self._wait = min(LONGEST_BACKOFF, 2 * self._wait)


class StallMargin:
    """See Note: [Stalls that a margin does not end].

    Attributes:
        value: the part of the measured bandwidths that the next plan counts on.
        cause: steps wait for transfers more than the plan says.
    """

    def __init__(self) -> None:
        self.value = self._followed = 1.0
        self.cause = Cause(STALLS)
        self._calm, self._calm_since = CALM_STEPS, 0

    def observe(self, stalled: float, predicted: float) -> None:
        """A step waited for transfers for this part of its time, where the plan says `predicted`."""
        self.cause.observe(stalled > predicted + STALL)

    def changed(self, step: int) -> str:
        """Change `value` if it is time to.

        Returns:
            Why it is another one; "": it is not.
        """
        if self.cause.seen and self.value > LEAST:
            self._calm_since = step
            if not self.cause.due(step):
                return ""
            self.value = max(LEAST, self.value * REDUCTION)
            self._calm = min(MOST_CALM_STEPS, 2 * self._calm)
            return STALLS
        if self.value < 1 and step >= self._calm_since + self._calm:
            self.value, self._calm_since = min(1.0, self.value / REDUCTION), step
            return CALM
        return ""

    def planned(self) -> None:
        """A plan was made with `value`."""
        self._followed = self.value

    def failed(self) -> None:
        """No plan was found with `value`: the one before is followed, with the margin that it was made with."""
        self.value = self._followed


class WearLimit:
    """The bytes per second that may be offloaded, from the rating of the drives and the bytes that reach them.

    Args:
        endurance: of the drives of this rank.

    Attributes:
        rate: bytes per second of saved tensors; None: the drives have no known rating.
        cause: the drives are written faster than allowed.
    """

    def __init__(self, endurance: Endurance) -> None:
        self.rate: float | None = None
        self.cause = Cause(WORE)
        self._endurance = endurance
        self._written: dict[str, int] = {}
        self._allowed: float | None = None
        self._margin, self._warned = 1.0, False

    def observe(self, store: StoreMetrics, offloaded: int, seconds: float) -> None:
        """A step of `seconds` has ended, after `offloaded` bytes of saved tensors in all."""
        written = {drive.path: drive.bytes_written for drive in store.drives}
        total = sum(written.values()) - sum(self._written.get(path, 0) for path in written)
        self._written, self._allowed = written, self._endurance.allowed_rate(written)
        if self._allowed is None:
            return
        # Of what is offloaded a part goes to the host tier, a codec makes it smaller, and stores are cancelled.
        share = offloaded / sum(written.values()) if any(written.values()) else 1.0
        self.cause.observe(seconds > 0 and total / seconds > _WEAR_SLACK * self._allowed)
        self.rate = self._margin * self._allowed * max(share, 0.1)

    def exceeded(self, step: int) -> bool:
        """Whether a plan is due that writes less."""
        if not self.cause.due(step):
            return False
        self._margin *= WEAR_MARGIN
        if self.rate is not None:
            self.rate *= WEAR_MARGIN
        return True

    def planned(self, *, bound: bool) -> None:
        """A plan begins. `bound`: it offloads less than could be hidden, which is logged once."""
        if bound and not self._warned and self._allowed is not None:
            self._warned = True
            logger.warning(
                "offload.endurance: at most %s/s are written to %s, for a life of %g years: less is offloaded than could be "
                "hidden",
                size_text(self._allowed),
                ", ".join(self._endurance.devices),
                self._endurance.years,
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
        self._first = "ssd" if store.drives else "host"
        self.margin = StallMargin()
        self.wear = None if endurance is None else WearLimit(endurance)
        self.rates = self._planned = self._latest = Rates(None, None)
        self._host_rates = self.rates
        self._link, self._capacity = link, store.host.capacity if store.host is not None else 0
        self._bandwidths, self._host = Bandwidths(), Bandwidths()
        self._recent, self._tolerated, drift = RecentRates(), DRIFT, Cause(DRIFTED)
        self._drift, self._causes = drift, [drift, self.margin.cause]
        if self.wear is not None:
            self._causes.append(self.wear.cause)

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
        host = [] if store.host is None else [store.host]
        self._latest = self._bandwidths.since([*store.drives, *(() if self.both else host)])
        if self.wear is not None:
            self.wear.observe(store, offloaded - (store.host_bytes_written if self.both else 0), elapsed)
        self.rates = self._recent.with_step(self._latest)
        self._host_rates = self._host.since(host).or_else(self._host_rates)

    def machine(self, engine: OffloadEngine) -> Machine:
        """The machine that the next plan counts on: a tier "ssd" where there are drives, else "host", or first "ssd" and then
        "host" where plans tell them apart; and the limits of `engine`."""
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
            (Tier(self._first, margin * write, margin * read, depth=ALL_BEGUN), *host),
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
        self._drift.observe(differ(self._latest, self._planned, self._tolerated))
        if not self._drift.due(step):
            return False
        self.margin.value = 1.0  # that of other bandwidths
        return True

    def reason(self, step: int) -> str:
        """Why else a plan is due: what it may count on changes with that. Empty: none is."""
        if why := self.margin.changed(step):
            return why
        return WORE if self.wear is not None and self.wear.exceeded(step) else ""

    def requested(self) -> None:
        """A plan is due, for whatever reason."""
        for cause in self._causes:
            cause.requested()

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
        self._searched(step, why, new=new)
        self.margin.planned()
        if self.wear is not None:
            self.wear.planned(bound=bound)
        if not (same and settles):
            self._tolerated = min(MOST_DRIFT, 1.5 * self._tolerated) if same else DRIFT

    def failed(self, step: int, why: str) -> None:
        """No plan was found, and the one of before is followed, with what it counts on. Never with `wear`, whose config has no
        limit that is an error."""
        self._searched(step, why, new=False)
        self.margin.failed()

    def _searched(self, step: int, why: str, *, new: bool) -> None:
        for cause in self._causes:
            cause.searched(step, why, new=new)
        self._planned = self.rates


class ArenaCost:
    """See Note: [An arena that costs more than it gives]."""

    def __init__(self, engine: OffloadEngine) -> None:
        self._engine, self._optional = engine, engine.arena_is_optional
        # Of what a forward saves, at most so far: without an arena it is not known, and plans must not take turns.
        self._share = 0.0

    def counted(self, machine: Machine, chunks: Sequence[Sequence[Block]]) -> Machine:
        """Return the machine with the bytes that the arena takes where something of these blocks leaves."""
        saved = sum(block.saved + block.fixed for blocks in chunks for block in blocks)
        if not self._optional or not saved:
            return machine
        self._share = max(self._share, self._engine.limits().buffers / saved)
        return replace(machine, buffers=round(self._share * saved), buffers_stay=False)

    def planned(self, *, used: bool) -> None:
        """A plan begins, between two steps. `used`: something leaves."""
        if self._optional:
            self._engine.set_arena_in_use(used)
