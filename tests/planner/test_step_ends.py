"""What the controller does at ends of steps that nobody announces: reentrant checkpointing, evaluations with gradients."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import ssdtrain
from ssdtrain.planner.controller import PlanController
from ssdtrain.runtime import Runtime
from tests.planner.test_auto import config, make_model, stepping_in_backward


def controller_of(runtime: Runtime) -> PlanController:
    (found,) = [one for one in runtime.features if isinstance(one, PlanController)]
    return found


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
        monkeypatch.setattr(controller.subject, "due", str)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        controller._reason = ""
        for step in range(6):
            model(torch.randn(512, 64)).square().sum().backward()
            if step == 3:
                model(torch.randn(512, 64)).sum()  # its backward never comes
            optimizer.step()
            controller._reason = ""
    assert judged == [True, True, True, False, True]


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
        take = runtime.engine.recorder.take

        def taken(user: str = "plan") -> Any:
            ends.append(len(updated))
            return take(user)

        monkeypatch.setattr(runtime.engine.recorder, "take", taken)
        for step in range(8):
            x = torch.randn(512, 64, generator=torch.Generator().manual_seed(step)).requires_grad_()
            for one in (model, plain):
                one(x).square().mean().backward()
        assert controller.steps == 7  # the last one ends when the next forward begins
    assert all(map(torch.equal, model.parameters(), plain.parameters()))
    # As many as the controller records: 8 parameters a step, none of them in the middle of a backward.
    assert ends == [8 * step for step in range(1, len(ends) + 1)] and len(ends) > 4
