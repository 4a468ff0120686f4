"""Which modules of plain PyTorch gather sharded parameters before their forwards: those of FSDP1 and FSDP2."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import cast

import torch
from torch import nn

from ssdtrain.offload.tensors.eligible import Gathered, GatheredStorages


def fsdp_classes() -> tuple[type, ...]:
    """The modules of FSDP2 and of FSDP1. Empty where the program has not imported them, which takes a second: no model can
    have one then."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return () if fsdp is None else (fsdp.FSDPModule, fsdp.FullyShardedDataParallel)


def watch_sharded(model: nn.Module) -> GatheredStorages | None:
    """Note the storages that the FSDP modules in `model` gather parameters into, until `remove`; None where there are none.

    FSDP2 gathers the parameters of an FSDP module, without those of FSDP modules below it, into storages that live as long as
    the module and are freed (`resize_`) in between. FSDP1 does the same with one storage for each wrapper, and sets views of
    it as plain attributes of the modules that it wraps.
    """
    units = fsdp_classes()
    if not any(isinstance(module, units) for module in model.modules()) and not _is_part_of_a_unit(model):
        return None
    waiting = _NotGatheredYet()
    points: dict[nn.Module, Gathered] = {}
    for module in model.modules():
        if isinstance(module, units[1:]):
            wrapped = cast(nn.Module, module.module)
            points[wrapped] = _attributes(list(_members(wrapped, units)))
        elif isinstance(module, units[:1]) or module is model:
            points[module] = waiting.add(_parameters(list(_members(module, units))))
    return GatheredStorages(points, waiting)


class _NotGatheredYet:
    """Returns the parameters of the units of FSDP2 that were gathered for the first time since it was last called.

    No forward announces these: units that are gathered together (`fully_shard([a, b])`) or ahead of their forwards, and methods
    of `register_fsdp_forward_method`. FSDP2 puts another Parameter in the place of the sharded one, and ever after the same.
    """

    def __init__(self) -> None:
        self._units: list[tuple[torch.Tensor, Gathered]] = []

    def add(self, parameters: Gathered) -> Gathered:
        """Wait for the unit that has these parameters; returns what its forward notes: them and what this object returns."""
        first = next(iter(parameters()), None)
        if first is not None:
            self._units.append((first, parameters))
        return lambda: [*parameters(), *self()]

    def __call__(self) -> list[torch.Tensor]:
        found: list[torch.Tensor] = []
        waiting = []
        for first, parameters in self._units:
            now = parameters()
            if not now or now[0] is first:
                waiting.append((first, parameters))
            else:
                found += now
        self._units = waiting
        return found


def _members(unit: nn.Module, units: tuple[type, ...]) -> Iterator[nn.Module]:
    """`unit` and the modules below it, without FSDP modules and what is below those."""
    yield unit
    for child in unit.children():
        if not isinstance(child, units):
            yield from _members(child, units)


def _parameters(members: list[nn.Module]) -> Gathered:
    owners = [module._parameters for module in members if module._parameters]
    return lambda: [parameter for owner in owners for parameter in owner.values() if parameter is not None]


def _attributes(members: list[nn.Module]) -> Gathered:
    owners = [module.__dict__ for module in members] + [module._parameters for module in members]
    return lambda: [value for owner in owners for value in owner.values() if isinstance(value, torch.Tensor)]


def _is_part_of_a_unit(model: nn.Module) -> bool:
    """True where an FSDP module above `model` shards its parameters: they are DTensors outside of forwards."""
    return any(type(parameter.data) is not torch.Tensor for parameter in model.parameters())
