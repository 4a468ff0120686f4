"""Bytes that an optimizer keeps for a parameter, before its first step."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ssdtrain.state.options import Options

_SIDE = 4  # of the parameter that is tried


def plain_step(kind: type[torch.optim.Optimizer]) -> Callable[..., Any]:
    """Return the step of an optimizer class without the hooks of its instances, which are called once for all chunks."""
    step: Callable[..., Any] = kind.step
    while getattr(step, "hooked", False) and hasattr(step, "__wrapped__"):
        step = step.__wrapped__
    return step


def state_bytes(optimizer: torch.optim.Optimizer, *, on_a_thread: bool = False) -> dict[nn.Parameter, int]:
    """Return the bytes that `optimizer` keeps for each of its parameters.

    Where it has none yet, it makes a step on a small parameter of the same type, with the options of the group, whose traces are
    removed.

    Args:
        on_a_thread: its steps are to be made beside the training loop.

    Raises:
        RuntimeError: it cannot make a step on the small parameter, or would count the parts of a step as steps; or a step that is
            to be made on a thread changes options or draws random numbers.
    """
    needed: dict[nn.Parameter, int] = {}
    for group in optimizer.param_groups:
        tried: dict[tuple[Any, ...], tuple[int, int]] = {}
        for parameter in group["params"]:
            state = optimizer.state.get(parameter)
            if not state:
                key = parameter.dtype, parameter.device, parameter.dim()
                if key not in tried:
                    tried[key] = _try(optimizer, group, parameter, on_a_thread)
                fixed, per_element = tried[key]
                needed[parameter] = fixed + per_element * parameter.numel()
            else:
                needed[parameter] = sum(v.nbytes for v in state.values() if isinstance(v, torch.Tensor))
    return needed


def _try(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], parameter: nn.Parameter, on_a_thread: bool
) -> tuple[int, int]:
    """Return the bytes of a parameter's state in all, and for each element."""
    small = nn.Parameter(
        torch.zeros([_SIDE] * parameter.dim(), dtype=parameter.dtype, device=parameter.device)
    )
    small.grad = torch.zeros_like(small)
    groups = optimizer.param_groups
    alone = {key: value if key == "params" else copy.deepcopy(value) for key, value in group.items()}
    alone["params"] = [small]
    optimizer.param_groups = [alone]
    options, attributes = Options(optimizer), dict(vars(optimizer))
    drawn = torch.get_rng_state() if on_a_thread else None
    try:
        plain_step(type(optimizer))(optimizer)
        state = optimizer.state.pop(small, {})
    except Exception as error:
        why = f"{type(optimizer).__name__} cannot be used with the config section state: it fails on a parameter alone"
        raise RuntimeError(f"{why}: {error}") from error
    else:
        options.end_part([True])
        if drawn is not None:
            options.refuse_changes()
            if not torch.equal(drawn, torch.get_rng_state()):
                raise RuntimeError(
                    f'{type(optimizer).__name__} cannot be used with state.optimizer "cpu": a step draws random numbers, whose '
                    'order would depend on the time of a thread: use state.optimizer "device"'
                )
    finally:
        optimizer.state.pop(small, None)
        vars(optimizer).clear()
        vars(optimizer).update(attributes)
        optimizer.param_groups = groups
    fixed = per_element = 0
    for value in state.values():
        if isinstance(value, torch.Tensor):
            if value.numel() > 1:
                per_element += value.element_size()  # a part of it (rows, columns) counts as all
            else:
                fixed += value.nbytes
    return fixed, per_element
