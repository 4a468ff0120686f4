"""Small models that save tensors in every way that has corrupted somebody's gradients.

Each case is a function that builds everything from a fixed seed and returns `run`; `run(recording)` does a few steps, enters
`recording()` around each forward, and returns all numbers that must be equal to the bit.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import ssdtrain

Recording = Callable[[], AbstractContextManager[Any]]
Case = Callable[[Recording], list[torch.Tensor]]

D = 64


def train(
    model: nn.Module, inputs: torch.Tensor, recording: Recording, steps: int = 2, **call: Any
) -> list[torch.Tensor]:
    """Losses of every step and the last gradients and buffers."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        with recording():
            loss = model(inputs, **call).float().square().mean()
        loss.backward()
        losses.append(loss.detach().clone())
        gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        optimizer.step()
    return [*losses, *gradients, *(b.clone() for b in model.buffers())]


class Attention(nn.Module):
    """One packed projection split by `chunk`, so that q, k and v overlap in one storage."""

    def __init__(self, heads: int = 4, dropout: float = 0.0) -> None:
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.qkv = nn.Linear(D, 3 * D)
        self.out = nn.Linear(D, D)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, s, d = x.shape
        q, k, v = (t.view(b, s, self.heads, -1).transpose(1, 2) for t in self.qkv(x).chunk(3, dim=-1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=self.dropout)
        return self.out(y.transpose(1, 2).reshape(b, s, d))


class Block(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.attention = Attention(dropout=dropout)
        self.norms = nn.ModuleList([nn.LayerNorm(D), nn.LayerNorm(D)])
        self.mlp = nn.Sequential(nn.Linear(D, 4 * D), nn.GELU(), nn.Linear(4 * D, D), nn.Dropout(dropout))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norms[0](x))
        return x + self.mlp(self.norms[1](x))


class Gpt(nn.Module):
    """Tied embedding and head."""

    def __init__(self, layers: int = 2, dropout: float = 0.0) -> None:
        super().__init__()
        self.embedding = nn.Embedding(97, D)
        self.blocks = nn.ModuleList([Block(dropout) for _ in range(layers)])
        self.norm = nn.LayerNorm(D)

    def forward(
        self, tokens: torch.Tensor, around: Callable[..., torch.Tensor] | None = None
    ) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x) if around is None else around(block, x)
        return self.norm(x) @ self.embedding.weight.t()


def tokens() -> torch.Tensor:
    return torch.randint(97, (2, 32), generator=torch.Generator().manual_seed(1))


def noise(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(2))


def gpt(recording: Recording) -> list[torch.Tensor]:
    return train(Gpt(), tokens(), recording, steps=3)


def gpt_with_dropout(recording: Recording) -> list[torch.Tensor]:
    return train(Gpt(dropout=0.2), tokens(), recording)


def gpt_compiled_eagerly(recording: Recording) -> list[torch.Tensor]:
    return train(torch.compile(Gpt(), backend="aot_eager"), tokens(), recording)  # type: ignore[arg-type]


def gpt_checkpointed(recording: Recording) -> list[torch.Tensor]:
    return train(
        Gpt(dropout=0.2),
        tokens(),
        recording,
        around=lambda block, x: checkpoint(block, x, use_reentrant=False),
    )


def gpt_checkpointed_reentrant(recording: Recording) -> list[torch.Tensor]:
    return train(
        Gpt(dropout=0.2),
        tokens(),
        recording,
        around=lambda block, x: checkpoint(block, x, use_reentrant=True),
    )


def gpt_with_our_checkpoint(recording: Recording) -> list[torch.Tensor]:
    return train(Gpt(dropout=0.2), tokens(), recording, around=ssdtrain.checkpoint)


def autocast(recording: Recording) -> list[torch.Tensor]:
    def bf16() -> AbstractContextManager[Any]:
        stack = __import__("contextlib").ExitStack()
        stack.enter_context(torch.autocast("cpu", dtype=torch.bfloat16))
        stack.enter_context(recording())
        return stack

    return train(Gpt(), tokens(), bf16)


class SwiGlu(nn.Module):
    """The two halves of a chunk() differ only in their storage offset."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(D, 8 * D)
        self.down = nn.Linear(4 * D, D)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, value = self.up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * value)


def swiglu(recording: Recording) -> list[torch.Tensor]:
    return train(nn.Sequential(SwiGlu(), SwiGlu()), noise(4, 16, D), recording)


class OverlappingQkv(nn.Module):
    """Three views of one storage, each over nearly all of it, none containing another: Megatron's split."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(D, 3 * D)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mixed = self.qkv(x).view(*x.shape[:-1], 4, 3 * D // 4)
        q, k, v = mixed.split(D // 4, dim=-1)
        return (q.sigmoid() * k.tanh() * v) + q * k


def overlapping_qkv(recording: Recording) -> list[torch.Tensor]:
    return train(OverlappingQkv(), noise(4, 16, D), recording)


class Views(nn.Module):
    """Small strided views, expanded, transposed, permuted, diagonal, overlapping windows and a view of another dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, D))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * self.scale
        thin = x[:, ::8, :4]
        tall = x.transpose(0, 2)
        wide = x.mean(dim=1, keepdim=True).expand(-1, 64, -1)
        diagonal = torch.diagonal(x, dim1=1, dim2=2)
        windows = x.reshape(-1).unfold(0, 64, 32)
        as_complex = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))
        # Products, not squares: pow saves one tensor, a product saves both factors.
        parts = [thin * thin.sin(), tall * tall.cos(), wide * wide.exp(), diagonal * diagonal.tanh()]
        parts += [windows * windows.sin(), (as_complex * as_complex.conj()).real]
        return torch.stack([part.mean() for part in parts])


def views(recording: Recording) -> list[torch.Tensor]:
    return train(Views(), noise(8, 128, D), recording)


def tied_weights(recording: Recording) -> list[torch.Tensor]:
    shared = nn.Linear(D, D)
    return train(nn.Sequential(shared, nn.GELU(), shared, nn.Tanh(), shared), noise(32, D), recording)


def batch_norm(recording: Recording) -> list[torch.Tensor]:
    model = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 8, 3))
    return train(model, noise(4, 3, 16, 16), recording)


def conv_channels_last(recording: Recording) -> list[torch.Tensor]:
    model = nn.Sequential(nn.Conv2d(4, 16, 3), nn.MaxPool2d(2), nn.Conv2d(16, 8, 3)).to(
        memory_format=torch.channels_last
    )
    return train(model, noise(4, 4, 16, 16).to(memory_format=torch.channels_last), recording)


class Lstm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(D, D, num_layers=2, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lstm(x)[0]


def lstm(recording: Recording) -> list[torch.Tensor]:
    return train(Lstm(), noise(4, 16, D), recording)


class ReturnsItsSavedTensor(torch.autograd.Function):
    """Modifies its saved tensor in backward and returns it as the gradient (Megatron's cross entropy does)."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        softmax = x.softmax(dim=-1)
        ctx.save_for_backward(softmax)
        return softmax.square().sum(dim=-1)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (softmax,) = ctx.saved_tensors
        softmax.mul_(grad.unsqueeze(-1))
        return softmax


class WithModifiedSaved(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lins = nn.ModuleList([nn.Linear(D, D) for _ in range(4)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return sum(ReturnsItsSavedTensor.apply(lin(x)).mean() for lin in self.lins)  # type: ignore[return-value]


def returns_modified_saved(recording: Recording) -> list[torch.Tensor]:
    return train(WithModifiedSaved(), noise(64, D), recording)


def retain_graph(recording: Recording) -> list[torch.Tensor]:
    model = Gpt()
    with recording():
        loss = model(tokens()).square().mean()
    found = []
    for again in (True, True, False):
        model.zero_grad()
        loss.backward(retain_graph=again)
        found += [p.grad.clone() for p in model.parameters() if p.grad is not None]
    return found


def double_backward(recording: Recording) -> list[torch.Tensor]:
    model = nn.Sequential(nn.Linear(D, D), nn.Tanh(), nn.Linear(D, D), nn.Sigmoid(), nn.Linear(D, 1))
    x = noise(64, D).requires_grad_()
    with recording():
        y = model(x).sum()
        (slope,) = torch.autograd.grad(y, x, create_graph=True)
        penalty = slope.square().mean()
    penalty.backward()
    return [slope.detach(), x.grad, *(p.grad for p in model.parameters() if p.grad is not None)]  # type: ignore[list-item]


def in_place_activations(recording: Recording) -> list[torch.Tensor]:
    model = nn.Sequential(
        nn.Linear(D, 4 * D), nn.ReLU(inplace=True), nn.Linear(4 * D, D), nn.Hardtanh(inplace=True)
    )
    return train(model, noise(64, D), recording)


def dead_branches(recording: Recording) -> list[torch.Tensor]:
    """Losses that are dropped, an exception in forward, an evaluation pass between forward and backward."""
    model, found = Gpt(), []
    for step in range(3):
        with recording():
            kept = model(tokens()).square().mean()
            model(tokens()).exp().mean()  # dropped
        try:
            with recording():
                model(tokens())
                raise KeyError("a batch that cannot be read")
        except KeyError:
            pass
        with torch.no_grad(), recording():
            found.append(model(tokens()).mean())
        if step != 1:
            kept.backward()
    return [*found, *(p.grad for p in model.parameters() if p.grad is not None)]


def accumulated(recording: Recording) -> list[torch.Tensor]:
    """Two graphs alive at once, backward in the order of the forwards and not the reverse."""
    model = Gpt()
    losses = []
    for _ in range(3):
        with recording():
            losses.append(model(tokens()).square().mean())
    for loss in losses:
        loss.backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


def deep_copied_inputs(recording: Recording) -> list[torch.Tensor]:
    """The same input saved by many: joined to one region."""
    model = nn.ModuleList([nn.Linear(D, D) for _ in range(6)])
    x = noise(64, D)

    class Fan(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = copy.deepcopy(model)

        def forward(self, y: torch.Tensor) -> torch.Tensor:
            y = y.sin()
            return sum(layer(y) for layer in self.model)  # type: ignore[return-value]

    return train(Fan(), x, recording)


CASES: list[Case] = [
    gpt,
    gpt_with_dropout,
    gpt_compiled_eagerly,
    gpt_checkpointed,
    gpt_checkpointed_reentrant,
    gpt_with_our_checkpoint,
    autocast,
    swiglu,
    overlapping_qkv,
    views,
    tied_weights,
    batch_norm,
    conv_channels_last,
    lstm,
    returns_modified_saved,
    retain_graph,
    double_backward,
    in_place_activations,
    dead_branches,
    accumulated,
    deep_copied_inputs,
]


def run(case: Case, recording: Recording) -> list[torch.Tensor]:
    """The case from its fixed seed, on this thread."""
    torch.manual_seed(0)
    return case(recording)
