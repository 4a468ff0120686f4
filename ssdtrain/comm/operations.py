"""Whole tensors cut into pieces: small enough that coding one hides behind the messages of those before."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ssdtrain.comm import algorithms
from ssdtrain.comm.algorithms import Call, Piece
from ssdtrain.comm.coding import Ranges, clip, spans
from ssdtrain.comm.work import Steps

# Pieces are cut at multiples of this, so that no block of a codec straddles two.
GRAIN = 256
# Bytes of a tensor that stand for all of it where time is measured.
SAMPLE = 32 << 20

# Taken before anybody replaces the module's attributes.
_all_reduce = dist.all_reduce
# Newer torch has other names for these two and warns of these.
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def pieces(kind: str, call: Call, values: Tensor, into: Tensor, exact: Ranges, chunk: int) -> list[Steps]:
    """The steps of one collective.

    Args:
        kind: "all_reduce", "reduce_scatter" or "all_gather".
        values: flat; for an all-reduce the same as `into`.
        into: flat.
        exact: elements of the whole tensor that are excluded.
        chunk: bytes of the whole tensor that make a piece.
    """
    return list({"all_reduce": _reduced, "reduce_scatter": _scattered, "all_gather": _gathered}[kind](
        call, values, into, exact, chunk
    ))  # fmt: skip


def _reduced(call: Call, values: Tensor, into: Tensor, exact: Ranges, chunk: int) -> Iterator[Steps]:
    ranks = call.topology.size
    for n, (start, stop) in enumerate(_spans(values, 1, chunk)):
        share = -(-(stop - start) // ranks // GRAIN) * GRAIN
        cuts = [min(start + i * share, stop) for i in range(ranks)] + [stop]
        yield algorithms.all_reduce(
            call, [Piece(values[a:b], clip(exact, a, b)) for a, b in pairwise(cuts)], str(n)
        )


def _scattered(call: Call, values: Tensor, into: Tensor, exact: Ranges, chunk: int) -> Iterator[Steps]:
    for n, (a, b) in enumerate(_spans(into, call.topology.size, chunk)):
        yield algorithms.reduce_scatter_into(
            call, into[a:b], _everywhere(values, into.numel(), a, b, exact), str(n)
        )


def _gathered(call: Call, values: Tensor, into: Tensor, exact: Ranges, chunk: int) -> Iterator[Steps]:
    for n, (a, b) in enumerate(_spans(values, call.topology.size, chunk)):
        outs = _everywhere(into, values.numel(), a, b, exact)
        yield algorithms.all_gather(call, Piece(values[a:b], outs[call.topology.rank].exact), outs, str(n))


def _everywhere(whole: Tensor, share: int, a: int, b: int, exact: Ranges) -> list[Piece]:
    """Elements a to b of each rank's share."""
    starts = range(0, whole.numel(), share) if share else ()
    return [Piece(whole[i + a : i + b], clip(exact, i + a, i + b)) for i in starts]


def _spans(tensor: Tensor, parts: int, chunk: int) -> Iterator[tuple[int, int]]:
    step = chunk // tensor.element_size() // parts
    return spans(tensor.numel(), max(GRAIN, step // GRAIN * GRAIN))


def samples(kind: str, values: Tensor, into: Tensor, ranks: int) -> tuple[Tensor, Tensor]:
    """Copies of the start of (values, into) in the right proportion, to measure on."""
    whole = SAMPLE // values.element_size()
    if kind == "all_reduce":
        copy = values[:whole].clone()
        return copy, copy
    if kind == "reduce_scatter":
        share = min(into.numel(), whole // ranks)
        return values[: share * ranks].clone(), torch.empty_like(into[:share])
    share = min(values.numel(), whole // ranks)
    return values[:share].clone(), torch.empty_like(into[: share * ranks])


def plain(kind: str, values: Tensor, into: Tensor, group: dist.ProcessGroup, op: Any) -> None:
    """torch's own collective of that kind."""
    if kind == "all_reduce":
        _all_reduce(values, op=op, group=group)
    elif kind == "reduce_scatter":
        _reduce_scatter(into, values, op=op, group=group)
    else:
        _all_gather(into, values, group=group)
