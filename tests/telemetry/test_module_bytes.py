"""Bytes and waits by module: in chosen steps, equal to the totals, and without a trace in the steps between."""

from __future__ import annotations

import json
import logging
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ssdtrain
from ssdtrain.config import load_config
from ssdtrain.offload.checks.module_tally import ModuleTally
from ssdtrain.runtime import Runtime
from ssdtrain.telemetry.module_bytes import ModuleBytes
from ssdtrain.tools.report.run import JournaledRun
from tests.support.filesystems import eventually

LAYERS = 4


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(LAYERS)))


def config(directory: Path, **offload: Any) -> dict[str, Any]:
    spill = {"directories": str(directory / "spill"), "min_bytes": "4KiB", "amount": "all", **offload}
    return {"offload": spill, "report": {"path": str(directory / "out"), "interval": 0}}


def train(runtime: Runtime, model: nn.Module, steps: int) -> None:
    for step in range(steps):
        x = torch.randn(256, 64, generator=torch.Generator().manual_seed(step))
        y = model(x)
        while (found := runtime.statistics()) is not None and found.offload.in_flight_bytes:
            time.sleep(0.001)  # so that backward cancels none
        y.sum().backward()
        runtime.step_end()


def lines_of(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / "out" / "rank-0.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("amount", ["all", 0.5])
def test_modules_of_a_chosen_step_add_up_to_its_totals(tmp_path: Path, amount: str | float) -> None:
    model = make_model()
    with ssdtrain.attach(model, config(tmp_path, amount=amount)) as runtime:
        train(runtime, model, 5)
        assert not runtime.engine.modules.watching
    lines = lines_of(tmp_path)
    assert [line["step"] for line in lines if "modules" in line] == [2, 4]
    for line in lines:
        if "modules" not in line:
            continue
        used = line["modules"]
        assert {one["module"] for one in used} == {f"{i}.{j}" for i in range(LAYERS) for j in (0, 1)}
        assert sum(one["offloaded_bytes"] for one in used) == line["offloaded_bytes"] > 0
        assert sum(one["kept_bytes"] for one in used) == line["kept_bytes"]
        saved = sum(one["offloaded_bytes"] + one["kept_bytes"] for one in used)
        assert saved == line["saved_bytes"]
        if amount == 0.5:
            # What backward needs first stays.
            assert next(one for one in used if one["module"] == f"{LAYERS - 1}.1")["offloaded_bytes"] == 0


def test_what_backward_needs_before_its_store_has_begun_counts_as_kept(tmp_path: Path) -> None:
    model = make_model()
    with Runtime(load_config(config(tmp_path, threads=1))) as runtime:
        runtime.register(model)
        assert runtime.engine is not None and runtime.offload is not None
        pool: Any = runtime.offload.store.pool
        for _ in range(2):
            # One thread: the first store begins, and all others wait for it.
            pool.hold(begun=True, reads=False)
            with runtime.forward():
                y = model(torch.randn(256, 64))
            first = runtime.engine.mover.stores.oldest()
            pool.flush()
            assert eventually(first.begun)
            y.sum().backward()
            pool.release()
            assert first.wait(30)
            runtime.step_end()
    line = lines_of(tmp_path)[1]
    assert line["avoided_write_bytes"] > 0 < line["offloaded_bytes"]
    assert sum(one["offloaded_bytes"] for one in line["modules"]) == line["offloaded_bytes"]
    assert sum(one["kept_bytes"] for one in line["modules"]) == line["avoided_write_bytes"]


def test_waits_have_names_of_modules_also_in_steps_that_are_not_chosen(tmp_path: Path) -> None:
    model = make_model()
    with ssdtrain.attach(model, config(tmp_path)) as runtime:
        waited = runtime.engine.metrics.count_load_wait
        train(runtime, model, 2)
        waited(
            "load", "chunk 0, region 0", 20.0
        )  # what the first layer saved, as it is called where names are unknown
        waited("load", "1.0", 30.0)
        train(runtime, model, 1)
        waited("load", "1.0", 40.0)
        train(runtime, model, 1)
    third, fourth = (line["load_waits"] for line in lines_of(tmp_path)[2:])
    assert [(wait["module"], round(wait["seconds"])) for wait in third[:2]] == [("1.0", 30), ("0.0", 20)]
    assert (fourth[0]["module"], round(fourth[0]["seconds"])) == ("1.0", 40)
    run = JournaledRun.read(tmp_path / "out")
    assert run.journals[0].modules_step == 4
    assert round(run.modules()["1.0"].load_wait_seconds) == 40


@pytest.mark.parametrize("trace", [[2], [3], [2, 3], [3, 4], [1, 2, 3, 4, 5]])
def test_a_trace_and_chosen_steps_leave_each_other_the_names(tmp_path: Path, trace: list[int]) -> None:
    model = make_model()
    sections = config(tmp_path)
    sections["report"]["trace"] = trace
    with ssdtrain.attach(model, sections) as runtime:
        train(runtime, model, 6)
        assert not runtime.engine.modules.watching
    modules = {f"{i}.{j}" for i in range(LAYERS) for j in (0, 1)}
    for line in lines_of(tmp_path):
        assert {one["module"] for one in line.get("modules", ())} == (
            modules if line["step"] in (2, 4) else set()
        )
    events = json.loads((tmp_path / "out" / "trace-rank-0.json").read_text())["traceEvents"]
    spans = [event["name"] for event in events if event.get("cat") == "module"]
    assert {spans.count(name) for name in modules} == {len(trace)}


def test_a_place_where_several_modules_were_seen_has_no_name(tmp_path: Path) -> None:
    model = make_model()
    with ssdtrain.attach(model, config(tmp_path)) as runtime:
        train(runtime, model, 2)
        (feature,) = [one for one in runtime.features if isinstance(one, ModuleBytes)]
        assert feature.names["chunk 0, region 0"] == "0.0"
        for _ in range(2):  # as where the first layer was left out
            feature._tally = ModuleTally(runtime.engine.metrics)
            feature._tally.names = {"chunk 0, region 0": "1.0"}
            feature._end()
        assert feature.names["chunk 0, region 0"] == "" and "2.0" in feature.names.values()
        runtime.engine.metrics.count_load_wait("load", "chunk 0, region 0", 20.0)
        train(runtime, model, 1)
    assert lines_of(tmp_path)[2]["load_waits"][0]["module"] == "chunk 0, region 0"


def test_a_compiled_model_gets_no_hooks(tmp_path: Path) -> None:
    model = torch.compile(make_model(), backend="eager")
    with ssdtrain.attach(model, config(tmp_path)) as runtime:
        assert runtime.engine is not None
        for _ in range(2):
            train(runtime, model, 1)
            assert not runtime.engine.modules.watching
    (line,) = [line for line in lines_of(tmp_path) if "modules" in line]
    assert line["step"] == 2
    assert sum(one["offloaded_bytes"] for one in line["modules"]) == line["offloaded_bytes"]


def test_a_loop_that_ends_no_step_is_told_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for ends in (True, False):
        caplog.clear()
        model = make_model()
        with (
            caplog.at_level(logging.WARNING, "ssdtrain"),
            ssdtrain.attach(model, config(tmp_path)) as runtime,
        ):
            model(torch.randn(256, 64)).sum().backward()
            if ends:
                runtime.step_end()
        warned = [record for record in caplog.records if "until a step ends" in record.getMessage()]
        assert len(warned) == (0 if ends else 1)
