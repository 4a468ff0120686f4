"""Clipping by the norm of all gradients, whose bits are those of `torch.nn.utils.clip_grad_norm_`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.utils._foreach_utils import _group_tensors_by_device_and_dtype

from ssdtrain.state.chunk import Chunk
from ssdtrain.state.hooks import BlockHooks
from ssdtrain.state.residency import Residency


def clip_grad_norm(
    parameters: Sequence[nn.Parameter],
    residency: Residency,
    hooks: BlockHooks,
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
    *,
    factor: torch.Tensor | None = None,
    on_host: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scale all gradients so that their norm together is at most `max_norm`.

    Gradients of chunks are read once, one chunk after the other, unless their norms are known. They are not written again: the
    factor is applied when the step loads them.

    Args:
        parameters: of the model, in its order.
        max_norm, norm_type, error_if_nonfinite, foreach: as torch's.
        factor: scale them by this one instead.
        on_host: factors of chunks are applied in host memory, for which the device is waited for here.

    Returns:
        The norm before, as torch's, and the factor that it gives.

    Raises:
        RuntimeError: the norm is not finite, with `error_if_nonfinite`.
    """
    hooks.end_abandoned()
    owners = {parameter: chunk for chunk in residency.chunks for parameter in chunk.parameters}
    with_gradient = [parameter for parameter in parameters if parameter.grad is not None]
    if not with_gradient:
        return torch.tensor(0.0), torch.tensor(1.0)
    norms: dict[nn.Parameter, torch.Tensor] = {}
    by_chunk: dict[Chunk | None, list[nn.Parameter]] = {}
    for parameter in with_gradient:
        by_chunk.setdefault(owners.get(parameter), []).append(parameter)
    for chunk, few in by_chunk.items():
        if chunk is not None and chunk.norms.keys() >= set(few):
            norms.update(chunk.norms)
            continue
        if chunk is not None:
            residency.load(chunk, chunk.gradients)
            hooks.adopt_gradients(chunk)
        gradients = [_gradient(parameter) for parameter in few]
        norms.update(zip(few, norms_of(gradients, norm_type, foreach), strict=True))
        if chunk is not None:
            residency.release(chunk.gradients)
    first = with_gradient[0].device
    ordered = [norms[parameter].to(first) for parameter in _in_order_of_torch(with_gradient)]
    total = torch.linalg.vector_norm(torch.stack(ordered), norm_type)
    if error_if_nonfinite and not bool(torch.isfinite(total)):
        raise RuntimeError(
            f"the norm of order {norm_type} of the gradients is {total.item()}, and cannot be clipped to"
        )
    exact = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    factor = exact if factor is None else factor
    factor_of_chunks = factor.to("cpu") if on_host else factor
    for chunk, few in by_chunk.items():
        if chunk is None:
            for parameter in few:
                _gradient(parameter).mul_(factor.to(parameter.device))
        else:
            chunk.norms = {}
            residency.scale_gradients(chunk, factor_of_chunks)
    return total, exact


def _gradient(parameter: nn.Parameter) -> torch.Tensor:
    assert parameter.grad is not None
    return parameter.grad


def _in_order_of_torch(parameters: Sequence[nn.Parameter]) -> list[nn.Parameter]:
    """Sort as torch sums up the norms of gradients: by device and type, which have the order of a hash table."""
    groups = _group_tensors_by_device_and_dtype([list(parameters)], with_indices=True)
    return [parameters[at] for _, places in groups.values() for at in places]


def norms_of(
    gradients: Sequence[torch.Tensor], norm_type: float, foreach: bool | None
) -> Sequence[torch.Tensor]:
    """Return the norm of each gradient, by the operator that torch takes on its device."""
    if foreach or (foreach is None and gradients[0].device.type == "cuda"):
        return list(torch._foreach_norm(list(gradients), norm_type))
    return [torch.linalg.vector_norm(gradient, norm_type) for gradient in gradients]
