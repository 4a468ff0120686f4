"""A small model, trained with and without its state in chunks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

WIDTH = 32
VOCABULARY = 61


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    """Blocks between an embedding and a head.

    Args:
        recompute: None, "each" block, or "pairs" of blocks; with "reentrant" by torch's older checkpoint.
        tied: the head has the weight of the embedding.
    """

    def __init__(
        self, layers: int = 8, width: int = WIDTH, recompute: str | None = None, *, tied: bool = False
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.layers = nn.ModuleList([Block(width) for _ in range(layers)])
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        self.recompute = recompute

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        if self.recompute == "pairs":
            for first, second in zip(self.layers[::2], self.layers[1::2], strict=True):
                x = checkpoint(lambda x, a=first, b=second: b(a(x)), x, use_reentrant=False)
        else:
            for layer in self.layers:
                if self.recompute is None:
                    x = layer(x)
                else:
                    x = checkpoint(layer, x, use_reentrant=self.recompute == "reentrant")
        return self.head(x)


def make_model(**options: Any) -> Model:
    torch.manual_seed(0)
    return Model(**options)


def batches(count: int, rows: int = 4) -> list[torch.Tensor]:
    generator = torch.Generator("cpu").manual_seed(1)
    return [torch.randint(VOCABULARY, (rows, 9), generator=generator, device="cpu") for _ in range(count)]


def device_of(model: nn.Module) -> torch.device:
    return next(model.parameters()).device


def loss_of(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """Of a batch in host memory, on the model's device."""
    batch = batch.to(device_of(model))
    logits = model(batch[:, :-1])
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())


MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


@dataclass
class Recipe:
    """How a model is trained."""

    optimizer: MakeOptimizer = lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1)
    steps: int = 5
    microbatches: int = 1
    clip: float | None = None
    schedule: bool = False
    model: dict[str, Any] = field(default_factory=dict)
    autocast: bool = False


def run(
    recipe: Recipe, model: nn.Module, optimizer: torch.optim.Optimizer, runtime: Any = None, first: int = 0
) -> list[float]:
    """Train; returns the losses, and the norms where gradients are clipped."""
    scheduler = (
        torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 7, last_epoch=-1) if recipe.schedule else None
    )
    seen: list[float] = []
    data = batches((first + recipe.steps) * recipe.microbatches)[first * recipe.microbatches :]
    for step in range(recipe.steps):
        for batch in data[step * recipe.microbatches : (step + 1) * recipe.microbatches]:
            with torch.autocast(device_of(model).type, torch.bfloat16, enabled=recipe.autocast):
                loss = loss_of(model, batch)
            loss.backward()
            seen.append(loss.item())
        if recipe.clip is not None:
            clip = (
                torch.nn.utils.clip_grad_norm_
                if runtime is None
                else lambda parameters, norm: runtime.state.clip_grad_norm_(norm)
            )
            seen.append(clip(model.parameters(), recipe.clip).item())
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        optimizer.zero_grad()
    return seen


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


def chunked(attach: Any, **options: Any) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    """A model whose chunks come and go, its optimizer and the runtime."""
    model = make_model()
    optimizer = adamw(model.parameters())
    return model, optimizer, attach(model, optimizer, **options)


def plain(recipe: Recipe) -> tuple[list[float], dict[str, torch.Tensor], dict[str, Any]]:
    """Without chunks: losses, parameters, the optimizer's state dict."""
    model = make_model(**recipe.model)
    optimizer = recipe.optimizer(list(model.parameters()))
    losses = run(recipe, model, optimizer)
    return losses, model.state_dict(), optimizer.state_dict()


def bits_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu().view(torch.uint8) if tensor.dim() else tensor


def same(one: Any, other: Any) -> bool:
    """Equal to the bit, with all that is inside of dicts and lists."""
    if isinstance(one, torch.Tensor):
        if not isinstance(other, torch.Tensor) or (one.shape, one.dtype) != (other.shape, other.dtype):
            return False
        return torch.equal(bits_of(one).cpu(), bits_of(other).cpu())
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(value, other[key]) for key, value in one.items())
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)
