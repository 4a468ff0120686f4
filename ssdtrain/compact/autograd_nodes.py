"""Private names of autograd's nodes, which no other file of this room touches, and the check that this torch has them.

`_raw_saved_NAME` of a node is the saved tensor that takes hooks, `_saved_NAME` its values, `_input_metadata` describes outputs.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

PRODUCT = "MulBackward0"
SILU = "SiluBackward0"
CAST = "ToCopyBackward0"
MEAN_SQUARE = ("RsqrtBackward0", "AddBackward0", "MeanBackward1", "PowBackward0")
"""Nodes of `rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)`, from the result to x."""
VIEWS = frozenset({"ViewBackward0", "TransposeBackward0", "PermuteBackward0", "ReshapeAliasBackward0"})
FACTORS = ("_raw_saved_self", "_raw_saved_other")
"""Saved tensors of a product."""
SQUARED = FACTORS[0]
"""Saved tensor of a square."""
_RESULTS = ("_raw_saved_result", "_raw_saved_output", "_raw_saved_out")


def saves_its_result(node: Any) -> bool:
    return any(hasattr(type(node), name) for name in _RESULTS)


def set_hooks(node: Any, name: str, pack: Callable[..., Any], unpack: Callable[..., Any]) -> None:
    """Raises RuntimeError: `node` saves nothing there, other hooks are in force, or `pack` raised it."""
    getattr(node, name).register_hooks(pack, unpack)


def saved_factors(product: Any) -> tuple[Tensor, Tensor]:
    """Raises RuntimeError: one was modified since it was saved."""
    return product._saved_self, product._saved_other


def saved_input(silu: Any) -> Tensor:
    saved: Tensor = silu._saved_self
    return saved


def output_dtype(node: Any, output: int = 0) -> torch.dtype:
    dtype: torch.dtype = node._input_metadata[output].dtype
    return dtype


@cache
def missing_names() -> tuple[str, ...]:
    """The names of nodes and of their attributes that this torch does not have, found by small graphs on the CPU."""
    with torch.inference_mode(False), torch.enable_grad(), torch.autocast("cpu", enabled=False):
        x = torch.ones(2, 2, device="cpu", requires_grad=True)
        product, silu, cast = (x * x).grad_fn, torch.nn.functional.silu(x).grad_fn, x.half().grad_fn
        nodes = [(product, PRODUCT), (silu, SILU), (cast, CAST)]
        norm: Any = (x.pow(2).mean(-1, keepdim=True) + 1.0).rsqrt().grad_fn
        for name in MEAN_SQUARE:
            nodes.append((norm, name))
            square, norm = norm, norm.next_functions[0][0] if norm is not None else None
        missing = [name for node, name in nodes if node is None or node.name() != name]
        attributes = [
            *((product, name) for name in (*FACTORS, "_saved_self", "_saved_other")),
            *((square, SQUARED), (silu, "_saved_self"), (cast, "_input_metadata")),
        ]
        missing += [f"{name} of {node.name()}" for node, name in attributes if not hasattr(node, name)]
        if not saves_its_result(x.tanh().grad_fn):
            missing.append(f"{_RESULTS[0]} of TanhBackward0")
    return tuple(missing)
