"""Small real blocks that save what fused kernels save, and a count of what they save."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ssdtrain.tools.whatif.models import Transformer


class RMSNorm(nn.Module):
    """Saves its input and one statistic per token, as the fused kernels on a GPU do."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden))

    def forward(self, x: Tensor) -> Tensor:
        return _RMSNorm.apply(x, self.weight)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        scale = x.float().pow(2).mean(-1, keepdim=True).add(1e-6).rsqrt()
        ctx.save_for_backward(x, weight, scale)
        return (x * scale).to(x.dtype) * weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, weight, scale = ctx.saved_tensors
        with torch.enable_grad():
            x, weight = x.detach().requires_grad_(), weight.detach().requires_grad_()
            scale = x.float().pow(2).mean(-1, keepdim=True).add(1e-6).rsqrt()
            y = (x * scale).to(x.dtype) * weight
            return torch.autograd.grad(y, (x, weight), gradient)


class SwiGLU(torch.autograd.Function):
    """silu(gate) * up in one kernel: saves its two inputs."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return F.silu(gate) * up

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = (t.detach().requires_grad_() for t in ctx.saved_tensors)
        with torch.enable_grad():
            return torch.autograd.grad(F.silu(gate) * up, (gate, up), gradient)


class Attention(nn.Module):
    """Without biases; keys and values from `memory` if given."""

    def __init__(self, model: Transformer) -> None:
        super().__init__()
        self.head = model.hidden // model.heads
        self.q = nn.Linear(model.hidden, model.hidden, bias=False)
        self.k = nn.Linear(model.hidden, model.key_width, bias=False)
        self.v = nn.Linear(model.hidden, model.key_width, bias=False)
        self.o = nn.Linear(model.hidden, model.hidden, bias=False)

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        memory = x if memory is None else memory
        q, k, v = (
            linear(y).unflatten(-1, (-1, self.head)).transpose(1, 2)
            for linear, y in ((self.q, x), (self.k, memory), (self.v, memory))
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=k.shape[1] != q.shape[1])
        return self.o(y.transpose(1, 2).flatten(2))


class Llama(nn.Module):
    def __init__(self, model: Transformer) -> None:
        super().__init__()
        self.norm1, self.norm2 = RMSNorm(model.hidden), RMSNorm(model.hidden)
        self.attention = Attention(model)
        self.gate, self.up = (nn.Linear(model.hidden, model.ffn, bias=False) for _ in range(2))
        self.down = nn.Linear(model.ffn, model.hidden, bias=False)
        self.fused = model.fused

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        y = self.norm2(x)
        gate, up = self.gate(y), self.up(y)
        return x + self.down(SwiGLU.apply(gate, up) if self.fused else F.silu(gate) * up)


class Experts(nn.Module):
    """A Mixtral block: every token passes `top_k` experts, as many tokens to each."""

    def __init__(self, model: Transformer) -> None:
        super().__init__()
        self.norm1, self.norm2 = RMSNorm(model.hidden), RMSNorm(model.hidden)
        self.attention = Attention(model)
        self.router = nn.Linear(model.hidden, model.experts, bias=False)
        expert, h, f = model.experts, model.hidden, model.ffn
        self.gate, self.up = (nn.Parameter(torch.randn(expert, h, f) / h**0.5) for _ in range(2))
        self.down = nn.Parameter(torch.randn(expert, f, h) / f**0.5)
        self.copies = model.top_k

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        y = self.norm2(x)
        flat = y.flatten(0, 1)
        tokens, experts = flat.shape[0], self.router.weight.shape[0]
        probability = torch.softmax(self.router(y).flatten(0, 1).float(), -1)
        # Balanced by construction: which expert gets a token does not depend on the probabilities.
        index = (torch.arange(tokens * self.copies) % tokens).reshape(experts, -1)
        chosen = flat[index]
        z = torch.bmm(SwiGLU.apply(torch.bmm(chosen, self.gate), torch.bmm(chosen, self.up)), self.down)
        weight = probability[index, torch.arange(experts)[:, None]].to(z.dtype)
        return x + (z * weight[..., None]).view(self.copies, *x.shape).sum(0)


class T5Decoder(nn.Module):
    def __init__(self, model: Transformer) -> None:
        super().__init__()
        self.norms = nn.ModuleList(RMSNorm(model.hidden) for _ in range(3))
        self.own, self.cross = Attention(model), Attention(model)
        self.expand = nn.Linear(model.hidden, model.ffn, bias=False)
        self.contract = nn.Linear(model.ffn, model.hidden, bias=False)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        x = x + self.own(self.norms[0](x))
        x = x + self.cross(self.norms[1](x), memory)
        return x + self.contract(F.gelu(self.expand(self.norms[2](x))))


def count_saved_bytes(module: nn.Module, run: Callable[[], Tensor], *others: Tensor) -> int:
    """Bytes of the storages that `run` saves for backward, each once, without those of `module`'s parameters and of `others`."""
    left_out = {p.untyped_storage().data_ptr() for p in (*module.parameters(), *others)}
    found: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in left_out and not isinstance(tensor, nn.Parameter):
            found[storage.data_ptr()] = storage  # held, so that no address is used twice
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = run()
    del output
    return sum(storage.nbytes() for storage in found.values())
