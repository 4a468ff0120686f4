"""Exact payloads that did not fit: their elements travel without a codec.

Note: [Elements follow]
    The payload of an exact codec has a fixed size, and a tensor whose exponents lie far apart does not fit in it. So a payload
    has sections with a header each. One that does not fit says so there, and has its first elements as they are in place of what
    would be decoded. Its sender sends the others to each rank that gets the payload, and a receiver that finds flags receives
    them, in one message for each payload: all together what a message without a codec has, and a header for each section. Both
    know all they need from this one payload: no other rank takes part, however many there are, and where nothing overflows there
    is no second message. These messages go between host memories, with a tag that both ends derive from the call. So they meet no
    other message, and the order of collectives on the device's own groups is the same on all ranks, with and without them.

Note: [The host reads flags]
    On a GPU flags are copied to pinned memory behind the message, and the host reads them where the caller waits for the call;
    what comes after a message (decoding, the second half of an all-reduce) is issued there, on the caller's stream: on the
    communication stream it would be behind messages of later calls. Elements are copied by a stream of their own, which nothing
    else makes wait.

Note: [What is owed is sent first]
    A receiver blocks until its peer has sent. Before that, it sends all that it owes itself, also of calls that it has not waited
    for: its own flags need no message of a peer. So no two ranks wait for each other's elements.

Note: [Rest after an overflow]
    What overflows often costs time, and saves nothing. After a payload of which more than `TOLERATED` did not fit, the next 4
    messages of its kind between the same ranks go uncompressed. If the first one after such a rest does not fit either, the next
    rest is 4 times as long, up to `MOST_RESTS` times. What was under way meanwhile says nothing more: overflows of fewer than
    `LAG` calls after the first one are one failure. Sender and receiver both know all that are `LAG` or more calls ago, because
    no more calls of a kind are under way, and decide by these alone.
"""

from __future__ import annotations

import zlib
from bisect import bisect_right, insort
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import reduce
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ssdtrain.comm.meter import CommMetrics

LAG = 16
"""Number of calls of a kind that may be under way; another one waits for the oldest."""
TOLERATED = 1 / 8
"""Share of a payload's sections that may not fit and cost no rest: about what the codec saves."""
MOST_RESTS = 6
"""Number of rests in a row after which they get no longer: 4096 calls."""
MOST_SENT = 256
"""Number of messages with elements that may be under way, before the oldest is waited for."""
OVERFLOWED = "the codec exact did not fit lately"
"""Reason of calls that go uncompressed after an overflow."""

# Taken before anybody replaces the module's attributes.
_send, _receive = dist.isend, dist.irecv

Kind = tuple[object, ...]
"""Names messages that are alike, in strings and numbers; the same on all their ranks."""


class PayloadPath(NamedTuple):
    """The ranks that messages of a kind go between."""

    kind: Kind
    sender: int
    """Global rank."""
    receiver: int | None
    """Global rank; None: all ranks of the call."""


class PayloadName(NamedTuple):
    """Identifies an exact payload, on the sender and on its receivers."""

    path: PayloadPath
    number: int
    """Number of the call among those of its kind."""
    what: str
    """Names the payload among those of the call."""

    @property
    def tag(self) -> int:
        """Tag of the message with the elements."""
        return 1 << 30 | zlib.crc32(repr(self).encode()) & (1 << 30) - 1


class SentPayload(NamedTuple):
    """A payload that this rank sends."""

    name: PayloadName
    flags: Sequence[Tensor]
    """uint8 [1] of each section, of its header."""
    behind: Sequence[slice]
    """Elements of each section that follow where it does not fit."""
    elements: Callable[[], Tensor]
    """Returns what was encoded, flat; it stays as it is until the caller has waited."""
    receivers: Sequence[int]
    """Global ranks."""


class ReceivedPayload(NamedTuple):
    """A payload that came from another rank."""

    name: PayloadName
    flags: Sequence[Tensor]
    """uint8 [1] of each section, of its header."""
    behind: Sequence[slice]
    """Elements of each section that follow where it does not fit."""
    dtype: torch.dtype


class HostFlags:
    """Flags of payloads, at least one, that the host reads later. See Note: [The host reads flags]."""

    def __init__(self, payloads: Sequence[SentPayload | ReceivedPayload]) -> None:
        self._counts = [len(payload.flags) for payload in payloads]
        values = torch.cat([flag for payload in payloads for flag in payload.flags])
        self._event: torch.cuda.Event | None = None
        if values.is_cuda:
            values, on_device = torch.empty_like(values, device="cpu", pin_memory=True), values
            values.copy_(on_device, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()
        self._values = values

    @property
    def on_host(self) -> bool:
        """Whether `read` does not wait."""
        return self._event is None

    def read(self) -> list[list[int]]:
        """Wait for the flags, and return the numbers of the sections that did not fit, by payload."""
        if self._event is not None:
            self._event.synchronize()
        return [part.nonzero().view(-1).tolist() for part in self._values.split(self._counts)]


class Overflows:
    """Sends and receives the elements of payloads that overflowed. One for all calls of a communicator.

    The constructor is a collective call of all ranks where no group of all ranks has messages in host memory.
    """

    def __init__(self) -> None:
        self._group = _group_in_host_memory()
        self._owed: deque[tuple[HostFlags, Sequence[SentPayload], CommMetrics]] = deque()
        self._sent: deque[tuple[Any, Tensor]] = deque()
        self._copying: torch.cuda.Stream | None = None
        self._numbers: Counter[Kind] = Counter()
        self._under_way: defaultdict[Kind, deque[Any]] = defaultdict(deque)
        self._overflowed: defaultdict[PayloadPath, list[int]] = defaultdict(list)
        self._settled: dict[PayloadPath, RestState] = {}  # from calls before those in `_overflowed`

    def number(self, kind: Kind) -> int:
        """Count a call that is about to begin; returns its number among those of its kind."""
        under_way = self._under_way[kind]
        while under_way and (under_way[0].done or len(under_way) >= LAG):
            work = under_way.popleft()
            if not work.done:
                work.wait()
        self._numbers[kind] += 1
        return self._numbers[kind]

    def began(self, kind: Kind, work: Any) -> None:
        """Note the handle of a call that was counted."""
        self._under_way[kind].append(work)

    @property
    def happened(self) -> bool:
        """Whether any messages may rest."""
        return bool(self._overflowed)

    def rests(self, path: PayloadPath, number: int) -> bool:
        """Return whether a message goes uncompressed. See Note: [Rest after an overflow]."""
        overflowed = self._overflowed.get(path, ())
        known = overflowed[: bisect_right(overflowed, number - LAG)]
        rest = reduce(_followed, known, self._settled.get(path))
        return rest is not None and number - LAG - rest.last < 4**rest.times

    def owe(self, payloads: Sequence[SentPayload], metrics: CommMetrics) -> None:
        """Send the elements of sections of `payloads` that did not fit: now, or on a device when the host reads flags.

        Args:
            metrics: counts them.
        """
        if payloads:
            flags = HostFlags(payloads)
            self._owed.append((flags, payloads, metrics))
            if flags.on_host:
                self.settle()

    def settle(self) -> None:
        """Send all elements that are owed. Waits for nothing but this rank's own encoding."""
        while self._owed:
            flags, payloads, metrics = self._owed.popleft()
            for payload, overflowed in zip(payloads, flags.read(), strict=True):
                if not overflowed:
                    continue
                self._note(payload, overflowed)
                values = self._on_host(payload, overflowed)
                metrics.overflows += len(overflowed)
                metrics.wire_bytes += values.nbytes * len(payload.receivers)
                for receiver in payload.receivers:
                    work = _send(values, receiver, group=self._group, tag=payload.name.tag)
                    self._sent.append((work, values))
        while len(self._sent) > MOST_SENT:
            self._sent.popleft()[0].wait()

    def receive(self, payload: ReceivedPayload, overflowed: list[int]) -> dict[int, Tensor]:
        """Return what follows of sections that did not fit, on their device, by the number of the section."""
        if not overflowed:
            return {}
        self.settle()
        self._note(payload, overflowed)
        device = payload.flags[0].device
        counts = [_count(payload.behind[number]) for number in overflowed]
        values = torch.empty(sum(counts), dtype=payload.dtype, device="cpu", pin_memory=device.type == "cuda")
        sender = payload.name.path.sender
        work = _receive(values, sender, group=self._group, tag=payload.name.tag)
        assert work is not None  # both ranks are in the group of all ranks
        work.wait()
        on_device = values.to(device, non_blocking=True)
        return dict(zip(overflowed, on_device.split(counts), strict=True))

    def complete(self) -> None:
        """Wait until all that was owed has arrived. Receivers have to have waited for their calls."""
        self.settle()
        while self._sent:
            self._sent.popleft()[0].wait()

    def _on_host(self, payload: SentPayload, overflowed: list[int]) -> Tensor:
        """Return what follows of some sections, one behind the other."""
        device = payload.flags[0].device
        if device.type == "cuda" and self._copying is None:
            self._copying = torch.cuda.Stream(device)
        # On a device they are there: their flags have been read.
        with nullcontext() if self._copying is None else torch.cuda.stream(self._copying):
            elements = payload.elements().detach()
            return torch.cat([elements[payload.behind[number]] for number in overflowed]).cpu()

    def _note(self, payload: SentPayload | ReceivedPayload, overflowed: list[int]) -> None:
        if len(overflowed) <= TOLERATED * len(payload.flags):
            return
        known, number = self._overflowed[payload.name.path], payload.name.number
        if number not in known:  # a call may have several payloads
            insort(known, number)
            # No call so old is under way on any rank, so that all ranks settle the same.
            while known[0] <= number - 2 * LAG:
                self._settled[payload.name.path] = _followed(
                    self._settled.get(payload.name.path), known.pop(0)
                )


class RestState(NamedTuple):
    """The latest failure of messages between the same ranks, as overflows of calls tell it, in their order."""

    first: int
    """Number of the first call of the failure."""
    last: int
    """Number of its last call."""
    times: int
    """Number of rests in a row, this one counted: it has 4 to the power of it calls."""


def _followed(rest: RestState | None, number: int) -> RestState:
    """Return what `rest` is after the call `number` did not fit either. See Note: [Rest after an overflow]."""
    if rest is None:
        return RestState(number, number, 1)
    if number < rest.first + LAG:
        return rest._replace(last=number)
    # It was tried although the failure was known.
    again = number <= rest.last + LAG + 4**rest.times
    return RestState(number, number, min(rest.times + 1, MOST_RESTS) if again else 1)


def _count(section: slice) -> int:
    return int(section.stop - section.start)


class Followed:
    """What follows the payloads of one message; an algorithm yields it after the message.

    Args:
        payloads: by a key of the caller's.
        device: of the payloads; the host reads flags of a GPU where the caller waits for the call.
    """

    def __init__(
        self, overflows: Overflows, payloads: dict[Any, ReceivedPayload], device: torch.device
    ) -> None:
        self._overflows = overflows
        self._payloads = payloads
        self._flags = HostFlags(list(payloads.values())) if payloads else None
        self._sections: dict[Any, dict[int, Tensor]] = {}
        self.blocks_host = device.type != "cpu"

    def wait(self) -> None:
        """Read the flags, and receive what follows."""
        self._overflows.settle()
        flags = [] if self._flags is None else self._flags.read()
        for (key, payload), overflowed in zip(self._payloads.items(), flags, strict=True):
            self._sections[key] = self._overflows.receive(payload, overflowed)

    def sections(self, key: Any) -> dict[int, Tensor]:
        """Return the last elements of sections that did not fit, by the number of the section."""
        return self._sections.get(key, {})


def _group_in_host_memory() -> dist.ProcessGroup:
    """Return a group of all ranks for tensors in host memory.

    Raises:
        RuntimeError: gloo cannot make one.
    """
    world = dist.group.WORLD
    assert world is not None, "torch.distributed is not initialised"
    if "cpu:gloo" in dist.get_backend_config(world):
        return world
    try:
        group = dist.new_group(backend="gloo")
    except (RuntimeError, ValueError) as error:
        raise RuntimeError(
            f"comm: the codec exact needs a gloo group of all ranks, and gloo made none ({error}): set GLOO_SOCKET_IFNAME, or "
            'leave "exact" out of the section ("excluded": "raw" in the presets balanced and aggressive)'
        ) from error
    assert group is not None
    return group
