"""When each region of a tape was saved and needed, by timestamps of the device at the begin and end of every
hook.

Between the end of one hook and the begin of the next a device computes for the model; between a hook's begin
and its end it waits for transfers (what the hook queued into its stream, or the host that was blocked), or runs a
codec, whose time is known by its price. So
computation and stalls are distinguished without blocking the host: timestamps are read when the device has
passed them. Where the host computes itself, a hook takes its time whether it waits or not: what it waited and
what it spent on stores is then known from the host (`HostTime`), and the rest is computation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any, NamedTuple, Protocol
from weakref import WeakKeyDictionary


class RecordedTimestamp(Protocol):
    """A moment of a device, with seconds once the device has passed it."""

    def seconds(self) -> float | None: ...


class _Aside:
    """Time that was spent aside until some moment: from `began` to `ended`, and before."""

    def __init__(self, before: _Aside | None, began: RecordedTimestamp, ended: RecordedTimestamp) -> None:
        self._before, self._began, self._ended = before, began, ended
        self._total: float | None = None

    def seconds(self) -> float | None:
        """Return the seconds in all; None: the device has not come to the end."""
        if self._ended.seconds() is None:
            return None
        chain: list[_Aside] = []
        one: _Aside | None = self
        while one is not None and one._total is None:
            chain.append(one)
            one = one._before
        total = 0.0 if one is None or one._total is None else one._total
        for one in reversed(chain):
            total += passed_at(one._ended) - passed_at(one._began)
            one._total, one._before = total, None
        return total


class _WithoutAside:
    """A timestamp of a clock that stands still while something runs aside."""

    def __init__(self, plain: RecordedTimestamp, aside: _Aside) -> None:
        self.plain, self._aside = plain, aside

    def seconds(self) -> float | None:
        plain, aside = self.plain.seconds(), self._aside.seconds()
        return None if plain is None or aside is None else plain - aside


class _RecordedRegion(Protocol):
    @property
    def name(self) -> str: ...
    @property
    def stays(self) -> bool: ...
    @property
    def operator(self) -> int: ...


class _RecordedTape(Protocol):
    chunk: int
    nbytes: int

    @property
    def regions(self) -> Sequence[_RecordedRegion | None]: ...


class HostTime(NamedTuple):
    """Seconds that transfers took of the host's time, since some moment."""

    store_wait: float = 0.0
    """Waited for stores."""
    load_wait: float = 0.0
    """Waited for loads."""
    storing: float = 0.0
    """Spent on beginning stores, without waits."""

    def since(self, before: HostTime) -> HostTime:
        return HostTime(*(now - then for now, then in zip(self, before, strict=True)))


class RegionTimes(NamedTuple):
    """A region of a tape. Seconds of the device."""

    nbytes: int
    name: str
    """Name of the module that saved it, or of its place on the tape."""
    forward: float
    """Computed between the region before and this one."""
    backward: float
    """Computed between its use and that of the next region (the one saved before)."""
    store_stall: float
    """Waited for stores in the hook that saved it."""
    load_stall: float
    """Waited in the hook that brought it back."""
    stays: bool = False
    """No plan may move it."""
    operator: int = -1
    """Number of the operator that saved it; -1: not known."""
    storing: float = 0.0
    """Spent on beginning stores, in the hook that saved it: on a device that the host is not, on encoding."""
    loading: float = 0.0
    """Spent in the hooks of its use, where it came from a tier, without waits: on a device that the host is not, on decoding."""


class TapeTimes(NamedTuple):
    """A forward, and the backward if it came."""

    serial: int
    chunk: int
    regions: tuple[RegionTimes, ...]
    used: bool
    """Backward has used it."""


class PassTimes(NamedTuple):
    """A forward or backward as it ran, and its hooks. Seconds of the device."""

    kind: str
    """"forward" or "backward"."""
    chunk: int
    began: float
    ended: float
    hooks: tuple[tuple[str, float, float], ...]
    """(name of the region, begin, end): in forward of hooks that made a region, in backward of all."""


class _Made(NamedTuple):
    """A region, as `RegionTimes` has it."""

    name: str = ""
    stays: bool = False
    operator: int = -1


_NONE = _Made()


class _Hook(NamedTuple):
    """Record of a tensor that was saved."""

    regions: int
    """Number of regions on the tape so far."""
    total: int
    """Bytes of these."""
    made: _Made
    began: RecordedTimestamp
    ended: RecordedTimestamp
    spent: HostTime | None
    coded: float
    """Seconds that the device encoded and decoded."""


class _Use(NamedTuple):
    """Record of the use of a saved tensor."""

    region: int
    """Its position on the tape."""
    began: RecordedTimestamp
    ended: RecordedTimestamp
    spent: HostTime | None
    coded: float
    """Seconds that the device encoded and decoded."""
    from_tier: bool


class _RecordedPass:
    def __init__(self, serial: int, chunk: int) -> None:
        self.serial, self.chunk = serial, chunk
        self.hooks: list[_Hook] = []
        self.uses: list[_Use] = []
        self.began: RecordedTimestamp | None = None
        self.saved: RecordedTimestamp | None = None  # the end of its forward
        self.ended: RecordedTimestamp | None = None  # the end of its backward

    def timestamps(self) -> Iterator[RecordedTimestamp]:
        """Iterate over all that `times` reads, the last ones first."""
        yield from filter(None, (self.ended, self.saved, self.began))
        hooks: tuple[Sequence[_Use | _Hook], ...] = (self.uses, self.hooks)
        for one in chain.from_iterable(map(reversed, hooks)):
            yield one.ended
            yield one.began

    def times(self) -> TapeTimes:
        """Raises TypeError where the device has not come to its end: ask `StepRecord.passed` first."""
        forward, nbytes, made, stored, storing = self._forward()
        backward, loaded, loading = self._backward(len(nbytes))
        regions = tuple(
            RegionTimes(size, one.name, before, after, store, load, one.stays, one.operator, begun, brought)
            for size, one, before, after, store, load, begun, brought in zip(
                nbytes, made, forward, backward, stored, loaded, storing, loading, strict=True
            )
        )
        return TapeTimes(self.serial, self.chunk, regions, bool(self.uses))

    def passes(self) -> Iterator[PassTimes]:
        """Iterate over what `times` lists."""
        made: list[tuple[str, float, float]] = []
        for hook in self.hooks:
            if hook.regions > len(made):
                made.append((hook.made.name, _ran_at(hook.began), _ran_at(hook.ended)))
        if self.began is not None and self.saved is not None:
            yield PassTimes("forward", self.chunk, _ran_at(self.began), _ran_at(self.saved), tuple(made))
        used = [
            (made[use.region][0], _ran_at(use.began), _ran_at(use.ended))
            for use in self.uses
            if use.region < len(made)
        ]
        if used:
            last = used[-1][2] if self.ended is None else max(used[-1][2], _ran_at(self.ended))
            yield PassTimes("backward", self.chunk, used[0][1], last, tuple(used))

    def _forward(self) -> tuple[list[float], list[int], list[_Made], list[float], list[float]]:
        seconds: list[float] = []
        storing: list[float] = []
        nbytes: list[int] = []
        made: list[_Made] = []
        stalls: list[float] = []
        before = passed_at(self.began) if self.began is not None else None
        computed = waited = stored = 0.0
        known = 0
        for hook in self.hooks:
            if before is not None:
                computed += max(0.0, passed_at(hook.began) - before)
            before = passed_at(hook.ended)
            inside = before - passed_at(hook.began)
            if hook.spent is None:
                coded = min(inside, hook.coded)
                waited += inside - coded
                stored += coded
            else:
                waited += hook.spent.store_wait
                stored += hook.spent.storing
                computed += max(0.0, inside - hook.spent.store_wait - hook.spent.storing)
            if hook.regions > len(nbytes):
                seconds.append(computed)
                nbytes.append(hook.total - known)
                made.append(hook.made)
                stalls.append(waited)
                storing.append(stored)
                computed = waited = stored = 0.0
                known = hook.total
        return seconds, nbytes, made, stalls, storing

    def _backward(self, count: int) -> tuple[list[float], list[float], list[float]]:
        seconds, stalls, loading = [0.0] * count, [0.0] * count, [0.0] * count
        for number, use in enumerate(self.uses):
            index = use.region
            if index >= count:
                continue
            inside = passed_at(use.ended) - passed_at(use.began)
            if use.spent is None:
                coded = min(inside, use.coded)
                stalls[index] += inside - coded
                loading[index] += coded
            else:
                waited = use.spent.load_wait
                stalls[index] += waited
                (loading if use.from_tier else seconds)[index] += max(0.0, inside - waited)
            last = number + 1 == len(self.uses)
            after = self.ended if last else self.uses[number + 1].began
            if after is not None:
                seconds[index] += max(0.0, passed_at(after) - passed_at(use.ended))
        return seconds, stalls, loading


def _is_passed(one: _RecordedPass) -> bool:
    return all(timestamp.seconds() is not None for timestamp in one.timestamps())


def passed_at(timestamp: RecordedTimestamp) -> float:
    """Return the seconds of a timestamp that the device has passed."""
    seconds = timestamp.seconds()
    if seconds is None:
        raise TypeError("the device has not come to this timestamp")
    return seconds


def _ran_at(timestamp: RecordedTimestamp) -> float:
    """Return the time of the device itself."""
    return passed_at(timestamp.plain if isinstance(timestamp, _WithoutAside) else timestamp)


class StepRecord:
    """The passes of one step, in the order in which they began."""

    def __init__(self) -> None:
        self.order: list[tuple[str, int, int]] = []
        """("forward" or "backward", serial number of the tape, chunk)"""
        self._passes: list[_RecordedPass] = []
        self._last: RecordedTimestamp | None = None

    def passed(self) -> bool:
        """The device has come to the end of the step, on each of its streams."""
        # The last one first: it is nearly always the last of all, and asking for it costs little.
        return self._last is None or (self._last.seconds() is not None and all(map(_is_passed, self._passes)))

    def passes(self) -> list[PassTimes]:
        """The passes, after `passed`."""
        return [times for one in self._passes for times in one.passes()]

    def tapes(self) -> Sequence[TapeTimes]:
        """The forwards, after `passed`."""
        return [one.times() for one in self._passes]


class PassRecorder:
    """Collects timestamps while somebody asks for them. The engine calls it on the threads that train. Each user has a record of
    its own: what one of them takes is still there for the others.

    Args:
        host: what transfers took of the host's time so far, where the host computes; None: a device does.
        coded: seconds that codecs took of the device so far.
    """

    def __init__(
        self, host: Callable[[], HostTime] | None = None, coded: Callable[[], float] = lambda: 0.0
    ) -> None:
        self._host, self._spent = host, HostTime()
        self._coded, self._coded_before = coded, 0.0
        self.active = False
        # Another one with each user that comes or goes: threads that run forward or backward walk it meanwhile.
        self._records: dict[str, StepRecord] = {}
        self._stopped: dict[str, StepRecord] = {}
        self._serial = 0
        self._passes: WeakKeyDictionary[Any, _RecordedPass] = WeakKeyDictionary()
        self._current: _RecordedPass | None = None  # whose backward runs
        self._aside: _Aside | None = None

    def request(self, user: str, on: bool) -> None:
        """`user` needs what is recorded from now on, or does not any more; `active` while anyone does. What it has not taken is
        dropped."""
        self._stopped.pop(user, None)
        if not on:
            self._without(user)
        elif user not in self._records:
            self._records = {**self._records, user: StepRecord()}
        self.active = bool(self._records)

    def stop(self, user: str) -> None:
        """No more is recorded for `user`, who may still take what was."""
        record = self._records.get(user)
        if record is not None:
            self._stopped[user] = record
        self._without(user)
        self.active = bool(self._records)

    def _without(self, user: str) -> None:
        self._records = {other: record for other, record in self._records.items() if other != user}

    def aside(self, began: RecordedTimestamp, ended: RecordedTimestamp) -> None:
        """Something ran that is none of the model's computation: passes do not count its time."""
        self._aside = _Aside(self._aside, began, ended)

    def clock(self, now: RecordedTimestamp) -> RecordedTimestamp:
        """Return the timestamp without what ran aside so far."""
        return now if self._aside is None else _WithoutAside(now, self._aside)

    def forward_began(self, tape: _RecordedTape, now: RecordedTimestamp) -> None:
        self._host_time()  # what was spent before the forward is none of its hooks'
        self._coded_time()
        self._serial += 1
        found = self._passes[tape] = _RecordedPass(self._serial, tape.chunk)
        found.began = self.clock(now)
        for record in self._records.values():
            record._passes.append(found)
        self._add("forward", found)
        self._reached(now)

    def forward_ended(self, tape: _RecordedTape, now: RecordedTimestamp) -> None:
        found = self._passes.get(tape)
        if found is not None:
            found.saved = self.clock(now)
            self._reached(now)

    def packed(self, tape: _RecordedTape, began: RecordedTimestamp, ended: RecordedTimestamp) -> None:
        """A tensor was saved, in a region of its own or not."""
        found, spent, coded = self._passes.get(tape), self._host_time(), self._coded_time()
        if found is not None:
            count, made = len(tape.regions), _NONE
            region = tape.regions[-1] if count > (found.hooks[-1].regions if found.hooks else 0) else None
            if region is not None:  # else there is no new one, or it was released meanwhile
                made = _Made(region.name, region.stays, region.operator)
            found.hooks.append(
                _Hook(count, tape.nbytes, made, self.clock(began), self.clock(ended), spent, coded)
            )
            self._reached(ended)

    def unpacked(
        self,
        tape: _RecordedTape,
        index: int,
        began: RecordedTimestamp,
        ended: RecordedTimestamp,
        *,
        from_tier: bool = False,
    ) -> None:
        """Backward was handed a saved tensor of region `index`, which came `from_tier` or was in memory all the time."""
        found, spent, coded = self._passes.get(tape), self._host_time(), self._coded_time()
        if found is None:
            return
        if not found.uses:
            self._add("backward", found)
        self._current = found
        found.uses.append(_Use(index, self.clock(began), self.clock(ended), spent, coded, from_tier))
        self._reached(ended)

    def last_packed(self, tape: _RecordedTape) -> RecordedTimestamp | None:
        """The end of the hook that last saved a tensor of `tape`."""
        found = self._passes.get(tape)
        return found.hooks[-1].ended if found is not None and found.hooks else None

    def serial(self, tape: _RecordedTape) -> int | None:
        """The serial number of `tape`; None: it is not recorded."""
        found = self._passes.get(tape)
        return found.serial if found is not None else None

    def backward_ended(self, now: RecordedTimestamp) -> None:
        """The backward that ran last is over."""
        current, self._current = self._current, None
        if current is not None:
            current.ended = self.clock(now)
            self._reached(now)

    def take(self, user: str = "plan") -> StepRecord:
        """What was recorded for `user` since it asked, or since the last call; empty where it has not asked."""
        taken = self._records.get(user)
        if taken is None:
            return self._stopped.pop(user, None) or StepRecord()
        self._records[user] = StepRecord()
        return taken

    def _host_time(self) -> HostTime | None:
        """Since the last call."""
        if self._host is None:
            return None
        before, self._spent = self._spent, self._host()
        return self._spent.since(before)

    def _coded_time(self) -> float:
        """Since the last call."""
        before, self._coded_before = self._coded_before, self._coded()
        return self._coded_before - before

    def _add(self, kind: str, one: _RecordedPass) -> None:
        for record in self._records.values():
            record.order.append((kind, one.serial, one.chunk))

    def _reached(self, now: RecordedTimestamp) -> None:
        for record in self._records.values():
            record._last = now
