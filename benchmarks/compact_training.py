"""A small Llama-like model trained on real text with compressed inputs, and its loss on text that it has not seen."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import ssdtrain
from examples.support.data import batches, corpus

HELD_OUT = 0.05
"""The part of the text, at its end, that no step trains on."""
BATCH, SEQUENCE = 8, 64
"""Of a step: tokens enough that runs of one variant with other seeds end within some tenths of a percent."""
LATE_CHECKPOINTS = 11
"""Evaluations, evenly spaced from half of the steps to the last one. Between two runs of one variant the loss of the last weights
differs by some tenths of a percent; the mean over the second half differs several times less."""
LATE_BATCHES, FINAL_BATCHES = 2, 16
"""Of held-out windows: of each of these evaluations, and of the last weights."""


@dataclass(frozen=True)
class LlamaConfig:
    layers: int = 2
    hidden: int = 128
    heads: int = 4
    middle: int = 384
    vocabulary: int = 256
    fused_norms: bool = False
    """torch.nn.RMSNorm in place of a norm in Python."""


TRAINED = LlamaConfig(hidden=64, heads=2, middle=192)
"""0.14 M parameters: runs short enough for the many seeds that a small gap needs."""


class RMSNorm(nn.Module):
    """As models of this family write it, in Python: it saves its input in float32 and the normalised input."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden))

    def forward(self, x: Tensor) -> Tensor:
        x_float32 = x.float()
        variance = x_float32.pow(2).mean(-1, keepdim=True)
        normalised: Tensor = x_float32 * torch.rsqrt(variance + 1e-6)
        return self.weight * normalised.to(x.dtype)


def _norm(config: LlamaConfig) -> nn.Module:
    return nn.RMSNorm(config.hidden, eps=1e-6) if config.fused_norms else RMSNorm(config.hidden)


class Attention(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.heads = config.heads
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            self.add_module(name, nn.Linear(config.hidden, config.hidden, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.shape
        q, k, v = (
            layer(x).view(B, T, self.heads, -1).transpose(1, 2)
            for layer in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = _rotated(q), _rotated(k)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(y.transpose(1, 2).reshape(B, T, C))


def _rotated(x: Tensor) -> Tensor:
    """Rotary positions."""
    T, D = x.shape[-2:]
    angle = torch.arange(T, device=x.device)[:, None] / 10000 ** (torch.arange(0, D, 2, device=x.device) / D)
    cos, sin = (torch.cat((wave, wave), -1).to(x.dtype) for wave in (angle.cos(), angle.sin()))
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat((-b, a), -1) * sin


class MLP(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden, config.middle, bias=False)
        self.up_proj = nn.Linear(config.hidden, config.middle, bias=False)
        self.down_proj = nn.Linear(config.middle, config.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.input_layernorm = _norm(config)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = _norm(config)
        self.mlp = MLP(config)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class Llama(nn.Module):
    """Returns the mean cross entropy in nats per token."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocabulary, config.hidden)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = _norm(config)
        self.lm_head = nn.Linear(config.hidden, config.vocabulary, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                joins = name.endswith(("o_proj.weight", "down_proj.weight"))
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * config.layers) if joins else 0.02)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embed_tokens(tokens)
        for layer in self.layers:
            x = layer(x)
        logits = self.lm_head(self.norm(x))
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def _evaluated(model: Llama, windows: Iterator[tuple[Tensor, Tensor]], count: int) -> float:
    with torch.no_grad():
        return float(torch.stack([model(*next(windows)) for _ in range(count)]).mean())


@functools.cache
def _text() -> Tensor:
    return corpus()


def train(
    compact: dict[str, Any] | None,
    *,
    seed: int,
    steps: int = 1000,
    batch: int = BATCH,
    sequence: int = SEQUENCE,
    learning_rate: float = 2e-3,
    config: LlamaConfig = TRAINED,
    windows: int = 64,
) -> dict[str, Any]:
    """One run. The same seed gives the same start and the same batches whatever `compact` is.

    Args:
        compact: the `compact` section; None trains without SSDTrain.
        windows: held-out sequences that are evaluated at once.

    Returns:
        `held_out`: nats per byte of the last weights; `late`: the same at each of LATE_CHECKPOINTS; both on the same windows in
        every run. `seconds`; `curve`: losses of the steps.
    """
    torch.manual_seed(seed)
    model = Llama(config)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.1, fused=True
    )
    warm = steps // 10

    def schedule(step: int) -> float:
        if step < warm:
            return (step + 1) / warm
        # To zero: the last steps average over the noise of gradients.
        return 0.5 * (1 + math.cos(math.pi * (step - warm) / (steps - warm)))

    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, schedule)
    text = _text()
    cut = int(len(text) * (1 - HELD_OUT))
    data = batches(text[:cut], microbatch=batch, sequence=sequence, seed=1000 + seed)
    runtime = None
    if compact is not None:
        section = {"compact": {"seed": seed, **compact}, "report": {"interval": 0}}
        runtime = ssdtrain.attach(model, section, optimizer=optimizer)
        runtime.step_begin()
    began = time.perf_counter()
    losses, late = [], []
    at_late = {steps - i * (steps // 2) // (LATE_CHECKPOINTS - 1) for i in range(LATE_CHECKPOINTS)}
    late_windows = batches(text[cut:], microbatch=windows, sequence=sequence, seed=-2)
    for step in range(1, steps + 1):
        loss = model(*next(data))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        if runtime is not None:
            runtime.step_end()
            runtime.step_begin()
        losses.append(float(loss.detach()))
        if step in at_late:
            late.append(_evaluated(model, late_windows, LATE_BATCHES))
    seconds = time.perf_counter() - began
    if runtime is not None:
        runtime.close()
    held_out = _evaluated(
        model, batches(text[cut:], microbatch=windows, sequence=sequence, seed=-1), FINAL_BATCHES
    )
    size = max(1, steps // 50)
    curve = [sum(losses[at : at + size]) / len(losses[at : at + size]) for at in range(0, steps, size)]
    return {"held_out": held_out, "late": late, "seconds": seconds, "curve": curve}
