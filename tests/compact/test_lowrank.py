"""Small trained matrices in place of weights: the paper's form, checkpoints, the optimizer, and what is refused."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ssdtrain
from benchmarks.compact_training import Llama, LlamaConfig
from ssdtrain.compact.lowrank import FACTOR
from ssdtrain.compact.projection import Projections, layer_key, layout_of
from ssdtrain.config import ConfigError
from ssdtrain.runtime import Runtime
from tests.compact.test_attach import Conv1D
from tests.support.processes import forked
from tests.support.tensors import all_equal

EVERY = 3
LIKE = torch.zeros(0, dtype=torch.float64)
Made = Callable[[Any], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Made] = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.1),
    "Adam": lambda p: torch.optim.Adam(p, lr=1e-2),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
}


def llama() -> Llama:
    torch.manual_seed(0)
    return Llama(LlamaConfig(hidden=64, heads=2, middle=128)).double()


def batch(step: int) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(256, (2, 9), generator=torch.Generator().manual_seed(step))
    return tokens[:, :-1], tokens[:, 1:]


def attach(model: nn.Module, optimizer: torch.optim.Optimizer | None, **section: Any) -> Runtime:
    section = {"mode": "lowrank", "update_every": EVERY, "seed": 7, **section}
    return ssdtrain.attach(model, {"compact": section, "report": {"interval": 0}}, optimizer=optimizer)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        for microbatch in range(2):
            (model(*batch(2 * step + microbatch)) / 2).backward()
        optimizer.step()


LEADERS = {"k_proj": "q_proj", "v_proj": "q_proj", "up_proj": "gate_proj"}
"""Whose input, and so whose projection, a layer shares."""


def projection(name: str, width: int, step: int, ratio: float) -> Tensor:
    """P [n, r] of a layer, whole."""
    path, _, own = name.rpartition(".")
    leader = f"{path}.{LEADERS.get(own, own)}"
    layout = layout_of(width, ratio)
    block = Projections("orthonormal", 7, EVERY).block(layout, layer_key(leader), step, LIKE)
    return torch.kron(torch.eye(width // layout.block, dtype=torch.float64), block.contiguous())


def train_as_the_paper(model: Llama, make: Made, steps: int, ratio: float) -> None:
    """The optimizer sees G^T x P of each weight; what it would change, times P^T, changes the weight."""
    layers = {name: m for name, m in model.named_modules() if name.endswith("_proj")}
    small = {
        name: nn.Parameter(torch.zeros(m.out_features, round(m.in_features * ratio), dtype=torch.float64))
        for name, m in layers.items()
    }
    others = [p for name, p in model.named_parameters() if name.removesuffix(".weight") not in layers]
    optimizer = make([*small.values(), *others])
    decay = optimizer.param_groups[0]["lr"] * optimizer.param_groups[0]["weight_decay"]
    for step in range(steps):
        model.zero_grad()
        for microbatch in range(2):
            (model(*batch(2 * step + microbatch)) / 2).backward()
        projections = {name: projection(name, m.in_features, step, ratio) for name, m in layers.items()}
        for name, parameter in small.items():
            if step % EVERY == 0:
                optimizer.state.pop(parameter, None)
            parameter.data.zero_()
            gradient = layers[name].weight.grad
            parameter.grad = gradient @ projections[name]
        optimizer.step()
        with torch.no_grad():
            for name, parameter in small.items():
                weight = layers[name].weight
                weight.mul_(1 - decay).add_(parameter @ projections[name].t())


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_lazy_merges_are_the_papers_form(make: Made) -> None:
    expected, found = llama(), llama()
    train_as_the_paper(expected, make, 8, 0.25)
    optimizer = make(found.parameters())
    with attach(found, optimizer):
        train(found, optimizer, range(8))
    untrained = dict(llama().named_parameters())
    for (name, weight), other in zip(found.named_parameters(), expected.parameters(), strict=True):
        assert float((weight - other).detach().abs().max()) < 1e-12, name
        assert float((weight - untrained[name]).detach().abs().max()) > 1e-5, name


def test_all_features_kept_train_with_sgd_as_without() -> None:
    expected, found = llama(), llama()
    for model, section in ((expected, None), (found, {"ratio": 1})):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        with attach(model, optimizer, **section) if section else nullcontext():
            train(model, optimizer, range(5))
    for weight, other in zip(found.parameters(), expected.parameters(), strict=True):
        assert float((weight - other).detach().abs().max()) < 1e-12


def test_gradients_state_and_saved_inputs_are_small_and_the_squared_norm_is_kept_in_the_mean() -> None:
    layer = nn.Linear(128, 40).double()
    optimizer = torch.optim.AdamW(layer.parameters(), lr=0.0, weight_decay=0.0)
    x, upstream = torch.randn(6, 128, dtype=torch.float64), torch.randn(6, 40, dtype=torch.float64)
    whole = (upstream.t() @ x).pow(2).sum()
    with attach(layer, optimizer, update_every=1):
        squares = []
        saved: list[tuple[int, ...]] = []
        for _ in range(200):
            optimizer.zero_grad()
            saved.clear()
            with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.shape) or t, lambda t: t):
                y = layer(x)
            y.backward(upstream)
            squares.append(float(getattr(layer, FACTOR).grad.pow(2).sum() / whole))
            optimizer.step()
    mean = torch.tensor(squares)
    assert float(mean.mean()) == pytest.approx(1, abs=4 * float(mean.std()) / 200**0.5)
    assert sorted(saved) == [(6, 32), (40, 32), (40, 128), (64, 16)]  # z, B, W, and the block of P
    with attach(layer, optimizer):
        layer(x).backward(upstream)
        optimizer.step()
        trained = dict(layer.named_parameters())
        assert trained["weight"].grad is None and not trained["weight"].requires_grad
        state = optimizer.state[trained[FACTOR]]
        assert state["exp_avg"].shape == (40, 32) and trained["weight"] not in optimizer.state


def test_a_checkpoint_holds_ordinary_weights_and_resumes_to_the_bit() -> None:
    """Saved in the middle of a period, where the optimizer's state goes on."""
    make = OPTIMIZERS["AdamW"]
    model = llama()
    keys = list(model.state_dict())
    optimizer = make(model.parameters())
    with attach(model, optimizer) as runtime:
        train(model, optimizer, range(4))
        file = io.BytesIO()
        runtime.compact.merge()
        torch.save((model.state_dict(), optimizer.state_dict(), runtime.compact.steps), file)
        with torch.no_grad():
            loss = model(*batch(99))
        train(model, optimizer, range(4, 8))
    assert list(model.state_dict()) == keys == list(dict(llama().state_dict()))

    file.seek(0)
    weights, state, steps = torch.load(file)
    assert list(weights) == keys and steps == 4
    plain = llama()
    plain.load_state_dict(weights)
    assert torch.equal(plain(*batch(99)), loss), "evaluation sees what was trained"

    resumed = llama()
    again = make(resumed.parameters())
    with attach(resumed, again) as runtime:
        resumed.load_state_dict(weights)
        again.load_state_dict(state)
        runtime.compact.steps = steps
        train(resumed, again, range(4, 8))
    assert all_equal(resumed.parameters(), model.parameters())


def test_a_resumed_decay_has_the_learning_rate_of_its_step() -> None:
    """A load replaces the groups of an optimizer. Without `merge` it goes on up to rounding."""
    found = []
    for resumes in (False, True):
        model = llama()
        optimizer = OPTIMIZERS["AdamW"](model.parameters())
        runtime = attach(model, optimizer)
        for step in range(6):
            if resumes and step == 4:
                saved = model.state_dict(), copy.deepcopy(optimizer.state_dict())
                runtime.close()
                model = llama()
                optimizer = OPTIMIZERS["AdamW"](model.parameters())
                runtime = attach(model, optimizer)
                model.load_state_dict(saved[0])
                optimizer.load_state_dict(saved[1])
                runtime.compact.steps = step
            for group in optimizer.param_groups:
                group["lr"] = 1e-2 / (1 + step)
            train(model, optimizer, range(step, step + 1))
        runtime.close()
        assert all(p.requires_grad for group in optimizer.param_groups for p in group["params"])
        found.append([parameter.detach() for parameter in model.parameters()])
    for weight, other in zip(*found, strict=True):
        assert float((weight - other).abs().max()) < 1e-12


@pytest.mark.parametrize("what", ["an evaluation first", "a save between a forward and its backward"])
def test_what_only_reads_changes_nothing(what: str) -> None:
    """Layers choose among projections of a shared input in their first forward with gradients."""
    found = []
    for reads in (False, True):
        model = llama()
        optimizer = OPTIMIZERS["AdamW"](model.parameters())
        with attach(model, optimizer):
            if reads and what == "an evaluation first":
                with torch.no_grad():
                    model(*batch(99))
            train(model, optimizer, range(3))
            optimizer.zero_grad()
            loss = model(*batch(50))
            if reads and what != "an evaluation first":
                model.state_dict()
            loss.backward()
            optimizer.step()
        found.append([parameter.detach() for parameter in model.parameters()])
    assert all_equal(*found)


class Reads(nn.Module):
    """A fused kernel that is given the weight of its second layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 8)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(torch.sin(self.first(x)), self.second.weight)


def test_a_layer_whose_forward_is_never_called_is_an_error_by_name() -> None:
    model = Reads()
    for exclude in ([], ["second"]):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with attach(model, optimizer, exclude=exclude):
            for step in range(4):
                model(torch.randn(2, 64)).sum().backward()
                if step != 2 or exclude:
                    optimizer.step()
                    continue
                with pytest.raises(RuntimeError, match=r"forwards of second \(1 layers\).*compact.exclude"):
                    optimizer.step()
                break


@pytest.mark.parametrize("padded", [False, True])
def test_torchs_encoder_trains_and_evaluates_what_it_trained(padded: bool) -> None:
    """Its attention gives the weight of out_proj away, and its evaluation those of both other layers."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True, dropout=0.0)
    model = nn.TransformerEncoder(layer, 2)
    x = torch.randn(2, 5, 64)
    mask = torch.tensor([[False] * 5, [False] * 3 + [True] * 2]) if padded else None
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    with attach(model, optimizer):
        for _ in range(2):
            optimizer.zero_grad()
            (model(x, src_key_padding_mask=mask)[:, :3] - x[:, :3]).square().mean().backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            found = model(x, src_key_padding_mask=mask)
    with torch.no_grad():
        expected = model(x, src_key_padding_mask=mask)
    kept = ~mask[:, : found.shape[1]] if mask is not None else torch.ones(2, 5, dtype=torch.bool)
    assert torch.allclose(found[kept], expected[kept], atol=1e-5)
    assert not [name for name, p in model.named_parameters() if torch.equal(p, before[name])]


def test_a_skipped_step_of_a_fused_optimizer_decays_and_counts_nothing() -> None:
    model = nn.Sequential(nn.Linear(64, 8))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1, fused=True)
    scaler = torch.amp.GradScaler("cpu")
    with attach(model, optimizer) as runtime:
        before = model[0].weight.detach().clone()
        for overflows, steps in ((True, 0), (False, 1)):
            optimizer.zero_grad()
            scaler.scale(model(torch.ones(2, 64)).sum() * (float("inf") if overflows else 1.0)).backward()
            scaler.step(optimizer)
            scaler.update()
            assert runtime.compact.steps == steps
            assert torch.equal(model[0].weight, before) == overflows


def test_another_optimizer_is_an_error() -> None:
    model = nn.Linear(64, 8)
    with attach(model, torch.optim.SGD(model.parameters(), lr=0.1)):
        other = torch.optim.SGD(model.parameters(), lr=0.1)
        model(torch.ones(1, 64)).sum().backward()
        with pytest.raises(RuntimeError, match=r"another optimizer than the one given to ssdtrain.attach"):
            other.step()


def test_a_load_replaces_all_of_a_weight() -> None:
    model, other = llama(), llama()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(2)
    optimizer = OPTIMIZERS["AdamW"](model.parameters())
    with attach(model, optimizer):
        train(model, optimizer, range(2))
        model.load_state_dict(other.state_dict())
        assert torch.equal(model(*batch(9)), other(*batch(9)))
    assert all_equal(model.parameters(), other.parameters())


def test_an_unmerged_evaluation_computes_with_the_small_matrix() -> None:
    model = llama()
    optimizer = OPTIMIZERS["SGD"](model.parameters())
    with attach(model, optimizer) as runtime:
        train(model, optimizer, range(2))
        with torch.no_grad():
            unmerged = model(*batch(9))
        runtime.compact.merge()
        with torch.no_grad():
            merged = model(*batch(9))
    assert float((model(*batch(9)) - unmerged).detach().abs()) < 1e-13
    assert float((merged - unmerged).abs()) < 1e-13


def test_frozen_layers_and_those_of_no_optimizer_are_left_alone() -> None:
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(3)))
    model[0].requires_grad_(False)
    optimizer = torch.optim.Adam(model[1].parameters())
    with attach(model, optimizer):
        assert [hasattr(layer, FACTOR) for layer in model] == [False, True, False]
    assert [p.requires_grad for p in model.parameters()] == [False] * 2 + [True] * 4
    assert optimizer.param_groups[0]["params"][0] is model[1].weight
    assert not any("forward" in layer.__dict__ or hasattr(layer, FACTOR) for layer in model)


def tied() -> nn.Module:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    model[1].weight = model[0].weight
    return model


def tied_to_an_embedding() -> nn.Module:
    model = nn.ModuleDict({"words": nn.Embedding(8, 64), "decoder": nn.Linear(64, 8)})
    model["decoder"].weight = model["words"].weight
    return model


def stepped(p: Any) -> torch.optim.Optimizer:
    parameters = list(p)
    optimizer = torch.optim.Adam(parameters)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return optimizer


@pytest.mark.parametrize(
    ("model", "make", "words"),
    [
        (lambda: nn.Linear(64, 8), lambda p: None, "was given none.*optimizer="),
        (lambda: nn.Linear(64, 8), torch.optim.Adagrad, "torch.optim.adagrad.Adagrad.*SGD, Adam, AdamW"),
        (lambda: nn.Linear(64, 8), lambda p: torch.optim.SGD(p, weight_decay=0.1), "weight_decay 0.1.*SGD"),
        (lambda: nn.Linear(64, 8), lambda p: torch.optim.Adam(p, weight_decay=0.1), "weight_decay 0.1.*Adam"),
        (lambda: nn.Linear(64, 8), stepped, "state of the whole weight"),
        (tied, torch.optim.Adam, "one weight in two modules, 0 and 1"),
        (tied_to_an_embedding, torch.optim.Adam, "one weight in two modules, decoder and words"),
        (
            lambda: nn.Linear(64, 8),
            lambda p: torch.optim.Adam([nn.Parameter(torch.ones(1))]),
            "finds no weight",
        ),
    ],
    ids=["none", "adagrad", "sgd decay", "adam decay", "state", "tied", "embedding", "another model's"],
)
def test_what_cannot_be_had_is_an_error_with_the_key(
    model: Callable[[], nn.Module], make: Made, words: str
) -> None:
    made = model()
    with pytest.raises(ConfigError, match=rf"ssdtrain.compact.mode: 'lowrank' (?s:.)*{words}"):
        attach(made, make(made.parameters()))
    assert not any(FACTOR in name for name, _ in made.named_parameters())


def test_a_copy_of_the_whole_model_is_an_error() -> None:
    model = nn.Sequential(nn.Linear(64, 8))
    with attach(model, torch.optim.Adam(model.parameters())):
        for call in (copy.deepcopy, pickle.dumps):
            with pytest.raises(RuntimeError, match="copy its state_dict, or copy it before"):
                call(model)
    copy.deepcopy(model)


def test_a_replaced_weight_is_an_error() -> None:
    model = nn.Sequential(nn.Linear(64, 8))
    runtime = attach(model, torch.optim.Adam(model.parameters()))
    model[0].weight = nn.Parameter(torch.zeros(8, 64))
    with pytest.raises(RuntimeError, match="parameters of 0 were replaced"):
        model(torch.zeros(1, 64))
    del runtime


def test_autocast_trains_in_float32() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    x = torch.randn(32, 64, generator=torch.Generator().manual_seed(0))
    with attach(model, optimizer, ratio=0.5):
        losses = []
        for _ in range(30):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                y = model(x)
            assert y.dtype == torch.bfloat16
            loss = (y.float()[:, 0] - x[:, 0]).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    assert losses[-1] < 0.3 * losses[0]


@pytest.mark.distributed
@pytest.mark.slow
def test_data_parallel_ranks_train_what_one_process_trains(tmp_path: Any) -> None:
    forked(2, "tests.compact.lowrank_ranks", str(tmp_path / "w"))
    expected = torch.load(tmp_path / "w.0.plain")
    first = torch.load(tmp_path / "w.0")["weights"]
    for rank in range(2):
        found = torch.load(tmp_path / f"w.{rank}")
        assert found["reduced"] == found["expected_bytes"]
        assert found["weights"].keys() == expected.keys()
        for name, weight in expected.items():
            assert torch.equal(found["weights"][name], first[name]), name
            assert float((found["weights"][name] - weight).abs().max()) < 1e-12, name


def test_a_transposed_layer_trains_as_a_linear_one() -> None:
    plain = nn.Linear(64, 24).double()
    transposed = Conv1D(24, 64)
    with torch.no_grad():
        transposed.weight.copy_(plain.weight.t())
        transposed.bias.copy_(plain.bias)
    x = torch.randn(2, 5, 64, dtype=torch.float64)
    for model in (plain, transposed):
        optimizer = OPTIMIZERS["AdamW"](model.parameters())
        with attach(model, optimizer, update_every=2):
            for _ in range(3):
                optimizer.zero_grad()
                model(x).square().mean().backward()
                optimizer.step()
    assert torch.allclose(transposed.weight.t(), plain.weight, rtol=1e-12, atol=1e-14)
