"""The GPT that the demo and the benchmarks train: pre-LN blocks, causal attention, byte vocabulary.

Shapes: B microbatch, T sequence, C hidden, H heads, D = C / H, V vocabulary.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint


@dataclass(frozen=True)
class GPTConfig:
    layers: int = 12
    hidden: int = 384
    """Width C of the residual stream; a multiple of `heads`."""
    heads: int = 6
    sequence: int = 512
    """The longest sequence T, in tokens; positions are learned."""
    vocabulary: int = 256
    dropout: float = 0.0
    """Probability at the embedding, in attention and at both residual branches; drawn from torch's global generators."""

    def __post_init__(self) -> None:
        if self.hidden % self.heads:
            raise ValueError(f"hidden {self.hidden} is not a multiple of heads {self.heads}")


class Attention(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.dropout = config.dropout
        self.qkv = nn.Linear(config.hidden, 3 * config.hidden)
        self.out = nn.Linear(config.hidden, config.hidden)

    def forward(self, x_BTC: Tensor) -> Tensor:
        B, T, C = x_BTC.shape
        q_BHTD, k_BHTD, v_BHTD = (
            self.qkv(x_BTC).view(B, T, 3, self.heads, C // self.heads).permute(2, 0, 3, 1, 4)
        )
        y_BHTD = F.scaled_dot_product_attention(
            q_BHTD, k_BHTD, v_BHTD, dropout_p=self.dropout if self.training else 0.0, is_causal=True
        )
        return self.out(y_BHTD.transpose(1, 2).reshape(B, T, C))


class Block(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(config.hidden)
        self.attention = Attention(config)
        self.norm2 = nn.LayerNorm(config.hidden)
        self.expand = nn.Linear(config.hidden, 4 * config.hidden)
        self.contract = nn.Linear(4 * config.hidden, config.hidden)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x_BTC: Tensor) -> Tensor:
        x_BTC = x_BTC + self.dropout(self.attention(self.norm1(x_BTC)))
        hidden = F.gelu(self.expand(self.norm2(x_BTC)), approximate="tanh")
        return x_BTC + self.dropout(self.contract(hidden))


class GPT(nn.Module):
    """Returns the mean cross entropy in nats per byte, in float32 whatever the dtype of the weights.

    `recomputed_blocks` says how many blocks, from the first, keep only their input and run again in backward. The
    reentrant checkpoint is used: what the second run saves then passes through the saved-tensor hooks in force, so that
    a meter made of such hooks sees it (the other mode installs its own, which hide it).
    """

    def __init__(self, config: GPTConfig, recomputed_blocks: int = 0) -> None:
        super().__init__()
        if not 0 <= recomputed_blocks <= config.layers:
            raise ValueError(
                f"recomputed_blocks {recomputed_blocks} is not between 0 and layers {config.layers}"
            )
        self.config = config
        self.recomputed_blocks = recomputed_blocks
        self.embedding = nn.Embedding(config.vocabulary, config.hidden)
        self.position = nn.Embedding(config.sequence, config.hidden)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.hidden)
        self.head = nn.Linear(config.hidden, config.vocabulary, bias=False)
        self.apply(self._initialise)

    def _initialise(self, module: nn.Module) -> None:
        """GPT-2's initialisation: 0.02, divided by sqrt(2 x layers) where a branch joins the residual stream."""
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)
        if isinstance(module, Block):
            for branch in (module.attention.out, module.contract):
                nn.init.normal_(branch.weight, std=0.02 / math.sqrt(2 * self.config.layers))

    def forward(self, tokens_BT: Tensor, targets_BT: Tensor) -> Tensor:
        T = tokens_BT.shape[1]
        x_BTC = self.dropout(self.embedding(tokens_BT) + self.position.weight[:T])
        for index, block in enumerate(self.blocks):
            if index < self.recomputed_blocks and torch.is_grad_enabled():
                x_BTC = checkpoint(block, x_BTC, use_reentrant=True)
            else:
                x_BTC = block(x_BTC)
        logits_BTV = self.head(self.norm(x_BTC))
        return F.cross_entropy(logits_BTV.float().flatten(0, 1), targets_BT.flatten())
