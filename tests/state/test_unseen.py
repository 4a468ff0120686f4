"""What goes past the events that chunks follow: it gives the same bits as without chunks, or is refused by name."""

from __future__ import annotations

import copy
import gc
import logging
import pickle
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ssdtrain
from ssdtrain.config import ConfigError
from ssdtrain.state.checksum import checksum
from ssdtrain.state.chunk import Part
from ssdtrain.state.residency import Residency
from ssdtrain.state.stored import StoredTensor
from ssdtrain.storage import Faults
from ssdtrain.storage.errors import IOFailure
from tests.state.conftest import Attach
from tests.state.training import Recipe, adamw, batches, chunked, loss_of, make_model, plain, run, same


class Counting(torch.optim.SGD):
    """Counts its steps in its groups, as fused optimizers do, or where it cannot be served."""

    where = "group"

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1)
        self.steps = 0
        if self.where == "tensor":
            self.param_groups[0]["count"] = torch.zeros(())

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.steps += self.where == "attribute"
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.add_(parameter.grad, alpha=-group["lr"] / group["step"])
                    if self.where == "sum":
                        group["sum"] = group.get("sum", 0.0) + float(parameter.grad.sum())
            if self.where == "tensor":
                group["count"] += 1


def test_a_step_in_parts_counts_once(attach: Attach) -> None:
    recipe = Recipe(Counting)
    losses, parameters, state = plain(recipe)
    model = make_model()
    optimizer = Counting(model.parameters())
    attach(model, optimizer)
    assert run(recipe, model, optimizer) == losses
    assert same(dict(model.state_dict()), dict(parameters))
    assert same(optimizer.state_dict(), state)
    assert optimizer.param_groups[0]["step"] == recipe.steps


@pytest.mark.parametrize("where", ["attribute", "tensor", "sum"])
def test_what_a_step_in_parts_cannot_count_is_refused(
    where: str, attach: Attach, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Counting, "where", where)
    model = make_model()
    optimizer = Counting(model.parameters())
    named = {"attribute": "its attribute steps", "tensor": "option count", "sum": "option sum"}[where]
    with pytest.raises(RuntimeError, match=f"Counting cannot be used with the config section state.*{named}"):
        attach(model, optimizer)
        run(Recipe(steps=1), model, optimizer)
    assert optimizer.steps == 0


class Turning(nn.Linear):
    """Changes its weight past torch's version counters: all signs, then the order of its rows."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = super().forward(x)
        self.weight.data.neg_()
        self.weight.data.copy_(self.weight.data.roll(1, 0))
        return found


@pytest.mark.parametrize("tier", ["ssd", "host"])
def test_values_changed_through_data_in_a_forward_are_kept(tier: str, attach: Attach) -> None:
    def evaluate(chunks: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Module()
        model.layers = nn.ModuleList([Turning(32, 32) for _ in range(12)])  # more than fit
        if chunks:
            attach(model, adamw(model.parameters()), tier=tier)
        found = []
        with torch.no_grad():
            for _ in range(3):
                x = torch.ones(1, 32)
                for layer in model.layers:
                    x = layer(x)
                found.append(x)
        return found

    assert same(evaluate(True), evaluate(False))


def test_an_eviction_reads_one_flag_of_the_device(attach: Attach, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each reading of a flag makes the host wait for all that is queued on the device: one for a part, not one for a tensor."""
    reads: list[int] = []
    compared: list[int] = []
    write = Residency.write

    def counted(self: Residency, part: Part) -> None:
        reads.append(0)
        compared.append(sum(tensor.differs() is not None for tensor in part.tensors))
        with monkeypatch.context() as patched:
            for name in ("__bool__", "item", "tolist", "__int__", "__float__"):
                read = getattr(torch.Tensor, name)

                def one_more(tensor: torch.Tensor, read: Any = read) -> Any:
                    reads[-1] += 1
                    with torch._C.DisableTorchFunction():  # a default device would call this once more
                        return read(tensor)

                patched.setattr(torch.Tensor, name, one_more)
            write(self, part)

    monkeypatch.setattr(Residency, "write", counted)
    model = nn.Module()
    model.layers = nn.ModuleList([nn.Linear(128, 128) for _ in range(12)])  # more than fit
    attach(model, adamw(model.parameters()))
    with torch.no_grad():
        for layer in (*model.layers, *model.layers):
            layer(torch.ones(1, 128))
    assert max(compared) > 1, "weight and bias"
    assert max(reads) == 1


def test_a_store_that_cannot_begin_leaves_no_slot_that_looks_unchanged() -> None:
    class Transfers:
        frees_at_once, refuses = False, False

        def make_room(self, nbytes: int) -> None: ...

        def store_where(self, *flag_slot_and_storage: Any) -> bool:
            return False

        def store(self, slot: Any, storage: Any) -> Any:
            if self.refuses:
                raise OSError("no thread can be started")
            return types.SimpleNamespace(wait=lambda: None, done=lambda: True)

    transfers: Any = Transfers()
    tensor, slot = torch.ones(64), Any
    stored = StoredTensor("weight", tensor, slot, transfers, watched=True)  # type: ignore[arg-type]
    assert stored.begin_store() == tensor.nbytes
    tensor.data.neg_()
    assert stored.differs()
    transfers.refuses = True
    with pytest.raises(OSError, match="no thread"):
        stored.begin_store(changed_unseen=True)
    transfers.refuses = False
    assert not stored.differs()
    assert stored.begin_store() == tensor.nbytes


def test_the_checksum_sees_places_signs_and_the_last_bytes() -> None:
    values = torch.randn(300_001)
    seen = [checksum(values.untyped_storage())]
    for change in (lambda v: v.neg_(), lambda v: v.copy_(v.flip(0)), lambda v: v[-1:].mul_(2)):
        change(values)
        seen.append(checksum(values.untyped_storage()))
    assert len({int(one) for one in seen}) == len(seen)
    assert int(checksum(values.clone().untyped_storage())) == int(seen[-1])


@pytest.mark.parametrize("staged", [False, True], ids=["in-place", "staged"])
def test_training_goes_on_after_inference_mode(staged: bool, attach: Attach) -> None:
    def train(chunks: bool) -> Any:
        model = make_model()
        optimizer = adamw(model.parameters())
        if chunks:
            attach(model, optimizer, staged=staged)
        losses = run(Recipe(steps=1), model, optimizer)
        loss_of(model, batches(1)[0]).backward()
        with torch.inference_mode():
            losses += [loss_of(model, batch).item() for batch in batches(2)]
        return losses, run(Recipe(steps=2), model, optimizer, first=1), dict(model.state_dict())

    assert same(train(True), train(False))


def test_loaded_optimizer_state_leaves_memory(attach: Attach, tmp_path: Path) -> None:
    model = make_model()
    optimizer = adamw(model.parameters())
    losses = run(Recipe(steps=1), model, optimizer)
    torch.save((model.state_dict(), optimizer.state_dict()), tmp_path / "saved.pt")
    losses = run(Recipe(steps=2), model, optimizer, first=1)
    model_state, state = torch.load(tmp_path / "saved.pt")

    model = make_model()
    optimizer = adamw(model.parameters())
    model.load_state_dict(model_state)
    optimizer.load_state_dict(state)
    attach(model, optimizer)
    weight = model.layers[7].up.weight
    assert optimizer.state[weight]["exp_avg"].isnan().all()
    optimizer.load_state_dict(state)
    assert optimizer.state[weight]["exp_avg"].isnan().all()
    assert not any(one["exp_avg"].isnan().any() for one in state["state"].values())
    assert run(Recipe(steps=2), model, optimizer, first=1) == losses


class Bytes(torch.optim.SGD):
    """Keeps 8 bits, which have no NaN to show."""

    def step(self, closure: Any = None) -> None:
        super().step()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.state[parameter].setdefault("bits", torch.zeros_like(parameter, dtype=torch.uint8))


def test_optimizer_state_that_stays_counts_with_a_warning(
    attach: Attach, caplog: pytest.LogCaptureFixture
) -> None:
    logging.getLogger("ssdtrain").addHandler(caplog.handler)
    try:
        model = make_model()
        optimizer = Bytes(model.parameters(), lr=0.1)
        runtime = attach(model, optimizer)
        run(Recipe(steps=1), model, optimizer)
    finally:
        logging.getLogger("ssdtrain").removeHandler(caplog.handler)
    warnings = {id(one) for one in caplog.records if "the optimizer's bits" in one.getMessage()}
    assert len(warnings) == 1
    chunked = runtime.state._chunked
    kept = sum(chunked._fixed.values())
    assert kept == sum(p.numel() for p in chunked._owner)


def test_modules_in_blocks_have_state_dicts(attach: Attach) -> None:
    model, _, _ = chunked(attach)
    whole = dict(model.state_dict())
    assert not any(value.isnan().any() for value in whole.values())
    for name in ("layers.5.up", "layers.6"):
        found = dict(model.get_submodule(name).state_dict())
        assert same(found, {key: whole[f"{name}.{key}"] for key in found})
    up = model.layers[5].up
    up.load_state_dict({"weight": torch.ones_like(up.weight), "bias": whole["layers.5.up.bias"]})
    assert model.layers[5].up.weight.isnan().all() or (up.weight == 1).all()
    assert same(dict(model.state_dict()), whole | {"layers.5.up.weight": torch.ones(128, 32)})


def test_an_optimizer_is_not_copied_as_an_object(attach: Attach) -> None:
    _, optimizer, runtime = chunked(attach)
    for copied in (copy.deepcopy, copy.copy, pickle.dumps):
        with pytest.raises(RuntimeError, match=r"cannot be copied or saved.*state_dict"):
            copied(optimizer)
    runtime.close()
    copy.deepcopy(optimizer)


def test_the_runtime_need_not_be_kept(tmp_path: Path) -> None:
    recipe = Recipe(steps=2)
    losses, parameters, _ = plain(recipe)
    model = make_model()
    optimizer = recipe.optimizer(list(model.parameters()))
    config = {"state": {"directories": str(tmp_path), "min_bytes": 256}, "report": {"interval": 0}}
    ssdtrain.attach(model, config, optimizer=optimizer)
    gc.collect()
    assert run(recipe, model, optimizer) == losses
    assert same(dict(model.state_dict()), dict(parameters))


@pytest.mark.parametrize("call", [1, 3])
def test_a_failed_load_of_optimizer_state(call: int, attach: Attach) -> None:
    model, optimizer, _ = chunked(attach)
    run(Recipe(steps=1), model, optimizer)
    good = optimizer.state_dict()
    calls = []

    def fail(_: Any) -> None:
        calls.append(None)
        if len(calls) == call:
            raise KeyError("in a hook")

    handle = optimizer.register_load_state_dict_post_hook(fail)
    with pytest.raises(KeyError, match="in a hook"):
        optimizer.load_state_dict(good)
    handle.remove()
    assert [len(group["params"]) for group in optimizer.param_groups] == [len(list(model.parameters()))]
    if call == 1:  # nothing was lost
        assert same(optimizer.state_dict(), good)
    else:
        with pytest.raises(RuntimeError, match="two checkpoints in part"):
            optimizer.step()
        with pytest.raises(RuntimeError, match="two checkpoints in part"):
            optimizer.state_dict()
    optimizer.load_state_dict(good)
    assert same(optimizer.state_dict(), good)
    run(Recipe(steps=1), model, optimizer, first=1)


def test_create_graph_is_refused(attach: Attach) -> None:
    model, _, _ = chunked(attach)
    with pytest.raises(RuntimeError, match=r"create_graph=True meets layers\.7.*section state"):
        loss_of(model, batches(1)[0]).backward(create_graph=True)


def test_a_section_that_would_do_nothing_is_refused(attach: Attach) -> None:
    model = make_model()
    with pytest.raises(ConfigError, match=r"in 8 blocks: 48 of less than state\.min_bytes"):
        attach(model, adamw(model.parameters()), min_bytes="1MiB")
    with pytest.raises(ConfigError, match="48 not in the optimizer that was given"):
        attach(model, adamw(make_model().parameters()))
    model.requires_grad_(False)
    with pytest.raises(ConfigError, match="48 frozen"):
        attach(model, adamw(model.parameters()))


class Positions(nn.Module):
    """The gradient of `places` is a view of the gradient of `x`."""

    def __init__(self) -> None:
        super().__init__()
        self.places = nn.Parameter(torch.ones(9, 32))
        self.linear = nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x + self.places.unsqueeze(0)).tanh()


@pytest.mark.parametrize("staged", [False, True], ids=["in-place", "staged"])
def test_a_gradient_that_shares_its_memory(staged: bool, attach: Attach) -> None:
    def train(chunks: bool) -> Any:
        torch.manual_seed(0)
        model = nn.Module()
        model.layers = nn.ModuleList([Positions() for _ in range(6)])
        optimizer = adamw(model.parameters())
        if chunks:
            attach(model, optimizer, staged=staged)
        seen = []
        for _ in range(2):
            x = start = torch.ones(1, 9, 32, requires_grad=True)
            for layer in model.layers:
                x = layer(x)
            x.square().sum().backward()
            seen.append(start.grad)
            optimizer.step()
            optimizer.zero_grad()
        return seen, dict(model.state_dict())

    assert same(train(True), train(False))


def test_state_dicts_after_a_failed_write(attach: Attach) -> None:
    model, optimizer, _ = chunked(attach, faults=Faults(fail_writes=frozenset(range(150, 4000))))
    with pytest.raises(IOFailure):
        run(Recipe(steps=5), model, optimizer)
    for _ in range(2):
        assert not any(value.isnan().any() for value in model.state_dict().values())
    for one in optimizer.state_dict()["state"].values():
        assert not one["exp_avg"].isnan().any()


def test_a_forward_that_is_interrupted(attach: Attach) -> None:
    model, optimizer, runtime = chunked(attach)

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    handle = model.layers[4].up.register_forward_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        loss_of(model, batches(1)[0])
    handle.remove()
    run(Recipe(steps=1), model, optimizer)
    assert not any(chunk.in_use for chunk in runtime.state._chunks)


def test_a_chunk_that_is_loaded_ahead_counts_once(attach: Attach) -> None:
    recipe = Recipe(steps=4)
    model = make_model()
    optimizer = recipe.optimizer(list(model.parameters()))
    runtime = attach(model, optimizer)
    run(recipe, model, optimizer)
    found = runtime.statistics()
    events = 3 * 8 * recipe.steps  # forward, backward, step
    assert 0 < found.values()["state/prefetched_chunks"] <= events
