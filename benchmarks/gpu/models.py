"""GPT, BERT and T5 as SSDTrain's paper trains them: blocks of attention and MLP with dropout, the loss at the end.

Called with (tokens, targets), int64 [microbatch, sequence], each returns the mean loss. Shapes: B microbatch, T sequence,
H hidden, N heads.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

__all__ = ["KINDS", "Model"]

KINDS = ("gpt", "bert", "t5")
DROPOUT = 0.1


class Attention(nn.Module):
    """Self-attention, or attention to `memory` where it is given."""

    def __init__(self, hidden: int, heads: int, causal: bool, options: dict[str, Any]) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.query = nn.Linear(hidden, hidden, **options)
        self.key_value = nn.Linear(hidden, 2 * hidden, **options)
        self.project = nn.Linear(hidden, hidden, **options)

    def forward(self, x_BTH: Tensor, memory: Tensor | None = None) -> Tensor:
        source = x_BTH if memory is None else memory
        query, key, value = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in (self.query(x_BTH), *self.key_value(source).chunk(2, dim=-1))
        )
        found = functional.scaled_dot_product_attention(query, key, value, is_causal=self.causal)
        return self.project(found.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """A layer of an encoder or decoder."""

    def __init__(
        self, hidden: int, heads: int, dropout: float, *, causal: bool, cross: bool, options: dict[str, Any]
    ) -> None:
        super().__init__()
        self.dropout = dropout
        self.before_attention = nn.LayerNorm(hidden, **options)
        self.attention = Attention(hidden, heads, causal, options)
        self.before_cross = nn.LayerNorm(hidden, **options) if cross else None
        self.cross = Attention(hidden, heads, False, options) if cross else None
        self.before_mlp = nn.LayerNorm(hidden, **options)
        self.up = nn.Linear(hidden, 4 * hidden, **options)
        self.down = nn.Linear(4 * hidden, hidden, **options)

    def forward(self, x_BTH: Tensor, memory: Tensor | None = None) -> Tensor:
        x_BTH = x_BTH + self._dropped(self.attention(self.before_attention(x_BTH)))
        if self.cross is not None and self.before_cross is not None:
            x_BTH = x_BTH + self._dropped(self.cross(self.before_cross(x_BTH), memory))
        return x_BTH + self._dropped(self.down(functional.gelu(self.up(self.before_mlp(x_BTH)))))

    def _dropped(self, x_BTH: Tensor) -> Tensor:
        return functional.dropout(x_BTH, self.dropout, self.training)


class Model(nn.Module):
    """One of `KINDS`. A T5 has half of its layers in the encoder, half in the decoder.

    Args:
        kind: "gpt" (causal), "bert" or "t5".
        positions: the longest sequence.
        recomputed_blocks: so many layers, from the first, keep only their inputs and run again in backward. By the reentrant
            checkpoint, as Megatron does: a meter of saved tensors sees what the second run saves.
        dropout: probability behind attention and MLP.
        device, dtype: of the parameters.
    """

    def __init__(
        self,
        kind: str,
        *,
        hidden: int,
        layers: int,
        heads: int,
        vocabulary: int = 50304,
        positions: int = 1024,
        recomputed_blocks: int = 0,
        dropout: float = DROPOUT,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        if kind not in KINDS:
            raise ValueError(f"kind must be one of {', '.join(KINDS)}, got {kind!r}")
        options: dict[str, Any] = {"device": device, "dtype": dtype}
        self.recomputed_blocks = recomputed_blocks
        self.embedding = nn.Embedding(vocabulary, hidden, **options)
        self.position = nn.Embedding(positions, hidden, **options)
        encoders = {"gpt": 0, "bert": layers, "t5": layers // 2}[kind]
        self.encoder = nn.ModuleList(
            Block(hidden, heads, dropout, causal=False, cross=False, options=options) for _ in range(encoders)
        )
        self.decoder = nn.ModuleList(
            Block(hidden, heads, dropout, causal=True, cross=kind == "t5", options=options)
            for _ in range(layers - encoders)
        )
        self.norm = nn.LayerNorm(hidden, **options)
        self.head = nn.Linear(hidden, vocabulary, bias=False, **options)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        place = torch.arange(tokens.shape[1], device=tokens.device)
        embedded = self.embedding(tokens) + self.position(place)
        memory = x_BTH = embedded
        for index, block in enumerate(self.encoder):
            x_BTH = self._run(index, block, x_BTH)
        if len(self.decoder):
            memory = x_BTH
            x_BTH = embedded
            for index, block in enumerate(self.decoder, len(self.encoder)):
                x_BTH = self._run(index, block, x_BTH, memory)
        logits = self.head(self.norm(x_BTH))
        return functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())

    def _run(self, index: int, block: nn.Module, *inputs: Tensor) -> Tensor:
        if index < self.recomputed_blocks and torch.is_grad_enabled():
            found: Tensor = checkpoint(block, *inputs, use_reentrant=True)
            return found
        plain: Tensor = block(*inputs)
        return plain
