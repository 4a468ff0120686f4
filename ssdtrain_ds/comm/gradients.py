"""Gradients of ZeRO-0 to 3: which parameters a bucket holds, and where the excluded ones lie in it."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from ssdtrain.comm import Bucket, Communicator
from ssdtrain.comm.coding import Ranges, clip
from ssdtrain.comm.exclusion import ranges_in_order
from ssdtrain.integration.patching import Patches
from ssdtrain.integration.traffic import Traffic, current_traffic, in_scope
from ssdtrain_ds import _compat, _compat_comm

Slice = tuple[int, bool]
"""Elements of one gradient in a flat tensor, and whether they are excluded."""


def interleaved_numel(tensors: Sequence[Slice], ranks: int) -> int:
    """Elements of a tensor that holds, rank after rank, the rank's part of all `tensors`."""
    return ranks * sum(math.ceil(count / ranks) for count, _ in tensors)


def interleaved(tensors: Sequence[Slice], numel: int, ranks: int) -> Ranges:
    """Ranges of the excluded elements in a tensor of `numel` elements that holds, rank after rank, the rank's part of all
    `tensors`, each padded to the same size on all ranks.

    ZeRO-3 does not write the padding: it is excluded as well, or it would spoil the codec's block that it is in.
    """
    if interleaved_numel(tensors, ranks) != numel:
        return ((0, numel),)
    parts = [math.ceil(count / ranks) for count, _ in tensors]
    slices: list[Slice] = []
    for rank in range(ranks):
        for (count, uncompressed), part in zip(tensors, parts, strict=True):
            filled = min(max(count - rank * part, 0), part)
            slices += [(filled, uncompressed), (part - filled, True)]
    return ranges_in_order(slices)


class BucketCursor:
    """Buckets for consecutive collectives over a list of gradients: each takes the next elements.

    Args:
        name: of the list, the same in every step for the same gradients.
        slices: what the gradients hold, in order.
    """

    def __init__(self, name: str, slices: Sequence[Slice]) -> None:
        self._name = name
        self._ranges = ranges_in_order(slices)
        self._at = 0

    def __call__(self, numel: int, group: Any, by_rank: bool = False) -> Bucket:
        start, self._at = self._at, self._at + numel
        return Bucket(f"{self._name}@{start}", clip(self._ranges, start, self._at))


def name_of(what: str, numbers: Iterable[int]) -> str:
    """A short name for a list of parameters."""
    return f"{what}-{hashlib.sha1(repr(tuple(numbers)).encode()).hexdigest()[:12]}"


def patch_gradients(
    patches: Patches, engine: Any, comm: Communicator, uncompressed: set[torch.nn.Parameter]
) -> None:
    """Run what issues gradient reductions of `engine` in a scope of the traffic "dp".

    Args:
        uncompressed: parameters excluded from compression.
    """
    optimizer, stage = engine.optimizer, _compat.zero_stage(engine)
    lists = Lists("engine", engine, comm, uncompressed)
    patches.replace(engine, "allreduce_bucket", in_scope(lists.traffic))
    buckets = Buckets(engine, comm, uncompressed)
    if stage in (1, 2) and hasattr(optimizer, _compat_comm.AVERAGE_TENSOR):
        patches.replace(optimizer, _compat_comm.AVERAGE_TENSOR, in_scope(buckets.of_stage_1_and_2))
        lists = Lists("list", engine, comm, uncompressed)
        patches.replace(optimizer, _compat_comm.ALLREDUCE_BUCKET, in_scope(lists.traffic))
    elif stage == 3 and hasattr(optimizer, _compat_comm.REDUCE_AND_PARTITION):
        patches.replace(optimizer, _compat_comm.REDUCE_AND_PARTITION, in_scope(buckets.of_stage_3))


class Lists:
    """Traffic of lists of gradients (ZeRO-0, pipelines, ZeRO-1 and 2 without contiguous gradients), which do not say whose they
    are: found by address, or where the optimizer keeps gradients of its own, by shape and by the place in the order of the step.
    """

    def __init__(
        self, name: str, engine: Any, comm: Communicator, uncompressed: set[torch.nn.Parameter]
    ) -> None:
        self._name = name
        self._engine = engine
        self._comm = comm
        self._uncompressed = uncompressed
        self._step = -1
        self._unknown = 0

    def traffic(self, tensors: Sequence[Tensor], *args: Any, **kwargs: Any) -> Traffic:
        around = current_traffic()
        if around is not None and around.dimension == "dp":
            return around  # inside of `average_tensor`, which knows the parameters
        if self._comm.steps != self._step:
            self._step, self._unknown = self._comm.steps, 0
        known = {
            p.grad.data_ptr(): (number, p in self._uncompressed)
            for number, p in enumerate(self._engine.module.parameters())
            if p.grad is not None and p.grad.layout is torch.strided
        }
        shapes = {parameter.shape for parameter in self._uncompressed}
        found = [known.get(t.data_ptr(), (-1, t.shape in shapes)) for t in tensors]
        numbers = [number for number, _ in found]
        if -1 in numbers:
            self._unknown += 1
            numbers += [self._unknown, *(t.numel() for t in tensors)]
        slices = [(t.numel(), uncompressed) for t, (_, uncompressed) in zip(tensors, found, strict=True)]
        return Traffic(self._comm, "dp", BucketCursor(name_of(self._name, numbers), slices))


class Buckets:
    """Traffic of ZeRO's buckets, whose parameters the optimizer knows."""

    def __init__(self, engine: Any, comm: Communicator, uncompressed: set[torch.nn.Parameter]) -> None:
        self._optimizer = engine.optimizer
        self._comm = comm
        self._uncompressed = {id(parameter) for parameter in uncompressed}
        # Numbers, and so names of buckets, are the same in a resumed run, whatever else the process has made before.
        self._numbers = {id(parameter): n for n, parameter in enumerate(engine.module.parameters())}

    def of_stage_1_and_2(self, tensor: Tensor, *args: Any, **kwargs: Any) -> Traffic:
        """Return the traffic of one call of `average_tensor`: a bucket of each process group."""
        groups: dict[Any, list[torch.nn.Parameter]] = {}
        for parameter, group in _compat_comm.parameters_of_bucket(self._optimizer, args):
            groups.setdefault(group, []).append(parameter)
        cursors = {
            group: BucketCursor(
                name_of("zero", (self._numbers[id(p)] for p in members)),
                [(p.numel(), id(p) in self._uncompressed) for p in members],
            )
            for group, members in groups.items()
        }
        whole = next(iter(cursors.values())) if len(cursors) == 1 else None

        def bucket(numel: int, group: Any, by_rank: bool) -> Bucket:
            return (whole or cursors[group])(numel, group)

        return Traffic(self._comm, "dp", bucket)

    def of_stage_3(self, *args: Any, **kwargs: Any) -> Traffic:
        """Return the traffic of one call that reduces and partitions: whole gradients in the order of filling, or each rank's
        parts."""
        as_filled = _compat_comm.parameters_of_zero_3_bucket(self._optimizer, args)
        by_id = sorted(as_filled, key=_compat_comm.zero_id)
        name = name_of("zero3", (self._numbers[id(p)] for p in by_id))
        whole = BucketCursor(name, self._slices(as_filled))

        def bucket(numel: int, group: Any, by_rank: bool) -> Bucket:
            if not by_rank:
                return whole(numel, group)
            ranks = torch.distributed.get_world_size(group)
            return Bucket(name, interleaved(self._slices(by_id), numel, ranks))

        return Traffic(self._comm, "dp", bucket)

    def _slices(self, parameters: Iterable[torch.nn.Parameter]) -> list[Slice]:
        return [(_compat_comm.zero_numel(p), id(p) in self._uncompressed) for p in parameters]
