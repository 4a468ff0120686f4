"""Reduce-scatter and all-gather of FSDP2 (`fully_shard`).

Weights are gathered compressed by exact codecs only: FSDP2 keeps none after a step that differences could be taken from.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from ssdtrain.comm.collectives import AllReduce, ReduceScatter
from ssdtrain.comm.communicator import Bucket, Communicator
from ssdtrain.comm.exclusion import excluded, ranges_in_order

REPLICAS = (
    "ssdtrain.comm: gradients of replicas (a mesh of two dimensions, as in HSDP, or replicate) are summed by an all-reduce "
    "inside of FSDP2, which goes uncompressed; comm.dp compresses the reduce-scatter between the shards of each replica"
)

_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

BETWEEN_REPLICAS = "FSDP2 itself reduces gradients between replicas (HSDP)"


def _managed(unit: Sequence[Any]) -> Iterator[nn.Parameter]:
    """The parameters that the modules of `unit` shard together, in FSDP2's order: those of their children first, without FSDP
    modules below them."""
    seen: set[Any] = set()

    def visit(one: nn.Module) -> Iterator[nn.Parameter]:
        seen.add(one)
        for child in one.children():
            if child not in seen and not isinstance(child, FSDPModule):
                yield from visit(child)
        for parameter in one.parameters(recurse=False):
            if parameter not in seen:
                seen.add(parameter)
                yield parameter

    for module in unit:
        if module not in seen:
            yield from visit(module)


def _units(model: nn.Module) -> dict[str, list[FSDPModule]]:
    """The modules that FSDP2 shards together, by name: several where `fully_shard` was given a list, in its order."""
    names = {module: name for name, module in model.named_modules() if isinstance(module, FSDPModule)}
    found: dict[Any, list[FSDPModule]] = {}
    for module in names:
        state = module._get_fsdp_state()
        found.setdefault(state, [one for one in state._modules if isinstance(one, FSDPModule)])
    return {"+".join(names[module] for module in unit if module in names): unit for unit in found.values()}


def _has_replicas(unit: Sequence[FSDPModule]) -> bool:
    state: Any = unit[0]._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
    infos = [getattr(group, "mesh_info", None) for group in groups]
    return any(getattr(info, "replicate_mesh_dim", None) is not None for info in infos)


class _UnitCollective:
    """What FSDP2 calls in place of a collective of the modules of one unit."""

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm

    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class _UnitAllGather(_UnitCollective):
    """Weights of the modules of one unit, in the dimension "zero_gather"."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> Any:
        work = self._comm.all_gather(output_tensor, input_tensor, "zero_gather", group)
        if work is None:
            return _all_gather(output_tensor, input_tensor, group=group, async_op=async_op)
        return work  # FSDP2 waits for it where it needs the weights, also if it did not ask for a handle


class _UnitReduceScatter(_UnitCollective):
    """Gradients of the modules of one unit, in the dimension "dp".

    FSDP2 lays them out by rank: of each parameter the part that the rank keeps, padded to the same size on all ranks.
    """

    def __init__(
        self,
        unit: Sequence[FSDPModule],
        name: str,
        comm: Communicator,
        exact: set[nn.Parameter],
        before: Callable[[], object],
    ) -> None:
        super().__init__(comm)
        self._name = name
        self._before = before
        self._parameters = [(p, p in exact) for p in _managed(unit)]

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> Any:
        self._before()
        replicas = max((_replicas(parameter, group) for parameter, _ in self._parameters), default=1)
        if replicas > 1:
            raw = AllReduce.ring_bytes(output_tensor.nbytes, replicas)
            self._comm.router.count_fallback("dp", BETWEEN_REPLICAS, raw)
        bucket = self._bucket(input_tensor.numel(), group)
        work = None
        if bucket is None:
            reason = f"{self._name} did not get gradients for all of its parameters"
            raw = ReduceScatter.ring_bytes(input_tensor.nbytes, dist.get_world_size(group))
            self._comm.router.count_fallback("dp", reason, raw)
        else:
            work = self._comm.reduce_scatter(output_tensor, input_tensor, "dp", group, op, bucket)
        if work is None:
            return _reduce_scatter(output_tensor, input_tensor, op=op, group=group, async_op=async_op)
        if async_op:
            return work
        work.wait()
        return None

    def _bucket(self, numel: int, group: dist.ProcessGroup) -> Bucket | None:
        ranks = dist.get_world_size(group)
        # Which parameters train may change at any time.
        training = [(parameter, exact) for parameter, exact in self._parameters if parameter.requires_grad]
        shares = [(_share(parameter, group), exact) for parameter, exact in training]
        if ranks * sum(share for share, _ in shares) != numel:
            return None
        return Bucket(self._name, ranges_in_order(shares * ranks))


def _share(parameter: nn.Parameter, group: dist.ProcessGroup) -> int:
    """Elements that a rank of `group` keeps of a parameter, padding included. Other dimensions of its mesh (tensor parallelism)
    have divided it before."""
    size, dimension = list(parameter.shape), 0
    if isinstance(parameter, DTensor):
        mesh = parameter.device_mesh
        for number, placement in enumerate(parameter.placements):
            divided = getattr(placement, "dim", None)  # of a Shard
            if divided is not None and mesh.get_group(number) is group:
                dimension = divided
            elif divided is not None:
                size[divided] = _chunk(size[divided], mesh.size(number), mesh.get_local_rank(number))
    if size:
        size[dimension] = _chunk(size[dimension], dist.get_world_size(group), 0)
    return math.prod(size)


def _replicas(parameter: nn.Parameter, group: dist.ProcessGroup) -> int:
    """Groups that shard the same parameter, as `group` does, and between which FSDP2 reduces its gradient: those of dimensions of
    its mesh before that of `group`. Dimensions behind it belong to tensor parallelism."""
    replicas = 1
    if isinstance(parameter, DTensor):
        mesh = parameter.device_mesh
        for number, placement in enumerate(parameter.placements):
            if not placement.is_replicate():
                return replicas if mesh.get_group(number) is group else 1
            replicas *= mesh.size(number)
    return 1


def _chunk(size: int, parts: int, number: int) -> int:
    """Elements of one part of a dimension that is divided as by `torch.chunk`."""
    largest = -(-size // parts)
    return max(0, min(largest, size - number * largest))


def attach(model: nn.Module, comm: Communicator, before: Callable[[], object]) -> None:
    """Compress the gradients and weights of every FSDP module in `model`, for as long as it lives.

    Args:
        before: called before the gradients of each module are reduced. Where the loop ends no steps of `comm`, it does.

    Raises:
        ValueError: this torch is too old for it.
    """
    if not hasattr(FSDPModule, "set_custom_reduce_scatter"):
        raise ValueError(
            f"ssdtrain.comm compresses gradients of fully_shard with torch 2.9 or newer, and this is {torch.__version__}: "
            "update torch, use DistributedDataParallel, or leave comm out"
        )
    exact = excluded(model, comm.policy.exclude)
    units = _units(model)
    training = [p for p in model.parameters() if p.requires_grad]
    if training:
        comm.announce([(p.numel(), p in exact) for p in training], {"dp": training[0].dtype})
    if any(map(_has_replicas, units.values())):
        comm.notices.add("replicas", REPLICAS)
    for name, unit in units.items():
        # What it takes is a protocol; its class is in a private module of torch.
        replacement: Any = _UnitReduceScatter(unit, f"fsdp-{name}", comm, exact, before)
        unit[0].set_custom_reduce_scatter(replacement)
        weights = comm.policy.rules["zero_gather"]
        if weights.exact and not weights.off:
            gathering: Any = _UnitAllGather(comm)
            unit[0].set_custom_all_gather(gathering)
