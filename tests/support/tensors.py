"""Comparisons that nothing passes by holding no tensor."""

from __future__ import annotations

from collections.abc import Iterable

import torch


def all_equal(one: Iterable[torch.Tensor], other: Iterable[torch.Tensor]) -> bool:
    """Whether both hold equally many tensors, at least one, and each equals its partner (`torch.equal`)."""
    pairs = list(zip(one, other, strict=True))
    return bool(pairs) and all(torch.equal(a, b) for a, b in pairs)


def equal_by_name(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    """Whether both have the same names, at least one, and equal tensors under each."""
    return one.keys() == other.keys() and all_equal(one.values(), (other[name] for name in one))
