"""Bytes that are alive for the backward of one block, and what they come to for LLaMA geometries."""

from __future__ import annotations

import gc
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

import ssdtrain
from benchmarks.compact_training import Block, LlamaConfig
from examples.support import model as gpt

TOKENS = 256
"""Of the sequence that blocks are measured with; bytes for a token do not depend on it."""


class Alive(TorchDispatchMode):
    """Storages that operations have made, and which of them are alive."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._weights = {parameter.untyped_storage()._cdata for parameter in model.parameters()}
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata in self._weights:
                    continue  # a view of a weight
                self._made[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        return result

    def nbytes(self) -> int:
        gc.collect()
        return sum(nbytes for reference, nbytes in self._made.values() if not reference.expired())


def saved_bytes(block: nn.Module, hidden: int, compact: dict[str, Any] | None) -> float:
    """Bytes for each token that the graph of `block` keeps alive after its forward, without its input and its output."""
    x = torch.randn(1, TOKENS, hidden).requires_grad_()
    runtime = None
    if compact is not None:
        runtime = ssdtrain.attach(block, {"compact": compact, "report": {"interval": 0}})
    with Alive(block) as alive:
        y = block(x * 1.0)
    found = alive.nbytes() - y.nbytes
    if runtime is not None:
        runtime.close()
    y.sum().backward()
    return found / TOKENS


class Adapter(nn.Module):
    """A frozen layer and a low-rank one beside it."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base_layer = base.requires_grad_(False)
        self.lora_A = nn.Linear(base.in_features, rank, bias=False)
        self.lora_B = nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.base_layer(x) + self.lora_B(self.lora_A(x))
        return found


def with_adapters(block: Block, rank: int = 8) -> Block:
    """q and v have adapters; everything else is frozen."""
    block.requires_grad_(False)
    for name in ("q_proj", "v_proj"):
        setattr(block.self_attn, name, Adapter(getattr(block.self_attn, name), rank))
    return block


@dataclass(frozen=True)
class Geometry:
    """Of the paper's pretraining: vocabulary 32,000, sequences of 256."""

    layers: int
    hidden: int
    middle: int
    heads: int

    @property
    def matrices(self) -> int:
        return self.layers * (4 * self.hidden**2 + 3 * self.hidden * self.middle)

    @property
    def parameters(self) -> int:
        return self.matrices + 2 * 32000 * self.hidden + (2 * self.layers + 1) * self.hidden

    def block(self) -> Block:
        return Block(LlamaConfig(1, self.hidden, self.heads, self.middle))


GEOMETRIES = {
    "60M": Geometry(8, 512, 1376, 8),
    "130M": Geometry(12, 768, 2048, 12),
    "350M": Geometry(24, 1024, 2736, 16),
    "1.3B": Geometry(24, 2048, 5461, 32),
}
SEQUENCES = 64
"""Of 256 tokens in a microbatch."""
BF16 = 2
LOGITS = 32000 * (2 + 4 + 4)
"""Bytes for a token: logits in bfloat16, the same in float32, and their log-softmax."""


def activation_ratios(variants: dict[str, dict[str, Any] | None]) -> dict[str, dict[str, float]]:
    """Saved bytes with each variant over those without, for a Llama-like and a GPT block of width 512."""
    geometry = GEOMETRIES["60M"]

    def gpt_block() -> nn.Module:
        return gpt.Block(gpt.GPTConfig(hidden=512, heads=8))

    found: dict[str, dict[str, float]] = {}
    for name, made in (("llama", geometry.block), ("gpt", gpt_block)):
        plain = saved_bytes(made(), 512, None)
        for variant, section in variants.items():
            if section is not None:
                found.setdefault(name, {})[variant] = saved_bytes(made(), 512, section) / plain
        found[name]["reconstruct n/4, recompute false"] = (
            saved_bytes(made(), 512, {"ratio": 0.25, "recompute": False}) / plain
        )
    return found


def peaks(variants: dict[str, dict[str, Any] | None]) -> dict[str, Any]:
    """Weights, gradients, Adam's state and activations in bfloat16 by geometry and variant, and their ratios to the full."""
    figures: dict[str, Any] = {
        "peak_ratio": {},
        "peak_gib": {},
        "finetune_ratio": {},
        "finetune_lora_ratio": {},
    }
    tokens = SEQUENCES * 256
    for name, geometry in GEOMETRIES.items():
        # Measured in float32; a block in bfloat16 saves half.
        per_token = {
            variant: geometry.layers * saved_bytes(geometry.block(), geometry.hidden, section) / 2
            for variant, section in variants.items()
        }
        model = 4 * BF16 * geometry.parameters
        total = {variant: model + tokens * (bytes_ + LOGITS) for variant, bytes_ in per_token.items()}
        full = total["full"]
        figures["peak_gib"][name] = {variant: found / 2**30 for variant, found in total.items()}
        figures["peak_ratio"][name] = {
            variant: found / full for variant, found in total.items() if variant != "full"
        }
        lora = {
            kind: BF16 * geometry.parameters
            + tokens
            * (
                geometry.layers * saved_bytes(with_adapters(geometry.block()), geometry.hidden, section) / 2
                + LOGITS
            )
            for kind, section in (("plain", None), ("compact", {"ratio": 0.25}))
        }
        figures["finetune_ratio"][name] = lora["compact"] / full
        figures["finetune_lora_ratio"][name] = lora["compact"] / lora["plain"]
    return figures


__all__ = ["GEOMETRIES", "activation_ratios", "peaks", "saved_bytes"]
