"""The layer of --spec: offload with nothing replaced in Megatron."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.pipeline_parallel import schedules

from ssdtrain_megatron import spec
from ssdtrain_megatron.attachment import attach
from tests.megatron import training
from tests.megatron.rows import Row
from tests.megatron.training import Trainer


@pytest.fixture
def trainer(monkeypatch: pytest.MonkeyPatch) -> Trainer:
    monkeypatch.setattr(training, "get_gpt_layer_local_spec", lambda **_: spec.layer_spec)
    return Trainer(Row("one process"))


@pytest.fixture
def runtime_file(config: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    file = tmp_path / "ssdtrain.yaml"
    file.write_text(yaml.safe_dump(config))
    monkeypatch.setenv(spec.CONFIG, str(file))
    monkeypatch.setattr(spec, "_runtime", None)
    yield file
    if spec._runtime is not None:
        spec._runtime.close()


def test_a_model_of_that_spec_offloads_what_its_layers_save(runtime_file: Path, trainer: Trainer) -> None:
    plain = schedules.forward_step
    assert isinstance(trainer.chunks[0].module.decoder.layers[0], spec.OffloadedTransformerLayer)
    expected = _plain_steps(2)
    assert [trainer.step(number) for number in range(2)] == expected
    assert schedules.forward_step is plain
    gc.collect()
    assert spec._runtime is not None
    found = spec._runtime.statistics()
    assert found is not None
    assert found.offload.offloaded_bytes + found.offload.cancelled_bytes == found.offload.saved_bytes > 2**20
    assert found.offload.live_regions == 0


def _plain_steps(count: int) -> list[tuple[str | None, str]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training, "get_gpt_layer_local_spec", get_gpt_layer_local_spec)
        plain = Trainer(Row("one process"))
    assert type(plain.chunks[0].module.decoder.layers[0]) is not spec.OffloadedTransformerLayer
    return [plain.step(number) for number in range(count)]


def test_evaluation_needs_no_config(trainer: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(spec.CONFIG, raising=False)
    monkeypatch.setattr(spec, "_runtime", None)
    with torch.no_grad():
        trainer.step(0, forward_only=True)
    with pytest.raises(RuntimeError, match="SSDTRAIN_CONFIG"):
        trainer.step(0)


def test_under_an_attachment_these_layers_are_ordinary(
    config: dict[str, Any], trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(spec.CONFIG, raising=False)
    monkeypatch.setattr(spec, "_runtime", None)
    with attach(trainer.chunks, config):
        trainer.step(0)
    assert spec._runtime is None


def test_a_layer_of_another_class_is_not_replaced() -> None:
    with pytest.raises(ValueError, match="only a TransformerLayer"):
        spec.offloaded(gpt_layer_specs.ModuleSpec(module=torch.nn.Linear))
