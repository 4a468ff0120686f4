"""Gradients of ZeRO-0 to 3: which parameters a bucket holds, and where the excluded ones lie in it."""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from ssdtrain.comm import Bucket, Communicator
from ssdtrain.comm.coding import Ranges, clip
from ssdtrain.comm.exclusion import ranges_in_order
from ssdtrain.integration.patching import Patches
from ssdtrain_ds import _compat, _compat_comm
from ssdtrain_ds.comm.traffic import Traffic, traffic_scope

__all__ = ["wrap_gradients"]

Slice = tuple[int, bool]
"""Elements of one gradient in a flat tensor, and whether they are excluded."""


def interleaved(tensors: Sequence[Slice], numel: int, ranks: int) -> Ranges:
    """Where the excluded ones lie in a tensor of `numel` elements that has each rank's part of all `tensors` behind those of the
    rank before, every tensor padded to the same part on all ranks.

    ZeRO-3 does not write the padding: it goes with the excluded ones, or it would spoil the block that it shares.
    """
    parts = [math.ceil(count / ranks) for count, _ in tensors]
    if ranks * sum(parts) != numel:
        return ((0, numel),)
    slices: list[Slice] = []
    for rank in range(ranks):
        for (count, exact), part in zip(tensors, parts, strict=True):
            filled = min(max(count - rank * part, 0), part)
            slices += [(filled, exact), (part - filled, True)]
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

    def __call__(self, numel: int, group: Any, scattered: bool = False) -> Bucket:
        start, self._at = self._at, self._at + numel
        return Bucket(f"{self._name}@{start}", clip(self._ranges, start, self._at))


def name_of(what: str, numbers: Iterable[int]) -> str:
    """A short name for a list of parameters."""
    return f"{what}-{hashlib.sha1(repr(tuple(numbers)).encode()).hexdigest()[:12]}"


def wrap_gradients(patches: Patches, engine: Any, comm: Communicator, exact: set[torch.nn.Parameter]) -> None:
    """Open a scope of the traffic "dp" around what issues gradient reductions.

    Args:
        exact: excluded parameters.
    """
    excluded = {id(parameter) for parameter in exact}
    # Names hold in a resumed run, too, whatever else the process has made before.
    numbers = {id(parameter): n for n, parameter in enumerate(engine.module.parameters())}
    optimizer, stage = engine.optimizer, _compat.zero_stage(engine)
    lists = functools.partial(_of_lists, optimizer)
    patches.replace(
        engine, "allreduce_bucket", functools.partial(lists, Lists("engine", engine, comm, exact))
    )
    if stage in (1, 2) and hasattr(optimizer, _compat_comm.AVERAGE_TENSOR):
        average = functools.partial(_of_stage_1_and_2, optimizer, comm, excluded, numbers)
        patches.replace(optimizer, _compat_comm.AVERAGE_TENSOR, average)
        bucket = functools.partial(lists, Lists("list", engine, comm, exact))
        patches.replace(optimizer, _compat_comm.ALLREDUCE_BUCKET, bucket)
    elif stage == 3 and hasattr(optimizer, _compat_comm.REDUCE_AND_PARTITION):
        reduce = functools.partial(_of_stage_3, optimizer, comm, excluded, numbers)
        patches.replace(optimizer, _compat_comm.REDUCE_AND_PARTITION, reduce)


class Lists:
    """Names and excluded elements of lists of gradients that do not say whose they are: by address, or where the optimizer keeps
    gradients of its own, by shape and by the place in the order of the step."""

    def __init__(self, name: str, engine: Any, comm: Communicator, exact: set[torch.nn.Parameter]) -> None:
        self._name = name
        self._engine = engine
        self._comm = comm
        self._exact = exact
        self._step = -1
        self._unknown = 0

    def traffic(self, tensors: Sequence[Tensor]) -> Traffic:
        if self._comm.steps != self._step:
            self._step, self._unknown = self._comm.steps, 0
        known = {
            p.grad.data_ptr(): (number, p in self._exact)
            for number, p in enumerate(self._engine.module.parameters())
            if p.grad is not None
        }
        shapes = {parameter.shape for parameter in self._exact}
        found = [known.get(t.data_ptr(), (-1, t.shape in shapes)) for t in tensors]
        numbers = [number for number, _ in found]
        if -1 in numbers:
            self._unknown += 1
            numbers += [self._unknown, *(t.numel() for t in tensors)]
        slices = [(t.numel(), exact) for t, (_, exact) in zip(tensors, found, strict=True)]
        return Traffic(self._comm, "dp", BucketCursor(name_of(self._name, numbers), slices))


def _of_lists(optimizer: Any, lists: Lists, plain: Callable[..., Any]) -> Callable[..., Any]:
    """Of the engine (ZeRO-0, pipelines), and of ZeRO-1 and 2 without contiguous gradients; not inside of `average_tensor`, whose
    traffic is the better one."""

    def allreduce_bucket(bucket: list[Tensor], *args: Any, **kwargs: Any) -> Any:
        if getattr(optimizer, _AVERAGING, False):
            return plain(bucket, *args, **kwargs)
        with traffic_scope(lists.traffic(bucket)):
            return plain(bucket, *args, **kwargs)

    return allreduce_bucket


_AVERAGING = "_ssdtrain_averaging"


def _of_stage_1_and_2(
    optimizer: Any, comm: Communicator, excluded: set[int], numbers: dict[int, int], plain: Callable[..., Any]
) -> Callable[..., Any]:
    def average_tensor(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        parameters = _compat_comm.parameters_of_bucket(optimizer, args)
        cursors: dict[Any, BucketCursor] = {}
        groups: dict[Any, list[tuple[int, Slice]]] = {}
        for parameter, group in parameters:
            groups.setdefault(group, []).append(
                (numbers[id(parameter)], (parameter.numel(), id(parameter) in excluded))
            )
        for group, members in groups.items():
            cursors[group] = BucketCursor(
                name_of("zero", (n for n, _ in members)), [found for _, found in members]
            )
        whole = next(iter(cursors.values())) if len(cursors) == 1 else None

        def bucket(numel: int, group: Any, scattered: bool) -> Bucket:
            return (whole or cursors[group])(numel, group)

        optimizer.__dict__[_AVERAGING] = True
        try:
            with traffic_scope(Traffic(comm, "dp", bucket)):
                return plain(tensor, *args, **kwargs)
        finally:
            del optimizer.__dict__[_AVERAGING]

    return average_tensor


def _of_stage_3(
    optimizer: Any, comm: Communicator, excluded: set[int], numbers: dict[int, int], plain: Callable[..., Any]
) -> Callable[..., Any]:
    def reduce_and_partition(*args: Any, **kwargs: Any) -> Any:
        as_filled = _compat_comm.parameters_of_zero_3_bucket(optimizer, args)
        by_id = sorted(as_filled, key=_compat_comm.zero_id)
        name = name_of("zero3", (numbers[id(p)] for p in by_id))
        whole = BucketCursor(name, [(_compat_comm.zero_numel(p), id(p) in excluded) for p in as_filled])

        def bucket(numel: int, group: Any, scattered: bool) -> Bucket:
            if not scattered:
                return whole(numel, group)
            shares = [(_compat_comm.zero_numel(p), id(p) in excluded) for p in by_id]
            return Bucket(name, interleaved(shares, numel, torch.distributed.get_world_size(group)))

        with traffic_scope(Traffic(comm, "dp", bucket)):
            return plain(*args, **kwargs)

    return reduce_and_partition
