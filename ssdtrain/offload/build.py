"""The offload engine that a config asks for, on the tiers that it names."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from ssdtrain.codecs import make_codec
from ssdtrain.codecs.base import FLOATS
from ssdtrain.codecs.warm_up import warm_up
from ssdtrain.config import OffloadConfig
from ssdtrain.config.codecs import AUTO, OFF
from ssdtrain.config.units import MiB
from ssdtrain.device import Device, device_for
from ssdtrain.offload.engine import OffloadEngine
from ssdtrain.offload.free_codec import free_codec, priced
from ssdtrain.offload.functorch import without_modes
from ssdtrain.offload.options import EngineOptions
from ssdtrain.offload.policy import AmountPolicy, ModulePolicy, OffloadPolicy
from ssdtrain.offload.transfer.coding import MASK, CodecRule
from ssdtrain.offload.transfer.gpudirect import attach_gpudirect, gpudirect_refused
from ssdtrain.storage import Faults, SpillStore, check_host_budget
from ssdtrain.storage.memory import HUGE_PAGE


def build_engine(
    offload: OffloadConfig,
    device: torch.device,
    directories: Sequence[Path],
    *,
    policy: OffloadPolicy | None = None,
    rank: int = 0,
    local_world_size: int = 1,
    faults: Faults | None = None,
    staged: bool | None = None,
    planned: bool = False,
) -> tuple[OffloadEngine, SpillStore]:
    """Return the engine, and the store that it uses, which the caller closes after the engine.

    Args:
        device: where the activations live.
        directories: of this rank, which exist.
        policy: decides in place of `offload.amount`; None: the amount decides.
        staged: pass CPU tensors through staging buffers, as those of a GPU (tests); None: by the device.
        planned: a plan says what leaves.

    Raises:
        ValueError: `amount: "auto"` without a policy; or `gpudirect: "on"`, and it cannot be had.
        HostBudgetExceeded: the ranks of the node would take more memory than it has.
        OSError: a directory cannot be used; names the path and the remedy.
    """
    layer = device_for(device)
    buffer = offload.buffer
    in_flight, prefetch = offload.in_flight, offload.prefetch
    buffer_limit = None
    register = layer.host_register()
    # A pinned host tier is its own staging memory.
    unstaged = register is not None and not offload.directories
    in_place = layer.kind == "cpu" and not staged
    if not in_place:
        # Transfers pass through the pinned arena, which is made at start: half of it for each direction.
        buffer = buffer or (HUGE_PAGE if unstaged else max(4 * (in_flight or 0), 1024 * MiB))
    elif offload.gpudirect == "on":
        raise gpudirect_refused("activations are on the CPU")
    host = offload.host or (0 if offload.directories else MiB)  # of what moves nothing
    budget = check_host_budget(host + (buffer or 0), local_world_size)
    store = SpillStore(
        directories,
        capacity=offload.capacity,
        host_bytes=host,
        threads=offload.threads,
        engine=offload.engine,
        direct=offload.direct,
        local_world_size=local_world_size,
        faults=faults,
        register=register,
        node=layer.numa_node(),
        huge_pages=in_place,  # else it is the arena that is written from, which lies in them
        **layer.event_functions(),
    )
    try:
        direct = not in_place and attach_gpudirect(offload, layer, store)
        if buffer is not None and not (in_place or direct or unstaged):
            if in_flight is not None:
                in_flight = min(in_flight, buffer // 2)
            if offload.buffer is None:
                buffer_limit = max(buffer, budget.share(local_world_size) - offload.host)
            elif prefetch is None:
                prefetch = buffer // 2
        with without_modes():  # as that of fake tensors: kernels run on what has memory
            codec = _codec(offload, device, layer, untried=direct or planned)
            warm_up(make_codec(MASK), device, [torch.bool])
        options = EngineOptions.of(
            offload,
            in_flight=in_flight,
            prefetch=prefetch,
            buffer=buffer,
            buffer_limit=buffer_limit,
            buffer_room=lambda: check_host_budget(0, local_world_size).share(local_world_size),
            raise_when_full=offload.on_full == "raise",
            staged=staged,
            by_cufile=direct,
            verified=offload.verify == "all",
            rank=rank,
            codec=codec,
        )
        return OffloadEngine(store, layer, device, _policy(offload, policy), options), store
    except BaseException:
        store.close()  # what is raised holds this frame, and with it the file and the threads
        raise


def _codec(offload: OffloadConfig, device: torch.device, layer: Device, *, untried: bool) -> CodecRule | None:
    """Return what encodes floating-point tensors, its kernels compiled.

    Args:
        untried: "auto" is no codec; see Note: [What a codec costs].
    """
    if offload.codec == AUTO:
        untried = untried or offload.amount.kind == "auto" or not offload.moves
        return None if untried else free_codec(device, layer)
    if offload.codec == OFF:
        return None
    warm_up(make_codec(offload.codec), device, FLOATS)
    return priced(offload.codec, device)


def _policy(offload: OffloadConfig, given: OffloadPolicy | None) -> OffloadPolicy:
    if given is None and offload.amount.kind == "auto":
        raise ValueError('amount "auto" needs a policy of the planner: make the engine through Runtime')
    policy = AmountPolicy(offload.amount) if given is None else given
    if offload.include or offload.exclude or offload.modules:
        return ModulePolicy(policy, offload.include, offload.exclude, offload.modules)
    return policy
