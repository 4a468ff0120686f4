"""Reference copies of gathered weights, so that ranks gather differences only.

After a step of ZeRO-1 or ZeRO-2 each rank has new weights for its shard, and all others still have the old ones. The difference
is small, and so is its error; weights themselves, quantised anew in every step, cost accuracy (SDP4Bit, arXiv 2410.15526).

Note: [What the others have]
    The owner keeps what the others hold of its shard, the reference: the sum of all differences as they were decoded, not its
    own exact weights. The next difference is taken from the reference, so what one loses is in the next: no error adds up.
    The owner uses the decoded weights as well, so all replicas hold the same bits; its exact weights live on in the optimizer's
    master copy.

Note: [Weights changed by other code]
    A difference is added to what a rank holds, so it must hold what the last gather left. Loaders, averaging and code of the
    user write weights in place, also through `.data`, NumPy and collectives, which move no version counter. So every rank keeps
    sums of the bits of the others' parts, compares them once a step before the first gather, and the ranks of the group agree:
    what changed on any of them is gathered in full by all. Sums are taken along rows and along columns, in wrapping integers:
    any one changed word is found with certainty, as are exchanged rows or blocks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from ssdtrain.comm.collectives import AllReduce
from ssdtrain.comm.meter import Meter

_COLUMNS = 4096

_all_reduce = dist.all_reduce


@dataclass
class _BucketReference:
    reference: Tensor
    group: dist.ProcessGroup
    others: tuple[Tensor, ...] = ()
    """The parts of the gathered tensor that other ranks own."""
    sums: Tensor | None = None
    """Bit sums of `others` after the last gather."""


class References:
    """The references of one rank, by bucket: as large as its shards.

    Args:
        meter: counts what ranks send to agree on changes.
    """

    def __init__(self, meter: Meter) -> None:
        self._meter = meter
        self._kept: dict[str, _BucketReference] = {}
        self._verified: dict[dist.ProcessGroup, int] = {}

    def verify(self, group: dist.ProcessGroup, step: int) -> list[str]:
        """Forget the buckets that changed since their last gather on any rank of `group`; returns which.

        All ranks of the group call it together, before the first gather of a step; later calls of a step do nothing.
        """
        if self._verified.get(group) == step:
            return []
        self._verified[group] = step
        names = [name for name, kept in self._kept.items() if kept.group is group]
        if not names:
            return []
        changed = torch.stack([_changed(self._kept[name]) for name in names]).int()
        _all_reduce(changed, op=dist.ReduceOp.MAX, group=group)
        sent = AllReduce.ring_bytes(changed.nbytes, dist.get_world_size(group))
        self._meter.of("zero_gather").wire_bytes += sent
        stale = [name for name, flag in zip(names, changed.tolist(), strict=True) if flag]
        for name in stale:
            del self._kept[name]
        return stale

    def find(self, name: str, tensor: Tensor) -> Tensor | None:
        """Return the other ranks' copy of this rank's shard, flat [n]; None where it is not known.

        Args:
            tensor: [n]; the shard that is to be gathered.
        """
        kept = self._kept.get(name)
        if kept is None or kept.reference.numel() != tensor.numel() or kept.reference.dtype != tensor.dtype:
            return None
        return kept.reference

    def remember(self, name: str, tensor: Tensor, group: dist.ProcessGroup) -> None:
        """Note that `tensor` is gathered as it is now."""
        self._kept[name] = _BucketReference(tensor.detach().reshape(-1).clone(), group)

    def gathered(self, name: str, out: Tensor, start: int) -> None:
        """Note the end of a gather.

        Args:
            out: flat; all ranks' parts.
            start: of this rank's part in `out`.
        """
        kept = self._kept[name]
        kept.reference.copy_(out[start : start + kept.reference.numel()])
        kept.others = out[:start], out[start + kept.reference.numel() :]
        kept.sums = bit_sums(kept.others)

    def forget(self, name: str) -> None:
        """Let the next gather of this bucket be in full."""
        self._kept.pop(name, None)

    def clear(self) -> None:
        """Let the next gathers be in full."""
        self._kept.clear()


def _changed(kept: _BucketReference) -> Tensor:
    if kept.sums is None:
        return torch.zeros((), dtype=torch.bool, device=kept.reference.device)
    return (bit_sums(kept.others) != kept.sums).any()


def bit_sums(tensors: tuple[Tensor, ...]) -> Tensor:
    """Sum the bits of flat tensors, int64 [a few for each 4096 words of 8 bytes], on their device. See Note: [Weights changed
    by other code]."""
    sums = []
    for tensor in tensors:
        raw = tensor.view(torch.uint8)
        head = min(-raw.storage_offset() % 8, raw.numel())
        words = (raw.numel() - head) // 8
        if words == 0:
            sums.append(raw.long())
            continue
        body = raw[head : head + 8 * words].view(torch.int64)
        rows = words // _COLUMNS
        square = body[: rows * _COLUMNS].view(rows, _COLUMNS)
        sums += [raw[:head].long(), raw[head + 8 * words :].long(), body[rows * _COLUMNS :]]
        sums += [square.sum(0), square.sum(1)]
    return torch.cat(sums)
