"""The parameters of a model that may come and go, in chunks; and what cannot be served."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterator

import torch
from torch import nn

from ssdtrain.config import ConfigError, StateConfig, exact_size
from ssdtrain.profile.blocks import find_blocks
from ssdtrain.state.chunk import Chunk
from ssdtrain.state.sizes import state_bytes
from ssdtrain.state.stored import MOVABLE, is_movable


def check(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, config: StateConfig
) -> torch.optim.Optimizer:
    """Return the optimizer, if it and the model can be served.

    Raises:
        ConfigError: names what cannot, and the remedy.
    """
    problem: tuple[str, str] | None = None
    compiled = next((name for name, module in model.named_modules() if _is_compiled(module)), None)
    if optimizer is None:
        problem = (
            "needs the optimizer of the model, before a learning rate scheduler is made",
            "ssdtrain.attach(model, config, optimizer=optimizer) in a loop of your own; a trainer that makes both itself cannot "
            "have this section",
        )
    elif isinstance(optimizer, torch.optim.LBFGS):
        problem = "meets LBFGS, which needs all parameters at once", "an optimizer that updates each alone"
    elif any(group.get("differentiable") for group in optimizer.param_groups):
        problem = (
            "meets an optimizer with differentiable=True, whose graph would hold all chunks",
            "leaving it out",
        )
    elif config.optimizer == "cpu" and any(group.get("capturable") for group in optimizer.param_groups):
        problem = 'meets capturable=True, which is for steps on a GPU, and optimizer "cpu"', "leaving it out"
    elif "step" in vars(optimizer):
        problem = (
            "meets an optimizer whose step is replaced already (by a learning rate scheduler?)",
            "ssdtrain.attach before the scheduler is made",
        )
    elif compiled is not None:
        problem = (
            f"meets {compiled or 'a model'} in torch.compile: not in this version",
            "attaching the model without torch.compile",
        )
    if problem is not None or optimizer is None:
        raise ConfigError.of("ssdtrain.state", type(optimizer).__name__, *(problem or ("", "")))
    return optimizer


def _is_compiled(module: nn.Module) -> bool:
    return hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None


def find_chunks(
    model: nn.Module, optimizer: torch.optim.Optimizer, config: StateConfig, device: torch.device
) -> tuple[list[Chunk], dict[Chunk, str], int]:
    """Return the chunks in the order of their blocks, the prefix of each in names of parameters, and the bytes in no chunk.

    In a chunk are trainable parameters of the optimizer on `device` that belong to one module alone, have a storage of their
    own, and are not small.

    Raises:
        ConfigError: the model has no blocks, or none with a parameter that may leave; names why each stays.
    """
    try:
        blocks = find_blocks(model, config.blocks)
    except ValueError as error:
        why, allowed = f"names no blocks: {error}", "names of modules that run one after the other"
        raise ConfigError.of("ssdtrain.state.blocks", list(config.blocks), why, allowed) from error
    needed = state_bytes(optimizer, on_a_thread=config.optimizer == "cpu")
    total = sum(
        parameter.nbytes + _gradient_bytes(parameter) + needed.get(parameter, 0)
        for parameter in model.parameters()
    )
    alone = set(_not_shared(model))
    staying: Counter[str] = Counter()
    chunks: list[Chunk] = []
    prefixes: dict[Chunk, str] = {}
    names: dict[nn.Module, str] = {}  # a block that stands in several places is listed once
    for name, block in blocks.items():
        names.setdefault(block, name)
    for block, name in names.items():
        movable: dict[str, nn.Parameter] = {}
        for local, parameter in block.named_parameters():
            reason = _why_it_stays(parameter, alone, needed, device, config.min_bytes)
            if reason is None:
                movable[f"{name}.{local}"] = parameter
            else:
                staying[reason] += 1
        if movable:
            chunk = Chunk(name, block, movable, sum(needed[each] for each in movable.values()))
            chunks.append(chunk)
            prefixes[chunk] = f"{name}."
    if not chunks:
        counts = "; ".join(f"{count} {reason}" for reason, count in staying.most_common())
        found_none = f"finds no parameter that could leave memory in {len(blocks)} blocks: {counts or 'they have none'}"
        remedy = "blocks with such parameters, or no section state"
        raise ConfigError.of("ssdtrain.state", list(blocks)[:4], found_none, remedy)
    return chunks, prefixes, total - sum(chunk.nbytes for chunk in chunks)


def _gradient_bytes(parameter: nn.Parameter) -> int:
    if not parameter.requires_grad:
        return 0
    dtype = getattr(parameter, "grad_dtype", None) or parameter.dtype  # None: any
    return parameter.nbytes // parameter.element_size() * dtype.itemsize


def _why_it_stays(
    parameter: nn.Parameter,
    alone: Container[nn.Parameter],
    needed: Container[nn.Parameter],
    device: torch.device,
    min_bytes: int,
) -> str | None:
    if not parameter.requires_grad:
        return "frozen"
    if parameter not in needed:
        return "not in the optimizer that was given"
    if parameter not in alone:
        return "shared by several modules, or in memory that others share"
    if parameter.device != device:
        return f"on {parameter.device}, while the device of this runtime is {device}"
    if getattr(parameter, "grad_dtype", parameter.dtype) is not parameter.dtype:
        return "with gradients of another type (grad_dtype)"
    if is_movable(parameter, min_bytes):
        return None
    if parameter.nbytes < min_bytes:
        return f"of less than state.min_bytes ({exact_size(min_bytes)})"
    if parameter.dtype not in MOVABLE:
        return f"of {parameter.dtype}"
    return "in memory that torch cannot free and allocate (load_state_dict with assign=True, or part of a larger tensor)"


def _not_shared(model: nn.Module) -> Iterator[nn.Parameter]:
    """Yield parameters that one module has under one name, and whose memory no other parameter or buffer has."""
    modules = list(model.modules())
    places = Counter(
        parameter for module in modules for parameter in module._parameters.values() if parameter is not None
    )
    tensors = [*places, *model.buffers()]
    addresses = Counter(
        tensor.untyped_storage().data_ptr()
        for tensor in tensors
        if type(tensor.data) is torch.Tensor and tensor.layout is torch.strided
    )
    for parameter, count in places.items():
        if count == 1 and (
            type(parameter.data) is not torch.Tensor or addresses[parameter.untyped_storage().data_ptr()] == 1
        ):
            yield parameter
