"""Training with its state in chunks gives the bits of the same training without: losses, norms, parameters, optimizer state."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.state.conftest import Attach
from tests.state.training import Recipe, batches, loss_of, make_model, plain, run, same


def adamw(**options: Any) -> Any:
    return lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1, **options)


def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def adagrad(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adagrad(parameters, lr=0.1)  # makes its state before the first step


def two_groups(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    decayed = [parameter for parameter in parameters if parameter.dim() > 1]
    others = [parameter for parameter in parameters if parameter.dim() < 2]
    return torch.optim.AdamW([{"params": decayed}, {"params": others, "weight_decay": 0.0}], lr=1e-2)


RECIPES = {
    "adamw": Recipe(steps=6),
    "foreach": Recipe(adamw(foreach=True, amsgrad=True)),
    "fused": Recipe(adamw(fused=True)),
    "sgd-momentum": Recipe(sgd),
    "adagrad": Recipe(adagrad),
    "two-groups": Recipe(two_groups),
    "accumulation": Recipe(microbatches=2),
    "clipping": Recipe(clip=0.5),
    "clipping-accumulation-schedule": Recipe(clip=0.5, microbatches=2, schedule=True),
    "recompute": Recipe(model={"recompute": "each"}, microbatches=2),
    "recompute-pairs": Recipe(model={"recompute": "pairs"}, clip=0.5),
    "recompute-reentrant": Recipe(model={"recompute": "reentrant"}),
    "tied": Recipe(model={"tied": True}),
    "autocast": Recipe(autocast=True),
}


@pytest.mark.parametrize("name", RECIPES)
def test_equal_to_the_bit(name: str, attach: Attach) -> None:
    recipe = RECIPES[name]
    losses, parameters, state = plain(recipe)
    model = make_model(**recipe.model)
    optimizer = recipe.optimizer(list(model.parameters()))
    runtime = attach(model, optimizer)
    assert runtime.state.plan.persistent < 8
    assert run(recipe, model, optimizer, runtime) == losses
    assert same(model.state_dict(), parameters)
    assert same(optimizer.state_dict(), state)
    found = runtime.statistics()
    values = found.values()
    assert values["state/resident_peak_bytes"] <= values["state/limit_bytes"]
    assert values["state/loaded_bytes"] > 0 and values["state/stored_bytes"] > 0
    runtime.close()
    assert same(dict(model.state_dict()), dict(parameters))
    assert same(optimizer.state_dict(), state)
    assert "step" not in vars(optimizer) or recipe.schedule


@pytest.mark.parametrize("tier", ["ssd", "host"])
@pytest.mark.parametrize("staged", [False, True], ids=["in-place", "staged"])
def test_equal_in_every_tier_and_way(tier: str, staged: bool, attach: Attach) -> None:
    recipe = Recipe(clip=0.5, microbatches=2)
    losses, parameters, state = plain(recipe)
    model = make_model()
    optimizer = recipe.optimizer(list(model.parameters()))
    runtime = attach(model, optimizer, tier=tier, staged=staged)
    assert run(recipe, model, optimizer, runtime) == losses
    assert same(model.state_dict(), parameters)
    assert same(optimizer.state_dict(), state)


@pytest.mark.parametrize("engine", ["c", pytest.param("python", marks=pytest.mark.slow)])
def test_equal_with_activations_offloaded(engine: str, attach: Attach) -> None:
    recipe = Recipe(microbatches=2, model={"recompute": None})
    losses, parameters, _ = plain(recipe)
    model = make_model()
    optimizer = recipe.optimizer(list(model.parameters()))
    runtime = attach(model, optimizer, engine=engine, offload={"min_bytes": 256, "engine": engine})
    assert run(recipe, model, optimizer, runtime) == losses
    assert same(model.state_dict(), parameters)
    found = runtime.statistics()
    assert found.offload.offloaded_bytes > 0


def test_equal_where_only_one_chunk_fits(attach: Attach) -> None:
    recipe = Recipe(clip=0.5, microbatches=2)
    losses, parameters, _ = plain(recipe)
    model = make_model()
    optimizer = recipe.optimizer(list(model.parameters()))
    runtime = attach(model, optimizer)
    plan = runtime.state.plan
    runtime.close()
    smallest = (plan.fixed + plan.limit) // 2  # what is outside, and one chunk
    model = make_model()
    optimizer = recipe.optimizer(list(model.parameters()))
    runtime = attach(model, optimizer, device_limit=smallest)
    assert runtime.state.plan.buffers == 1
    assert run(recipe, model, optimizer, runtime) == losses
    assert same(model.state_dict(), parameters)
    found = runtime.statistics()
    assert found.values()["state/resident_peak_bytes"] <= smallest


def test_the_norm_of_gradients_of_two_types(attach: Attach) -> None:
    """torch sums up the norms of one type before those of another."""

    def train(chunks: bool) -> Any:
        model = make_model()
        for layer in model.layers[::2]:
            layer.up.bfloat16()
            layer.up.register_forward_pre_hook(lambda _, args: (args[0].bfloat16(),))
            layer.up.register_forward_hook(lambda _, args, output: output.float())
        optimizer = sgd(list(model.parameters()))
        runtime = attach(model, optimizer) if chunks else None
        seen = []
        for batch in batches(8):
            loss_of(model, batch).backward()
            for order in (1.0, 2.0, 3.0):
                if runtime is not None and runtime.state is not None:
                    norm = runtime.state.clip_grad_norm_(1e9, order)
                else:
                    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9, order)
                seen.append(norm.item())
            optimizer.zero_grad()
        return seen

    assert same(train(True), train(False))


def test_parameters_without_a_gradient(attach: Attach) -> None:
    """Their chunk stays in memory until the backward is over; it is not updated."""

    class Unused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(32, 32) for _ in range(6)])
            for layer in self.layers:
                layer.register_parameter("unused", nn.Parameter(torch.ones(32, 32)))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = layer(x).relu()
            return x

    def train(chunks: bool) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        model = Unused()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        if chunks:
            attach(model, optimizer)
        for step in range(3):
            torch.manual_seed(step)
            model(torch.randn(4, 32)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return model.state_dict()

    assert same(train(True), train(False))


def test_a_gradient_that_is_kept_goes_on(attach: Attach) -> None:
    """Without zero_grad the gradients of the step before are added to, also where clipping has scaled them."""

    def train(chunks: bool) -> tuple[Any, ...]:
        model = make_model()
        optimizer = sgd(list(model.parameters()))
        runtime = attach(model, optimizer) if chunks else None
        recipe = Recipe(sgd, clip=0.2, steps=1)
        optimizer.zero_grad = lambda set_to_none=True: None
        losses = [run(recipe, model, optimizer, runtime, first=first) for first in range(4)]
        return losses, dict(model.state_dict())

    assert same(train(True), train(False))


def test_evaluation_and_a_backward_that_raises_in_between(attach: Attach) -> None:
    def train(chunks: bool) -> Any:
        model = make_model()
        optimizer = sgd(list(model.parameters()))
        runtime = attach(model, optimizer) if chunks else None
        recipe = Recipe(sgd, steps=2)
        losses = run(recipe, model, optimizer, runtime)
        with torch.no_grad():
            losses.append(model(torch.arange(8)[None]).sum().item())
        out = model.layers[3](model.layers[2](torch.ones(2, 32, requires_grad=True)))

        def fail(_: torch.Tensor) -> None:
            raise KeyError("in backward")

        out.register_hook(lambda gradient: None)
        model.layers[2].norm.weight.register_hook(fail).remove()
        handle = model.layers[2].up.weight.register_hook(fail)
        with pytest.raises(KeyError, match="in backward"):
            out.sum().backward()
        handle.remove()
        optimizer.zero_grad()
        losses += run(recipe, model, optimizer, runtime, first=2)
        return losses, dict(model.state_dict())

    assert same(train(True), train(False))
