"""Model state in chunks as a feature of a runtime."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ssdtrain.config import ConfigError, StateConfig, exact_size
from ssdtrain.device import device_for, warn_of_untested_torch
from ssdtrain.features import Feature, Forward, Placement
from ssdtrain.metrics import MetricSet
from ssdtrain.profile.blocks import find_blocks
from ssdtrain.state.checkpoints import StateDicts
from ssdtrain.state.chunk import Chunk, Part
from ssdtrain.state.find import check, find_chunks
from ssdtrain.state.hooks import BlockHooks
from ssdtrain.state.host_steps import HostOptimizer
from ssdtrain.state.metrics import StateMetrics
from ssdtrain.state.optimizer import ChunkedOptimizer
from ssdtrain.state.plan import CHUNK_BUFFERS, StateChoice, StateChunk, StatePlan, plan_state
from ssdtrain.state.residency import Residency, StateTimes
from ssdtrain.state.stored import StoredTensor
from ssdtrain.state.transfers import Staged, StateTransfers
from ssdtrain.state.vertical import run_vertically
from ssdtrain.storage import Arena, Faults, SpillStore, check_host_budget, defer_signals
from ssdtrain.storage.metrics import TierMetrics
from ssdtrain.storage.pieces import image_bytes
from ssdtrain.text import size_text

logger = logging.getLogger("ssdtrain")


class ModelState(Feature):
    """Keeps parameters, gradients and optimizer state of one model within a limit of device memory.

    Args:
        config: its directories exist.
        directories: of this rank.
        place: of this rank.
        faults, staged: see `Runtime`.
        planned: a plan of blocks decides what stays (`follow`); until then as little as possible does.

    Attributes:
        directories: of this rank.
        beside: see `BlockHooks`; set before `attach`.
        optimizer: of the model; set before `attach`.
        plan: what stays on the device; None before `attach`.

    Raises:
        HostBudgetExceeded: the ranks of the node would take more memory than it has.
        OSError: a directory cannot be used; names the path and the remedy.
    """

    def __init__(
        self,
        config: StateConfig,
        directories: Sequence[Path],
        place: Placement,
        *,
        faults: Faults | None = None,
        staged: bool | None = None,
        planned: bool = False,
    ) -> None:
        warn_of_untested_torch()
        self.directories, self._planned = directories, planned
        self.beside: Callable[[], AbstractContextManager[None]] = nullcontext
        self.optimizer: torch.optim.Optimizer | None = None
        self.plan: StatePlan | None = None
        self._config = config
        self._place = place
        self._layer = device_for(place.device)
        self._in_place = self._layer.kind == "cpu" and not staged
        self._metrics = StateMetrics()
        self._model: nn.Module | None = None
        self._chunks: list[Chunk] = []
        self._storages: set[int] = set()
        self._arena: Arena | None = None
        self._staged: Staged | None = None
        self._residency: Residency | None = None
        self._hooks: BlockHooks | None = None
        self._state_dicts: StateDicts | None = None
        self._chunked: ChunkedOptimizer | None = None
        check_host_budget(config.host, place.local_world_size, subject="ssdtrain.state.host")
        self._make_store = partial(
            SpillStore,
            directories,
            capacity=config.capacity,
            threads=config.threads,
            engine=config.engine,
            direct=config.direct,
            local_world_size=place.local_world_size,
            faults=faults,
            register=self._layer.host_register(),
            node=self._layer.numa_node(),
            huge_pages=False,
            **self._layer.event_functions(),
        )
        self._store: SpillStore | None = None

    # The model

    def attach(self, model: nn.Module) -> None:
        """Plan the chunks of `model`, and move those that do not stay.

        Raises:
            ConfigError: the model or its optimizer cannot be served, `device_limit` is too small, or the tiers are.
            StoreFull: a drive has less room than its capacity.
            IOFailure: a store failed.
        """
        if self._model is not None:
            why, allowed = "is a second model of one runtime", "a runtime for each"
            raise ConfigError.of("ssdtrain.state", type(model).__name__, why, allowed)
        defer_signals()
        optimizer = check(model, self.optimizer, self._config)
        device = self._place.device
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        chunks, prefixes, outside = find_chunks(model, optimizer, self._config, device)
        self.plan = self._plan(chunks, outside)
        moving = chunks[self.plan.persistent :]
        for chunk in moving[: self.plan.kept]:
            chunk.values.stays = True
        largest = max((max(chunk.nbytes, 3 * chunk.values.nbytes) for chunk in moving), default=0)
        self._store = self._make_store(host_bytes=self._config.host - self._share_host(moving))
        self._check_capacity(moving, self._store)
        self._model, self._chunks = model, chunks
        self._metrics.chunks, self._metrics.persistent_chunks = len(chunks), self.plan.persistent
        self._residency = Residency(moving, self.plan.limit, self.plan.fixed, self._metrics)
        transfers = self._transfers(self._store, largest)
        self._hooks = BlockHooks(self._residency, transfers)
        self._hooks.beside = self.beside
        self._state_dicts = StateDicts(model, self._residency, prefixes)
        parts = optimizer, self._residency, self._hooks, transfers, self._store
        if self._config.optimizer == "device":
            self._chunked = ChunkedOptimizer(*parts)
        else:
            self._chunked = HostOptimizer(*parts, self._config.clip, self._config.microbatches)
        for chunk in moving:
            self._take(chunk, transfers, self._store)
        self._residency.reset_peak()

    def _plan(self, chunks: Sequence[Chunk], outside: int) -> StatePlan:
        limit, whole = self._config.device_limit, [chunk.nbytes for chunk in chunks]
        if self._config.optimizer == "device":
            return plan_state(whole, outside, self._at_first(limit, outside, whole))
        self._share_host(chunks)
        values = [chunk.values.nbytes for chunk in chunks]
        passing = [
            chunk.values.nbytes
            + (0 if chunk.gradients.stays else chunk.gradients.nbytes)
            + (0 if chunk.state.stays or not self._in_place else chunk.state.nbytes)
            for chunk in chunks
        ]
        return plan_state(whole, outside, self._at_first(limit, outside, passing), passing, values)

    def _at_first(self, limit: int | None, outside: int, passing: Sequence[int]) -> int | None:
        """Return the limit until there is a plan of blocks, which shares `device_limit` with activations."""
        if limit is None or not self._planned:
            return limit
        return min(limit, outside + CHUNK_BUFFERS * max(passing))

    def _share_host(self, chunks: Sequence[Chunk]) -> int:
        """Let optimizer state of chunks that the CPU steps stay in host memory, and gradients where that is the device's, as far
        as there is room beside the slots that every step uses. Returns the bytes of it."""
        if self._config.optimizer == "device":
            return 0
        keeps_gradients = self._in_place and self._gradients_tier is None
        room, in_host = self._config.host, 0
        for chunk in chunks:
            room -= 0 if chunk.values.stays else _slot_bytes(chunk, chunk.values)
            room -= 0 if keeps_gradients else _slot_bytes(chunk, chunk.gradients)
        for chunk in chunks:
            for part in (chunk.gradients, chunk.state) if keeps_gradients else (chunk.state,):
                part.stays = in_host + part.nbytes <= room
                in_host += part.nbytes if part.stays else 0
        return in_host

    @property
    def _gradients_tier(self) -> str | None:
        """The tier of gradients: drives where they are stored only after a backward that raised."""
        config = self._config
        used_up = config.clip == "none" and config.microbatches == 1
        return "ssd" if used_up and config.directories else None

    def on_forward(self, forward: Forward) -> None:
        defer_signals()  # handlers come and go

    def _take(self, chunk: Chunk, transfers: StateTransfers, store: SpillStore) -> None:
        """Let the tensors of `chunk` come and go, and leave."""
        assert self._residency is not None and self._hooks is not None and self._chunked is not None
        for parameter in chunk.parameters:
            chunk.gradient_slots[parameter] = (
                None if chunk.gradients.stays else store.reserve(parameter.nbytes, self._gradients_tier)
            )
        for part in chunk.parts:
            if part.stays or (part is chunk.state and self._config.optimizer == "cpu" and not self._in_place):
                part.nbytes = 0
        self._residency.load(chunk, *chunk.parts)  # there is nothing yet: they are counted
        if not chunk.values.stays:
            chunk.values.tensors = [
                StoredTensor(name, parameter, store.reserve(parameter.nbytes), transfers, watched=True)
                for parameter, name in chunk.names.items()
            ]
            self._storages |= {parameter.untyped_storage()._cdata for parameter in chunk.parameters}
        self._hooks.adopt_gradients(chunk)
        expected = chunk.state.nbytes
        self._chunked.adopt_state(chunk)
        for part in chunk.parts:
            self._residency.release(part)
        self._residency.wait()
        if not chunk.state.tensors:
            self._residency.resize(chunk.state, expected)

    def _check_capacity(self, moving: Sequence[Chunk], store: SpillStore) -> None:
        needed = sum(_slot_bytes(chunk, part) for chunk in moving for part in chunk.parts if not part.stays)
        capacity = store.metrics.capacity_bytes
        if needed > capacity:
            key = "capacity" if self._config.directories else "host"
            why = f"gives {exact_size(capacity)} in all tiers, and the chunks that leave the device take {exact_size(needed)}"
            allowed = "more capacity, another directory, or a higher device_limit"
            raise ConfigError.of(f"ssdtrain.state.{key}", exact_size(capacity), why, allowed)

    def _transfers(self, store: SpillStore, largest: int) -> StateTransfers:
        verify = self._config.verify == "all"
        if self._in_place:
            return StateTransfers(store, verify=verify)
        nbytes = max(2 * largest, 1)
        check_host_budget(
            nbytes, self._place.local_world_size, subject="the two largest chunks of ssdtrain.state"
        )
        self._arena = Arena(nbytes, register=self._layer.host_register(), node=self._layer.numa_node())
        self._staged = Staged(store, self._layer, self._arena, verify=verify)
        return self._staged

    def holds(self, tensor: torch.Tensor) -> bool:
        """Return True for views of parameters that come and go, however they were made: they are no activations."""
        return (
            type(tensor) is torch.Tensor
            and tensor.layout is torch.strided
            and tensor.untyped_storage()._cdata in self._storages
        )

    def clip_grad_norm_(
        self,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> torch.Tensor:
        """Clip all parameters of the model as `torch.nn.utils.clip_grad_norm_`, to the bit. See `ssdtrain.state.clip`, and for
        `optimizer: "cpu"` with `clip: "delayed"` Note: [Delayed clipping] in `ssdtrain.state.host_steps`."""
        if self._model is None or self._chunked is None:
            raise RuntimeError("no model is attached to this runtime")
        parameters = list(self._model.parameters())
        return self._chunked.clip_grad_norm(parameters, max_norm, norm_type, error_if_nonfinite, foreach)

    def accumulate(
        self,
        model: nn.Module,
        microbatches: Sequence[Any],
        loss: Callable[[nn.Module, Any], torch.Tensor],
    ) -> list[torch.Tensor]:
        """Run forward and backward of all microbatches block by block. See `Runtime.accumulate`."""
        if (
            self._model is None
            or self._residency is None
            or self._chunked is None
            or model is not self._model
        ):
            raise RuntimeError("runtime.accumulate is given a model that is not attached to this runtime")
        if not torch.is_grad_enabled():
            raise RuntimeError("runtime.accumulate runs backward, and gradients are disabled")
        chunks = {chunk.module: chunk for chunk in self._residency.chunks}

        def hold(block: nn.Module, again: bool) -> None:
            if block in chunks:
                chunks[block].held = again

        try:
            with self._chunked.counting(len(microbatches)):
                return run_vertically(
                    model,
                    find_blocks(model, self._config.blocks),
                    [partial(loss, model, microbatch) for microbatch in microbatches],
                    hold,
                )
        finally:
            for chunk in chunks.values():
                chunk.held = False

    # Plans of blocks

    @property
    def steps_inside(self) -> bool:
        """The CPU steps chunks while backward runs, as steps are now: with `clip: "delayed"` only where they are clipped."""
        return isinstance(self._chunked, HostOptimizer) and self._chunked.steps_inside

    @property
    def fixed(self) -> int:
        """Bytes on the device whatever `follow` is given."""
        return 0 if self.plan is None else self.plan.fixed

    @property
    def limit(self) -> int:
        """Bytes on the device at most, now."""
        return self._metrics.limit_bytes

    def planned_chunks(self) -> list[StateChunk]:
        """List what comes and goes."""
        in_place, on_cpu = self._in_place, self._config.optimizer == "cpu"
        found = []
        for chunk in () if self._residency is None else self._residency.chunks:
            values, gradients = (
                (0 if part.stays else part.nbytes) for part in (chunk.values, chunk.gradients)
            )
            state = chunk.state.nbytes if in_place or not on_cpu else 0
            whole = values + gradients + state
            staying, stepped = (whole, 0)
            if on_cpu:
                staying, stepped = values, sum(parameter.nbytes for parameter in chunk.parameters)
            found.append(StateChunk(chunk.name, values, gradients, staying, whole, stepped))
        return found

    def times(self) -> StateTimes:
        """Return what was measured since the start."""
        return StateTimes() if self._residency is None else replace(self._residency.times)

    def narrow(self, limit: int | None) -> None:
        """Let steps run as if the limit were `limit`, to measure them, until this is called with None, or `follow`."""
        if self._residency is not None:
            self._residency.narrow(limit)

    def tiers(self) -> Sequence[TierMetrics]:
        """Return the counters of the drives, or of host memory where there are none."""
        store = None if self._store is None else self._store.metrics
        if store is None:
            return ()
        return store.drives or (() if store.host is None else (store.host,))

    def follow(self, choice: StateChoice) -> None:
        """Let other chunks stay from the next forward on. Called between steps.

        Raises:
            IOFailure: something could not be read or written.
        """
        if self._residency is None or self._chunked is None:
            return
        self._chunked.finish_steps()
        self._residency.unpin_all(choice.limit)
        for chunk in self._residency.chunks[: choice.persistent]:
            self._residency.pin(chunk, *((chunk.values,) if self._config.optimizer == "cpu" else chunk.parts))
        assert self.plan is not None
        self._metrics.persistent_chunks = self.plan.persistent + choice.persistent

    def detach(self) -> None:
        """Bring everything back into memory, and give the model and the optimizer back their methods.

        Raises:
            IOFailure: something could not be read; all else is back.
        """
        if self._hooks is None or self._residency is None:
            return
        self._hooks.remove()
        failed: BaseException | None = None
        for chunk in self._residency.chunks:
            for part in chunk.parts:
                try:
                    self._residency.restore(part, chunk)
                except Exception as error:  # noqa: BLE001 - all others come back first
                    failed = failed or error
        if self._state_dicts is not None:
            self._state_dicts.remove()
        if self._chunked is not None:
            self._chunked.remove()
        self._hooks = self._state_dicts = self._chunked = self._residency = self._model = None
        self._storages.clear()
        if failed is not None:
            raise failed

    def close(self) -> None:
        failed: Exception | None = None
        try:
            self.detach()  # after an interrupt the tiers stay open, and a second `close` brings the rest back
        except Exception as error:  # noqa: BLE001 - all is closed first
            failed = error
        with ExitStack() as closing:  # all are called, the last first, whatever one of them raises
            if self._arena is not None:
                closing.callback(self._arena.close)
            if self._staged is not None:
                closing.callback(self._staged.close)
            if self._store is not None:
                closing.callback(self._store.close)
            if failed is not None:
                raise failed

    # Reports

    def metrics(self) -> Sequence[tuple[str, MetricSet]]:
        return (("state", self._metrics),)

    def reset_peak(self) -> None:
        if self._residency is not None:
            self._residency.reset_peak()

    def description(self) -> str:
        limit = self._config.device_limit
        much = f"within {size_text(limit)}" if limit is not None else "as few as two chunks"
        return f"model state: {much} on the device, the rest in {', '.join(self._config.directories) or 'host memory'}"


def _slot_bytes(chunk: Chunk, part: Part) -> int:
    """Return the bytes that slots of `part` take at most."""
    return image_bytes(part.nbytes) + len(chunk.parameters) * image_bytes(1)
