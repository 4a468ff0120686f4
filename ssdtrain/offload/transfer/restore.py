"""The way back of a saved tensor: from wherever its region is to what the unpack hook returns."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from ssdtrain.offload.pacing.prefetch import Prefetcher
from ssdtrain.offload.tensors.region import Handle, Region, after_close, modified
from ssdtrain.offload.transfer.mover import Mover
from ssdtrain.offload.transfer.state import State
from ssdtrain.storage import CorruptedData

# Looked up once: each saved tensor comes by here.
_STORED, _LOADING, _STORING, _STAGED = State.STORED, State.LOADING, State.STORING, State.STAGED


class Restorer:
    """Called with the engine's lock held, and never waits.

    Args:
        mover: moves the regions.
        prefetcher: determines how large the arena has to be.
        models: by which errors name where a tensor was saved.
    """

    def __init__(self, mover: Mover, prefetcher: Prefetcher, models: Sequence[nn.Module]) -> None:
        self._mover = mover
        self._prefetcher = prefetcher
        self._models = models

    def restore(self, handle: Handle) -> torch.Tensor | None:
        """Return the saved tensor if its bytes are in memory; else None, with their load under way, or waiting for a buffer.

        Raises:
            RuntimeError: it was modified in place since, or is in a tier after the engine was closed.
            IOFailure: it could not be read back.
            ProofFailed: it is not what was saved, where that is compared (`offload.prove_steps`).
        """
        region = handle.region
        try:
            tensor = self._restore(handle)
        except CorruptedData as error:
            striped = region.transfer.slot is not None and self._mover.store.directories(region.transfer.slot)
            parts = f", in {', '.join(map(str, striped))}" if striped and len(striped) > 1 else ""
            error.subject = origin_text(region, self._models) + parts
            raise
        proof = handle.proof
        if proof is not None and tensor is not None and tensor.untyped_storage().data_ptr() != region.pointer:
            proof.check(tensor, partial(origin_text, region, self._models))
        return tensor

    def _restore(self, handle: Handle) -> torch.Tensor | None:
        region = handle.region
        transfer, mover = region.transfer, self._mover
        state = transfer.state
        if state is _STORED:
            if mover.transfer.closed:
                raise after_close()
            self._prefetcher.missed(region)
            if not mover.loads.begin(region, on_demand=True):
                return None
            state = transfer.state
        if state is _LOADING:
            operation = transfer.operation
            assert operation is not None
            if not operation.done():
                return None
            return self._hand_out(handle) if mover.loads.end(region) else self._restore(handle)
        loaded = transfer.loaded
        if loaded is not None and loaded._version != transfer.loaded_version:
            # Backward wrote into the buffer: those are not the bytes that were saved. See Note: [Buffers belong to the tensor].
            if state is State.RESIDENT:
                dtype, size, *_ = handle.geometry
                raise modified(dtype, size, loaded._version, transfer.loaded_version)
            if state is State.LOADED:
                mover.loads.let_go(region)
                return self._restore(handle)
            if state is _STORING:
                # The staging buffer or the payload still has the bytes that were saved.
                mover.loads.let_go(region)
        if state is _STORING and not mover.stop_store(region):
            mover.forward(region)
        if transfer.state is _STAGED:
            mover.unstage(region)
        return self._hand_out(handle)

    def _hand_out(self, handle: Handle) -> torch.Tensor:
        region = handle.region
        transfer = region.transfer
        loads = self._mover.loads
        loads.hand_out(region)
        now = region.tape.pass_number
        if region.last_pass != now:
            region.last_pass = handle.last_pass = now
            region.pending_unpacks = region.handles - 1
        elif handle.last_pass != now:
            handle.last_pass = now
            region.pending_unpacks -= 1
        base = transfer.loaded
        if base is None:
            return region.tensor_from(region.tensor, region.start, handle.geometry, alone=False)
        # It can come from its tier again: then whoever was handed it owns the buffer.
        alone = False
        if region.pending_unpacks <= 0 and transfer.slot is not None:
            target = transfer.target
            loads.let_go(region)
            if not region.shared:
                if target is not None and target.form is handle.geometry:
                    return base  # see Note: [Form of a target] in `targets`
                alone = True
        start = int(base.storage_offset())  # what came back has a storage of its own
        return region.tensor_from(base, start, handle.geometry, alone=alone)


FURTHEST = 256
"""Nodes of the graph that are searched for a parameter."""


def origin_text(region: Region, models: Iterable[nn.Module]) -> str:
    """Return the place of `region`, and what is known of the module that saved it. Called while its tensor is being unpacked.

    Where modules are not watched, the module is found by the nearest parameter in the graph, from the node that asks for the
    tensor towards the inputs.
    """
    place = f"region {region.index} of chunk {region.tape.chunk}"
    if region.module:
        return f'{place}, saved by module "{region.module}"'
    node = torch._C._current_autograd_node()  # type: ignore[attr-defined]
    if node is None:
        return place
    parameter = _nearest_parameter(node, models)
    near = f' next to parameter "{parameter}"' if parameter else ""
    return f"{place}, saved for {node.name()}{near}"


def _nearest_parameter(node: Any, models: Iterable[nn.Module]) -> str:
    names = {id(p): name for model in models for name, p in nn.Module.named_parameters(model)}
    line, seen = deque([node]), {node}
    while line and len(seen) < FURTHEST:
        current = line.popleft()
        name = names.get(id(getattr(current, "variable", None)))
        if name is not None:
            return name
        for following, _ in current.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                line.append(following)
    return ""
