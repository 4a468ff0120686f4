"""What is done to tensors while they are away, and backwards and state dicts in the middle of something else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from ssdtrain.state.chunk import Where
from ssdtrain.state.stored import StoredTensor
from tests.state.conftest import Attach
from tests.state.training import Block, Model, Recipe, batches, loss_of, make_model, run, same

Write = Callable[[torch.Tensor], Any]


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


# Writes that torch allows to one element that stands for all.
WRITES: dict[str, Write] = {
    "zero_": lambda tensor: tensor.zero_(),
    "fill_": lambda tensor: tensor.fill_(0.5),
    "an element": lambda tensor: tensor[0].__setitem__(0, 1.0),
    "zero_ of data": lambda tensor: tensor.data.zero_(),
}


@pytest.mark.parametrize("name", WRITES)
@pytest.mark.parametrize("of", ["parameter", "state"])
def test_a_write_while_away_is_an_error(of: str, name: str, attach: Attach) -> None:
    model, twin = make_model(), make_model()
    optimizer, twins = adamw(model.parameters()), adamw(twin.parameters())
    runtime = attach(model, optimizer)
    run(Recipe(steps=1), model, optimizer)
    run(Recipe(steps=1), twin, twins)
    weight = model.layers[4].down.weight
    tensor = weight if of == "parameter" else optimizer.state[weight]["exp_avg"]
    assert tensor.isnan().all()
    with torch.no_grad():
        WRITES[name](tensor)
    with pytest.raises(
        RuntimeError, match=r"layers\.4\.down\.weight was written to while it was not in memory"
    ):
        run(Recipe(steps=1), model, optimizer)
    with torch.no_grad():
        WRITES[name](tensor)  # it is still away, or on its way
    with pytest.raises(RuntimeError, match="the write is lost"):
        runtime.close()
    if of == "parameter":  # the failed forward has changed nothing
        assert same(dict(model.state_dict()), dict(twin.state_dict()))
    else:
        found, expected = optimizer.state[weight], twins.state[twin.layers[4].down.weight]
        assert same(found["exp_avg"], expected["exp_avg"])


def test_other_data_while_its_store_is_in_flight(attach: Attach, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model()
    runtime = attach(model, adamw(model.parameters()))
    assert runtime.state is not None and runtime.state._residency is not None
    residency = runtime.state._residency
    chunk = residency.chunks[-1]
    residency.load(chunk, chunk.values)
    with monkeypatch.context() as patched:
        patched.setattr(StoredTensor, "may_be_freed", lambda self: False)
        residency.release(chunk.values)
    assert chunk.values.where is Where.LEAVING
    weight = model.layers[7].up.weight
    before, weight.data = weight.data, torch.ones(128, 32)
    with pytest.raises(RuntimeError, match=r"layers\.7\.up\.weight was given other data"):
        model.layers[7](torch.ones(1, 32))
    weight.data = before


class Balanced(Block):
    """Has a loss of its own, which is made after the output and goes past it."""

    extra: list[torch.Tensor] | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = super().forward(x)
        loss = self.down(self.up(found.detach())).square().mean()
        if self.extra is None:
            self.losses = {"balance": [loss]}
        else:
            self.extra.append(loss)
        return found


def _balanced() -> Model:
    torch.manual_seed(0)
    model = Model()
    model.layers = nn.ModuleList([Balanced(32) for _ in range(8)])
    return model


def test_a_loss_that_a_block_puts_elsewhere_never_meets_what_is_being_loaded(
    attach: Attach, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Staged: the memory of a weight is allocated when its bytes are there."""
    found: list[torch.Tensor] = []
    monkeypatch.setattr(Balanced, "extra", found)
    model = _balanced()
    attach(model, adamw(model.parameters()), staged=True)
    loss = loss_of(model, batches(1)[0])
    with pytest.raises(RuntimeError, match=r"storage of size 0|not allocated"):
        (loss + sum(found)).backward()


@pytest.mark.parametrize("when", ["forward", "backward", "step"])
def test_a_state_dict_in_the_middle(when: str, attach: Attach) -> None:
    """As a handler of signals asks for it: what was in use stays in memory."""

    def train(chunks: bool) -> Any:
        model = make_model()
        optimizer = adamw(model.parameters())
        if chunks:
            attach(model, optimizer)
        seen: list[Any] = []

        def look(*_: Any) -> None:
            seen.append({name: value.clone() for name, value in model.state_dict().items()})
            seen.append(optimizer.state_dict()["param_groups"][0]["lr"])

        if when == "forward":
            model.layers[4].norm.register_forward_hook(look)
        elif when == "backward":
            model.layers[4].down.weight.register_hook(look)
        else:
            optimizer.register_step_pre_hook(look)
        losses = run(Recipe(steps=3), model, optimizer)
        return seen, losses, dict(model.state_dict()), optimizer.state_dict()

    assert same(train(True), train(False))
