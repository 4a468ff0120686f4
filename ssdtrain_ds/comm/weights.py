"""Weights that ranks gather: of ZeRO-1 and 2 after a step, of ZeRO-3 before a module uses them.

Note: [Only while training]
    ZeRO-3 gathers weights for checkpoints and for the user, too (`GatheredParameters`); those are uncompressed. Only what the
    coordinator fetches for a module's forward or backward is in a traffic scope.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from ssdtrain.comm import Bucket, Communicator
from ssdtrain.integration.patching import Patches, run_inside
from ssdtrain.integration.traffic import Traffic, current_traffic, in_scope, traffic_scope
from ssdtrain_ds import _compat, _compat_comm
from ssdtrain_ds.comm.gradients import Slice, interleaved, interleaved_numel

_stepping: ContextVar[tuple[Communicator, set[torch.nn.Parameter]] | None] = ContextVar(
    "ssdtrain_stepping", default=None
)


def patch_gathering(patches: Patches) -> None:
    """Compress what optimizers gather inside of a step of an engine that compresses; outside of one nothing changes."""
    for module in _compat_comm.modules_that_gather():
        patches.replace(module, _compat_comm.GATHER_GROUPS, _all_gather_dp_groups)


def patch_weights(
    patches: Patches, engine: Any, comm: Communicator, uncompressed: set[torch.nn.Parameter]
) -> None:
    """Compress the weights that ranks gather for training.

    Args:
        uncompressed: parameters excluded from compression.
    """
    stage = _compat.zero_stage(engine)
    if stage in (1, 2):
        patches.replace(engine.optimizer, "step", run_inside(lambda *_, **__: _gathering(comm, uncompressed)))
    coordinator = _compat_comm.coordinator_of(engine)
    if stage == 3 and coordinator is not None:
        # Uncompressed until it is known what is gathered.
        unknown = Traffic(comm, "zero_gather", lambda numel, group, by_rank: Bucket("weights", ((0, numel),)))
        patches.replace(coordinator, _compat_comm.FETCH, in_scope(lambda *args, **kwargs: unknown))
        one_by_one = _compat_comm.gathers_one_by_one(engine)
        some = functools.partial(_gathering_some, {id(parameter) for parameter in uncompressed}, one_by_one)
        for parameter in engine.module.parameters():
            if hasattr(parameter, _compat_comm.GATHER_PARAMETERS):
                patches.replace(parameter, _compat_comm.GATHER_PARAMETERS, some)


def _gathering_some(excluded: set[int], one_by_one: bool, plain: Callable[..., Any]) -> Callable[..., Any]:
    def all_gather_coalesced(params: Any, *args: Any, **kwargs: Any) -> Any:
        traffic = current_traffic()
        if traffic is None or traffic.dimension != "zero_gather":
            return plain(params, *args, **kwargs)
        params = list(params)
        shares = [
            (_compat_comm.zero_numel(p), id(p) in excluded) for p in sorted(params, key=_compat_comm.zero_id)
        ]
        with traffic_scope(Traffic(traffic.comm, "zero_gather", _GatheredWeights(shares, one_by_one))):
            return plain(params, *args, **kwargs)

    return all_gather_coalesced


class _GatheredWeights:
    """Buckets of the collectives that gather the weights of one fetch.

    Args:
        shares: the weights, in the order in which they are gathered.
        one_by_one: each by a collective of its own.
    """

    def __init__(self, shares: Sequence[Slice], one_by_one: bool) -> None:
        self._left = [[share] for share in shares] if one_by_one else [list(shares)]

    def __call__(self, numel: int, group: Any, by_rank: bool) -> Bucket:
        ranks = torch.distributed.get_world_size(group)
        if by_rank and self._left and interleaved_numel(self._left[0], ranks) == numel:
            return Bucket("weights", interleaved(self._left.pop(0), numel, ranks))
        return Bucket("weights", ((0, numel),))  # laid out in another way


@contextmanager
def _gathering(comm: Communicator, uncompressed: set[torch.nn.Parameter]) -> Iterator[None]:
    token = _stepping.set((comm, uncompressed))
    try:
        yield
    finally:
        _stepping.reset(token)


def _all_gather_dp_groups(plain: Callable[..., Any]) -> Callable[..., Any]:
    def all_gather_dp_groups(
        groups_flat: list[Tensor],
        partitioned_param_groups: list[list[Tensor]],
        dp_process_group: list[Any],
        *args: Any,
        **kwargs: Any,
    ) -> None:
        stepping = _stepping.get()
        if stepping is None:
            plain(groups_flat, partitioned_param_groups, dp_process_group, *args, **kwargs)
            return
        comm, uncompressed = stepping
        for index, (flat, parts, group) in enumerate(
            zip(groups_flat, partitioned_param_groups, dp_process_group, strict=False)
        ):
            own = parts[torch.distributed.get_rank(group)]
            work = None
            if torch.distributed.get_world_size(group) > 1 and own.numel() * len(parts) == flat.numel():
                work = comm.gather_weights(
                    flat, own, group, Bucket(f"weights{index}", _ranges_in(flat, uncompressed))
                )
            if work is None:
                plain([flat], [parts], [group], *args, **kwargs)
            else:
                work.wait()

    return all_gather_dp_groups


def _ranges_in(flat: Tensor, uncompressed: set[torch.nn.Parameter]) -> tuple[tuple[int, int], ...]:
    """Where the excluded parameters, which are views of `flat`, lie in it."""
    begin, size = flat.data_ptr(), flat.element_size()
    starts = [((p.data_ptr() - begin) // size, p.numel()) for p in uncompressed if p.dtype == flat.dtype]
    return tuple(
        (start, start + numel)
        for start, numel in sorted(starts)
        if start >= 0 and start + numel <= flat.numel()
    )
