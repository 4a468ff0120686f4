"""A plan that is carried out changes memory and nothing else."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ssdtrain
from examples.support.model import GPT, GPTConfig
from ssdtrain.offload.checkpoint import Checkpoint
from ssdtrain.planner.execute import BlockPolicy
from ssdtrain.planner.model.types import Machine, Tier
from ssdtrain.planner.plans import NoPlan
from ssdtrain.planner.recompute.modules import recompute_blocks, recompute_modules
from ssdtrain.tools.model_profile import plan_blocks, profile_blocks

LAYERS = 4


def model() -> GPT:
    torch.manual_seed(0)
    return GPT(GPTConfig(layers=LAYERS, hidden=64, heads=2, sequence=64, dropout=0.1))


def gradients(of: GPT) -> list[torch.Tensor]:
    torch.manual_seed(1)
    tokens = torch.randint(256, (4, 64))
    loss = of(tokens, tokens)
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in of.parameters() if p.grad is not None)]


@pytest.mark.parametrize(
    "actions", [["ssd", "recompute", "keep", "host"], ["recompute"] * LAYERS, ["offload"] * LAYERS], ids=str
)
def test_gradients_are_those_without_a_plan(actions: list[str], tmp_path: Path) -> None:
    expected = gradients(model())
    planned = model()
    named = {f"blocks.{i}": action for i, action in enumerate(actions)}
    config = {
        "offload": {"directories": str(tmp_path), "host": "16MiB", "min_bytes": "1KiB"},
        "report": {"interval": 0},
    }
    runtime = ssdtrain.attach(planned, config, policy=BlockPolicy(named))
    undo = recompute_blocks(planned, named)
    try:
        found = gradients(planned)
        metrics = runtime.statistics()
    finally:
        undo()
        runtime.close()
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
    moved = metrics.offload.offloaded_bytes + metrics.offload.avoided_write_bytes
    assert (moved > 0) == any(action in ("ssd", "host", "offload") for action in actions)
    assert not any("forward" in block.__dict__ for block in planned.blocks)


def test_the_plan_of_a_measured_model_keeps_to_its_memory() -> None:
    planned = model()
    tokens = torch.randint(256, (4, 64))
    profile = profile_blocks(planned, lambda: planned(tokens, tokens), steps=1)
    machine = Machine((Tier("ssd", 1e6, 1e6),))
    assert set(plan_blocks(profile, machine, 1 << 40).values()) == {"keep"}
    one = profile.blocks[0].saved
    tight = plan_blocks(profile, Machine(), profile.saved - one + profile.blocks[0].backward_transient)
    assert set(tight.values()) == {"keep", "recompute"}
    with pytest.raises(NoPlan):
        plan_blocks(profile, machine, one // 2)


def test_an_unknown_action_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"\['burn'\]; allowed: keep"):
        BlockPolicy({"blocks.0": "burn"})


class Counted(Checkpoint):
    calls = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        return super().__call__(*args, **kwargs)


@pytest.mark.parametrize("first", ["dropped", "latest"])
@pytest.mark.parametrize("own", [False, True])
def test_a_recomputation_that_was_never_undone_gives_way_to_the_next(own: bool, first: str) -> None:
    block = torch.nn.Linear(4, 4)
    if own:
        block.forward = functools.partial(torch.nn.Linear.forward, block)
    before = block.__dict__.get("forward")
    old, new = Counted(), Counted()
    dropped = recompute_modules({"block": block}, old)
    undo = recompute_modules({"block": block}, new)
    block(torch.randn(2, 4)).sum().backward()
    assert (old.calls, new.calls) == (0, 1)
    for restore in (dropped, undo) if first == "dropped" else (undo, dropped):
        restore()
    assert block.__dict__.get("forward") is before


def test_a_plan_undoes_its_own_recomputation_and_not_that_of_the_user() -> None:
    block, user, planned = torch.nn.Linear(4, 4), Counted(), Counted()
    x = torch.randn(2, 4)
    undo = recompute_modules({"block": block}, user)
    for _ in range(2):  # a plan, and the next one
        undo_plan = recompute_modules({"block": block}, planned, owner=planned)
        block(x).sum().backward()
        undo_plan()
    assert (user.calls, planned.calls) == (0, 2)
    block(x)
    assert (user.calls, planned.calls) == (1, 2)
    undo()
    assert "forward" not in block.__dict__


def test_what_replaced_the_forward_since_stays_when_a_plan_is_undone() -> None:
    block, planned = torch.nn.Linear(4, 4), Counted()
    undo = recompute_modules({"block": block}, planned)
    block.forward = replaced = functools.partial(block.forward)
    undo()
    assert block.forward is replaced
    assert block(torch.ones(2, 4)).shape == (2, 4) and not planned.calls


def test_the_recomputation_of_an_owner_that_is_gone_is_none() -> None:
    class Owner:
        pass

    block, dropped, checkpoint = torch.nn.Linear(4, 4), Owner(), Counted()
    recompute_modules({"block": block}, checkpoint, owner=dropped)
    del dropped
    block(torch.ones(2, 4))
    assert not checkpoint.calls
    recompute_modules({"block": block}, checkpoint)()
    assert "forward" not in block.__dict__


def recomputed_as_plain(run: Callable[[GPT], list[torch.Tensor]]) -> None:
    """What `run` returns is the same whether blocks are recomputed or not."""
    plain, planned = model(), model()
    torch.manual_seed(1)
    expected = run(plain)
    undo = recompute_blocks(planned, {f"blocks.{i}": "recompute" for i in range(LAYERS)})
    torch.manual_seed(1)
    found = run(planned)
    undo()
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


def test_a_call_with_other_parameters_has_their_gradients() -> None:
    """Backward comes when the block has its own again."""

    def adapted(of: GPT) -> list[torch.Tensor]:
        tokens = torch.randint(256, (4, 64))
        names = dict(of.named_parameters())
        faster = {name: one * 1.5 for name, one in names.items()}
        torch.func.functional_call(of, faster, (tokens, tokens)).backward()
        return [one.grad for one in names.values() if one.grad is not None]

    recomputed_as_plain(adapted)


def test_transforms_of_torch_func_run() -> None:
    """They allow no saved-tensor hooks, by which a checkpoint recomputes."""

    def derivatives(of: GPT) -> list[torch.Tensor]:
        x = torch.randn(2, 64, 64)
        block: Any = of.blocks[0]
        return [torch.func.grad(lambda x: block(x).square().sum())(x)]

    recomputed_as_plain(derivatives)


def test_an_evaluation_before_backward_does_not_change_what_is_recomputed() -> None:
    def evaluated(of: GPT) -> list[torch.Tensor]:
        tokens = torch.randint(256, (4, 64))
        loss = of(tokens, tokens)
        of.eval()
        loss.backward()
        assert not any(module.training for module in of.modules())
        return [one.grad for one in of.parameters() if one.grad is not None]

    recomputed_as_plain(evaluated)


class Anneals(nn.Module):
    """Counts its runs, and computes by that."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.runs, self.scale = nn.Linear(64, 64), 0, 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.runs += 1
        self.scale *= 0.9
        return self.linear(x * self.scale * self.runs).tanh()


def test_a_recomputation_is_not_counted() -> None:
    def run(recomputed: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        block = Anneals()
        undo = recompute_modules({"block": block}) if recomputed else lambda: None
        first, second = (block(torch.randn(8, 64)).sum() for _ in range(2))
        first.backward()
        second.backward()
        undo()
        return [
            *(one.grad for one in block.parameters() if one.grad is not None),
            torch.tensor([block.runs, block.scale]),
        ]

    assert all(torch.equal(a, b) for a, b in zip(run(False), run(True), strict=True))
