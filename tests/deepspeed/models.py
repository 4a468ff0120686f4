"""A GPT small enough for a test and large enough that its activations may move."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from deepspeed.accelerator import get_accelerator
from torch import nn

VOCABULARY, HIDDEN, LAYERS, HEADS, SEQUENCE, BATCH = 64, 32, 3, 4, 32, 4
MIN_BYTES = 4096

Checkpoint = Callable[..., Any]


class Embedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, HIDDEN)
        self.position = nn.Embedding(SEQUENCE, HIDDEN)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.token(ids) + self.position(torch.arange(ids.shape[1], device=ids.device))


class Block(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(HIDDEN, HIDDEN) for _ in range(4))
        self.up_proj, self.down_proj = nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(4 * HIDDEN, HIDDEN)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, s, _ = x.shape

        def heads(t: torch.Tensor) -> torch.Tensor:
            return t.view(b, s, -1, HIDDEN // HEADS).transpose(1, 2)

        y = self.norm1(x)
        y = F.scaled_dot_product_attention(
            heads(self.q_proj(y)), heads(self.k_proj(y)), heads(self.v_proj(y)), is_causal=True
        )
        x = x + self.dropout(self.o_proj(y.transpose(1, 2).reshape(b, s, -1)))
        return x + self.down_proj(F.gelu(self.up_proj(self.norm2(x))))


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.out = nn.Linear(HIDDEN, VOCABULARY, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.norm(x))


def loss_of(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.float().reshape(-1, VOCABULARY), labels.reshape(-1))


class GPT(nn.Module):
    """Args: checkpoint: called as `checkpoint(block, x)`; None runs the block."""

    def __init__(
        self,
        checkpoint: Checkpoint | None = None,
        dropout: float = 0.0,
        block: Callable[[float], nn.Module] = Block,
    ) -> None:
        super().__init__()
        self.embedding = Embedding()
        self.blocks = nn.ModuleList(block(dropout) for _ in range(LAYERS))
        self.head = Head()
        self.checkpoint = checkpoint

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = self.checkpoint(block, x) if self.checkpoint is not None else block(x)
        return loss_of(self.head(x), labels)


def batches(seed: int, count: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """`count` microbatches of a small alphabet, so that a few steps learn something; on DeepSpeed's device."""
    device = get_accelerator().current_device_name()
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        tokens = torch.randint(0, VOCABULARY // 8, (BATCH, SEQUENCE + 1), generator=generator)
        yield tokens[:, :-1].contiguous().to(device), tokens[:, 1:].contiguous().to(device)
