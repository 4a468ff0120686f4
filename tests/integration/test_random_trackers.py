"""Dropout masks that a library draws from states of its own are the same in the recomputation."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

import pytest
import torch
from torch import nn

import ssdtrain
from ssdtrain.config import ConfigError
from ssdtrain.integration.random_trackers import register_trackers
from tests.planner.test_plan_auto import Stack, auto_of, equal, train
from tests.planner.test_plan_safety import LEAST


class Tracker:
    """As those of libraries with tensor parallelism, for torch's generator of CPUs."""

    def __init__(self) -> None:
        self.states: dict[str, torch.Tensor | torch.Generator] = {}

    def get_states(self) -> dict[str, torch.Tensor | torch.Generator]:
        return dict(self.states)

    def set_states(self, states: dict[str, torch.Tensor | torch.Generator]) -> None:
        self.states = states

    @contextmanager
    def fork(self) -> Iterator[None]:
        outer = torch.get_rng_state()
        state = self.states["parallel"]
        assert isinstance(state, torch.Tensor)
        torch.set_rng_state(state)
        yield
        self.states["parallel"] = torch.get_rng_state()
        torch.set_rng_state(outer)


@pytest.fixture
def tracker(monkeypatch: pytest.MonkeyPatch) -> Iterator[Tracker]:
    found, library, importer = Tracker(), ModuleType("some_library"), ModuleType("some_layers")
    found.states["parallel"] = torch.Generator().manual_seed(7).get_state()
    Drops.tracker = found

    def get_cuda_rng_tracker() -> Tracker:
        return found

    get_cuda_rng_tracker.__module__ = "some_library"
    for module in (library, importer):
        module.get_cuda_rng_tracker = get_cuda_rng_tracker
        monkeypatch.setitem(sys.modules, module.__name__, module)
    yield found
    ssdtrain.checkpoint.unregister_random_state("some_library.get_cuda_rng_tracker")


class Drops(nn.Module):
    tracker: Tracker

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(x).tanh()
        with self.tracker.fork():
            x = nn.functional.dropout(x, 0.3)
        return x.tanh()


def test_a_plan_restores_the_states_of_every_tracker(tracker: Tracker) -> None:
    begin = tracker.get_states()
    torch.manual_seed(0)
    expected = train(Stack(Drops))
    tracker.set_states(begin)
    torch.manual_seed(0)
    model = Stack(Drops)
    with ssdtrain.attach(model, LEAST) as runtime:
        assert equal(expected, train(model))
        plan = auto_of(runtime).plan
        assert plan.count("recompute")
    names = [name for name in ssdtrain.checkpoint._random if name.startswith("some_")]
    assert names == ["some_library.get_cuda_rng_tracker"]


def test_a_tracker_is_made_by_its_library_and_restored_from_then_on(
    tracker: Tracker, monkeypatch: pytest.MonkeyPatch
) -> None:
    library, made = sys.modules["some_library"], []
    library._CUDA_RNG_STATE_TRACKER_INITIALIZED = False
    function = library.get_cuda_rng_tracker
    monkeypatch.setattr(Tracker, "get_states", lambda self: made.append(self) or dict(self.states))
    begin = dict(tracker.states)
    torch.manual_seed(0)
    expected = train(Stack(Drops))
    tracker.states = dict(begin)
    torch.manual_seed(0)
    model = Stack(Drops)
    with ssdtrain.attach(model, LEAST) as runtime:
        assert function() is tracker and not made
        library._CUDA_RNG_STATE_TRACKER_INITIALIZED = True
        assert equal(expected, train(model))
        plan = auto_of(runtime).plan
        assert plan.count("recompute")


def test_a_tracker_without_states_stays_without_a_seed(
    tracker: Tracker, monkeypatch: pytest.MonkeyPatch
) -> None:
    tracker.states = {}
    monkeypatch.setattr(Tracker, "set_states", lambda *_: pytest.fail("it was seeded"))
    assert not register_trackers()
    linear = nn.Linear(4, 4)
    ssdtrain.checkpoint(linear, torch.ones(2, 4, requires_grad=True)).sum().backward()
    assert linear.weight.grad is not None


def test_generators_of_a_later_seed_are_an_error_with_a_remedy(tracker: Tracker) -> None:
    tracker.states = {}
    assert not register_trackers()
    tracker.states["parallel"] = torch.Generator()
    with pytest.raises(RuntimeError, match=r'some_library.* are no tensors .*plan\.recompute to "off"'):
        ssdtrain.checkpoint(nn.Linear(4, 4), torch.ones(2, 4, requires_grad=True))


def test_generators_that_are_shared_cannot_be_restored(tracker: Tracker) -> None:
    tracker.states["parallel"] = torch.Generator()
    assert "some_library.get_cuda_rng_tracker are no tensors" in register_trackers()
    why = r'can recompute no block here: the random states of some_library.*: set plan\.recompute to "off"'
    with pytest.raises(ConfigError, match=why):
        ssdtrain.attach(Stack(Drops), LEAST)


def test_a_tracker_that_cannot_be_read_excludes_recomputation(
    tracker: Tracker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Tracker, "get_states", None)
    assert "cannot be read (TypeError" in register_trackers()


@pytest.mark.slow
def test_a_seed_of_megatron_core_chooses_the_kind_of_its_tracker(monkeypatch: pytest.MonkeyPatch) -> None:
    random = pytest.importorskip("megatron.core.tensor_parallel.random")
    monkeypatch.setattr(random, "_CUDA_RNG_STATE_TRACKER_INITIALIZED", False)
    monkeypatch.setattr(random, "_CUDA_RNG_STATE_TRACKER", None)
    assert not register_trackers()
    ssdtrain.checkpoint(nn.Linear(4, 4), torch.ones(2, 4, requires_grad=True)).sum().backward()
    assert random._CUDA_RNG_STATE_TRACKER is None
    assert random._CUDA_RNG_STATE_TRACKER_INITIALIZED is False
