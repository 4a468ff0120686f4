"""A runtime attached to the model chunks of one rank."""

from __future__ import annotations

import functools
import importlib.util
import logging
from collections.abc import Mapping, Sequence
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ssdtrain.config import Config, load_config
from ssdtrain.features import Placement
from ssdtrain.integration import residuals
from ssdtrain.integration.claims import check_not_attached, claim, related
from ssdtrain.integration.inner_hooks import InnerHooks
from ssdtrain.integration.patching import Patches
from ssdtrain.offload.checkpoint import Checkpoint
from ssdtrain.runtime import Runtime, RuntimeMetrics
from ssdtrain_megatron import _compat, _compat_comm, compact
from ssdtrain_megatron.comm import Hooks
from ssdtrain_megatron.conflicts import check_conflicts
from ssdtrain_megatron.installation import installation
from ssdtrain_megatron.module_names import with_plain_patterns
from ssdtrain_megatron.plan import plan_blocks
from ssdtrain_megatron.planned_state import refuse_state_limit
from ssdtrain_megatron.recompute import has_grad_mode_side_effects
from ssdtrain_megatron.schedule import BypassedSchedules, Schedule

__all__ = ["Attachment", "apex_parts", "attach"]

logger = logging.getLogger("ssdtrain")

_WAY = "ssdtrain_megatron.attach"


class Attachment:
    """What `attach` returns: a runtime and the events that reach it. Also a context manager that closes.

    Args:
        runtime: closed if this raises.
        optimizer, iteration: see `attach`.

    Attributes:
        runtime: for statistics and more.
        schedule: the events of this rank.
        checkpoint: the replacement of `tensor_parallel.checkpoint` while a forward of these chunks runs.
        uses_native_checkpoint: whether this model needs Megatron's own checkpoint function. See Note: [Runs that count] in
            `recompute`.
    """

    def __init__(self, runtime: Runtime, chunks: Sequence[nn.Module], optimizer: Any, iteration: int) -> None:
        self.runtime = runtime
        # With comm a step ends after the optimizer, where it is known whether its gradients were dropped.
        self.schedule = Schedule(runtime, len(chunks), ends_steps=runtime.comm is None)
        self.checkpoint = Checkpoint(runtime.config.checkpoint)
        self.checkpoint.register_tracker("megatron", _compat.random_tracker)
        self.uses_native_checkpoint = any(
            has_grad_mode_side_effects(_compat.model_config(chunk)) for chunk in chunks
        )
        self._chunks = {id(chunk): (index, chunk) for index, chunk in enumerate(chunks)}
        try:
            self._attach(optimizer, iteration)
        except BaseException:
            self.close()
            raise

    @property
    def chunks(self) -> list[nn.Module]:
        """The model chunks, in their order."""
        return [chunk for _, chunk in self._chunks.values()]

    def chunk_of(self, model: nn.Module) -> int | None:
        """The index of `model` among the chunks, or None."""
        found = self._chunks.get(id(model))
        return found[0] if found is not None else None

    def statistics(self) -> RuntimeMetrics | None:
        """The metrics so far; None where nothing is enabled."""
        return self.runtime.statistics()

    def _attach(self, optimizer: Any, iteration: int) -> None:
        runtime, engine = self.runtime, self.runtime.engine
        if runtime.compact is not None:
            patches = Patches()
            runtime.call_at_close(patches.undo)
            compact.follow(patches)
            names = compact.names_of(self.chunks)
            runtime.compact.rename = lambda path, module: names.get(id(module), path)
            if _compat.pipeline_stages(self.chunks[0]) > 1:
                runtime.compact.look_elsewhere(self.chunks)
        if engine is not None:
            for chunk in self.chunks:
                runtime.call_at_close(claim(chunk, _WAY))
            engine.eligible.add_exclusion(installation.must_stay)
            engine.eligible.add_exclusion(_compat.marked_not_offload)
            engine.eligible.add_freed_function(_compat.FREEING_FUNCTION)
            runtime.features += [
                InnerHooks(engine.options.min_bytes, reports=runtime.reports, moves=runtime.moves),
                BypassedSchedules(),
            ]
        for chunk in self.chunks:
            runtime.register(chunk)
        if engine is not None or runtime.compact is not None:
            # Events of the schedule reach this from now on.
            runtime.call_at_close(functools.partial(installation.remove, self))
            installation.add(self)
        self.resume(iteration)
        if runtime.comm is not None:
            hooks = Hooks(runtime.comm, self.chunks, optimizer, self._stepped)
            runtime.call_at_close(hooks.remove)
            hooks.install()
            runtime.step_begin()

    def _stepped(self, skipped: bool) -> None:
        self.runtime.step_end(skipped)
        if self.runtime.engine is None:
            # Otherwise the schedule begins the next one.
            self.runtime.step_begin()

    def resume(self, iteration: int) -> None:
        """The run goes on after `iteration` steps: the projections of compressed inputs are those of a run that never stopped."""
        if self.runtime.compact is not None:
            self.runtime.compact.steps = iteration

    def save(self, directory: str | Path) -> None:
        """Write what a resumed run needs of this rank beside a checkpoint: the residuals of error feedback. All ranks call it
        together, and it returns when all of them have written.

        Args:
            directory: of the checkpoint of one iteration, the same on all ranks or one for each.

        Raises:
            OSError: a rank cannot write; raised on all ranks, and names that rank.
        """
        if self.runtime.comm is not None:
            residuals.save(self.runtime.comm, self._residuals(directory), _compat_comm.layout())

    def load(self, directory: str | Path) -> None:
        """Take what `save` wrote; without it feedback begins anew, with a warning. All ranks call it together."""
        if self.runtime.comm is not None:
            residuals.load(self.runtime.comm, self._residuals(directory), _compat_comm.layout())

    def _residuals(self, directory: str | Path) -> Path:
        return Path(directory, "ssdtrain_comm", f"rank_{self.runtime.rank:05d}.pt")

    def close(self) -> None:
        """Put megatron-core's functions back and close the runtime. Idempotent."""
        self.runtime.close()

    def __enter__(self) -> Attachment:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def attach(
    model_chunks: nn.Module | Sequence[nn.Module],
    config: Config | Mapping[str, Any] | str | Path | None,
    *,
    optimizer: Any = None,
    iteration: int = 0,
    device: torch.device | str | None = None,
    rank: int | None = None,
    local_rank: int | None = None,
    local_world_size: int | None = None,
    logs: bool = True,
) -> Attachment:
    """Offload what the schedules of megatron-core save for backward on these chunks, and compress the collectives of this
    process, as the config asks, until `close`.

    Call it after the chunks are wrapped (DDP, Float16Module) and before the first step. A loop that calls models and
    `backward` by itself, without `get_forward_backward_func`, uses `ssdtrain.attach` instead.

    Example:
        >>> attachment = ssdtrain_megatron.attach(model, {"offload": {"directories": "/nvme/{user}"}})
        >>> for _ in range(steps):
        ...     losses = forward_backward_func(forward_step_func=..., model=model, ...)
        ...     optimizer.step()
        >>> attachment.close()

    Args:
        model_chunks: as the schedules get them: one per virtual pipeline stage, in their order.
        config: a `Config`, a dict of its sections, or a YAML or JSON file. None, or one that enables nothing, attaches
            nothing and changes nothing.
        optimizer: Megatron's optimizer of these chunks; with a comm section it must be given.
        iteration: steps that a resumed run has made before; see `Attachment.resume`.
        device: of the activations; by default the model's.
        rank: global rank; by default torch.distributed's.
        local_rank, local_world_size: within the node; by default what torchrun, srun or mpirun say.
        logs: write a log line every `report.interval` steps; False for a loop that writes `GatheredMetrics` at its own interval.

    Raises:
        ConfigError: names the key, or the option of Megatron that excludes what is asked for.
        ImportError: this megatron-core lacks a name that is needed.
        RuntimeError: ranks have different comm sections.
        ValueError: there are no chunks, or one is given twice or inside of another; something is attached to one of the chunks
            already, here or by `ssdtrain.attach`; collectives of this process are compressed already; or there is a comm
            section and no optimizer.
        OSError: a directory cannot be used.
    """
    chunks = [model_chunks] if isinstance(model_chunks, nn.Module) else list(model_chunks)
    read = with_plain_patterns(load_config(dict(config) if isinstance(config, Mapping) else config))
    if read.active:
        if read.plan is not None:
            refuse_state_limit(read.plan.state_limit)
        _compat.check()
        _check_chunks(chunks)
        if read.compresses:
            _compat_comm.check()
        check_conflicts(chunks, read)
        if read.offload is not None or read.plans:
            for chunk in chunks:
                check_not_attached(chunk, _WAY)
        if read.compact is not None:
            compact.refuse(chunks, read.compact.mode)
        if any(installation.related_chunk(chunk) is not None for chunk in chunks):
            raise ValueError("a runtime is attached to this model already: close it first")
    if read.compresses:
        Hooks.check_not_installed()
        if optimizer is None:
            raise ValueError(
                "the config has a comm section: attach(model, config, optimizer=optimizer) also needs Megatron's optimizer, "
                "which reports when a step was skipped"
            )
    runtime = Runtime(
        read,
        Placement.of(device_of(chunks) if device is None else device, rank, local_rank, local_world_size),
        plan_blocks=plan_blocks(chunks, read),
        logs=logs,
    )
    attachment = Attachment(runtime, chunks, optimizer, iteration)
    parts = apex_parts() if runtime.engine is not None and runtime.rank == 0 else ()
    if parts:
        logger.info("apex is installed (%s): SSDTrain was never run with it", ", ".join(parts))
    return attachment


def _check_chunks(chunks: Sequence[nn.Module]) -> None:
    if not chunks:
        raise ValueError(
            "there are no model chunks: attach needs at least one, as the schedule of this rank gets them"
        )
    for at, chunk in enumerate(chunks):
        for before, other in enumerate(chunks[:at]):
            if related(chunk, other):
                raise ValueError(
                    f"model chunks {before} and {at} are the same {type(chunk).__name__}, or one is inside of the other: "
                    "give each chunk once, as the schedule gets it"
                )


def device_of(chunks: Sequence[nn.Module]) -> torch.device:
    """Where the parameters of `chunks` are."""
    for chunk in chunks:
        for parameter in chunk.parameters():
            return parameter.device
    return (
        torch.device("cuda", torch.cuda.current_device())
        if torch.cuda.is_available()
        else torch.device("cpu")
    )


APEX_PARTS = {
    "FusedLayerNorm": "fused_layer_norm_cuda",
    "FusedAdam": "amp_C",
    "gradient accumulation fusion": "fused_weight_gradient_mlp_cuda",
}
"""Parts of NVIDIA's apex, by the extension module that each needs. They are expected to save ordinary tensors, which was neither
run nor checked against their sources. apex is not on the package registry (the package of that name is another project), so it
is found by what it holds."""


def apex_parts() -> tuple[str, ...]:
    """Return the parts of apex that this interpreter could import, without importing them. A Python file of an extension module's
    name is a stub, which stands in for apex where nothing of it is used."""
    return tuple(part for part, module in APEX_PARTS.items() if _is_extension(module))


def _is_extension(module: str) -> bool:
    spec = importlib.util.find_spec(module)
    return spec is not None and str(spec.origin).endswith(tuple(EXTENSION_SUFFIXES))
