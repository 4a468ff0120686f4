"""What is done to tensors while they are away, and backwards and state dicts in the middle of something else."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from ssdtrain.state.chunk import Where
from ssdtrain.state.hooks import _tensors_in
from ssdtrain.state.stored import StoredTensor
from tests.state.conftest import Attach
from tests.state.training import Block, Model, Recipe, adamw, batches, chunked, loss_of, make_model, run, same

Write = Callable[[torch.Tensor], Any]


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


def give_other_data(tensor: torch.Tensor) -> None:
    tensor.data = torch.zeros(tensor.shape)


@pytest.mark.parametrize("written", [*WRITES.values(), give_other_data], ids=[*WRITES, "other data"])
def test_a_state_dict_replaces_what_was_written_while_away(written: Write, attach: Attach) -> None:
    model, optimizer, _ = chunked(attach)
    run(Recipe(steps=1), model, optimizer)
    saved = dict(model.state_dict())

    def write() -> None:
        for layer in model.layers[4:]:
            assert layer.down.weight.isnan().all()
            for parameter in (layer.up.weight, layer.down.weight):
                with torch.no_grad():
                    written(parameter)

    write()
    model.load_state_dict(saved)
    assert same(dict(model.state_dict()), saved)
    write()
    with pytest.raises(RuntimeError, match=r"layers\.4\.down\.weight was (written to|given other data)"):
        model.load_state_dict({"layers.4.up.weight": saved["layers.4.up.weight"]}, strict=False)
    model.load_state_dict(saved)
    assert same(dict(model.state_dict()), saved)


def test_other_data_while_its_store_is_in_flight(attach: Attach, monkeypatch: pytest.MonkeyPatch) -> None:
    model, _, runtime = chunked(attach)
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


def test_blocks_that_are_frozen_and_trained_again(attach: Attach) -> None:
    """Below the first trainable parameter no output needs a gradient."""

    def train(chunks: bool) -> Any:
        model = make_model()
        optimizer = adamw(model.parameters())
        if chunks:
            attach(model, optimizer)
        losses = run(Recipe(steps=1), model, optimizer)
        for frozen in (model.embed, model.layers[0], model.layers[1], model.layers[5]):
            frozen.requires_grad_(False)
        losses += run(Recipe(steps=2), model, optimizer, first=1)
        model.requires_grad_(True)
        losses += run(Recipe(steps=2), model, optimizer, first=3)
        return losses, dict(model.state_dict()), optimizer.state_dict()

    assert same(train(True), train(False))


class Balanced(Block):
    """Has a loss of its own, which is made after the output and goes past it."""

    extra: list[torch.Tensor] | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = super().forward(x)
        loss = self.down(self.up(found.detach())).square().mean()
        if self.extra is None:
            self.losses: dict[str, Any] = {"balance": [loss]}
            self.losses["self"] = self.losses
        else:
            self.extra.append(loss)
        return found


def _balanced() -> Model:
    torch.manual_seed(0)
    model = Model()
    model.layers = nn.ModuleList([Balanced(32) for _ in range(8)])
    return model


@pytest.mark.parametrize("staged", [False, True], ids=["in-place", "staged"])
def test_a_loss_that_a_block_leaves_in_an_attribute(staged: bool, attach: Attach) -> None:
    """Its backward comes before that of the output: what is being loaded ahead then is waited for. The dict that it is in
    contains itself."""

    def train(chunks: bool) -> Any:
        model = _balanced()
        optimizer = adamw(model.parameters())
        if chunks:
            attach(model, optimizer, staged=staged)
        losses = []
        for batch in batches(3):
            loss = loss_of(model, batch)
            (loss + sum(layer.losses["balance"][0] for layer in model.layers)).backward()
            losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
        return losses, dict(model.state_dict())

    assert same(train(True), train(False))


@pytest.mark.parametrize("output", [None, 1.0, "elsewhere", "raises"])
def test_a_block_that_leaves_its_output_in_an_attribute(output: Any, attach: Attach) -> None:
    class Leaving(Block):
        kept: torch.Tensor | None = None

        def forward(self, x: torch.Tensor) -> Any:
            found = super().forward(x)
            if output == "raises":
                raise ValueError("in the forward")
            if output != "elsewhere":
                self.kept = found
                return output
            elsewhere.append(found)

    class Chain(Model):
        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            x = self.embed(tokens)
            for layer in self.layers:
                layer(x)
                x = layer.kept
            return self.head(x)

    elsewhere: list[torch.Tensor] = []

    def train(chunks: bool) -> Any:
        torch.manual_seed(0)
        model = Chain()
        model.layers = nn.ModuleList([Leaving(32) for _ in range(24)])  # more than fit at a time
        optimizer = adamw(model.parameters())
        if chunks:
            attach(model, optimizer, staged=True)
        return run(Recipe(steps=2), model, optimizer), dict(model.state_dict())

    if output == "raises":
        with pytest.raises(ValueError, match="in the forward"), warnings.catch_warnings():
            warnings.simplefilter("error")
            train(True)
    elif output == "elsewhere":
        with pytest.raises(RuntimeError, match=r"layers\.0 \(Leaving\) returned NoneType"):
            train(True)
    else:
        assert same(train(True), train(False))


def test_attributes_that_contain_themselves_or_are_large() -> None:
    loss, other = torch.ones(1), torch.zeros(1)
    around: dict[str, Any] = {"vocabulary": dict.fromkeys(range(100_000), other), "losses": [(loss,)]}
    around["self"] = around
    assert {id(tensor) for tensor in _tensors_in(around)} == {id(loss)}
    assert not list(_tensors_in([other] * 100_000))


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


def test_gradients_of_another_type(attach: Attach) -> None:
    if not hasattr(nn.Parameter(torch.ones(1)), "grad_dtype"):
        pytest.skip("this torch gives gradients the type of their parameter")

    def train(chunks: bool) -> Any:
        model = make_model().bfloat16()
        for layer in model.layers[:2]:
            for parameter in layer.parameters():
                parameter.grad_dtype = torch.float32
        optimizer = adamw(model.parameters())
        runtime = attach(model, optimizer) if chunks else None
        for batch in batches(2):
            loss_of(model, batch).backward()
        if runtime is not None:
            runtime.close()
        return [parameter.grad for parameter in model.parameters()]

    assert same(train(True), train(False))
    plans = []
    for dtype in (torch.bfloat16, torch.float32):
        model = make_model().bfloat16()
        model.head.weight.grad_dtype = dtype  # it stays on the device
        plans.append(attach(model, adamw(model.parameters())).state.plan)
    assert plans[1].fixed - plans[0].fixed == plans[1].total - plans[0].total == 2 * model.head.weight.numel()
    model = make_model().bfloat16()
    attach(model, adamw(model.parameters()))
    model.layers[5].up.weight.grad_dtype = torch.float32
    with pytest.raises(RuntimeError, match=r"gradient of layers\.5\.up\.weight is of torch\.float32"):
        loss_of(model, batches(1)[0]).backward()


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


def test_closed_in_the_middle_of_a_backward(attach: Attach) -> None:
    def train(chunks: bool) -> Any:
        model = make_model()
        optimizer = adamw(model.parameters())
        if chunks:
            runtime = attach(model, optimizer)
            model.layers[4].down.weight.register_hook(lambda _: runtime.close())
        loss_of(model, batches(1)[0]).backward()
        return [parameter.grad for parameter in model.parameters()], dict(model.state_dict())

    assert same(train(True), train(False))
