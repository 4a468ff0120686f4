"""Reduce-scatter, all-gather and all-to-all of payloads.

A reduce-scatter is an all-to-all of payloads, one message for each peer, summed in float32 by the owner of the shard; an
all-reduce is a reduce-scatter and an all-gather. Nothing is quantised again on its way, except a node's sum before it goes to
the other nodes, and the whole sum before it is gathered. What is gathered is decoded by its owner as well, so that all ranks hold
the same bits.

Payloads with an exact section may overflow; then elements follow (see `overflow`). Every rank waits for them at the same place of
an algorithm, whether any come or not, so that the order of messages is the same on all ranks.

Functions are `MessageSteps` (see `work`): they yield the messages that they wait for. Tensors are flat; a "piece" is a contiguous
part of one, small enough that its coding hides behind the messages of the pieces before it.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ssdtrain.codecs import Key
from ssdtrain.codecs.base import Pieces
from ssdtrain.comm.coding import Coder, TensorPiece
from ssdtrain.comm.feedback import Feedback
from ssdtrain.comm.meter import CommMetrics
from ssdtrain.comm.overflow import (
    OVERFLOWED,
    Followed,
    Kind,
    Overflows,
    PayloadName,
    PayloadPath,
    ReceivedPayload,
    SentPayload,
)
from ssdtrain.comm.topology import Topology
from ssdtrain.comm.work import MessageSteps

# Taken before anybody replaces the module's attributes.
_all_to_all = dist.all_to_all_single
# Newer torch has another name for it and warns of this one.
plain_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

# Payloads of unequal size are padded for an all-gather if that adds no more than this.
_PADDING = 1.02


@dataclass(frozen=True)
class Coders:
    """Coders within a node and between nodes."""

    inside: Coder
    between: Coder


class ArrivedPayload(NamedTuple):
    """A payload that came from another rank, or would have come from this one."""

    coder: Coder
    piece: TensorPiece
    """A piece of the shape of the one that was encoded."""
    payload: Tensor
    what: str
    """Names the payload on its sender."""
    known: Mapping[int, Tensor] = {}
    """Elements of exact sections, by number, that are not decoded from the payload; see `ExactSections.decode`."""

    def decode(self, out: TensorPiece, accumulate: bool = False) -> None:
        self.coder.decode(self.payload, out, accumulate, self.known)


@dataclass
class Call:
    """State shared by the pieces of one call."""

    topology: Topology
    scatter: Coders
    gather: Coder
    metrics: CommMetrics
    name: str
    """Names the residuals and the random numbers; the same in every step for the same gradients."""
    key: Key
    collective: str = ""
    """Second part of the residuals' name: another collective cuts a bucket into other pieces."""
    average: bool = False
    feedback: Feedback | None = None
    measured: bool = False
    errors: list[Tensor] = field(default_factory=list)
    """Relative error of each encoded piece, where error feedback measures it."""
    overflows: Overflows | None = None
    """Needed where a coder has an exact section."""
    kind: Kind = ()
    number: int = 0
    """Number of this call among those of its kind."""
    rests: bool = False
    """Whether a message of this rank goes uncompressed after an overflow."""

    def coder(self, coder: Coder, sender: int, receiver: int | None = None) -> Coder:
        """Return `coder` for payloads from a group rank to another, or to all: without exact sections where some have overflowed
        lately, which both know."""
        if self.overflows is None or not self.overflows.happened:
            return coder
        if not coder.may_overflow or not self.overflows.rests(self._path(sender, receiver), self.number):
            return coder
        if sender == self.topology.rank and not self.rests:
            self.rests = True
            self.metrics.fallbacks[OVERFLOWED] += 1
        return coder.without_exact

    def sent(
        self, coder: Coder, piece: TensorPiece, payload: Tensor, what: str, receiver: int | None = None
    ) -> list[SentPayload]:
        """Return what `Overflows.owe` has to know of a payload that this rank sends; nothing if it cannot overflow."""
        exact = coder.exact(piece)
        if exact is None:
            return []
        where = self.topology
        others = (
            [rank for rank in range(where.size) if rank != where.rank] if receiver is None else [receiver]
        )
        name = PayloadName(self._path(where.rank, receiver), self.number, what)
        flags, elements = coder.overflow_flags(payload, piece), partial(coder.exact_elements, piece)
        receivers = [where.ranks[rank] for rank in others]
        return [SentPayload(name, flags, exact.behind, elements, receivers)]

    def owe(self, payloads: list[SentPayload]) -> None:
        """Send the elements of those of `payloads` that overflowed."""
        if payloads:
            assert self.overflows is not None
            self.overflows.owe(payloads, self.metrics)

    def followed(
        self,
        coder: Coder,
        arrivals: dict[Any, ArrivedPayload],
        sender: Callable[[Any], int],
        receiver: int | None,
    ) -> Generator[Any, None, None]:
        """Receive what follows `arrivals`. Whether there is a wait depends on `coder` alone, as on all ranks.

        Args:
            coder: of the message, before `self.coder`.
            sender: returns the group rank that an arrival comes from, by its key.
            receiver: this rank; None: the payloads went to all.
        """
        if not coder.may_overflow:
            return
        assert self.overflows is not None
        expected: dict[Any, ReceivedPayload] = {}
        device = next(arrival.payload.device for arrival in arrivals.values())
        for key, (each, piece, payload, what, _) in arrivals.items():
            if (exact := each.exact(piece)) is not None:
                name = PayloadName(self._path(sender(key), receiver), self.number, what)
                flags = each.overflow_flags(payload, piece)
                expected[key] = ReceivedPayload(name, flags, exact.behind, exact.dtype)
        yield (followed := Followed(self.overflows, expected, device))
        for key, arrival in arrivals.items():
            arrivals[key] = arrival._replace(known=followed.sections(key))

    def _path(self, sender: int, receiver: int | None) -> PayloadPath:
        ranks = self.topology.ranks
        return PayloadPath(self.kind, ranks[sender], None if receiver is None else ranks[receiver])

    def encode(self, coder: Coder, piece: TensorPiece, out: Tensor, what: str) -> None:
        """Write the payload of `piece` to `out`, with feedback where there is one and the codec loses anything."""
        name, key = self._keyed(what)
        if self.feedback is None or not coder.loses(piece):
            coder.encode(piece, out, key)
            return
        error = self.feedback.encode(f"{self.collective}|{name}", coder, piece, out, key, self.measured)
        if error is not None:
            self.errors.append(error)

    def encode_for_peers(
        self, coder: Coder, outgoing: Sequence[Sequence[TensorPiece]], index: int, packed: Tensor, what: str
    ) -> bool:
        """Write the payloads of all peers, without this rank's own (`index`), to `packed` at once. False: encode them one by
        one, because they differ in size, do not lie at equal distances, or no kernel does it."""
        if self.feedback is not None or any(len(pieces) != 1 for pieces in outgoing):
            return False
        pieces = [piece for (piece,) in outgoing]
        first = pieces[0].values
        stride = pieces[1].values.data_ptr() - first.data_ptr()
        if stride % first.element_size() or not coder.encodes(pieces[0]):
            return False
        for i, (values, uncompressed_ranges, reference) in enumerate(pieces):
            alike = values.numel() == first.numel() and values.dtype == first.dtype
            if not alike or uncompressed_ranges or reference is not None:
                return False
            if values.data_ptr() != first.data_ptr() + i * stride:
                return False
        peers = len(pieces) - 1
        places = Pieces(peers, stride // first.element_size(), packed.numel() // peers, index)
        return coder.encode_pieces(first, packed, places, self._keyed(what)[1])

    def _keyed(self, what: str) -> tuple[str, Key]:
        name = f"{self.name}|{what}"
        return name, self.key._replace(tensor=zlib.crc32(name.encode()))


def reduce_scatter(call: Call, shards: Sequence[TensorPiece], part: str) -> Generator[Any, None, Tensor]:
    """Sum the shard that this rank owns over ranks; returns float32 [numel].

    Args:
        shards: by group rank, the same sizes on all ranks.
        part: names this piece among those of the call.
    """
    where = call.topology
    column = [shards[rank] for rank in where.columns[where.place]]
    sums = [piece.values.to(torch.float32, copy=True) for piece in column]
    if where.inside is not None:
        arrived = yield from _exchange(
            call, call.scatter.inside, where.inside, where.place, where.grid[where.node],
            [[shards[i] for i in ranks] for ranks in where.columns], column,
            [[f"{part}|in|{i}" for i in ranks] for ranks in where.columns],
        )  # fmt: skip
        for arrivals in arrived:
            for arrival, piece, total in zip(arrivals, column, sums, strict=True):
                arrival.decode(piece._replace(values=total), accumulate=True)
    total = sums[where.node]
    if where.between is not None:
        outgoing = [[piece._replace(values=values)] for values, piece in zip(sums, column, strict=True)]
        mine = outgoing[where.node]
        arrived = yield from _exchange(
            call, call.scatter.between, where.between, where.node, where.columns[where.place], outgoing, mine,
            [[f"{part}|out|{row[where.place]}"] for row in where.grid],
        )  # fmt: skip
        for (arrival,) in arrived:
            arrival.decode(mine[0], accumulate=True)
    return total.div_(where.size) if call.average else total


def all_gather(call: Call, mine: TensorPiece, outs: Sequence[TensorPiece], part: str) -> MessageSteps:
    """Gather every rank's piece in `outs` [by group rank], this one's included.

    Args:
        mine: what this rank contributes; may share memory with its place in `outs`. With a reference, all of `outs` have one.
    """
    where, what = call.topology, f"{part}|gather"
    coders = [call.coder(call.gather, rank) for rank in range(where.size)]
    own = coders[where.rank]
    sizes = [coder.nbytes(piece) for coder, piece in zip(coders, outs, strict=True)]
    payload = torch.empty(sizes[where.rank], dtype=torch.uint8, device=mine.values.device)
    call.encode(own, mine, payload, what)
    call.owe(call.sent(own, mine, payload, what))
    column = [payload]
    if where.between is not None:
        column = yield from _gather(
            call, payload, [sizes[rank] for rank in where.columns[where.place]], where.node, where.between
        )
    rows = {where.place: column}
    if where.inside is not None:
        by_place = [[sizes[rank] for rank in ranks] for ranks in where.columns]
        packed = column[0] if len(column) == 1 else torch.cat(column)
        arrived = yield from _gather(
            call, packed, [sum(each) for each in by_place], where.place, where.inside
        )
        rows = {place: list(column.split(by_place[place])) for place, column in enumerate(arrived)}
    arrivals = {
        rank: ArrivedPayload(coders[rank], outs[rank], received, what)
        for place, payloads in rows.items()
        for rank, received in zip(where.columns[place], payloads, strict=True)
    }
    decoded = arrivals.pop(where.rank)._replace(known=own.known_sections(mine))
    yield from call.followed(call.gather, arrivals, sender=int, receiver=None)
    for rank, arrival in (arrivals | {where.rank: decoded}).items():
        arrival.decode(outs[rank])


def sum_of_two(call: Call, values: Tensor, part: str) -> MessageSteps:
    """Sum `values` of two ranks, in place, by gathering both: as many bytes as two halves of an all-reduce, in one message. The
    sum of two has one order, so it is that of any other algorithm."""
    both = values.new_empty(2, values.numel())
    outs = [TensorPiece(row) for row in both]
    yield from all_gather(call, TensorPiece(values), outs, part)
    torch.add(both[0], both[1], out=values)


def all_to_all(
    call: Call,
    incoming: Sequence[Tensor],
    outgoing: Sequence[Tensor],
    coders: Sequence[Coder],
    min_bytes: int,
    part: str,
) -> MessageSteps:
    """Send `outgoing[i]` to group rank i, whose `incoming` takes it; the own one is copied.

    Args:
        coders: by group rank: one for each pair of ranks, the same on both sides.
        min_bytes: smaller messages are uncompressed.
    """
    where = call.topology

    def coded(
        tensors: Sequence[Tensor], of_peer: Callable[[Coder, int], Coder]
    ) -> tuple[list[tuple[Coder, TensorPiece]], list[int]]:
        """Return how each tensor is coded, and its bytes: none for this rank's own."""
        pieces = [
            (
                replace(coder, codec=None) if values.nbytes < min_bytes else of_peer(coder, peer),
                TensorPiece(values),
            )
            for peer, (coder, values) in enumerate(zip(coders, tensors, strict=True))
        ]
        return pieces, [
            0 if i == where.rank else coder.nbytes(piece) for i, (coder, piece) in enumerate(pieces)
        ]

    to, sends = coded(outgoing, lambda coder, peer: call.coder(coder, where.rank, peer))
    by, receives = coded(incoming, lambda coder, peer: call.coder(coder, peer, where.rank))
    packed = torch.empty(sum(sends), dtype=torch.uint8, device=outgoing[where.rank].device)
    sent: list[SentPayload] = []
    for i, ((coder, piece), place) in enumerate(zip(to, packed.split(sends), strict=True)):
        if i != where.rank:
            call.encode(coder, piece, place, f"{part}|to|{i}")
            sent += call.sent(coder, piece, place, f"{part}|to|{i}", i)
    call.owe(sent)
    incoming[where.rank].copy_(outgoing[where.rank])
    arrived = yield from _swap(call, packed, sends, receives, where.group)
    arrivals = {
        i: ArrivedPayload(coder, piece, place, f"{part}|to|{where.rank}")
        for i, ((coder, piece), place) in enumerate(zip(by, arrived, strict=True))
        if i != where.rank
    }
    coder = next((coder for coder in coders if coder.may_overflow), coders[where.rank])
    yield from call.followed(coder, arrivals, sender=int, receiver=where.rank)
    for i, arrival in arrivals.items():
        arrival.decode(by[i][1])


def reduce_scatter_bytes(where: Topology, inside: Sequence[int], between: Sequence[int]) -> list[int]:
    """Return the bytes that each group rank sends in `reduce_scatter`.

    Args:
        inside: payload bytes of each rank's shard on the hop inside nodes.
        between: the same, between nodes.
    """
    sent = [0] * where.size
    of_places = [sum(inside[rank] for rank in column) for column in where.columns]
    for place, column in enumerate(where.columns):
        total = sum(between[rank] for rank in column)
        for rank in column:
            # To the other places of this node, and to this place of the other nodes.
            sent[rank] = sum(of_places) - of_places[place] + total - between[rank]
    return sent


def all_gather_bytes(where: Topology, sizes: Sequence[int]) -> list[int]:
    """Return the bytes that each group rank sends in `all_gather`.

    Args:
        sizes: payload bytes of each rank's piece.
    """
    sent = [0] * where.size
    of_places = _gather_bytes([sum(sizes[rank] for rank in column) for column in where.columns])
    for column, inside in zip(where.columns, of_places, strict=True):
        for rank, between in zip(column, _gather_bytes([sizes[rank] for rank in column]), strict=True):
            sent[rank] = inside + between
    return sent


def _gather_bytes(sizes: Sequence[int]) -> list[int]:
    """Return the bytes that each rank sends in `_gather`."""
    if _is_padded(sizes):
        return [max(sizes) * (len(sizes) - 1)] * len(sizes)
    return [size * (len(sizes) - 1) for size in sizes]


def _is_padded(sizes: Sequence[int]) -> bool:
    return max(sizes) * len(sizes) <= _PADDING * sum(sizes)


def _swap(
    call: Call, packed: Tensor, sends: list[int], receives: list[int], group: dist.ProcessGroup
) -> Generator[Any, None, list[Tensor]]:
    """Send each peer its bytes of `packed`; returns what comes from each."""
    arrived = torch.empty(sum(receives), dtype=torch.uint8, device=packed.device)
    work = _all_to_all(arrived, packed, receives, sends, group=group, async_op=True)
    call.metrics.wire_bytes += packed.numel()
    yield work
    return list(arrived.split(receives))


def _exchange(
    call: Call,
    coder: Coder,
    group: dist.ProcessGroup,
    index: int,
    ranks: Sequence[int],
    outgoing: Sequence[Sequence[TensorPiece]],
    incoming: Sequence[TensorPiece],
    names: Sequence[Sequence[str]],
) -> Generator[Any, None, list[list[ArrivedPayload]]]:
    """Send one message to each peer: the payloads of `outgoing[peer]`, one behind the other. What peers send has the shapes of
    `incoming`. Returns the payloads of each peer, without this rank's own.

    Args:
        index: of this rank among the peers.
        ranks: of the peers in the group of the call.
        names: of the payloads to each peer.
    """
    own = ranks[index]
    to = [call.coder(coder, own, rank) for rank in ranks]
    by = [call.coder(coder, rank, own) for rank in ranks]
    sizes = [[each.nbytes(piece) for piece in pieces] for each, pieces in zip(to, outgoing, strict=True)]
    sizes[index] = []
    sends = [sum(payloads) for payloads in sizes]
    messages = [[each.nbytes(piece) for piece in incoming] for each in by]
    messages[index] = []
    packed = torch.empty(sum(sends), dtype=torch.uint8, device=incoming[0].values.device)
    alike = all(each is coder for each in to)
    at_once = alike and call.encode_for_peers(coder, outgoing, index, packed, names[0][0])
    sent: list[SentPayload] = []
    for peer, place in enumerate(packed.split(sends)):
        if peer == index:
            continue
        for piece, name, out in zip(outgoing[peer], names[peer], place.split(sizes[peer]), strict=True):
            if not at_once:
                call.encode(to[peer], piece, out, name)
            sent += call.sent(to[peer], piece, out, name, ranks[peer])
    call.owe(sent)
    received = yield from _swap(call, packed, sends, [sum(message) for message in messages], group)
    arrivals = {
        (peer, i): ArrivedPayload(by[peer], incoming[i], payload, names[index][i])
        for peer, (message, place) in enumerate(zip(messages, received, strict=True))
        for i, payload in enumerate(place.split(message))
        if peer != index
    }
    yield from call.followed(coder, arrivals, sender=lambda key: ranks[key[0]], receiver=own)
    peers = [peer for peer in range(len(ranks)) if peer != index]
    return [[arrivals[peer, i] for i in range(len(incoming))] for peer in peers]


def _gather(
    call: Call, mine: Tensor, sizes: Sequence[int], index: int, group: dist.ProcessGroup
) -> Generator[Any, None, list[Tensor]]:
    """Gather the payloads of all ranks of `group`."""
    count, largest = len(sizes), max(sizes)
    if largest == 0:
        return [mine] * count
    if _is_padded(sizes):
        if mine.numel() < largest:
            padded = torch.zeros(largest, dtype=torch.uint8, device=mine.device)
            padded[: mine.numel()].copy_(mine)
        else:
            padded = mine
        out = torch.empty(largest * count, dtype=torch.uint8, device=mine.device)
        work = plain_all_gather(out, padded, group=group, async_op=True)
        call.metrics.wire_bytes += largest * (count - 1)
        yield work
        return [payload[:size] for payload, size in zip(out.split(largest), sizes, strict=True)]
    sends = [0 if peer == index else mine.numel() for peer in range(count)]
    receives = [0 if peer == index else size for peer, size in enumerate(sizes)]
    payloads = yield from _swap(call, mine.repeat(count - 1), sends, receives, group)
    payloads[index] = mine
    return payloads
