"""Has ZeRO-3 hold model state where a plan of `ssdtrain plan` puts it: the keys of `zero_optimization`. Needs no DeepSpeed."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from ssdtrain.config import ConfigError, ConfigIssue
from ssdtrain.planner.planned_state import PlannedState

ZERO_SECTION = "zero_optimization"

_AUTO = "auto"  # Hugging Face's word for a key that it fills in

_DEVICES = {"host": "cpu", "ssd": "nvme"}


def zero_options(state: PlannedState, directory: str | None = None) -> dict[str, Any]:
    """The keys of `zero_optimization` for a plan.

    DeepSpeed keeps parameters on the device in the order of the model, up to `stage3_model_persistence_threshold` elements, and
    steps all optimizer state on CPUs that is not on the device: `ratio` of it where the plan leaves blocks there.

    Args:
        directory: on the drives, for model state on SSD.
    """
    stage = 3 if state.away else max(state.zero, 1 if state.optimizer_away else 0)
    options: dict[str, Any] = {"stage": stage}
    optimizer: dict[str, Any] = {"device": _DEVICES.get(state.place, "cpu")}
    if state.place == "ssd":
        optimizer["nvme_path"] = directory
    if state.optimizer_away:
        options["offload_optimizer"] = optimizer
    if stage < 3:
        return options
    buffers = max(2, state.buffers)
    stay = state.persistent_parameters if state.away else 0
    options["stage3_max_live_parameters"] = stay + buffers * state.block_parameters
    options["stage3_prefetch_bucket_size"] = (buffers - 1) * state.block_parameters
    if not state.away:
        return options
    options["stage3_param_persistence_threshold"] = state.largest_parameter
    options["stage3_model_persistence_threshold"] = stay
    options["offload_param"] = {"device": _DEVICES[state.place]}
    if state.place == "ssd":
        options["offload_param"] |= {"nvme_path": directory, "buffer_size": state.largest_parameter}
    elif state.optimizer_away < 1:
        # DeepSpeed steps whole groups of parameters here or there.
        optimizer["ratio"] = round(state.optimizer_away, 3)
        options["sub_group_size"] = max(1, state.block_parameters // state.ranks)
    return options


def with_less_state(section: Mapping[str, Any]) -> str:
    """Say which `zero_optimization` leaves more of the GPU to activations than `section` does, as the end of a line of the log.
    "": ZeRO-3 has the optimizer and weights off the GPU already, or it is another stage."""
    if section.get("stage") != 3:
        return ""
    for name in ("offload_optimizer", "offload_param"):
        inner = section.get(name)
        inner = inner if isinstance(inner, Mapping) else {}
        if inner.get("device", "none") == "none":
            changed = {**section, name: {**inner, "device": "cpu"}}
            return (
                "; where model state is cannot be changed while training: less of it is on the GPU with "
                f'"{ZERO_SECTION}": {json.dumps(changed)}'
            )
    return ""


def planned_section(state: PlannedState, written: Mapping[str, Any], value: Any, key: str) -> dict[str, Any]:
    """The section `zero_optimization` of a config, with what a plan adds to it.

    Args:
        written: the whole DeepSpeed config.
        value, key: of the config, that the plan follows from, for errors.

    Raises:
        ConfigError: the config says otherwise, or lacks what is read before an engine is made.
    """
    section = written.get(ZERO_SECTION) or {}
    problems: list[ConfigIssue] = []
    directory = next(_directories(section), None)
    options = zero_options(state, directory)
    if state.place == "ssd" and state.optimizer_away and directory is None:
        why = "has model state on SSD, and the config has no directory for it"
        problems.append(
            ConfigIssue(key, value, why, f'"{ZERO_SECTION}": {{"offload_param": {{"nvme_path": DIRECTORY}}}}')
        )
    stage = section.get("stage", 0)
    if stage != options["stage"]:
        why = f"is not the stage of the plan of {key}, and cannot be changed for an engine that is being made"
        allowed = f'"{ZERO_SECTION}": {json.dumps(options)}, as ssdtrain plan --apply writes it'
        problems.append(ConfigIssue(f"{ZERO_SECTION}.stage", stage, why, allowed))
    merged = _merged(section, options, ZERO_SECTION, key, problems)
    if problems:
        raise ConfigError(problems)
    return merged


def _directories(section: Mapping[str, Any]) -> Iterator[str]:
    for name in ("offload_param", "offload_optimizer"):
        inner = section.get(name)
        if isinstance(inner, Mapping) and inner.get("nvme_path"):
            yield str(inner["nvme_path"])


def _merged(
    section: Mapping[str, Any], options: Mapping[str, Any], path: str, key: str, problems: list[ConfigIssue]
) -> dict[str, Any]:
    """Both, with a problem for each key that has another value in `section`."""
    merged = dict(section)
    for name, value in options.items():
        given = section.get(name, _AUTO)
        if isinstance(value, Mapping) and isinstance(given, Mapping):
            merged[name] = _merged(given, value, f"{path}.{name}", key, problems)
            continue
        if name != "stage" and given not in (_AUTO, value):
            why = f"is {value} in the plan of {key}"
            problems.append(ConfigIssue(f"{path}.{name}", given, why, f"{value}, or leaving it out"))
        merged[name] = value
    return merged
