"""A feature written outside of the package: it is plugged in, works, and its metrics are where those of the package are."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import nn

import ssdtrain
from ssdtrain.config import load_config
from ssdtrain.features import UNNAMED, Feature, Forward, Microbatch, Step
from ssdtrain.metrics import MetricSet, Unit, counter
from ssdtrain.runtime import Runtime
from tests.support.tensors import all_equal


@dataclass
class HalvedMetrics(MetricSet):
    halved_bytes: int = counter(Unit.BYTES, "saved in half precision")


class HalfPrecisionInputs(Feature):
    """Linear layers save their input in bfloat16: a feature that replaces the forwards of layers."""

    def __init__(self) -> None:
        self.counted = HalvedMetrics()
        self.replaced: list[nn.Module] = []

    def attach(self, model: nn.Module) -> None:
        for layer in [module for module in model.modules() if type(module) is nn.Linear]:
            layer.forward = lambda x, layer=layer: _Linear.apply(x, layer.weight, layer.bias, self.counted)  # type: ignore
            self.replaced.append(layer)

    def detach(self) -> None:
        while self.replaced:
            del self.replaced.pop().forward

    def metrics(self) -> list[tuple[str, MetricSet]]:
        return [("half", self.counted)]


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, counted):  # type: ignore[no-untyped-def]
        saved = x.bfloat16()
        counted.halved_bytes += saved.nbytes
        ctx.save_for_backward(saved, weight)
        return torch.nn.functional.linear(x, weight, bias)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        x, weight = ctx.saved_tensors
        return grad @ weight, grad.T @ x.to(grad.dtype), grad.sum(0), None


class Recorder(Feature):
    """Writes down every event."""

    def __init__(self) -> None:
        self.events: list[object] = []

    def attach(self, model: nn.Module) -> None:
        self.events.append(("attach", type(model).__name__))

    def detach(self) -> None:
        self.events.append("detach")

    def on_step_begin(self) -> None:
        self.events.append("step begins")

    @contextmanager
    def on_forward(self, forward: Forward) -> Iterator[None]:
        self.events.append(forward)
        yield
        self.events.append("forward ends")

    def on_backward(self, backward: Microbatch) -> None:
        self.events.append(backward)

    def on_next_backward(self, upcoming: Sequence[Microbatch]) -> None:
        self.events.append(list(upcoming))

    def on_step_end(self, step: Step) -> None:
        self.events.append((step.number, step.skipped))

    def description(self) -> str:
        return "recording: everything"

    def close(self) -> None:
        self.events.append("close")


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64))


def train(model: nn.Module, runtime: Runtime | None) -> list[torch.Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(3):
        x = torch.randn(32, 64, generator=torch.Generator().manual_seed(step))
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if runtime is not None:
            runtime.step_end()
        losses.append(loss.detach())
    return [*losses, *(p.detach() for p in model.parameters())]


@pytest.mark.parametrize("offloading", [False, True])
def test_a_feature_from_outside_changes_layers_and_its_metric_is_in_the_journal(
    tmp_path: Path, offloading: bool, caplog: pytest.LogCaptureFixture
) -> None:
    alone = HalfPrecisionInputs()
    model = network()
    alone.attach(model)
    expected = train(model, None)
    config: dict[str, object] = {"report": {"path": str(tmp_path / "report"), "interval": 3}}
    if offloading:
        config["offload"] = {"directories": str(tmp_path / "spill"), "min_bytes": 1024}
    feature, model = HalfPrecisionInputs(), network()
    forwards = [module.forward for module in model.modules()]
    caplog.set_level(logging.INFO, "ssdtrain")
    with ssdtrain.attach(model, config, features=[feature]) as runtime:
        found = train(model, runtime)
        statistics = runtime.statistics()
    assert all_equal(found, expected)
    assert [module.forward for module in model.modules()] == forwards
    lines = [json.loads(line) for line in (tmp_path / "report" / "rank-0.jsonl").read_text().splitlines()]
    per_step = 32 * (64 + 128) * 2
    assert [line["half/halved_bytes"] for line in lines] == [per_step] * 3
    assert any("half saved in half precision/step: 12.0 KiB" in text for text in caplog.messages)
    assert statistics is not None and ("half/halved bytes" in str(statistics))
    if offloading:
        assert statistics.offload.saved_bytes > 3 * per_step, "what the feature saves is offloaded, too"


def test_events_arrive_in_the_order_of_training(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    feature = Recorder()
    caplog.set_level(logging.INFO, "ssdtrain")
    offload = {"directories": str(tmp_path), "min_bytes": 1024}
    with Runtime(load_config({"offload": offload}), features=[feature]) as runtime:
        assert "recording: everything" in caplog.text
        model = network()
        runtime.register(model)
        with runtime.step():
            with runtime.forward(1, 2, keep=True) as tape:
                assert tape.microbatch == 2
                loss = model(torch.randn(4, 64)).sum()
            runtime.next_backward((1, 2))
            with runtime.backward(1, 2):
                loss.backward()
        runtime.step_begin()
        with pytest.raises(ZeroDivisionError), runtime.forward():
            raise ZeroDivisionError
        runtime.step_end(skipped=True, number=70)
    assert feature.events == [
        ("attach", "Sequential"),
        "step begins",
        Forward(1, 2, True),
        "forward ends",
        [Microbatch(1, 2)],
        Microbatch(1, 2),
        (1, False),
        "step begins",
        Forward(0, UNNAMED, False),  # its context left with the exception
        (70, True),
        "detach",
        "close",
    ]


def test_disabled_calls_no_feature() -> None:
    feature = Recorder()
    with Runtime(load_config({"enabled": False}), features=[feature]) as runtime:
        runtime.register(network())
        with runtime.step(), runtime.forward(), runtime.backward():
            pass
    assert not runtime.enabled and not feature.events


def test_all_features_are_closed_though_one_of_them_fails() -> None:
    class Failing(Recorder):
        def close(self) -> None:
            raise OSError("no")

    features = [Recorder(), Failing(), Recorder()]
    runtime = Runtime(load_config({"report": {"interval": 0}}), features=features)
    with pytest.raises(OSError, match="no"):
        runtime.close()
    assert [feature.events for feature in features] == [["detach", "close"], ["detach"], ["detach", "close"]]


def test_two_metrics_of_one_name_are_an_error_at_start() -> None:
    with pytest.raises(
        ValueError, match=r"HalfPrecisionInputs and HalfPrecisionInputs both.*half/halved_bytes"
    ):
        Runtime(load_config({}), features=[HalfPrecisionInputs(), HalfPrecisionInputs()])


def test_closing_undoes_everything_and_closes_features_whatever_raises() -> None:
    heard: list[str] = []

    class Closed(Feature):
        def close(self) -> None:
            heard.append("closed")

    def fail() -> None:
        heard.append("fails")
        raise OSError("full")

    runtime = Runtime(load_config({}), features=[Closed()])
    runtime.call_at_close(lambda: heard.append("first"))
    runtime.call_at_close(fail)
    runtime.call_at_close(lambda: heard.append("last"))
    with pytest.raises(OSError, match="full"):
        runtime.close()
    assert heard == ["last", "fails", "first", "closed"]
