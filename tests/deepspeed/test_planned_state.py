"""Model state where a plan puts it, carried out by ZeRO-3: from a file, a config that --apply has written, or a limit."""

from __future__ import annotations

import json
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ssdtrain_ds
from ssdtrain.config import ConfigError
from ssdtrain.config.errors import InvalidValue
from ssdtrain.planner.planned_state import PlannedState
from ssdtrain.storage import HostBudgetExceeded, check_host_budget
from ssdtrain.tools.cli.main import main
from ssdtrain_ds import _compat
from ssdtrain_ds.planned_state import with_less_state, zero_options
from tests.deepspeed import models
from tests.deepspeed.conftest import ACCELERATOR, MakeEngine, train
from tests.support import processes

LAYERS, GPU_MEMORY, LIMIT = 16, 24 * 2**30, 800_000

OPTIONS: dict[str, Any] = {
    "stage": 3,
    "stage3_max_live_parameters": 3136 + (4 + 2) * 12704,
    "stage3_prefetch_bucket_size": 12704,
    "stage3_param_persistence_threshold": 4096,
    "stage3_model_persistence_threshold": 3136 + 4 * 12704,
    "offload_param": {"device": "cpu"},
    "offload_optimizer": {"device": "cpu"},
}
"""Of the plan below: four of sixteen blocks stay on the device, and two of the others are there at a time."""

OTHERS: dict[str, Any] = {"zero_force_ds_cpu_optimizer": False, "zero_allow_untested_optimizer": True}


def plan(tmp_path: Path, capsys: pytest.CaptureFixture[str], *more: str) -> Path:
    """The file of a plan for a GPU in which the model's state has no room by far."""
    shape = f"--model gpt --hidden {models.HIDDEN} --layers {LAYERS} --heads {models.HEADS} --seq {models.SEQUENCE}"
    machine = (
        f"--gpu rtx3090 --gpus-per-node 1 --reserve {GPU_MEMORY - LIMIT}B --host 1GB --cpu-optimizer 20GB/s"
    )
    question = f"{shape} --vocab {models.VOCABULARY} {machine} --state host --microbatch 4 --batch 4"
    assert main(["plan", *question.split(), "--no-alternatives", "--json", *more]) == 0
    file = tmp_path / "plan.json"
    file.write_text(capsys.readouterr().out)
    return file


def deep(layers: int = LAYERS) -> nn.Module:
    torch.manual_seed(0)
    model = models.GPT()
    model.blocks = nn.ModuleList(models.Block() for _ in range(layers))
    return model


STATE = PlannedState(
    place="host",
    zero=0,
    ranks=1,
    blocks=LAYERS,
    persistent=4,
    buffers=2,
    block_parameters=12704,
    outer_parameters=3136,
    largest_parameter=4096,
    cpu_optimizer=True,
)


@pytest.fixture
def planned(tmp_path: Path) -> Path:
    file = tmp_path / "plan.json"
    file.write_text(json.dumps({"state": STATE.to_dict()}))
    return file


def persistent(engine: Any) -> set[str]:
    return {name for name, one in engine.module.named_parameters() if one.ds_persist}


@pytest.mark.slow
def test_state_of_four_times_the_limit_trains_by_one_key_as_by_hand(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], make_engine: MakeEngine
) -> None:
    planned = plan(tmp_path, capsys)
    state = PlannedState.read(str(planned), "file")
    assert state == STATE
    total = 16 * (state.outer_parameters + state.blocks * state.block_parameters)
    assert total > 4 * LIMIT
    key = {"plan": {"file": str(planned)}, "report": {"interval": 0}}
    engine = make_engine(key, model=deep(), zero_optimization={"stage": 3}, **OTHERS)
    by_hand = make_engine(None, model=deep(), zero_optimization=OPTIONS, **OTHERS)
    assert persistent(engine) == persistent(by_hand)
    assert {name.split(".")[1] for name in persistent(engine) if "blocks" in name} >= set("0123")
    stay = sum(one.ds_numel for one in engine.module.parameters() if one.ds_persist)
    buffers = state.buffers * state.block_parameters
    assert 2 * (stay + 2 * buffers) < LIMIT < total  # weights of 2 bytes; all else is in host memory
    assert all(torch.equal(a, b) for a, b in zip(train(engine, 7), train(by_hand, 7), strict=True))


@pytest.mark.slow
def test_plan_auto_alone_trains_state_of_four_times_the_gpu_as_by_hand(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    total = 16 * (3136 + 2048 + LAYERS * 12704)
    monkeypatch.setattr(_compat, "device_memory", lambda: total // 4)
    key = {"plan": "auto", "report": {"interval": 0}}
    engine = make_engine(key, model=deep(), zero_optimization={"stage": 3}, **OTHERS)
    section = engine._config._param_dict["zero_optimization"]
    by_hand = make_engine(None, model=deep(), zero_optimization=section, **OTHERS)
    assert section["offload_param"] == section["offload_optimizer"] == {"device": "cpu"}
    assert persistent(engine) == persistent(by_hand)
    stay = sum(one.ds_numel for one in engine.module.parameters() if one.ds_persist)
    assert 0 < 4 * (stay + 2 * 12704) <= total // 8  # half of the GPU is for activations
    steps = 8  # five of them are profiled
    assert all(torch.equal(a, b) for a, b in zip(train(engine, steps), train(by_hand, steps), strict=True))
    assert ssdtrain_ds.runtime_of(engine).statistics().values()["plan/plans"] >= 1


@pytest.mark.slow
def test_a_config_that_apply_has_written_is_that_by_hand_and_trains_equal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], make_engine: MakeEngine
) -> None:
    file = tmp_path / "ds.json"
    file.write_text(
        json.dumps({**OTHERS, "steps_per_print": 10**9, "zero_optimization": {"overlap_comm": False}})
    )
    plan(tmp_path, capsys, "--apply", str(file))
    applied = json.loads(file.read_text())
    assert applied["zero_optimization"] == {**OPTIONS, "overlap_comm": False}
    assert applied["train_batch_size"] == applied["train_micro_batch_size_per_gpu"] == 4
    engine = make_engine(None, model=deep(), **applied)
    by_hand = make_engine(None, model=deep(), zero_optimization={**OPTIONS, "overlap_comm": False}, **OTHERS)
    assert all(torch.equal(a, b) for a, b in zip(train(engine), train(by_hand), strict=True))


@pytest.mark.parametrize(
    ("section", "error"),
    [
        (
            {"stage": 2},
            r'zero_optimization\.stage: 2 is not the stage of the plan.*"stage3_max_live_parameters": 79360',
        ),
        (
            {"stage": 3, "stage3_prefetch_bucket_size": 5},
            r"stage3_prefetch_bucket_size: 5 is 12704 in the plan.*leaving it out",
        ),
        (
            {"stage": 3, "offload_optimizer": {"device": "none"}},
            r"zero_optimization\.offload_optimizer\.device: 'none' is cpu in the plan",
        ),
    ],
)
def test_a_config_that_says_otherwise_is_an_error_with_what_to_write(
    section: dict[str, Any], error: str, planned: Path, make_engine: MakeEngine
) -> None:
    with pytest.raises(ConfigError, match=error):
        make_engine({"plan": {"file": str(planned)}}, model=deep(), zero_optimization=section, **OTHERS)


def test_a_file_of_something_else_is_an_error(tmp_path: Path, make_engine: MakeEngine) -> None:
    other = tmp_path / "other.json"
    for text, error in ((None, "cannot be read"), ("{", "is no JSON"), ("{}", "has no section `state`")):
        if text is not None:
            other.write_text(text)
        with pytest.raises(ConfigError, match=rf"ssdtrain\.plan\.file: .* {error}.*ssdtrain plan .* --json"):
            make_engine({"plan": {"file": str(other)}}, model=deep(), zero_optimization={"stage": 3})


def test_blocks_whose_optimizer_stays_are_a_ratio_of_groups_and_ranks_share_what_stays() -> None:
    both = zero_options(replace(STATE, cpu_optimizer=False))
    assert both["offload_optimizer"] == {"device": "cpu", "ratio": 0.75}
    assert both["sub_group_size"] == STATE.block_parameters
    shared = zero_options(replace(STATE, zero=3, ranks=4))
    assert shared["stage3_model_persistence_threshold"] == OPTIONS["stage3_model_persistence_threshold"] // 4
    drives = zero_options(replace(STATE, place="ssd"), "/nvme")
    assert drives["offload_param"] == {"device": "nvme", "nvme_path": "/nvme", "buffer_size": 4096}
    assert drives["offload_optimizer"] == {"device": "nvme", "nvme_path": "/nvme"}
    assert zero_options(replace(STATE, place="device", zero=2, cpu_optimizer=False)) == {"stage": 2}
    fits = zero_options(replace(STATE, persistent=LAYERS))
    assert fits == {"stage": 1, "offload_optimizer": {"device": "cpu"}}


def test_what_cannot_be_changed_while_training_is_said_with_the_json() -> None:
    """For activations that need more of the GPU than model state leaves."""

    def changed(section: dict[str, Any]) -> Any:
        line = with_less_state(section)
        return json.loads(line.partition('"zero_optimization": ')[2]) if line else None

    on_cpus = {"stage": 3, "offload_optimizer": {"device": "cpu"}}
    assert changed({"stage": 3}) == changed({"stage": 3, "offload_optimizer": None}) == on_cpus
    # DeepSpeed's default of `device` is "none".
    pinned = changed({"stage": 3, "offload_optimizer": {"pin_memory": True}})
    assert pinned == {"stage": 3, "offload_optimizer": {"pin_memory": True, "device": "cpu"}}
    assert changed(on_cpus) == {**on_cpus, "offload_param": {"device": "cpu"}}
    assert changed(OPTIONS) is None and changed({"stage": 2}) is None


def run_ranks(directory: Path, name: str, config: dict[str, Any], steps: int, resume: str = "") -> list[Any]:
    """What two ranks of `placed` have written."""
    arguments = [str(directory), name, json.dumps(config), str(steps), *([resume] if resume else [])]
    killed = pytest.raises(AssertionError) if name == "killed" else nullcontext()
    with killed:
        imports = ["deepspeed", "ssdtrain_ds"]
        processes.forked(2, "tests.deepspeed.placed", *arguments, imports=imports, timeout=850, **ACCELERATOR)
    return [json.loads((directory / f"{name}.{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.slow
@pytest.mark.timeout(1800)  # three groups of two processes
def test_two_ranks_train_four_times_the_limit_by_the_plan_as_by_hand_and_go_on_after_a_kill(
    tmp_path: Path,
) -> None:
    limit, layers, steps = 158_000, 6, 3
    base = {"train_micro_batch_size_per_gpu": models.BATCH, "steps_per_print": 10**9, **OTHERS}
    key = {"plan": {"state_limit": f"{limit}B"}, "report": {"interval": 0}}
    planned = run_ranks(
        tmp_path, "killed", {**base, "zero_optimization": {"stage": 3}, "ssdtrain": key}, steps
    )
    section = planned[0]["section"]
    by_hand = run_ranks(tmp_path, "hand", {**base, "zero_optimization": section}, steps)
    resumed = run_ranks(
        tmp_path, "resumed", {**base, "zero_optimization": {"stage": 3}, "ssdtrain": key}, steps, "killed"
    )
    elements = 3136 + 2048 + layers * 12704
    assert 16 * elements // 2 > 4 * limit
    assert section["offload_param"] == section["offload_optimizer"] == {"device": "cpu"}
    for mine, hand, after in zip(planned, by_hand, resumed, strict=True):
        assert mine["planned"] and not hand["planned"]
        assert mine["section"] == section and mine["kept"] == hand["kept"] < elements
        assert 4 * (mine["kept"] + 2 * 12704) < limit
        assert mine["losses"] == hand["losses"]
        assert after["losses"] == mine["losses"][2:]


def test_state_takes_the_device_then_the_cpus_for_the_optimizer_then_host_memory() -> None:
    whole = replace(STATE, place="device", zero=3, ranks=2, persistent=LAYERS, cpu_optimizer=False)
    weights, buffers = 4 * (3136 + LAYERS * 12704), 4 * 2 * 12704
    others = 3 * weights
    assert whole.within((weights + others) // 2 + buffers, 4, others) == whole
    on_cpus = replace(whole, cpu_optimizer=True)
    assert whole.within((weights + others) // 2 + buffers - 1, 4, others) == on_cpus
    assert whole.within(weights // 2 + buffers, 4, others) == on_cpus
    assert whole.within(weights // 2 + buffers - 1, 4, others) == replace(
        on_cpus, place="host", persistent=15
    )
    least = 4 * 3136 // 2 + buffers
    assert whole.within(least, 4, others).persistent == 0
    with pytest.raises(InvalidValue, match=f"{least // 1024}|{least}"):
        whole.within(least - 1, 4, others)


def test_a_gpu_whose_memory_state_exceeds_has_half_of_it_unless_the_config_says_where_state_is(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def section(memory: int | None, **more: Any) -> dict[str, Any]:
        monkeypatch.setattr(_compat, "device_memory", lambda: memory)
        engine = make_engine({"plan": "auto"}, model=deep(), zero_optimization={"stage": 3, **more}, **OTHERS)
        return dict(engine._config._param_dict["zero_optimization"])

    outer = 3136 + 2048  # the output layer is no other's weight here
    total = 16 * (outer + LAYERS * 12704)
    assert section(total) == section(None) == {"stage": 3}
    planned = section(total // 2)
    by_limit = replace(STATE, zero=3, outer_parameters=outer).within(total // 4, 4, total * 3 // 4)
    assert planned == zero_options(by_limit) and planned["offload_optimizer"] == {"device": "cpu"}
    weights_fit = section(int(0.9 * total))
    assert weights_fit["offload_optimizer"] == {"device": "cpu"} and "offload_param" not in weights_fit
    with monkeypatch.context() as full:
        full.setattr("ssdtrain_ds.state.check_host_budget", partial(check_host_budget, proc=tmp_path))
        (tmp_path / "meminfo").write_text("MemAvailable: 1 kB\n")
        with pytest.raises(
            HostBudgetExceeded, match=r"^ssdtrain\.plan: .*; or use drives: ssdtrain plan --state ssd"
        ):
            section(total // 2)
    for place in ("cpu", "none"):
        given = {"offload_optimizer": {"device": place}}
        assert section(total // 2, **given) == {"stage": 3, **given}


def test_an_optimizer_that_cannot_step_on_cpus_is_said(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An error where a limit is given; else all stays as it is configured."""
    monkeypatch.setattr(_compat, "device_memory", lambda: 1_000_000)
    engine = make_engine({"plan": "auto"}, model=deep(), zero_optimization={"stage": 3})
    assert engine._config._param_dict["zero_optimization"] == {"stage": 3}
    assert "it stays as it is configured" in caplog.text and "was given AdamW" in caplog.text
    with pytest.raises(
        ConfigError, match=r"ssdtrain\.plan\.state_limit: .* was given AdamW.*DeepSpeedCPUAdam"
    ):
        make_engine({"plan": {"state_limit": "800000B"}}, model=deep(), zero_optimization={"stage": 3})


def test_a_limit_for_an_engine_that_cannot_keep_it_is_an_error(make_engine: MakeEngine) -> None:
    def make(limit: str, **section: Any) -> None:
        make_engine({"plan": {"state_limit": limit}}, model=deep(), zero_optimization=section, **OTHERS)

    with pytest.raises(ConfigError, match=r"zero_optimization\.stage: 2 is not the stage of the plan"):
        make("800000B", stage=2)
    with pytest.raises(ConfigError, match=r"offload_optimizer\.device: 'none' is cpu in the plan"):
        make("800000B", stage=3, offload_optimizer={"device": "none"})
    with pytest.raises(ConfigError, match=r"ssdtrain\.plan\.state_limit: .* outside of blocks .* and more"):
        make("100000B", stage=3)
