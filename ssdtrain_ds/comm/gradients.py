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
from ssdtrain_ds import _compat, _compat_comm
from ssdtrain_ds.comm.roles import Role, taken

__all__ = ["wrap_gradients"]

Slice = tuple[int, bool]
"""Elements of one gradient in a flat tensor, and whether they are excluded."""


def ranges_of(slices: Iterable[Slice]) -> Ranges:
    """Where the excluded ones lie, one behind the other, neighbours joined."""
    found: list[tuple[int, int]] = []
    at = 0
    for numel, exact in slices:
        if exact and numel:
            begin = found.pop()[0] if found and found[-1][1] == at else at
            found.append((begin, at + numel))
        at += numel
    return tuple(found)


class Flow:
    """Buckets for consecutive collectives over a list of gradients: each takes the next elements.

    Args:
        name: of the list, the same in every step for the same gradients.
        slices: what the gradients hold, in order.
    """

    def __init__(self, name: str, slices: Sequence[Slice]) -> None:
        self._name = name
        self._ranges = ranges_of(slices)
        self._at = 0

    def __call__(self, numel: int, group: Any) -> Bucket:
        start, self._at = self._at, self._at + numel
        return Bucket(f"{self._name}@{start}", clip(self._ranges, start, self._at))


def name_of(what: str, numbers: Iterable[int]) -> str:
    """A short name for a list of parameters."""
    return f"{what}-{hashlib.sha1(repr(tuple(numbers)).encode()).hexdigest()[:12]}"


def wrap_gradients(
    engine: Any, comm: Communicator, exact: set[torch.nn.Parameter]
) -> list[tuple[Any, str, Callable[..., Any]]]:
    """(object, attribute, function) of what issues gradient reductions, in the role "dp".

    Args:
        exact: excluded parameters.
    """
    excluded = {id(parameter) for parameter in exact}
    # Names hold in a resumed run, too, whatever else the process has made before.
    numbers = {id(parameter): n for n, parameter in enumerate(engine.module.parameters())}
    found = [(engine, "allreduce_bucket", _of_engine(engine, comm, exact))]
    optimizer = engine.optimizer
    stage = _compat.zero_stage(engine)
    if stage in (1, 2) and hasattr(optimizer, _compat_comm.AVERAGE_TENSOR):
        found.append(
            (optimizer, _compat_comm.AVERAGE_TENSOR, _of_stage_1_and_2(optimizer, comm, excluded, numbers))
        )
        found.append((optimizer, _compat_comm.ALLREDUCE_BUCKET, _of_lists(engine, optimizer, comm, exact)))
    elif stage == 3 and hasattr(optimizer, _compat_comm.REDUCE_AND_PARTITION):
        found.append(
            (optimizer, _compat_comm.REDUCE_AND_PARTITION, _of_stage_3(optimizer, comm, excluded, numbers))
        )
    return found


def _slices_of_tensors(engine: Any, tensors: Sequence[Tensor], exact: set[torch.nn.Parameter]) -> list[Slice]:
    """For a list of gradients that does not say whose they are: by address, or by shape where the optimizer keeps gradients of
    its own."""
    known = {p.grad.data_ptr(): p in exact for p in engine.module.parameters() if p.grad is not None}
    shapes = {parameter.shape for parameter in exact}
    return [(t.numel(), known.get(t.data_ptr(), t.shape in shapes)) for t in tensors]


def _of_engine(engine: Any, comm: Communicator, exact: set[torch.nn.Parameter]) -> Callable[..., Any]:
    plain = engine.allreduce_bucket

    @functools.wraps(plain)
    def allreduce_bucket(bucket: list[Tensor], *args: Any, **kwargs: Any) -> Any:
        flow = Flow(name_of("engine", (t.numel() for t in bucket)), _slices_of_tensors(engine, bucket, exact))
        with taken(Role(comm, "dp", flow)):
            return plain(bucket, *args, **kwargs)

    return allreduce_bucket


def _of_lists(
    engine: Any, optimizer: Any, comm: Communicator, exact: set[torch.nn.Parameter]
) -> Callable[..., Any]:
    """Of ZeRO-1 and 2 without contiguous gradients, and inside of `average_tensor`, whose role is the better one."""
    plain = getattr(optimizer, _compat_comm.ALLREDUCE_BUCKET)

    @functools.wraps(plain)
    def allreduce_bucket(bucket: list[Tensor], *args: Any, **kwargs: Any) -> Any:
        if optimizer.__dict__.get(_AVERAGING):
            return plain(bucket, *args, **kwargs)
        flow = Flow(name_of("list", (t.numel() for t in bucket)), _slices_of_tensors(engine, bucket, exact))
        with taken(Role(comm, "dp", flow)):
            return plain(bucket, *args, **kwargs)

    return allreduce_bucket


_AVERAGING = "_ssdtrain_averaging"


def _of_stage_1_and_2(
    optimizer: Any, comm: Communicator, excluded: set[int], numbers: dict[int, int]
) -> Callable[..., Any]:
    plain = getattr(optimizer, _compat_comm.AVERAGE_TENSOR)

    @functools.wraps(plain)
    def average_tensor(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        parameters = _compat_comm.parameters_of_bucket(optimizer, args)
        flows: dict[Any, Flow] = {}
        groups: dict[Any, list[tuple[int, Slice]]] = {}
        for parameter, group in parameters:
            groups.setdefault(group, []).append(
                (numbers[id(parameter)], (parameter.numel(), id(parameter) in excluded))
            )
        for group, members in groups.items():
            flows[group] = Flow(name_of("zero", (n for n, _ in members)), [found for _, found in members])
        whole = next(iter(flows.values())) if len(flows) == 1 else None

        def bucket(numel: int, group: Any) -> Bucket:
            return (whole or flows[group])(numel, group)

        optimizer.__dict__[_AVERAGING] = True
        try:
            with taken(Role(comm, "dp", bucket)):
                return plain(tensor, *args, **kwargs)
        finally:
            del optimizer.__dict__[_AVERAGING]

    return average_tensor


def _of_stage_3(
    optimizer: Any, comm: Communicator, excluded: set[int], numbers: dict[int, int]
) -> Callable[..., Any]:
    plain = getattr(optimizer, _compat_comm.REDUCE_AND_PARTITION)

    @functools.wraps(plain)
    def reduce_and_partition(*args: Any, **kwargs: Any) -> Any:
        parameters = sorted(
            _compat_comm.parameters_of_zero_3_bucket(optimizer, args), key=_compat_comm.zero_id
        )
        name = name_of("zero3", (numbers[id(p)] for p in parameters))
        whole = Flow(name, [(_compat_comm.zero_numel(p), id(p) in excluded) for p in parameters])
        gradients = sum(_compat_comm.zero_numel(p) for p in parameters)

        def bucket(numel: int, group: Any) -> Bucket:
            ranks = torch.distributed.get_world_size(group)
            shares = [(math.ceil(_compat_comm.zero_numel(p) / ranks), id(p) in excluded) for p in parameters]
            if numel == ranks * sum(share for share, _ in shares) and not _compat_comm.reduces_whole(
                optimizer
            ):
                # Reduce-scattered: each rank's parts of all gradients lie together.
                return Bucket(name, ranges_of(shares * ranks))
            assert numel <= gradients
            return whole(numel, group)

        with taken(Role(comm, "dp", bucket)):
            return plain(*args, **kwargs)

    return reduce_and_partition
