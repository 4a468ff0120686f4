"""Bytes that are alive for the backward of one block, and what they come to for LLaMA geometries."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

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


class Kept(NamedTuple):
    """What training keeps of one block."""

    activation_bytes: float
    """For each token, alive after the forward, without the block's input and its output."""
    trained: int
    """Numbers that have a gradient and an optimizer's state."""
    parameters: int


def kept(
    block: nn.Module, hidden: int, compact: dict[str, Any] | None, dtype: torch.dtype = torch.bfloat16
) -> Kept:
    """Measured on one forward in `dtype`."""
    block.to(dtype)
    x = torch.randn(1, TOKENS, hidden, dtype=dtype).requires_grad_()
    runtime = None
    if compact is not None:
        optimizer = torch.optim.AdamW(block.parameters(), weight_decay=0.0)
        section = {"compact": compact, "report": {"interval": 0}}
        runtime = ssdtrain.attach(block, section, optimizer=optimizer)
    block(x)  # projections are made once for several steps, and are no activations
    with Alive(block) as alive:
        y = block(x * 1.0)
    found = alive.nbytes() - y.nbytes
    numbers = [(p.numel(), p.requires_grad) for p in block.parameters()]
    if runtime is not None:
        runtime.close()
    del y
    return Kept(found / TOKENS, sum(n for n, trains in numbers if trains), sum(n for n, _ in numbers))


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
    def block_parameters(self) -> int:
        return self.matrices // self.layers + 2 * self.hidden

    @property
    def parameters(self) -> int:
        return self.layers * self.block_parameters + 2 * 32000 * self.hidden + self.hidden

    def block(self, fused_norms: bool = False) -> Block:
        return Block(LlamaConfig(1, self.hidden, self.heads, self.middle, fused_norms=fused_norms))


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


def activation_ratios(
    variants: dict[str, dict[str, Any] | None], dtype: torch.dtype
) -> dict[str, dict[str, float]]:
    """Saved bytes with each variant over those without, for a Llama-like and a GPT block of width 512."""
    geometry = GEOMETRIES["60M"]

    def gpt_block() -> nn.Module:
        return gpt.Block(gpt.GPTConfig(hidden=512, heads=8))

    found: dict[str, dict[str, float]] = {}
    for name, made in (("llama", geometry.block), ("gpt", gpt_block)):

        def saved(section: dict[str, Any] | None, made: Callable[[], nn.Module] = made) -> float:
            return kept(made(), 512, section, dtype).activation_bytes

        plain = saved(None)
        for variant, section in variants.items():
            if section is not None:
                found.setdefault(name, {})[variant] = saved(section) / plain
        found[name]["reconstruct n/4, recompute false"] = saved({"ratio": 0.25, "recompute": False}) / plain
    return found


def model_bytes(geometry: Geometry, block: Kept, *, frozen: bool = False) -> int:
    """Weights, gradients and Adam's two moments in bfloat16.

    Args:
        frozen: embedding, head and norms do not train.
    """
    rest = geometry.parameters - geometry.layers * geometry.block_parameters
    weights = rest + geometry.layers * block.parameters
    trained = geometry.layers * block.trained + (0 if frozen else rest)
    return BF16 * (weights + 3 * trained)


LORA: dict[str, dict[str, Any] | None] = {
    "lora": None,
    "lora, reconstruct n/4": {"ratio": 0.25},
    "lora, quant int4": {"mode": "quant"},
}
"""Fine-tuning of adapters on a frozen model: by name, the `compact` section."""


def peaks(variants: dict[str, dict[str, Any] | None]) -> dict[str, Any]:
    """Weights, gradients, Adam's state and activations in bfloat16 by geometry and variant, and their ratios to the full.

    `peak_ratio` has the logits of a language model for every token. Fine-tuning is that of a classifier: one label for a
    sequence, so that there are no logits to speak of; `lora` trains adapters of q and v on a frozen model. The blocks have norms
    in Python; `finetune_fused_norms_ratio` is the same with torch's fused norm on both sides.
    """
    figures: dict[str, Any] = {
        name: {}
        for name in (
            "peak_ratio",
            "peak_gib",
            "optimizer_ratio",
            "finetune_ratio",
            "finetune_gib",
            "finetune_lora_ratio",
            "finetune_fused_norms_ratio",
            "peak_floor",
        )
    }
    tokens = SEQUENCES * 256
    for name, geometry in GEOMETRIES.items():
        hidden = geometry.hidden
        blocks = {variant: kept(geometry.block(), hidden, section) for variant, section in variants.items()}
        tuned = {variant: _tuned_bytes(geometry, block) for variant, block in blocks.items()}
        tuned |= _tuned_adapters(geometry, fused_norms=False)
        peak = {variant: tuned[variant] + tokens * LOGITS for variant in blocks}
        trained = {
            v: geometry.layers * (block.trained - geometry.block_parameters) + geometry.parameters
            for v, block in blocks.items()
        }
        figures["peak_gib"][name] = {variant: found / 2**30 for variant, found in peak.items()}
        figures["peak_ratio"][name] = _ratios(peak)
        figures["optimizer_ratio"][name] = _ratios(trained)
        figures["finetune_ratio"][name] = _ratios(tuned)
        figures["finetune_gib"][name] = {variant: found / 2**30 for variant, found in tuned.items()}
        figures["finetune_lora_ratio"][name] = tuned["lora, reconstruct n/4"] / tuned["lora"]
        fused = {"full": _tuned_bytes(geometry, kept(geometry.block(fused_norms=True), hidden, None))}
        figures["finetune_fused_norms_ratio"][name] = _ratios(
            {**fused, **_tuned_adapters(geometry, fused_norms=True)}
        )
        # What no compression of inputs reaches: the model's bytes, logits, and what is not an input of a linear layer.
        figures["peak_floor"][name] = (model_bytes(geometry, blocks["full"]) + tokens * LOGITS) / peak["full"]
    return figures


def _tuned_bytes(geometry: Geometry, block: Kept, *, frozen: bool = False) -> float:
    """Model, gradients, optimizer and activations, without logits."""
    activations = SEQUENCES * 256 * geometry.layers * block.activation_bytes
    return model_bytes(geometry, block, frozen=frozen) + activations


def _tuned_adapters(geometry: Geometry, *, fused_norms: bool) -> dict[str, float]:
    return {
        name: _tuned_bytes(
            geometry, kept(with_adapters(geometry.block(fused_norms)), geometry.hidden, section), frozen=True
        )
        for name, section in LORA.items()
    }


def _ratios(found: dict[str, Any]) -> dict[str, float]:
    return {variant: value / found["full"] for variant, value in found.items() if variant != "full"}


__all__ = ["GEOMETRIES", "activation_ratios", "kept", "peaks"]
