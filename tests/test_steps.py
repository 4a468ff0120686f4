"""When a step is over: each row of the table of `StepClock`, and that everything in a runtime counts the same."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.optimizer import Optimizer

import ssdtrain
from ssdtrain.features import Feature
from ssdtrain.integration.inner_hooks import InnerHooks
from ssdtrain.planner.controller import PlanController
from ssdtrain.runtime import Runtime
from ssdtrain.steps import Step, StepClock


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(4)))


class Ends(Feature):
    """Writes down events: "begin", "over" of a backward, and steps."""

    def __init__(self) -> None:
        self.events: list[object] = []
        self.many = 0

    @property
    def steps(self) -> list[Step]:
        return [event for event in self.events if isinstance(event, Step)]

    def on_step_begin(self) -> None:
        self.events.append("begin")

    def on_backward_over(self) -> None:
        self.events.append("over")

    def on_step_end(self, step: Step) -> None:
        self.events.append(step)

    def on_unended_step(self) -> str:
        self.many += 1
        return ""


class Clock:
    now = 0.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("ssdtrain.steps.time", clock)
    return clock


def clock_of(ends: Ends, *models: nn.Module) -> StepClock:
    clock = StepClock(ends.on_step_end, ends.on_backward_over, ends.on_unended_step)
    clock.watch_optimizers()
    for model in models:
        clock.attach(model)
    return clock


def test_what_lies_between_two_steps_is_no_part_of_them(time: Clock) -> None:
    ends, model = Ends(), nn.Linear(2, 2)
    clock = clock_of(ends, model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for _ in range(4):
        for _ in range(2):  # microbatches
            clock.forward_begins()
            time.now += 1.0
        optimizer.step()
        time.now += 10.0  # an evaluation without gradients: nobody is told
    assert [(step.seconds - step.idle, step.elapsed) for step in ends.steps] == [(2.0, 12.0)] * 3
    assert [step.forwards for step in ends.steps] == [2] * 3
    clock.close()
    clock.close()
    assert [step.number for step in ends.steps] == [1, 2, 3, 4]
    assert [step.closing for step in ends.steps] == [False, False, False, True]


def test_what_lies_between_announced_steps_counts_as_passed(time: Clock) -> None:
    ends = Ends()
    clock = clock_of(ends)
    for _ in range(3):
        clock.begin()
        time.now += 2.0
        clock.end()
        time.now += 10.0  # an evaluation
    clock.close()
    found = [(step.seconds, step.idle, step.elapsed) for step in ends.steps]
    assert found == [(2.0, 0.0, 2.0), (2.0, 0.0, 12.0), (2.0, 0.0, 12.0)]


@pytest.mark.slow
def test_a_compiled_optimizer_ends_its_steps() -> None:
    torch._dynamo.reset()
    ends, model, plain = Ends(), make_model(), make_model()
    clock = clock_of(ends, model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    step = torch.compile(optimizer.step, backend="eager")
    for number in range(5):
        clock.forward_begins()
        assert len(ends.steps) == number == clock.optimizer_steps
        for one in (model, plain):
            one(torch.ones(4, 64)).square().sum().backward()
        step()
        with torch.no_grad():
            for parameter in plain.parameters():
                assert parameter.grad is not None
                parameter.add_(parameter.grad, alpha=-0.01)
        for one in (model, plain):
            one.zero_grad()
    clock.forward_begins()
    assert len(ends.steps) == 5
    assert all(found.idle == found.seconds for found in ends.steps)  # when it ran is not known
    clock.remove()
    assert all(map(torch.equal, model.parameters(), plain.parameters()))


def test_an_optimizer_in_a_captured_graph_or_before_any_forward_ends_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ends, model = Ends(), nn.Linear(2, 2)
    clock = clock_of(ends, model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    optimizer.step()  # makes its state, say
    clock.forward_begins()
    assert not ends.steps
    monkeypatch.setattr("ssdtrain.steps._capturing", lambda: True)
    optimizer.step()
    monkeypatch.undo()
    clock.forward_begins()
    clock.close()
    assert not ends.steps


def test_an_optimizer_that_trains_copies_counts_until_one_trains_the_model() -> None:
    """A discriminator's optimizer steps between the forward of the generator and its backward."""
    ends, model, copies = Ends(), nn.Linear(2, 2), nn.Linear(2, 2)
    clock = clock_of(ends, model)
    ours, theirs = (torch.optim.SGD(one.parameters(), lr=0.0) for one in (model, copies))
    for steps in range(3):
        assert clock.steps == steps
        clock.forward_begins()
        theirs.step()
        ours.step()
    for _ in range(2):
        theirs.step()
    assert clock.optimizer_steps == 3  # another rank may have no discriminator
    clock.forward_begins()
    assert [step.forwards for step in ends.steps] == [1, 1, 1]
    theirs.step()
    clock.close()
    assert len(ends.steps) == 3


def test_a_loop_that_announces_a_step_is_left_to_do_so() -> None:
    ends, model = Ends(), nn.Linear(2, 2)
    clock = clock_of(ends, model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for _ in range(2):
        clock.forward_begins()
        optimizer.step()
    assert clock.steps == 2  # the second one is not over
    clock.end(7, skipped=True)
    clock.forward_begins()
    optimizer.step()
    clock.forward_begins()
    clock.close()
    found = [(step.number, step.skipped, step.announced) for step in ends.steps]
    assert found == [(1, False, False), (7, True, True)]
    assert clock.steps == 2


def test_a_step_of_many_forwards_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ssdtrain.steps.UNENDED_FORWARDS", 4)
    ends = Ends()
    clock = clock_of(ends)
    for _ in range(9):
        clock.forward_begins()
    assert ends.many == 1
    clock.end()
    for _ in range(4):
        clock.forward_begins()
    assert ends.many == 2


def test_features_hear_of_a_backward_that_is_over_of_the_step_and_of_the_next_one() -> None:
    ends, model = Ends(), make_model()
    with ssdtrain.attach(model, {"report": {"interval": 0}}, features=[ends]):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            model(torch.randn(4, 64)).sum().backward()
            optimizer.step()
    told = ["step" if isinstance(event, Step) else event for event in ends.events]
    assert told == ["over", "step", "begin", "over", "step"]


# Everything counts the same

Loop = Callable[[Runtime, nn.Sequential, int], None]


def forward(model: nn.Module) -> torch.Tensor:
    loss: torch.Tensor = model(torch.ones(256, 64)).square().mean()
    return loss


def sgd(*modules: nn.Module) -> list[Optimizer]:
    return [torch.optim.SGD(module.parameters(), lr=0.01) for module in modules]


def accumulating(runtime: Runtime, model: nn.Sequential, steps: int) -> None:
    """Two microbatches, two optimizers, and an evaluation."""
    optimizers = sgd(model[:2], model[2:])
    for _ in range(steps):
        for _ in range(2):
            forward(model).backward()
        for optimizer in optimizers:
            optimizer.step()
        with torch.no_grad():
            forward(model)


def alternating(runtime: Runtime, model: nn.Sequential, steps: int) -> None:
    """Each of two optimizers has a forward of its own."""
    optimizers = sgd(model[:2], model[2:])
    for _ in range(steps):
        for optimizer in optimizers:
            forward(model).backward()
            optimizer.step()


def adversarial(runtime: Runtime, model: nn.Sequential, steps: int) -> None:
    other = nn.Linear(64, 1)
    [ours, theirs] = sgd(model, other)
    for _ in range(steps):
        made = model(torch.ones(256, 64))
        other(made.detach()).sum().backward()
        theirs.step()
        made.square().mean().backward()
        ours.step()


def in_closures(runtime: Runtime, model: nn.Sequential, steps: int) -> None:
    def closure() -> torch.Tensor:
        loss = forward(model)
        loss.backward()
        return loss

    [optimizer] = sgd(model)
    for _ in range(steps):
        optimizer.step(closure)  # type: ignore[arg-type]


def in_backward(runtime: Runtime, model: nn.Sequential, steps: int) -> None:
    for parameter in model.parameters():
        optimizer = torch.optim.SGD([parameter], lr=0.01)
        parameter.register_post_accumulate_grad_hook(lambda _, optimizer=optimizer: optimizer.step())
    for _ in range(steps):
        forward(model).backward()


def announced(runtime: Runtime, model: nn.Sequential, steps: int) -> None:
    [optimizer] = sgd(model)
    for _ in range(steps):
        with runtime.step():
            forward(model).backward()
            optimizer.step()


@pytest.mark.parametrize(
    "loop", [accumulating, alternating, adversarial, in_closures, in_backward, announced]
)
def test_in_a_loop_of_ten_steps_everything_counts_ten(loop: Loop, tmp_path: Path) -> None:
    """And one fewer as long as no forward came after the last one."""
    ends, model = Ends(), make_model()
    config: dict[str, Any] = {
        "offload": {"directories": str(tmp_path / "spill"), "amount": "auto", "min_bytes": "4KiB"},
        "compact": {"ratio": 0.5},
        "report": {"path": str(tmp_path), "interval": 0},
    }

    def counted(runtime: Runtime) -> dict[str, int]:
        statistics, compact = runtime.statistics(), runtime.compact
        [controller] = [feature for feature in runtime.features if isinstance(feature, PlanController)]
        [inner] = [feature for feature in runtime.features if isinstance(feature, InnerHooks)]
        lines = (tmp_path / "rank-0.jsonl").read_text().splitlines()
        assert [json.loads(line)["step"] for line in lines] == list(range(1, len(lines) + 1))
        return {
            "runtime": runtime.steps,
            "statistics": statistics.steps,
            "journal": len(lines),
            "checks": runtime.offload.checks.steps,
            "plans": controller.steps,
            "hooks": inner.steps,
            "others": len(ends.steps),
            "compact": compact.step(),
        }

    with ssdtrain.attach(model, config, features=[ends]) as runtime:
        loop(runtime, model, 10)
        found = counted(runtime)
        # The next forward has the projection of the next step, unless a backward may still need that of this one.
        known, projections = 10 if loop in (announced, alternating) else 9, 9 if loop is in_backward else 10
        assert found == {**dict.fromkeys(found, known), "compact": projections}
    assert set(counted(runtime).values()) == {10}
