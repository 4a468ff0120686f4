"""What a plain PyTorch user writes: `with ssdtrain.offload(...)`, `ssdtrain.attach(...)`, `ssdtrain.checkpoint(...)`."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import nn

from ssdtrain.config import Config, ConfigError, load_config
from ssdtrain.features import Feature, Placement
from ssdtrain.integration.inner_hooks import InnerHooks
from ssdtrain.integration.random_trackers import register_trackers
from ssdtrain.offload.policy import OffloadPolicy
from ssdtrain.offload.tensors.tape import Tape
from ssdtrain.planner.plan_blocks import PlanBlocks, recomputable_blocks
from ssdtrain.pytorch.attached import attach_model
from ssdtrain.pytorch.placed_state import place_state
from ssdtrain.runtime import Runtime

logger = logging.getLogger("ssdtrain")


class Offload:
    """A context manager around forwards: what they save for backward leaves memory. Enter it for each forward.

    The runtime lives as long as this object or a graph made inside; `close` ends it at once.

    Attributes:
        runtime: for statistics and more.
    """

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        self._entered = threading.local()  # hooks belong to the thread that installs them

    def __enter__(self) -> Offload:
        recording = self.runtime.forward()
        self._stack().append((recording, recording.__enter__()))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack().pop()[0].__exit__(kind, error, trace)

    @property
    def tape(self) -> Tape | None:
        """The tape being recorded, or None outside."""
        stack = self._stack()
        return stack[-1][1] if stack else None

    def _stack(self) -> list[tuple[AbstractContextManager[Tape | None], Tape | None]]:
        found: list[tuple[AbstractContextManager[Tape | None], Tape | None]] = (
            self._entered.__dict__.setdefault("stack", [])
        )
        return found

    def close(self) -> None:
        """Wait for what is in flight and give back all space."""
        self.runtime.close()


def offload(
    directories: str | Path | list[str] | tuple[str, ...] | None = None,
    *,
    model: nn.Module | None = None,
    device: torch.device | str | None = None,
    **options: Any,
) -> Offload:
    """Offload what forwards save for backward.

    Example:
        >>> offloading = ssdtrain.offload("/mnt/nvme", model=model)
        >>> for batch in batches:
        ...     with offloading:
        ...         loss = model(batch)
        ...     loss.backward()

    Args:
        directories: on the drives; may be left out where `host` gives a tier of host memory.
        model: its parameters and buffers stay; without it parameters are recognised by their class, buffers are not.
        device: of the activations; by default the model's, else CPU.
        options: keys of the config's `offload` section, as in `min_bytes="1MiB"`.

    Raises:
        ConfigError: names the key, the value and what is allowed.
        OSError: a directory cannot be used.
    """
    section = dict(options)
    if directories is not None:
        section["directories"] = (
            [str(d) for d in directories] if isinstance(directories, list | tuple) else str(directories)
        )
    runtime = Runtime(load_config({"offload": section}), _device_of(model, device))
    if model is not None:
        runtime.register(model)
    return Offload(runtime)


def attach(
    model: nn.Module,
    config: Config | Mapping[str, Any] | str | Path,
    *,
    device: torch.device | str | None = None,
    rank: int | None = None,
    local_rank: int | None = None,
    local_world_size: int | None = None,
    policy: OffloadPolicy | None = None,
    features: Sequence[Feature] = (),
    optimizer: torch.optim.Optimizer | None = None,
) -> Runtime:
    """Offload what every call of `model` saves for backward, until `close` of the runtime that is returned.

    Args:
        model: called as before, as a whole or by its parts; whatever stands as its `forward`, also later.
        config: a `Config`, a dict of its sections, or a YAML or JSON file.
        device: of the activations; by default the model's.
        rank, local_rank, local_world_size: of this process, for directories and shared drives; by default torch.distributed's,
            and what torchrun, srun or mpirun say.
        policy: decides for each saved tensor instead of `offload.amount`: see `ssdtrain.offload.policy`.
        features: more features: see `ssdtrain.features`.
        optimizer: of the model, for model state in chunks (the section state, or a plan that adds it) and for compact.mode
            "lowrank"; not used otherwise.

    Raises:
        ConfigError: names the key, the value and what is allowed.
        OSError: a directory cannot be used.
        HostBudgetExceeded: this node has no room for what the config asks for.
        ValueError: an adapter offloads this model already, or there is a comm section and nothing reduces gradients.
        TypeError: `model` is no module.
    """
    if not isinstance(model, nn.Module):
        kind = model.__name__ if isinstance(model, type) else type(model).__name__
        raise TypeError(
            f"ssdtrain.attach: the model is a {kind}, not a torch.nn.Module: pass the model that the loop calls"
        )
    read = load_config(dict(config) if isinstance(config, Mapping) else config)
    if read.enabled and not read.active:
        logger.warning(
            "the config of ssdtrain.attach (%s) switches nothing on: without offload, comm.preset, compact, plan, state and "
            'report.path the rest of it has no effect; write "offload": {"directories": ...} into it, or "enabled": false '
            "(docs/config.md)",
            ", ".join(sorted(read.model_fields_set)) or "empty",
        )
    place = Placement.of(_device_of(model, device), rank, local_rank, local_world_size)
    read = place_state(read, model, optimizer, place)
    runtime = Runtime(
        read,
        place,
        policy=policy,
        plan_blocks=_plan_blocks(model, read),
        features=features,
        chunked_state=True,
    )
    if runtime.compact is not None:
        runtime.compact.optimizer = optimizer
    if runtime.state is not None:
        runtime.state.optimizer = optimizer
    try:
        if runtime.engine is not None:
            least, said = runtime.engine.options.min_bytes, runtime.reports
            runtime.features.append(InnerHooks(least, reports=said, moves=runtime.moves))
        attach_model(runtime, model)
    except BaseException:
        runtime.close()
        raise
    return runtime


def _plan_blocks(model: nn.Module, config: Config) -> PlanBlocks | None:
    if not config.plans or config.plan is None:
        return None
    if config.plan.file is not None:
        why = "is for frameworks that hold model state, and nothing here is configured from it"
        allowed = (
            "the section state, or for FSDP2 the options of ssdtrain.pytorch.planned_state.fully_shard_options(FILE), "
            "without this key"
        )
        raise ConfigError.of("ssdtrain.plan.file", config.plan.file, why, allowed)
    blocks = recomputable_blocks(model, config.plan) or {}
    why = register_trackers() if blocks and config.plan.recompute != "off" else ""
    return PlanBlocks(why=why, compress=True) if why else PlanBlocks(blocks, compress=True)


def _device_of(model: nn.Module | None, device: torch.device | str | None) -> torch.device:
    if device is not None:
        return torch.device(device)
    first = next(model.parameters(), None) if model is not None else None
    mesh = getattr(first, "device_mesh", None)
    if mesh is not None and mesh.device_type == "cuda":
        # FSDP2 computes on the mesh's device, wherever the shards are (CPUOffloadPolicy).
        return torch.device("cuda", torch.cuda.current_device())
    return first.device if first is not None else torch.device("cpu")
