"""The picture of memory over a step, predicted against measured."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import ssdtrain
from benchmarks.planner_simulated import memory_panels
from ssdtrain.config import ConfigError, load_config
from ssdtrain.config.units import MiB
from ssdtrain.offload.tensors.meter import ActivationMeter
from ssdtrain.planner import memory_plot
from ssdtrain.planner.memory_plot import MemoryPanel, PlanPlot, draw_memory
from ssdtrain.planner.model.types import Machine
from ssdtrain.planner.plans import SearchProblem
from tests.planner.test_plan_auto import STEPS, auto_of, gpt, train


def config(directory: Path, **more: Any) -> dict[str, Any]:
    report = {"interval": 0, "path": str(directory)}
    return {"plan": {"device_limit": "64MiB", "plot": True, "recompute": "off"}, "report": report, **more}


def test_a_run_draws_the_second_step_of_its_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[tuple[list[MemoryPanel], Path]] = []

    def draw(panels: list[MemoryPanel], file: Path) -> None:
        drawn.append((panels, file))

    monkeypatch.setattr(memory_plot, "draw_memory", draw)
    model = gpt()
    sections = config(tmp_path / "report", plan={"device_limit": "4MiB", "plot": True})
    with ssdtrain.attach(model, sections) as runtime:
        train(model)
        plan, engine = auto_of(runtime).plan, runtime.engine
        meter = engine.meter
        assert not meter.record and not meter.timeline
    [([panel], file)] = drawn
    assert file == tmp_path / "report" / "plan-rank-0.png"
    assert plan.summary() == panel.title and panel.limit == 4 * MiB
    assert max(nbytes for _, nbytes in panel.predicted) == plan.peak
    measured = max(nbytes for _, nbytes in panel.measured)
    # Of a recomputed block the meter does not see what its second run saves.
    assert 0.5 * plan.peak < measured <= 1.01 * plan.peak
    times = [when for when, _ in panel.measured]
    assert times == sorted(times) and times[0] == 0.0


def plotted(file: Path, monkeypatch: pytest.MonkeyPatch, plans: int, steps: int = 2) -> None:
    """Plans in turn, each of which is followed for some steps."""
    played = SimpleNamespace(timeline=SimpleNamespace(memory=[(0.0, 0)]))
    monkeypatch.setattr(memory_plot, "play", lambda *_, **__: played)
    problem = SearchProblem([], [], Machine(), {})
    meter = ActivationMeter()
    plot = PlanPlot(file, meter)
    for number in range(plans):
        plan: Any = SimpleNamespace(actions=(), peak=0, summary=lambda number=number: str(number + 1))
        plot.planned(problem, plan, None)
        for _ in range(steps):
            plot.step_ended()
            meter.adjust(1)
    assert not meter.record


def test_of_many_plans_few_are_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[str] = []
    monkeypatch.setattr(memory_plot, "draw_memory", lambda panels, _: drawn.append(panels[0].title))
    plotted(tmp_path / "plan.png", monkeypatch, 40)
    assert drawn == ["1", "2", "3", "4", "8", "16", "32"]


def test_what_cannot_be_drawn_is_a_warning_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object) -> None:
        raise ImportError("numpy.core.multiarray failed to import")

    monkeypatch.setattr(memory_plot, "draw_memory", broken)
    plotted(tmp_path / "plan.png", monkeypatch, 3)
    [line] = [record.getMessage() for record in caplog.records]
    assert "plan.plot" in line and "ImportError: numpy.core.multiarray" in line


def test_a_file_that_cannot_be_written_ends_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    caplog.set_level(logging.WARNING, "ssdtrain")
    monkeypatch.setattr(memory_plot, "draw_memory", full)
    model = gpt()
    with ssdtrain.attach(model, config(tmp_path, plan={"device_limit": "4MiB", "plot": True})):
        train(model)
    [line] = [r.getMessage() for r in caplog.records if "cannot be written" in r.getMessage()]
    assert "plan-rank-0.png" in line and "No space left" in line


def test_without_a_directory_or_matplotlib_it_is_an_error_at_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError) as raised:
        load_config({"plan": {"plot": True}})
    assert [problem.path for problem in raised.value.problems] == ["ssdtrain.plan.plot"]
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match=r"needs matplotlib.*ssdtrain\[plot\]") as raised:
        ssdtrain.attach(gpt(), config(tmp_path))
    assert [problem.path for problem in raised.value.problems] == ["ssdtrain.plan.plot"]


@pytest.mark.slow
def test_where_the_amount_is_planned_it_is_drawn_too(tmp_path: Path) -> None:
    model = gpt()
    offload = {"directories": str(tmp_path / "drive"), "min_bytes": "4KiB"}
    sections = config(tmp_path / "report", offload=offload)
    file = tmp_path / "report" / "plan-rank-0.png"
    with ssdtrain.attach(model, sections):
        for _ in range(12):  # nothing is planned while no store was written
            train(model, STEPS)
            if file.exists():
                break
    assert file.exists()


@pytest.mark.slow
def test_on_the_simulated_device_the_lines_have_one_peak(tmp_path: Path) -> None:
    panels = memory_panels()
    assert len(panels) == 4
    for panel in panels:
        predicted, measured = (max(n for _, n in line) for line in (panel.predicted, panel.measured))
        assert measured == pytest.approx(predicted, rel=0.001), panel.title
        assert panel.measured[-1][0] == pytest.approx(panel.predicted[-1][0], rel=0.1), panel.title
        assert panel.limit is None or measured <= panel.limit
    draw_memory(panels, tmp_path / "new" / "memory.png")
    assert (tmp_path / "new" / "memory.png").read_bytes().startswith(b"\x89PNG")


def test_the_peaks_of_a_step_are_those_since_the_one_before() -> None:
    meter = ActivationMeter()
    large, small = (torch.empty(nbytes, dtype=torch.uint8) for nbytes in (1000, 100))
    meter.see(large.untyped_storage())
    del large
    meter.see(small.untyped_storage())
    assert meter.begin_recent() == (1000, 1000)
    meter.adjust(50)
    meter.see_own(torch.empty(10, dtype=torch.uint8).untyped_storage())
    assert meter.begin_recent() == (160, 100)
    assert (meter.peak_bytes, meter.unoffloaded_peak_bytes) == (1000, 1000)  # since `reset_peak`
