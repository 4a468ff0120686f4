"""State dicts are ordinary: whole, the same as without chunks, and loaded before and after attaching."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.state.conftest import Attach
from tests.state.training import Recipe, adamw, chunked, make_model, run, same


def whole_run() -> tuple[Any, Any, Any]:
    model = make_model()
    optimizer = adamw(model.parameters())
    losses = run(Recipe(steps=3), model, optimizer) + run(Recipe(steps=3), model, optimizer, first=3)
    return losses, dict(model.state_dict()), optimizer.state_dict()


@pytest.mark.parametrize("loads", ["before", "after"])
@pytest.mark.parametrize("resumed_with", ["chunks", "plain"])
def test_a_resumed_run_goes_on_to_the_bit(
    loads: str, resumed_with: str, attach: Attach, tmp_path: Path
) -> None:
    losses, parameters, state = whole_run()
    model, optimizer, _ = chunked(attach)
    seen = run(Recipe(steps=3), model, optimizer)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "saved.pt")
    del model, optimizer

    torch.manual_seed(7)
    model = make_model()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    optimizer = adamw(model.parameters())
    if loads == "after" and resumed_with == "chunks":
        attach(model, optimizer)
        run(Recipe(steps=1), model, optimizer)  # there is state to be replaced
    saved = torch.load(tmp_path / "saved.pt", weights_only=True)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    if loads == "before" and resumed_with == "chunks":
        attach(model, optimizer)
    seen += run(Recipe(steps=3), model, optimizer, first=3)
    assert seen == losses
    assert same(dict(model.state_dict()), parameters)
    assert same(optimizer.state_dict(), state)


def test_a_state_dict_holds_what_it_was_when_training_goes_on(attach: Attach) -> None:
    model, optimizer, _ = chunked(attach)
    run(Recipe(steps=1), model, optimizer)
    found = dict(model.state_dict())
    kept = {name: value.clone() for name, value in found.items()}
    state = optimizer.state_dict()["state"]
    kept_state = {number: {k: v.clone() for k, v in one.items()} for number, one in state.items()}
    run(Recipe(steps=1), model, optimizer, first=1)
    assert same(found, kept)
    assert same(state, kept_state)


def test_a_part_of_a_state_dict_is_loaded(attach: Attach) -> None:
    model, _, _ = chunked(attach)
    before = dict(model.state_dict())
    ones = torch.ones_like(before["layers.3.up.weight"])
    missing, _ = model.load_state_dict({"layers.3.up.weight": ones}, strict=False)
    assert len(missing) == len(before) - 1
    assert same(dict(model.state_dict()), before | {"layers.3.up.weight": ones})


def test_a_state_dict_that_replaces_parameters_is_refused(attach: Attach) -> None:
    model = make_model()
    optimizer = adamw(model.parameters())
    saved = {name: value.clone() for name, value in model.state_dict().items()}
    attach(model, optimizer)
    with pytest.raises(RuntimeError, match="assign=True"):
        model.load_state_dict(saved, assign=True)


def test_an_optimizer_state_of_other_parameters_is_refused_as_torch_does(attach: Attach) -> None:
    model = make_model()
    optimizer = adamw(model.parameters())
    other = adamw(make_model(layers=2).parameters()).state_dict()
    attach(model, optimizer)
    with pytest.raises(ValueError, match="size"):
        optimizer.load_state_dict(other)
