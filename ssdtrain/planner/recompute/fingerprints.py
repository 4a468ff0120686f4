"""Fingerprints of saved tensors: whether two runs of a block saved the same bytes.

A parameter is compared by identity: backward reads it as it is, also without recomputation. Bytes (uint8) prove nothing, since
they are the workspace of a kernel that may leave some unwritten (LSTM); nor do one or two integers of a block that computes on a
GPU: attention leaves the state of a generator, which may be in host memory, unwritten where nothing is dropped.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import zip_longest
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ssdtrain.offload.functorch import without_modes

__all__ = ["Fingerprint", "difference", "fingerprints"]

_SLICE = 1 << 17
"""Number of words of 8 bytes of which a fingerprint makes a product at a time."""

_ODD = (-7046029254386353131, -4658895280553007687)
"""Two odd numbers of 64 bits (those of the splitmix64 generator, as signed integers)."""


class Fingerprint(NamedTuple):
    """A tensor as it was at one moment."""

    like: tuple[Any, ...]
    """Dtype, sizes and strides."""
    parameter: nn.Parameter | None = None
    """The parameter that it is, or is a view of."""
    digest: torch.Tensor | None = None
    """A sum of all bytes, weighted by their places, on the device of the tensor; None: it is a parameter, or has no bytes."""


_NONE = Fingerprint((None, ()))


def difference(first: Sequence[list[Fingerprint]], second: Sequence[list[Fingerprint]]) -> str:
    """Compare what two runs saved, as many tensors each. Returns what differs; "": nothing. Waits for each device once."""
    by_device: dict[torch.device, list[tuple[int, Fingerprint, torch.Tensor]]] = {}
    on_gpu = any(one.digest is not None and one.digest.device.type != "cpu" for ones in first for one in ones)
    for number, (ones, others) in enumerate(zip(first, second, strict=True), 1):
        for one, other in zip_longest(ones, others, fillvalue=_NONE):
            if one.like != other.like or one.parameter is not other.parameter:
                return f"saved tensor {number} of {len(first)} was {_text(one)}, then {_text(other)}"
            if one.digest is not None and other.digest is not None and _is_conclusive(one, on_gpu):
                by_device.setdefault(one.digest.device, []).append((number, one, one.digest != other.digest))
    for compared in by_device.values():
        with without_modes():
            answers = torch.stack([differs for _, _, differs in compared]).tolist()
        for (number, one, _), differs in zip(compared, answers, strict=True):
            if differs:
                return f"saved tensor {number} of {len(first)} differs: {_text(one)}"
    return ""


def _is_conclusive(one: Fingerprint, on_gpu: bool) -> bool:
    """Whether a difference of its bytes says that the block, which computes on a GPU or not, computed something else."""
    dtype, sizes, *_ = one.like
    if dtype is torch.uint8:
        return False
    if not on_gpu or dtype.is_floating_point or dtype.is_complex:
        return True
    most = 2 if one.digest is None or one.digest.device.type != "cpu" else int(tuple(sizes) == ())
    return dtype is torch.bool or math.prod(sizes) > most


def _text(one: Fingerprint) -> str:
    dtype, sizes, *_ = one.like
    what = "" if one.parameter is None else "a parameter, "
    return f"{what}{str(dtype).removeprefix('torch.')} {list(sizes)}"


def fingerprints(tensor: torch.Tensor) -> list[Fingerprint]:
    """Return one of a tensor, or those of the plain tensors that a wrapper around some is made of."""
    with without_modes(), torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
        if is_traceable_wrapper_subclass(tensor):
            names, _ = tensor.__tensor_flatten__()
            return [one for name in names for one in fingerprints(getattr(tensor, name))]
        base = tensor if isinstance(tensor, nn.Parameter) else tensor._base
        strided = tensor.layout is torch.strided and not tensor.is_nested
        like = (
            tensor.dtype,
            tuple(tensor.shape) if not tensor.is_nested else (),
            tensor.stride() if strided else (),
        )
        if isinstance(base, nn.Parameter):
            return [Fingerprint(like, base)]
        if not strided or tensor.is_quantized or tensor.device.type == "meta":
            return [Fingerprint(like)]
        return [Fingerprint(like, digest=_digest(tensor.detach()))]


def _digest(tensor: torch.Tensor) -> torch.Tensor:
    """Sum up all bytes of a tensor on its device, as words of 8 bytes, each times an odd number of its place in a slice; slices
    are summed up in the same way. It allocates a few slices, and a copy of a tensor that is not dense."""
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    # Of an expanded dimension the memory has one element.
    sizes = [1 if stride == 0 else size for size, stride in zip(tensor.shape, tensor.stride(), strict=True)]
    if tensor.numel():
        tensor = tensor.as_strided(sizes, tensor.stride(), tensor.storage_offset())
    dense = torch.ops.aten.is_non_overlapping_and_dense(tensor)
    if not dense or tensor.storage_offset() * tensor.itemsize % 8:
        tensor = tensor.clone(memory_format=torch.contiguous_format)
    flat = tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)
    length = flat.numel() // 8
    words, rest = flat[: 8 * length].view(torch.int64), flat[8 * length :].to(torch.int64)
    weights = _weights(min(length, _SLICE), tensor.device)
    sums = (
        [(part * weights[: part.numel()]).sum().reshape(1) for part in words.split(_SLICE)] if length else []
    )
    line = torch.cat([*sums, rest])
    return (line * _weights(line.numel(), line.device)).sum()


def _weights(count: int, device: torch.device) -> torch.Tensor:
    """Return odd numbers of 64 bits without a pattern, drawn from no generator."""
    if count > _SLICE:
        return _made_weights(count, device)
    weights = _slice_weights.get(device)
    if weights is None:
        weights = _slice_weights[device] = _made_weights(_SLICE, device)
        if device.type == "cuda":  # any stream may read them from now on
            torch.cuda.current_stream(device).synchronize()
    return weights[:count]


_slice_weights: dict[torch.device, torch.Tensor] = {}
"""Weights of a slice, kept: to make them takes longer than a slice's sum."""


def _made_weights(count: int, device: torch.device) -> torch.Tensor:
    with torch.inference_mode(False):
        weights = torch.arange(1, count + 1, device=device) * _ODD[0]
        weights ^= weights >> 29
        weights *= _ODD[1]
        return weights ^ (weights >> 32) | 1
