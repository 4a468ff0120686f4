"""Accumulation block by block: the bits of a backward for each microbatch, and a further one moves no weights."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any

import pytest
import torch
from torch import nn

from ssdtrain.config import load_config
from ssdtrain.runtime import Runtime
from tests.state.conftest import Attach
from tests.state.training import (
    Model,
    Recipe,
    adamw,
    batches,
    device_of,
    loss_of,
    make_model,
    plain,
    run,
    same,
)

MICROBATCHES = 3


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    runtime: Any,
    steps: int = 3,
    clip: float | None = None,
) -> list[float]:
    """Return what `run` returns."""
    seen: list[float] = []
    data = batches(steps * MICROBATCHES)
    for step in range(steps):
        some = data[step * MICROBATCHES :][:MICROBATCHES]
        seen += [loss.item() for loss in runtime.accumulate(model, some, loss_of)]
        if clip is not None:
            seen.append(runtime.state.clip_grad_norm_(clip).item())
        optimizer.step()
        optimizer.zero_grad()
    return seen


@pytest.mark.parametrize("recompute", [None, "each", "pairs"])
@pytest.mark.parametrize(
    "options",
    [{}, {"optimizer_on": "cpu"}, {"optimizer_on": "cpu", "clip": "none"}, {"staged": True, "tier": "host"}],
    ids=["device", "cpu", "cpu-inside", "staged"],
)
def test_equal_to_the_bit(options: dict[str, Any], recompute: str | None, attach: Attach) -> None:
    clip = None if options.get("clip") == "none" else 0.5
    recipe = Recipe(
        lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, fused=True),
        steps=3,
        microbatches=MICROBATCHES,
        clip=clip,
        model={"recompute": recompute},
    )
    losses, parameters, state = plain(recipe)
    model = make_model(recompute=recompute)
    optimizer = recipe.optimizer(list(model.parameters()))
    runtime = attach(model, optimizer, **options)
    assert train(model, optimizer, runtime, clip=clip) == losses
    assert same(dict(model.state_dict()), dict(parameters))
    assert same(optimizer.state_dict()["state"], state["state"])
    values = runtime.statistics().values()
    assert values["state/resident_peak_bytes"] <= values["state/limit_bytes"]


def test_equal_with_autocast_and_activations_offloaded(attach: Attach) -> None:
    recipe = Recipe(
        lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, fused=True),
        steps=3,
        microbatches=MICROBATCHES,
        autocast=True,
    )
    losses, parameters, _ = plain(recipe)
    model = make_model()
    optimizer = recipe.optimizer(list(model.parameters()))
    runtime = attach(model, optimizer, optimizer_on="cpu", clip="none", offload={"min_bytes": 256})
    with torch.autocast(device_of(model).type, torch.bfloat16):
        assert train(model, optimizer, runtime) == losses
    assert same(dict(model.state_dict()), dict(parameters))
    assert runtime.statistics().offload.offloaded_bytes > 0


def test_ctrl_c_in_a_microbatch_ends_the_others(attach: Attach) -> None:
    def interrupts(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        loss = loss_of(model, batch)
        if batch is data[1]:
            os.kill(os.getpid(), signal.SIGINT)
        return loss

    data = batches(3)
    model = make_model()
    optimizer = adamw(model.parameters())
    runtime = attach(model, optimizer)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            runtime.accumulate(model, data, interrupts)
            time.sleep(10)  # where the signal comes late
    finally:
        signal.signal(signal.SIGINT, before)
    assert not [thread for thread in threading.enumerate() if "microbatch" in thread.name]
    optimizer.zero_grad()
    twin = make_model()
    twins = adamw(twin.parameters())
    assert train(model, optimizer, runtime) == run(Recipe(steps=3, microbatches=MICROBATCHES), twin, twins)


@pytest.mark.parametrize("options", [{}, {"optimizer_on": "cpu", "clip": "none"}], ids=["device", "cpu"])
def test_a_further_microbatch_moves_nothing(options: dict[str, Any], attach: Attach) -> None:
    def moved(count: int) -> tuple[int, int]:
        model = make_model()
        optimizer = adamw(model.parameters())
        runtime = attach(model, optimizer, **options)
        for batch in batches(6):
            runtime.accumulate(model, [batch] * count, loss_of)
            optimizer.step()
            optimizer.zero_grad()
        values = runtime.statistics().values()
        runtime.close()
        return values["state/loaded_bytes"], values["state/stored_bytes"]

    for one, four in zip(moved(1), moved(4), strict=True):
        assert one > 6 * 8 * sum(parameter.nbytes for parameter in make_model().layers[0].parameters())
        assert (
            four < 1.25 * one
        )  # what is still in memory at a turn depends on the drive; in the usual order 2.5 times


def test_it_is_equal_with_glue_between_blocks_and_tensors_that_all_blocks_get(attach: Attach) -> None:
    """As in models with rotary angles that have a gradient, an encoder, skips between blocks, and blocks that return tuples."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(32, 32)

        def forward(self, x: torch.Tensor, *, angles: torch.Tensor) -> tuple[torch.Tensor, None]:
            return torch.tanh(self.up(x) * angles), None

    class Glued(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Linear(32, 32)
            self.angles = nn.Parameter(torch.ones(32))
            self.encoder = nn.ModuleList([Block() for _ in range(3)])
            self.norm = nn.LayerNorm(32)
            self.decoder = nn.ModuleList([Block() for _ in range(4)])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x, angles = self.embed(x), self.angles.cos()
            for block in self.encoder:
                x = block(x * 2, angles=angles)[0]
            memory = self.norm(x)
            previous = x
            for block in self.decoder:
                y = block(x * 2, angles=memory)[0]
                x, previous = y + 0.5 * previous, y
            return x

    def gradients(vertical: bool) -> Any:
        torch.manual_seed(0)
        model = Glued()
        data = [torch.randn(4, 32) for _ in range(MICROBATCHES)]

        def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
            return model(x).square().mean()

        if vertical:
            runtime = attach(model, torch.optim.SGD(model.parameters(), lr=0.1))
            losses = [one.item() for one in runtime.accumulate(model, data, loss)]
            runtime.close()
        else:
            losses = []
            for x in data:
                value = loss(model, x)
                value.backward()
                losses.append(value.item())
        return losses, {name: parameter.grad for name, parameter in model.named_parameters()}

    assert same(gradients(True), gradients(False))


def refused(attach: Attach, model: nn.Module, loss: Any = loss_of, data: Any = None, **options: Any) -> str:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    runtime = attach(model, optimizer, **options)
    with pytest.raises(RuntimeError) as error:
        runtime.accumulate(model, batches(2) if data is None else data, loss)
    optimizer.zero_grad()
    recipe = Recipe(steps=1)
    if loss is loss_of:  # and training goes on
        run(recipe, model, optimizer, runtime)
    return str(error.value)


def test_models_that_cannot_be_run_so_are_refused_by_name(attach: Attach) -> None:
    tied = refused(attach, make_model(tied=True))
    assert "embed.weight" in tied and "another order" in tied
    assert "use_reentrant=False" in refused(attach, make_model(recompute="reentrant"))
    model = make_model()
    model.layers[3].drop = nn.Dropout(0.1)
    model.layers[3].register_forward_hook(lambda block, args, output: block.drop(output))
    assert "random numbers (layers.3.drop)" in refused(attach, model)

    class Skipping(Model):
        """A skip over the blocks that none of them is given."""

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            x = self.embed(tokens)
            skip = x.tanh()
            for layer in self.layers:
                x = layer(x)
            return self.head(x + skip)

    assert "used by what comes before the blocks and by what comes after layers.7" in refused(
        attach, Skipping()
    )

    class InPlace(Model):
        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            x = self.embed(tokens)
            for layer in self.layers:
                x = layer(x)
                x += 1
            return self.head(x)

    assert "changes in place" in refused(attach, InPlace())


def test_blocks_that_only_some_microbatches_call_are_refused(attach: Attach) -> None:
    def some(model: Any, batch: torch.Tensor) -> torch.Tensor:
        x = model.embed(batch)
        for layer in model.layers[int(batch[0, 0]) :]:
            x = layer(x)
        return x.sum()

    data = [torch.full((1, 4), place) for place in (0, 1)]
    assert "microbatch 1 comes to layers.1, and microbatch 0 to layers.0" in refused(
        attach, make_model(), some, data
    )


def test_an_error_in_a_microbatch_reaches_the_loop_and_ends_the_others(attach: Attach) -> None:
    def fails(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        loss = loss_of(model, batch)
        if batch is data[1]:
            raise KeyError("in microbatch 1")
        return loss

    data = batches(3)
    model = make_model()
    optimizer = adamw(model.parameters())
    runtime = attach(model, optimizer)
    with pytest.raises(KeyError, match="in microbatch 1"):
        runtime.accumulate(model, data, fails)
    assert not [thread for thread in threading.enumerate() if "microbatch" in thread.name]
    optimizer.zero_grad()
    twin = make_model()
    twins = adamw(twin.parameters())
    assert train(model, optimizer, runtime) == run(Recipe(steps=3, microbatches=MICROBATCHES), twin, twins)


def test_without_the_section_it_is_an_error(attach: Attach) -> None:
    with pytest.raises(RuntimeError, match="needs the config section state"):
        Runtime(load_config({})).accumulate(make_model(), batches(1), loss_of)
    model = make_model()
    runtime = attach(model, adamw(model.parameters()))
    with pytest.raises(RuntimeError, match="not attached"):
        runtime.accumulate(make_model(), batches(1), loss_of)
