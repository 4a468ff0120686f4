"""A plan as frameworks take it: DeepSpeed's JSON and Megatron-LM's flags."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ssdtrain.config.errors import InvalidValue
from ssdtrain.tools.whatif.cluster_plan import ClusterPlan
from ssdtrain.tools.whatif.explain import planned_state
from ssdtrain_ds.planned_state import ZERO_SECTION, zero_options
from ssdtrain_megatron.planned_state import state_flags

__all__ = ["apply_to_file", "launch_flags"]

_BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


def apply_to_file(plan: ClusterPlan, file: Path, directory: str | None) -> None:
    """Write model state where the plan has it into a DeepSpeed config; all other keys stay. The batch is written where the plan
    was asked for one, or the config has none.

    Args:
        file: is made if it is not there.
        directory: on the drives.

    Raises:
        InvalidValue: the file is no config, or the plan has model state on SSD and there is no directory.
    """
    written: dict[str, Any] = {}
    if file.exists():
        try:
            written = json.loads(file.read_text())
        except (OSError, ValueError) as error:
            raise InvalidValue(
                f"has the config {file}, which cannot be read ({error})", "a DeepSpeed config in JSON"
            ) from error
    section = written.get(ZERO_SECTION) or {}
    known = section.get("offload_param") or section.get("offload_optimizer") or {}
    state = planned_state(plan)
    options = zero_options(
        state, _directory(directory or known.get("nvme_path"), needed=state.place == "ssd")
    )
    for name in ("offload_param", "offload_optimizer"):
        if name not in options:
            section = {key: value for key, value in section.items() if key != name}
    written[ZERO_SECTION] = _merged(section, options)
    if plan.job.batch or not any(key in written for key in _BATCH):
        sizes = plan.microbatch * plan.microbatches * plan.job.layout.dp, plan.microbatch, plan.microbatches
        written |= dict(zip(_BATCH, sizes, strict=True))
    file.write_text(json.dumps(written, indent=2) + "\n")


def launch_flags(plan: ClusterPlan, directory: str | None) -> list[str]:
    """The flags of Megatron-LM for a plan, each with its values.

    Raises:
        InvalidValue: the plan offloads activations to SSD and there is no directory.
    """
    layout, job = plan.job.layout, plan.job
    flags: dict[str, Any] = {
        "--tensor-model-parallel-size": layout.tp,
        "--pipeline-model-parallel-size": layout.pp,
        "--micro-batch-size": plan.microbatch,
        "--global-batch-size": plan.microbatch * plan.microbatches * layout.dp,
    }
    if layout.virtual > 1:
        flags["--num-layers-per-virtual-pipeline-stage"] = job.model.layers // (layout.pp * layout.virtual)
    if layout.sequence_parallel:
        flags["--sequence-parallel"] = True
    if layout.expert > 1:
        flags["--expert-model-parallel-size"] = layout.expert
    flags |= state_flags(planned_state(plan))
    actions = [action for stage in plan.stages for action in stage.plan.actions]
    recomputed = max(stage.plan.count("recompute") for stage in plan.stages)
    if set(actions) - {"keep", "recompute"}:  # which layers, the plan while training decides
        flags["--ssdtrain-plan"] = "auto"
        if job.host:
            flags["--ssdtrain-offload-host"] = job.host // job.local_node
        if job.ssds is not None:
            flags["--ssdtrain-offload-directories"] = _directory(directory, needed=True)
    elif recomputed:
        flags |= {
            "--recompute-granularity": "full",
            "--recompute-method": "block",
            "--recompute-num-layers": recomputed,
        }
    return [flag if value is True else f"{flag} {value}" for flag, value in flags.items()]


def _directory(directory: str | None, *, needed: bool) -> str | None:
    if needed and directory is None:
        raise InvalidValue(
            "uses drives, and no directory on them is named", "--directory, such as /nvme/ssdtrain"
        )
    return directory


def _merged(section: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """`section` with `options` in it, also inside of sections of its own."""
    found = dict(section)
    for key, value in options.items():
        inner = found.get(key)
        if isinstance(value, Mapping) and isinstance(inner, Mapping):
            value = _merged(inner, value)
        found[key] = value
    return found
