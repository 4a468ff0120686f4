"""Steps of a loop that does not say when one is over, such as a trainer's, are recorded all the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ssdtrain
from ssdtrain.runtime import Runtime


def attached(model: nn.Module, tmp_path: Path, **report: Any) -> Runtime:
    offload = {"directories": str(tmp_path / "spill"), "min_bytes": "4KiB", "amount": "all"}
    return ssdtrain.attach(
        model, {"offload": offload, "report": {"path": str(tmp_path), "interval": 0, **report}}
    )


def lines(tmp_path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (tmp_path / "rank-0.jsonl").read_text().splitlines()]


def make_model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))


def test_each_step_of_the_optimizer_has_a_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Two microbatches, two optimizers, and an evaluation: one step."""
    model = make_model()
    optimizers = [torch.optim.SGD(layer.parameters(), lr=0.1) for layer in (model[0], model[2])]
    with attached(model, tmp_path, trace=[2]) as runtime:
        assert runtime.engine is not None
        for step in range(3):
            for _ in range(2):
                model(torch.randn(256, 64)).sum().backward()
            for optimizer in optimizers:
                optimizer.step()
            runtime.log_values(loss=float(step))
            with torch.no_grad():
                model(torch.randn(256, 64))
            assert runtime.engine.modules.stack == ()  # the hooks of a step go in the first forward after it
    found = lines(tmp_path)
    assert [line["step"] for line in found] == [1, 2, 3]
    assert [line["loss"] for line in found] == [0.0, 1.0, 2.0]
    assert {line["saved_bytes"] for line in found} == {found[0]["saved_bytes"]} and found[0]["saved_bytes"]
    assert [bool(line.get("modules")) for line in found] == [False, True, False]
    assert json.loads((tmp_path / "trace-rank-0.json").read_text())["traceEvents"]
    assert "nothing is recorded" not in caplog.text


@pytest.mark.parametrize("way", ["step_end", "step"])
def test_a_loop_that_announces_its_steps_has_no_others(tmp_path: Path, way: str) -> None:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train(count: int) -> None:
        for _ in range(count):
            model(torch.randn(256, 64)).sum().backward()
            optimizer.step()

    with attached(model, tmp_path) as runtime:
        for _ in range(3):
            if way == "step_end":
                train(2)  # the first time that it is not announced, an optimizer's step is the step
                runtime.step_end()
            else:
                with runtime.step():
                    train(2)
    assert len(lines(tmp_path)) == (4 if way == "step_end" else 3)


def test_what_an_optimizer_of_another_model_does_is_no_step(tmp_path: Path) -> None:
    model, other = make_model(), make_model()
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (model, other)]
    with attached(model, tmp_path):
        for _ in range(2):
            model(torch.randn(256, 64)).sum().backward()
            optimizers[0].step()
            for _ in range(3):
                other(torch.randn(256, 64)).sum().backward()
                optimizers[1].step()
    assert len(lines(tmp_path)) == 2


def test_a_step_in_a_closure_is_recorded_with_its_own_forwards(tmp_path: Path) -> None:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        for _ in range(2):
            loss = model(torch.randn(256, 64)).sum()
            loss.backward()
        return loss

    with attached(model, tmp_path):
        for _ in range(3):
            optimizer.step(closure)
    found = lines(tmp_path)
    assert len(found) == 3
    assert {line["saved_bytes"] for line in found} == {found[0]["saved_bytes"]} and found[0]["saved_bytes"]


def test_steps_are_counted_where_only_model_state_is_offloaded(tmp_path: Path) -> None:
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    state = {"directories": str(tmp_path / "state"), "device_limit": "8MiB", "min_bytes": 256}
    config = {"state": {**state, "blocks": ["0", "2"]}, "report": {"path": str(tmp_path)}}
    with ssdtrain.attach(model, config, optimizer=optimizer):
        for _ in range(3):
            model(torch.randn(256, 64)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert [line["step"] for line in lines(tmp_path)] == [1, 2, 3]


def train(model: nn.Module, steps: int, runtime: Runtime | None = None) -> None:
    """With a runtime everything is written before backward begins."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        loss = model(torch.randn(256, 64)).sum()
        if runtime is not None and runtime.engine is not None:
            runtime.engine.drain()
            while runtime.engine.snapshot().in_flight_bytes:
                pass
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def test_the_first_step_has_its_time_from_its_first_forward(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So the mean and the median of few steps are those of all of them, and the projected life counts them."""
    now = [100.0]
    monkeypatch.setattr("ssdtrain.steps.time.perf_counter", lambda: now[0])
    model = make_model()
    model[1].register_forward_hook(lambda *_: now.__setitem__(0, now[0] + 4.0))
    with attached(model, tmp_path) as runtime:
        now[0] = 200.0  # what lies between attaching and the first forward is no part of a step
        train(model, 2)
        model(torch.randn(256, 64))
        found = runtime.statistics()
    assert [line["step_seconds"] for line in lines(tmp_path)] == [4.0, 4.0]
    assert found.step_seconds == 8.0 and found.steps == 2


@pytest.mark.parametrize("interval", [0, 100])
def test_what_offloading_checks_by_steps_is_checked(
    interval: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """That nothing moved, that the drives wear, and the end of a proof."""
    directories = str(tmp_path / "spill")
    model = make_model()
    with ssdtrain.attach(
        model,
        {"offload": {"directories": directories, "min_bytes": "1GiB"}, "report": {"interval": interval}},
    ):
        train(model, 4)
    assert "moved nothing in the first 3 steps" in caplog.text
    section = {"directories": directories, "min_bytes": "4KiB", "amount": "all", "prove_steps": 2}
    model = make_model()
    with ssdtrain.attach(
        model, {"offload": {**section, "endurance": {"tbw": "1KB"}}, "report": {"interval": interval}}
    ) as runtime:
        train(model, 5, runtime)
        assert runtime.engine.prover is None
        assert "life" in str(runtime.statistics())
    assert "wears out" in caplog.text
