"""`report.trace`: the file is what trace viewers read, its events nest, cover the steps and name modules."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ssdtrain
from ssdtrain.config import ConfigError, load_config
from ssdtrain.features import Placement
from ssdtrain.planner import memory_plot
from ssdtrain.planner.memory_plot import MemoryPanel, PlanPlot
from ssdtrain.runtime import Runtime, Seams
from ssdtrain.storage import Faults
from ssdtrain.tools.cli import main
from tests.offload.conftest import settled

Event = dict[str, Any]

OUTSIDE = "chunk 0, region 8"
"""What `loss.square()` saves: no module runs."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.gelu(self.inner(x))


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(4)))


def config(directory: Path, trace: Any, **offload: Any) -> dict[str, Any]:
    spill = {"directories": str(directory / "spill"), "min_bytes": "4KiB", "amount": "all", **offload}
    return {"offload": spill, "report": {"path": str(directory / "out"), "trace": trace, "interval": 0}}


def train(runtime: Runtime, model: nn.Module, steps: int, microbatches: int = 1) -> None:
    for step in range(steps):
        with runtime.step():
            for microbatch in range(microbatches):
                x = torch.randn(256, 64, generator=torch.Generator().manual_seed(step))
                with runtime.forward(microbatch=microbatch):
                    loss = model(x).square().sum()
                with runtime.backward(microbatch=microbatch):
                    loss.backward()


def traced(directory: Path, trace: Any, *, steps: int, rank: int = 0, **offload: Any) -> Path:
    model = make_model()
    faults = Faults(
        delay=1.0, max_delay=0.02
    )  # so that training has something to wait for, whatever else runs
    with Runtime(
        load_config(config(directory, trace, **offload)), Placement.of("cpu", rank), seams=Seams(faults)
    ) as runtime:
        runtime.register(model)
        train(runtime, model, steps, microbatches=2)
    return directory / "out" / f"trace-rank-{rank}.json"


def spans(file: Path) -> list[Event]:
    return [event for event in json.loads(file.read_text())["traceEvents"] if event["ph"] == "X"]


def of_kind(events: list[Event], kind: str) -> list[Event]:
    return [event for event in events if event["cat"] == kind]


def inside(inner: Event, outer: Event) -> bool:
    slack = 1e-6
    return (
        outer["ts"] - slack <= inner["ts"]
        and inner["ts"] + inner["dur"] <= outer["ts"] + outer["dur"] + slack
    )


def overlapping(events: list[Event]) -> Iterator[tuple[Event, Event]]:
    """Pairs of one track that overlap, and neither is inside of the other."""
    tracks: dict[Any, list[Event]] = defaultdict(list)
    for event in events:
        tracks[event["pid"], event["tid"]].append(event)
    for found in tracks.values():
        for one in found:
            for other in found:
                if one["ts"] < other["ts"] < one["ts"] + one["dur"] - 1e-6 and not inside(other, one):
                    yield one, other


def test_the_events_nest_cover_the_steps_and_name_modules(tmp_path: Path) -> None:
    file = traced(tmp_path, [2, "4-5"], steps=6, in_flight="128KiB")
    events = spans(file)
    steps = of_kind(events, "step")
    assert [step["name"] for step in steps] == ["step 2", "step 4", "step 5"]
    assert not list(overlapping(events))
    for event in events:
        assert event["dur"] >= 0 and math.isfinite(event["ts"])
        if event["cat"] not in ("store", "load"):
            assert any(inside(event, step) for step in steps), event
    for step in steps:
        own = [event for event in events if inside(event, step)]
        # The host's track, and the device's.
        assert len(of_kind(own, "forward")) == len(of_kind(own, "backward")) == 4
        modules = {event["name"] for event in of_kind(own, "module")}
        assert modules == {"Sequential", *(f"{i}{name}" for i in range(4) for name in ("", ".inner"))}
        names = modules | {OUTSIDE}
        assert {event["name"] for event in of_kind(own, "save")} <= {f"save {name}" for name in names}
        assert {event["name"] for event in of_kind(own, "save")} >= {"save 0", "save 3.inner"}
        assert len(of_kind(own, "use")) >= 2 * len(of_kind(own, "save")) / 2 > 0
    stores = of_kind(events, "store")
    assert stores and all(event["args"]["bytes"] > 0 and event["name"] in names for event in stores)
    waits = of_kind(events, "wait")
    assert {event["name"].partition(":")[0] for event in waits} >= {"admission wait", "load wait"}
    assert all(event["name"].partition(": ")[2] in names for event in waits)
    memory = [e for e in json.loads(file.read_text())["traceEvents"] if e["ph"] == "C"]
    assert max(e["args"]["bytes"] for e in memory) > 256 * 64 * 4


def test_waits_are_those_of_the_metrics(tmp_path: Path) -> None:
    model = make_model()
    with Runtime(load_config(config(tmp_path, "1-3", codec="int8", prefetch=0))) as runtime:
        runtime.register(model)
        for _ in range(3):
            with runtime.step():
                with runtime.forward():
                    loss = model(torch.randn(256, 64)).square().sum()
                settled(runtime)  # all is in the tier, and nothing is read ahead
                with runtime.backward():
                    loss.backward()
        found = runtime.engine.snapshot()
    events = spans(tmp_path / "out" / "trace-rank-0.json")
    waited = sum(event["dur"] for event in of_kind(events, "wait")) / 1e6
    assert waited == pytest.approx(found.stall_seconds, rel=1e-3)
    codec = sum(event["dur"] for event in of_kind(events, "codec")) / 1e6
    assert codec == pytest.approx(found.codec_seconds, rel=1e-3)
    assert found.codec_seconds > 0 < found.stall_seconds


def test_steps_that_are_not_traced_leave_no_hook_and_record_nothing(tmp_path: Path) -> None:
    model = make_model()
    with Runtime(load_config(config(tmp_path, [2]))) as runtime:
        runtime.register(model)
        engine = runtime.engine
        assert engine is not None

        def off() -> bool:
            hooks = any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())
            recorders = engine.recorder.active, engine.meter.record, engine.metrics.spans is not None
            return not hooks and not any(recorders)

        assert off()
        train(runtime, model, 1)
        assert not off()  # step 2 begins
        train(runtime, model, 1)
        assert off()


def test_a_picture_of_memory_beside_a_trace_leaves_no_timeline_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured: list[int] = []
    monkeypatch.setattr(
        memory_plot, "draw_memory", lambda panels, _: measured.append(len(panels[0].measured))
    )
    model = make_model()
    with Runtime(load_config(config(tmp_path, [3]))) as runtime:
        runtime.register(model)
        meter = runtime.engine.meter
        plot = PlanPlot(tmp_path / "plan.png", meter)
        plot._panel = MemoryPanel("a plan", [(0.0, 0)], (), 0)
        train(runtime, model, 1)
        plot.step_ended()
        train(runtime, model, 1)
        plot.step_ended()  # while step 3 is traced
        train(runtime, model, 1)
        assert not meter.record and not meter.timeline
    events = json.loads((tmp_path / "out" / "trace-rank-0.json").read_text())["traceEvents"]
    assert measured[0] > 2 < sum(event["ph"] == "C" for event in events)


def test_the_step_of_a_resumed_run_is_the_number_that_it_ends_with(tmp_path: Path) -> None:
    model = make_model()
    with Runtime(load_config(config(tmp_path, [1, 102]))) as runtime:
        runtime.register(model)
        for number in (101, 102, 103):
            runtime.step_begin()
            with runtime.forward():
                loss = model(torch.randn(256, 64)).sum()
            loss.backward()
            runtime.step_end(number=number)
    steps = of_kind(spans(tmp_path / "out" / "trace-rank-0.json"), "step")
    assert [step["name"] for step in steps] == ["step 102"]


def test_an_automatic_amount_still_plans_from_traced_steps(tmp_path: Path) -> None:
    model = make_model()
    with Runtime(load_config(config(tmp_path, "1-30", amount="auto")), logs=False) as runtime:
        runtime.register(model)
        for _ in range(30):
            train(runtime, model, 1)
            if runtime.engine is not None and runtime.engine.policy.plans:  # type: ignore[attr-defined]
                break
        assert runtime.engine is not None and runtime.engine.policy.plans  # type: ignore[attr-defined]
    assert of_kind(spans(tmp_path / "out" / "trace-rank-0.json"), "save")


def test_steps_that_a_plan_is_made_from_have_their_passes(tmp_path: Path) -> None:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    report = {"path": str(tmp_path / "out"), "trace": "1-7", "interval": 0}
    plan = {"blocks": ["0", "1", "2", "3"]}
    with ssdtrain.attach(model, {"plan": plan, "report": report}) as runtime:
        for _ in range(7):
            with runtime.step():
                model(torch.randn(256, 64)).square().sum().backward()
                optimizer.step()  # before which the plan takes its records
    events = spans(tmp_path / "out" / "trace-rank-0.json")
    steps = of_kind(events, "step")
    assert len(steps) == 7
    for step in steps:
        own = [event for event in events if inside(event, step)]
        assert of_kind(own, "save") and of_kind(own, "use"), step["name"]


def test_report_puts_the_ranks_on_one_time_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [traced(tmp_path, [1], steps=1, rank=rank) for rank in range(2)]
    assert main(["report", str(tmp_path / "out"), "--trace"]) == 0
    assert "2 ranks" in capsys.readouterr().out
    merged = spans(tmp_path / "out" / "trace.json")
    assert {event["pid"] for event in merged} == {0, 1}
    assert len(merged) == sum(len(spans(file)) for file in files)
    first, second = of_kind(merged, "step")
    assert first["ts"] + first["dur"] < second["ts"]  # they ran one after the other
    about = [json.loads(file.read_text())["otherData"]["unix_microseconds"] for file in files]
    assert second["ts"] - first["ts"] == pytest.approx(about[1] - about[0], abs=1e4)


def test_a_directory_without_traces_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(tmp_path), "--trace"]) == 1
    assert "report.trace" in capsys.readouterr().err
    (tmp_path / "trace-rank-0.json").write_text("[]")
    assert main(["report", str(tmp_path), "--trace"]) == 1
    assert "trace-rank-0.json is not a trace" in capsys.readouterr().err


@pytest.mark.parametrize("steps", [0, "x", [3, "5-4"], "1-101", True, [1.5]])
def test_what_is_no_list_of_steps_is_an_error(steps: Any) -> None:
    with pytest.raises(ConfigError, match="10-12"):
        load_config({"report": {"path": "/out", "trace": steps}})


def test_a_trace_needs_a_directory() -> None:
    with pytest.raises(ConfigError, match=r"report\.trace.*\n?.*path is not set"):
        load_config({"report": {"trace": [1]}})


def test_a_file_that_cannot_be_written_does_not_end_training(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "out" / "trace-rank-0.json").mkdir(parents=True)
    traced(tmp_path, [1], steps=2)
    assert "report.trace" in caplog.text and "training continues" in caplog.text
