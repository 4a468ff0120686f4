"""When a step is over, and how long it took: compiled optimizers, reentrant checkpointing, evaluations between steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import ssdtrain
from ssdtrain.planner import step_ends
from ssdtrain.planner.controller import PlanController
from ssdtrain.planner.step_ends import OptimizerHook, StepEnds
from ssdtrain.runtime import Runtime
from tests.planner.test_auto import config, make_model, stepping_in_backward


class Ends:
    def __init__(self) -> None:
        self.found: list[tuple[float, float]] = []

    def end(self, seconds: float, elapsed: float) -> None:
        self.found.append((seconds, elapsed))

    def drain(self) -> None: ...


class Clock:
    now = 0.0

    def perf_counter(self) -> float:
        return self.now


def controller_of(runtime: Runtime) -> PlanController:
    (found,) = [one for one in runtime.features if isinstance(one, PlanController)]
    return found


def test_what_lies_between_two_steps_is_no_part_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, ends, model = Clock(), Ends(), nn.Linear(2, 2)
    monkeypatch.setattr(step_ends, "time", clock)
    found = StepEnds(ends.end, ends.drain)
    found.attach(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for _ in range(4):
        for _ in range(2):  # microbatches
            found.before_forward()
            found.forward()
            clock.now += 1.0
        optimizer.step()
        clock.now += 10.0  # an evaluation without gradients: nobody is told
    found.close()
    assert ends.found == [(2.0, 12.0)] * 3


def test_what_lies_between_announced_steps_counts_as_passed(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, ends = Clock(), Ends()
    monkeypatch.setattr(step_ends, "time", clock)
    found = StepEnds(ends.end, ends.drain)
    for _ in range(3):
        clock.now += 2.0
        found.announced(2.0)
        clock.now += 10.0  # an evaluation
    found.close()
    assert ends.found == [(2.0, 2.0), (2.0, 12.0), (2.0, 12.0)]


def test_an_evaluation_with_gradients_is_no_step_that_stalls_are_judged_by(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model()
    with ssdtrain.attach(model, config(tmp_path)) as runtime:
        controller = controller_of(runtime)
        judged: list[bool] = []
        stalled = controller.subject.stalled

        def judge(fresh: bool, total: float) -> float | None:
            found = stalled(fresh, total)
            judged.append(found is not None)
            return found

        monkeypatch.setattr(controller.subject, "stalled", judge)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        controller._reason = ""
        for step in range(6):
            model(torch.randn(512, 64)).square().sum().backward()
            if step == 3:
                model(torch.randn(512, 64)).sum()  # its backward never comes
            optimizer.step()
            controller._reason = ""
    assert judged == [True, True, False, True, True]


class Reentrant(nn.Module):
    """Each block in a checkpoint whose backward runs inside of another one."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = make_model()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=True)
        return x


def test_an_optimizer_inside_of_a_reentrant_backward_ends_each_step_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, plain = Reentrant(), Reentrant()
    with ssdtrain.attach(model, config(tmp_path)) as runtime:
        for one in (model, plain):
            stepping_in_backward(one)
        controller = controller_of(runtime)
        updated, ends = [], []
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(lambda _: updated.append(1))
        assert runtime.engine is not None
        take = runtime.engine.recorder.take

        def taken(user: str = "plan") -> Any:
            ends.append(len(updated))
            return take(user)

        monkeypatch.setattr(runtime.engine.recorder, "take", taken)
        for step in range(8):
            x = torch.randn(512, 64, generator=torch.Generator().manual_seed(step)).requires_grad_()
            for one in (model, plain):
                one(x).square().mean().backward()
        assert (
            controller.steps == 6
        )  # neither the first, nor the last, which ends when the next forward begins
    assert all(map(torch.equal, model.parameters(), plain.parameters()))
    assert ends == [8 * step for step in range(2, 8)]  # parameters: not in the middle of a backward


class Counts:
    ran = 0

    def run(self) -> None:
        self.ran += 1


@pytest.mark.slow
def test_a_compiled_optimizer_ends_its_steps() -> None:
    torch._dynamo.reset()
    counts, model, plain = Counts(), make_model(), make_model()
    hook = OptimizerHook(counts.run)
    hook.attach(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    step = torch.compile(optimizer.step, backend="eager")
    try:
        for number in range(5):
            hook.before_forward()
            assert counts.ran == number
            for one in (model, plain):
                one(torch.ones(4, 64)).square().sum().backward()
            step()
            with torch.no_grad():
                for parameter in plain.parameters():
                    assert parameter.grad is not None
                    parameter.add_(parameter.grad, alpha=-0.01)
            for one in (model, plain):
                one.zero_grad()
        hook.before_forward()
        assert counts.ran == 5
        assert hook.ran_at is None
    finally:
        hook.remove()
    assert all(map(torch.equal, model.parameters(), plain.parameters()))
