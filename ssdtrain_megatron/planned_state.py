"""Megatron-LM's flags for model state where a plan of `ssdtrain plan` puts it. Needs no Megatron."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ssdtrain.config import ConfigError
from ssdtrain.planner.planned_state import PlannedState

_KEY = "ssdtrain.plan.file (--ssdtrain-plan-file)"


def state_flags(state: PlannedState) -> dict[str, Any]:
    """Flags and their values for a plan; True: a flag without a value.

    Megatron-LM can hold the state of the optimizer in host memory, and steps it there. Parameters and gradients stay.
    """
    found: dict[str, Any] = {}
    if state.zero:
        found["--use-distributed-optimizer"] = True
    if state.zero >= 2:
        sharded = "optim_grads" if state.zero == 2 else "optim_grads_params"
        found |= {"--use-megatron-fsdp": True, "--data-parallel-sharding-strategy": sharded}
    if state.optimizer_away:
        found["--use-precision-aware-optimizer"] = True
        found["--optimizer-cpu-offload"] = True
        found["--optimizer-offload-fraction"] = round(state.optimizer_away, 3)
    return found


def refuse_state_limit(limit: object) -> None:
    """Raise ConfigError if `plan.state_limit` is set: nothing here is configured from it."""
    if limit is None:
        return
    why = "is for DeepSpeed's ZeRO-3, and Megatron has built its optimizer from its own flags"
    allowed = "the flags that ssdtrain plan --print-flags prints, without this one"
    key = "ssdtrain.plan.state_limit (--ssdtrain-plan-state-limit)"
    raise ConfigError.of(key, limit, why, allowed)


def check_flags(file: str, args: Mapping[str, Any]) -> None:
    """Check that the flags of a run are those of the plan in a file.

    Raises:
        ConfigError: the file cannot be read, or flags are missing: Megatron-LM has built its config from them already.
    """
    state = PlannedState.read(file, _KEY)
    missing = {
        flag: value
        for flag, value in state_flags(state).items()
        if args.get(flag.removeprefix("--").replace("-", "_")) != value
    }
    if missing:
        words = " ".join(flag if value is True else f"{flag} {value}" for flag, value in missing.items())
        why = "has model state in another place than the flags of this run, which cannot be changed any more"
        raise ConfigError.of(
            _KEY, file, why, f"the flags {words}, as ssdtrain plan --print-flags prints them"
        )
