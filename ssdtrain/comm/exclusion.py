"""Parameters excluded from compression: norms, biases, embeddings, and those whose names match a pattern.

They are few, and their gradients tolerate the least compression: a norm's weight scales every token, and an embedding's gradient
is zero except for the rows of this batch. They are found by name and class, so that every framework excludes the same ones.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from itertools import accumulate
from typing import TypeVar

from torch import Tensor, nn

from ssdtrain.comm.coding import Ranges

_T = TypeVar("_T", bound=Tensor)

# Classes: LayerNorm, FusedRMSNorm, BatchNorm2d, LayerNorm1P; not LayerNormLinear, whose weight is a linear layer's.
_NORM_CLASS = re.compile(r"norm(\d+[a-z]?)?$", re.IGNORECASE)
# Fused layers hold a norm's parameters beside their own: layer_norm_weight, norm1_weight.
_NORM_LEAF = re.compile(r"norm|(^|_)ln(_|\d|$)", re.IGNORECASE)

# bias, in_proj_bias, e_score_correction_bias, fc1_bias, and bias_ih_l0 of recurrent layers.
_BIAS_LEAF = re.compile(r"(^|_)bias(\d*$|_[ih]h)", re.IGNORECASE)


def is_norm(name: str, parameter: nn.Parameter, module: nn.Module) -> bool:
    """Return whether `parameter`, at the dotted `name` in `module`, is a scale or shift of a normalisation."""
    if _NORM_CLASS.search(type(module).__name__):
        return True
    *path, leaf = name.split(".")
    owner = path[-1] if path else ""
    return parameter.dim() <= 1 and bool(_NORM_LEAF.search(leaf) or _NORM_LEAF.search(owner))


def is_bias(name: str, parameter: nn.Parameter, module: nn.Module) -> bool:
    """Return whether it is added to every token. Arguments: see `is_norm`."""
    return bool(_BIAS_LEAF.search(name.rpartition(".")[2]))


def is_embedding(name: str, parameter: nn.Parameter, module: nn.Module) -> bool:
    """Return whether it is a table of which a batch uses some rows, or an output layer tied to one. Arguments: see `is_norm`."""
    if isinstance(module, nn.Embedding | nn.EmbeddingBag) or "embedding" in type(module).__name__.lower():
        return True
    return "embed" in name.rpartition(".")[2].lower()


_KINDS = {"norm": is_norm, "bias": is_bias, "embedding": is_embedding}


def excluded(model: nn.Module, patterns: Sequence[str]) -> set[nn.Parameter]:
    """Return the parameters of `model` that are sent uncompressed: of tied weights those with any excluded name.

    Args:
        model: as the framework wrapped it; patterns also meet the names below the wrappers, without "module.".
        patterns: `Policy.exclude`: "norm", "bias", "embedding", or patterns of whole names as `fnmatch` reads them.
    """
    parameters = set()
    names = [pattern for pattern in patterns if pattern not in _KINDS]
    kinds = [_KINDS[pattern] for pattern in patterns if pattern in _KINDS]
    for path, module in model.named_modules(remove_duplicate=False):
        for leaf, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            name = f"{path}.{leaf}" if path else leaf
            if any(kind(name, parameter, module) for kind in kinds) or _matches(name, names):
                parameters.add(parameter)
    return parameters


def _matches(name: str, patterns: Sequence[str]) -> bool:
    inner = name
    while inner.startswith("module."):
        inner = inner.removeprefix("module.")
    return any(fnmatchcase(name, pattern) or fnmatchcase(inner, pattern) for pattern in patterns)


def ranges_of(places: Mapping[_T, tuple[int, int]], chosen: Iterable[_T]) -> Ranges:
    """Return the elements of a flat bucket that `chosen` parameters take, neighbours joined, for `Bucket.uncompressed_ranges`.

    Args:
        places: (start, stop) of each parameter in the bucket; chosen ones that are not in it are left out.
    """
    return _joined(sorted({places[parameter] for parameter in chosen if parameter in places}))


def ranges_in_order(slices: Iterable[tuple[int, bool]]) -> Ranges:
    """Return `ranges_of` tensors that lie one behind the other: (elements, whether they are excluded) of each."""
    slices = list(slices)
    stops = accumulate(numel for numel, _ in slices)
    pairs = zip(stops, slices, strict=True)
    return _joined((stop - numel, stop) for stop, (numel, is_excluded) in pairs if is_excluded)


def _joined(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """Drop empty `ranges` of ascending ones, and join neighbours."""
    joined: list[tuple[int, int]] = []
    for start, stop in ranges:
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(stop, joined[-1][1]))
        elif start < stop:
            joined.append((start, stop))
    return tuple(joined)
