"""Collectives as objects: each owns its tensors, cuts them into pieces, and computes what it sends and what the plain one sends.

To add a collective: a class here with its ring bytes, its pieces, its plain form and a sample to measure on; and a verb of
`Communicator` that makes one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from ssdtrain.comm import algorithms
from ssdtrain.comm.algorithms import Call, plain_all_gather
from ssdtrain.comm.coding import Ranges, TensorPiece, clip
from ssdtrain.comm.work import MessageSteps

# Pieces are cut at multiples of this, so that no block of a codec straddles two.
GRAIN = 256
# Bytes of a tensor that stand for all of it where time is measured.
SAMPLE = 32 << 20
# What a message of a few bytes takes on a network with headers and acknowledgement (gloo over TCP: 95 bytes a packet).
SMALL_MESSAGE = 128

# Taken before anybody replaces the module's attributes.
_all_reduce = dist.all_reduce
# Newer torch has another name for it and warns of this one.
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

Parts = list[tuple[int, int]]
"""(start, stop) in the whole tensor of each rank's part of one piece."""


class Collective(ABC):
    """One call: what is sent, and how."""

    name: ClassVar[str]
    """Name in messages."""
    scatters: ClassVar[bool] = False
    """Whether it has a reduction: then a call without a codec is the framework's own, whose order of summation differs."""
    gathers: ClassVar[bool] = False
    """Whether results go from their owners to all ranks."""
    op: Any = dist.ReduceOp.SUM
    dtype: torch.dtype
    nbytes: int | None
    """Bytes of the whole tensor; None where ranks send different sizes, and each message is looked at by itself."""

    def fits(self, ranks: int) -> bool:
        """Return whether dtypes and sizes of the tensors fit each other. If not, the plain one raises an error."""
        return len({tensor.dtype for tensor in self.tensors}) == 1

    @abstractmethod
    def raw_bytes(self, ranks: int) -> int:
        """Return the bytes that the plain one sends from this rank."""

    @abstractmethod
    def steps(self, call: Call, chunk: int) -> list[MessageSteps]:
        """Return the messages of this call.

        Args:
            chunk: bytes of the whole tensor that make a piece.
        """

    @property
    @abstractmethod
    def tensors(self) -> tuple[Tensor, ...]:
        """Tensors that must live until the call is over."""


class Sharded(Collective):
    """A collective on one flat tensor of which each rank owns a part.

    Args:
        values: flat; what this rank contributes.
        into: flat; takes the result. May share memory with `values`.
        uncompressed_ranges: elements of the whole tensor that are excluded.
    """

    def __init__(
        self, values: Tensor, into: Tensor, uncompressed_ranges: Ranges = (), op: Any = dist.ReduceOp.SUM
    ) -> None:
        self.values = values
        self.into = into
        self.uncompressed_ranges = uncompressed_ranges
        self.op = op
        self.dtype = self.whole.dtype
        self.nbytes: int = self.whole.nbytes

    @property
    def whole(self) -> Tensor:
        """The one of the two tensors that holds all ranks' parts."""
        return self.values if self.scatters else self.into

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.values, self.into

    def fits(self, ranks: int) -> bool:
        part = self.into if self.scatters else self.values
        return super().fits(ranks) and ranks * part.numel() == self.whole.numel()

    @classmethod
    def ring_bytes(cls, nbytes: int, ranks: int) -> int:
        """Return the bytes that one rank sends in a ring of `ranks` for a whole tensor of `nbytes`: (N-1)/N in each half."""
        return (cls.scatters + cls.gathers) * (ranks - 1) * nbytes // ranks

    def raw_bytes(self, ranks: int) -> int:
        return self.ring_bytes(self.nbytes, ranks)

    @property
    def sizes(self) -> tuple[object, ...]:
        """All that `wire_bytes` depends on beside the call."""
        return type(self), self.whole.numel(), self.dtype, self.uncompressed_ranges

    def parts(self, ranks: int, chunk: int) -> Iterator[Parts]:
        """Yield the parts of each piece, by group rank."""
        share = self.whole.numel() // ranks
        for a, b in _spans(share, chunk // self.dtype.itemsize // ranks):
            yield [(rank * share + a, rank * share + b) for rank in range(ranks)]

    def steps(self, call: Call, chunk: int) -> list[MessageSteps]:
        pieces = enumerate(self.parts(call.topology.size, chunk))
        return [self._piece(call, parts, str(n)) for n, parts in pieces]

    @abstractmethod
    def _piece(self, call: Call, parts: Parts, part: str) -> MessageSteps:
        """Return the steps of one piece."""

    def wire_bytes(self, call: Call, chunk: int) -> list[int]:
        """Return the bytes each group rank sends in `steps`, from sizes alone, so that all ranks find the same."""
        total = [0] * call.topology.size
        for parts in self.parts(call.topology.size, chunk):
            pieces = self._pieces(parts)
            halves: list[list[int]] = []
            if self.scatters:
                hops = (
                    [coder.nbytes(piece) for piece in pieces]
                    for coder in (call.scatter.inside, call.scatter.between)
                )
                halves.append(algorithms.reduce_scatter_bytes(call.topology, *hops))
            if self.gathers:
                payloads = [call.gather.nbytes(piece) for piece in pieces]
                halves.append(algorithms.all_gather_bytes(call.topology, payloads))
            total = [sum(sent) for sent in zip(total, *halves, strict=True)]
        return total

    def agreement_bytes(self, ranks: int) -> int:
        """Return the most bytes a rank sends so that all agree on the call; the plain one sends none."""
        return 0

    @abstractmethod
    def plain(self, group: dist.ProcessGroup, async_op: bool = False) -> dist.Work | None:
        """Run torch's own collective, to its end unless `async_op`."""

    def sample(self, ranks: int) -> Sharded:
        """Return the same on copies of the start of the tensors, in proportion."""
        share = -(-min(self.whole.numel(), SAMPLE // self.dtype.itemsize) // ranks)
        values, into = (
            tensor[: share * ranks if tensor is self.whole else share].clone()
            for tensor in (self.values, self.into)
        )
        return type(self)(values, values if self.into is self.values else into, (), self.op)

    def _pieces(self, parts: Parts) -> list[TensorPiece]:
        return [TensorPiece(self.whole[a:b], clip(self.uncompressed_ranges, a, b)) for a, b in parts]


class AllReduce(Sharded):
    """The sum of `values` over ranks, in place: `into` is the same tensor."""

    name = "all_reduce"
    scatters = gathers = True

    def fits(self, ranks: int) -> bool:
        return True  # one tensor

    def parts(self, ranks: int, chunk: int) -> Iterator[Parts]:
        for start, stop in _spans(self.values.numel(), chunk // self.dtype.itemsize):
            share = -(-(stop - start) // ranks // GRAIN) * GRAIN
            yield list(pairwise([min(start + i * share, stop) for i in range(ranks)] + [stop]))

    def _piece(self, call: Call, parts: Parts, part: str) -> MessageSteps:
        if _is_exact(call):
            yield from algorithms.sum_of_two(call, self.values[parts[0][0] : parts[-1][1]], part)
            return
        shards = self._pieces(parts)
        total = yield from algorithms.reduce_scatter(call, shards, part)
        own = shards[call.topology.rank]
        yield from algorithms.all_gather(call, own._replace(values=total), shards, part)

    def wire_bytes(self, call: Call, chunk: int) -> list[int]:
        if not _is_exact(call):
            return super().wire_bytes(call, chunk)
        pieces = (TensorPiece(self.values[p[0][0] : p[-1][1]]) for p in self.parts(2, chunk))
        return [sum(call.gather.nbytes(piece) for piece in pieces)] * 2

    def plain(self, group: dist.ProcessGroup, async_op: bool = False) -> dist.Work | None:
        return _all_reduce(self.values, op=self.op, group=group, async_op=async_op)


class ReduceScatter(Sharded):
    """The sum of `values` [ranks x n] over ranks; each gets its part of it in `into` [n]."""

    name = "reduce_scatter"
    scatters = True

    def _piece(self, call: Call, parts: Parts, part: str) -> MessageSteps:
        total = yield from algorithms.reduce_scatter(call, self._pieces(parts), part)
        self.into[slice(*parts[0])].copy_(total)

    def plain(self, group: dist.ProcessGroup, async_op: bool = False) -> dist.Work | None:
        return _reduce_scatter(self.into, self.values, op=self.op, group=group, async_op=async_op)


class AllGather(Sharded):
    """Every rank's `values` [n] in `into` [ranks x n]."""

    name = "all_gather"
    gathers = True

    def _piece(self, call: Call, parts: Parts, part: str) -> MessageSteps:
        (a, b), outs = parts[0], self._pieces(parts)
        mine = outs[call.topology.rank]._replace(values=self.values[a:b])
        return algorithms.all_gather(call, mine, outs, part)

    def plain(self, group: dist.ProcessGroup, async_op: bool = False) -> dist.Work | None:
        return plain_all_gather(self.into, self.values, group=group, async_op=async_op)


class DeltaAllGather(AllGather):
    """`AllGather` of what changed since the last one. See `references`.

    Args:
        reference: flat [n]: what all ranks have of this rank's `values`; the new ones at the end of the call. None: not known
            yet, and only the bytes are asked for.
    """

    def __init__(
        self, values: Tensor, into: Tensor, uncompressed_ranges: Ranges, reference: Tensor | None = None
    ) -> None:
        super().__init__(values, into, uncompressed_ranges)
        self.reference = reference

    def agreement_bytes(self, ranks: int) -> int:
        """Charged in full to each gather, though the gathers of a step share it."""
        return 2 * (ranks - 1) * SMALL_MESSAGE

    def sample(self, ranks: int) -> Sharded:
        return AllGather(self.values, self.into).sample(ranks)

    def _piece(self, call: Call, parts: Parts, part: str) -> MessageSteps:
        assert self.reference is not None
        (a, b), rank = parts[0], call.topology.rank
        outs = [out._replace(reference=out.values) for out in self._pieces(parts)]
        outs[rank] = outs[rank]._replace(reference=self.reference[a:b])
        return algorithms.all_gather(call, outs[rank]._replace(values=self.values[a:b]), outs, part)


class AllToAll(Collective):
    """Parts of one tensor to each rank, and as many back, of any sizes.

    Args:
        incoming: flat, by group rank.
        outgoing: flat, by group rank.
        min_bytes: smaller messages are uncompressed.
    """

    name = "all_to_all"
    nbytes = None

    def __init__(
        self, incoming: Sequence[Tensor], outgoing: Sequence[Tensor], own: int, min_bytes: int
    ) -> None:
        self.incoming = incoming
        self.outgoing = outgoing
        self.own = own
        self.min_bytes = min_bytes
        self.dtype = outgoing[own].dtype

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return *self.incoming, *self.outgoing

    def raw_bytes(self, ranks: int) -> int:
        return sum(part.nbytes for rank, part in enumerate(self.outgoing) if rank != self.own)

    def steps(self, call: Call, chunk: int) -> list[MessageSteps]:
        """Return one message to each rank: coded where its payload is smaller, which both sides know from its size."""
        coders, nodes = call.scatter, call.topology.nodes
        of_peers = [coders.inside if node == nodes[self.own] else coders.between for node in nodes]
        return [algorithms.all_to_all(call, self.incoming, self.outgoing, of_peers, self.min_bytes, "0")]


def _is_exact(call: Call) -> bool:
    """Return whether all messages of a sum are exact: then it is one of two ranks."""
    where, scatter = call.topology, call.scatter
    halves = scatter.between if where.inside is None else scatter.inside, call.gather
    return where.size == 2 and all(coder.is_exact for coder in halves)


def _spans(total: int, step: int) -> Iterator[tuple[int, int]]:
    """Cut [0, total) at about every `step`."""
    step = max(GRAIN, step // GRAIN * GRAIN)
    for start in range(0, total, step):
        yield start, min(start + step, total)


def flattened(tensor: Tensor) -> tuple[Tensor, Callable[[], Any] | None]:
    """Return `tensor` as a vector; where that is a copy, also what writes it back."""
    flat = tensor.detach().contiguous().view(-1)
    if flat.data_ptr() == tensor.data_ptr():
        return flat, None
    return flat, lambda: tensor.detach().copy_(flat.view(tensor.shape))
