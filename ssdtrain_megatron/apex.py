"""NVIDIA's apex: which of its parts are there, and what each changes for saved tensors.

apex is not on the package registry (the package of that name is another project), so it is found by what it holds and not by
its name. Nothing here imports it, and nothing depends on it. Its parts are expected to save ordinary tensors, which was neither
run nor checked against its sources.
"""

from __future__ import annotations

import importlib.util
from importlib.machinery import EXTENSION_SUFFIXES

__all__ = ["PARTS", "found"]

PARTS: dict[str, tuple[str, str]] = {
    "FusedLayerNorm": (
        "fused_layer_norm_cuda",
        "saves its input and two small vectors, or its output where it was built memory-efficient",
    ),
    "FusedAdam": ("amp_C", "saves nothing for backward"),
    "gradient accumulation fusion": (
        "fused_weight_gradient_mlp_cuda",
        "saves what a linear layer saves without it; the weight's gradient is added in place, and is not an activation",
    ),
}
"""Part -> (the extension module that it needs, what it should change for saved tensors)."""


def found() -> tuple[str, ...]:
    """The parts of apex that this interpreter could import, by name; () without apex. A Python file of an extension module's
    name is a stub, which stands in for apex where nothing of it is used."""
    return tuple(part for part, (module, _) in PARTS.items() if _is_extension(module))


def _is_extension(module: str) -> bool:
    spec = importlib.util.find_spec(module)
    return spec is not None and str(spec.origin).endswith(tuple(EXTENSION_SUFFIXES))
