"""Settings of DeepSpeed that do not go together with the block are named at start; the docs' table is made of the same rows."""

from __future__ import annotations

import logging
import types
from pathlib import Path
from typing import Any

import pytest
import torch

from ssdtrain.config import ConfigError, load_config
from ssdtrain.integration.compatibility import check_conflicts, conflict_table
from ssdtrain_ds import _compat_comm
from ssdtrain_ds.conflicts import DEEPSPEED_CONFLICTS
from tests.deepspeed import models
from tests.deepspeed.conftest import MakeEngine
from tests.support.processes import ROOT

COMM = {"comm": {"preset": "safe"}}


def zero(**keys: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": 3, **keys}}


def on_nvme(section: str, path: str) -> dict[str, Any]:
    return zero(**{section: {"device": "nvme", "nvme_path": path}})


def check(block: dict[str, Any], written: dict[str, Any]) -> None:
    check_conflicts(DEEPSPEED_CONFLICTS, load_config(block), written)


@pytest.fixture
def offload(tmp_path: Path) -> dict[str, Any]:
    return {"offload": {"directories": str(tmp_path / "ours")}}


@pytest.mark.parametrize("section", ["offload_param", "offload_optimizer"])
def test_zero_infinity_needs_room_beside_offload(
    section: str, offload: dict[str, Any], tmp_path: Path
) -> None:
    for path in (tmp_path / "ours", tmp_path / "theirs" / "not-there-yet"):
        with pytest.raises(ConfigError) as error:
            check(offload, on_nvme(section, str(path)))
        (problem,) = error.value.problems
        assert problem.path == f"zero_optimization.{section}.nvme_path"
        assert problem.value == str(path) and "ssdtrain.offload.capacity" in problem.allowed
    check({"offload": {**offload["offload"], "capacity": "1GiB"}}, on_nvme(section, str(tmp_path)))
    check(offload, on_nvme(section, "/proc"))  # another file system
    check(offload, zero(**{section: {"device": "cpu", "nvme_path": str(tmp_path)}}))
    check(COMM, on_nvme(section, str(tmp_path)))


def test_deepcompile_offloads_activations_or_the_block_does(offload: dict[str, Any]) -> None:
    both = {"compile": {"deepcompile": True, "offload_activation": True}}
    with pytest.raises(ConfigError, match=r"compile.offload_activation: True .*allowed: false, or the block"):
        check(offload, both)
    check(COMM, both)
    check(offload, {"compile": {"deepcompile": True}})
    check(offload, {"compile": {"deepcompile": False, "offload_activation": True}})


@pytest.mark.parametrize(
    ("key", "written"),
    [
        ("zero_optimization.zenflow", zero(zenflow={"topk_ratio": 0.1})),
        (
            "zero_optimization.offload_optimizer.super_offload",
            zero(offload_optimizer={"device": "cpu", "super_offload": True}),
        ),
    ],
)
def test_zenflow_and_superoffload_bar_compression_and_are_named_beside_offload(
    key: str, written: dict[str, Any], offload: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(ConfigError) as error:
        check({**offload, **COMM}, written)
    assert [problem.path for problem in error.value.problems] == [key]
    caplog.clear()
    with caplog.at_level(logging.WARNING, "ssdtrain"):
        check(offload, written)
    assert len(caplog.records) == 1 and key in caplog.text and "was never run" in caplog.text


@pytest.mark.parametrize(
    ("block", "words"),
    [
        (
            {"plan": {"blocks": ["nothing.*"]}},
            r"ssdtrain\.plan\.blocks: \['nothing\.\*'\] names no module of GPT",
        ),
        ({"compact": {"include": ["nothing"]}}, r"ssdtrain\.compact\.include: \['nothing'\] leaves no layer"),
        (COMM, r"zero_optimization\.zenflow"),
    ],
)
def test_they_and_patterns_that_name_nothing_come_out_of_initialize_before_the_model_is_partitioned(
    block: dict[str, Any], words: str, make_engine: MakeEngine
) -> None:
    model = models.GPT()
    with pytest.raises(ConfigError, match=words):
        make_engine(block, model=model, **zero(**({"zenflow": {"topk_ratio": 0.1}} if block is COMM else {})))
    assert not any(hasattr(parameter, "ds_id") for parameter in model.parameters())


def test_the_docs_have_the_table() -> None:
    assert conflict_table(DEEPSPEED_CONFLICTS) in (ROOT / "docs" / "deepspeed.md").read_text()


class Quantising:
    """What is asked of an engine of ZeRO-3 with zero_quantized_gradients."""

    optimizer = None
    module = torch.nn.Module()

    def zero_optimization_stage(self) -> int:
        return 3

    def zero_quantized_gradients(self) -> bool:
        return True


@pytest.mark.parametrize(("nodes", "said"), [(1, "here comm.dp compresses"), (2, "left to it")])
def test_gradients_that_deepspeed_does_not_quantise_are_not_said_to_be_its_own(
    nodes: int, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_compat_comm, "_nodes", lambda: nodes)
    (found,) = _compat_comm.bypasses(Quantising())
    assert said in found


class Dividing:
    """What is asked of an engine whose model a layer of its own divides over two tensor-parallel ranks, as Domino's do."""

    optimizer = None

    def __init__(self, marked: bool) -> None:
        self.module = torch.nn.Linear(2, 2)
        self.module.weight.model_parallel = marked  # type: ignore[attr-defined]
        self.mpu = types.SimpleNamespace(get_tensor_model_parallel_world_size=lambda: 2)

    def zero_optimization_stage(self) -> int:
        return 1


def test_parts_of_tensor_parallelism_that_are_not_marked_are_named() -> None:
    (found,) = _compat_comm.bypasses(Dividing(marked=False))
    assert "no parameter is marked as one rank's part (parameter.model_parallel = True)" in found
    assert _compat_comm.bypasses(Dividing(marked=True)) == []
