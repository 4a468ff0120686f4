"""A block that switches nothing on says so, whatever it is called; and steps that DeepSpeed skips."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
from deepspeed.pipe import LayerSpec, PipelineModule

import ssdtrain_ds
from ssdtrain.config import ConfigError
from ssdtrain.integration.patching import is_patched
from ssdtrain_ds import _compat, attach
from tests.deepspeed import models
from tests.deepspeed.conftest import MakeEngine, train


@pytest.mark.parametrize(
    "key",
    [
        "SSDTrain",
        "ssd_train",
        "ssd-train",
        "ssdtrain_ds",
        "SSDTrainDS",
        "ssdtrian",
        "sdtrain",
        "ssdtran",
        "ssd_trian",
        "ssdtrains",
        "ssdtrain_config",
    ],
)
def test_a_misspelled_block_is_rejected_by_the_key(key: str, make_engine: MakeEngine) -> None:
    model = models.GPT()
    with pytest.raises(ConfigError, match="allowed: the key 'ssdtrain'") as error:
        make_engine(None, model=model, zero_optimization={"stage": 3}, **{key: {"enabled": True}})
    assert error.value.problems[0].path == key
    assert not any(hasattr(parameter, "ds_id") for parameter in model.parameters())


def test_keys_of_others_are_no_misspelled_block(make_engine: MakeEngine) -> None:
    make_engine(training_data={"ssdtrain": "a name", "train": {}}, my_train={"ssd": 1})


@pytest.mark.parametrize(
    ("written", "path"),
    [
        ({"activation_checkpointing": {"ssdtrain": {"offload": {}}}}, "activation_checkpointing.ssdtrain"),
        ({"notes": {"ssdtrian": {}}}, "notes.ssdtrian"),
        ({"deepspeed": {"plugins": {"ssdtrain": {}}}}, "deepspeed.plugins.ssdtrain"),
    ],
)
def test_a_block_inside_of_another_section_is_rejected_by_its_full_key(
    written: dict[str, Any], path: str, make_engine: MakeEngine
) -> None:
    with pytest.raises(ConfigError, match="at the top level of the config") as error:
        make_engine(None, **written)
    assert [problem.path for problem in error.value.problems] == [path]


def test_install_after_initialize_is_an_error(
    process_group: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(attach, "_was_uninstalled", False)
    model = models.GPT()
    made = []
    for block in ({"enabled": False}, {"offload": {"directories": str(tmp_path)}}):
        engine, *_ = deepspeed.initialize(
            model=model,
            optimizer=torch.optim.AdamW(model.parameters()),
            config={"train_micro_batch_size_per_gpu": models.BATCH, "ssdtrain": block},
        )
        made.append(engine)
    # Only those of this test: others may be alive yet.
    monkeypatch.setattr(_compat, "existing_engines", lambda: made[:1])
    ssdtrain_ds.install()
    ssdtrain_ds.uninstall()
    monkeypatch.setattr(attach, "_was_uninstalled", False)
    monkeypatch.undo()
    assert all(any(found is engine for found in _compat.existing_engines()) for engine in made)
    monkeypatch.setattr(attach, "_was_uninstalled", False)
    with pytest.raises(ConfigError, match=r"before ssdtrain_ds.install\(\) was called.*allowed: calling"):
        ssdtrain_ds.install()
    assert not is_patched(_compat.DeepSpeedEngine, "__init__")
    for engine in made:
        engine._config = None
        engine.destroy()


def test_a_step_without_a_call_of_the_engine_says_so(
    make_engine: MakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    ids, labels = next(models.batches(1, 1))
    for call, times in ((lambda engine: engine, 0), (lambda engine: engine.module, 1)):
        engine = make_engine()
        caplog.clear()
        engine.backward(call(engine)(ids, labels))
        engine.step()
        found = [record.getMessage() for record in caplog.records]
        assert len([text for text in found if "Call engine(...) in its place" in text]) == times


@pytest.mark.parametrize(
    ("block", "named"),
    [
        ({}, "(empty)"),
        ({"checkpoint": {"use_reentrant": True}, "report": {"interval": 1}}, "(checkpoint, report)"),
        ({"comm": {}}, "(comm)"),
        (None, None),
        ({"enabled": False, "report": {"interval": 1}}, None),
        ({"comm": {"preset": "safe"}}, None),
    ],
)
def test_a_block_that_switches_nothing_on_says_so(
    block: dict[str, Any] | None, named: str | None, make_engine: MakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    make_engine(block)
    found = [record.getMessage() for record in caplog.records if "switches nothing on" in record.getMessage()]
    assert len(found) == (named is not None)
    assert named is None or (named in found[0] and '"offload": {"directories"' in found[0])


def pipeline() -> PipelineModule:
    layers = [LayerSpec(models.Embedding), LayerSpec(models.Block), LayerSpec(models.Head)]
    return PipelineModule(layers, num_stages=1, loss_fn=models.loss_of)


def one_step(engine: Any) -> None:
    if hasattr(engine, "train_batch"):
        engine.train_batch(iter(list(models.batches(1, 1))))
    else:
        train(engine, 1)


@pytest.mark.parametrize("make_model", [models.GPT, pipeline])
def test_a_step_is_skipped_if_deepspeed_skips_it_and_not_because_another_run_skipped_some(
    make_model: Any, make_engine: MakeEngine, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = make_engine(None, model=make_model())
    one_step(first)
    first.skipped_steps = 5
    first.save_checkpoint(str(tmp_path / "saved"), tag="five")
    engine = make_engine(model=make_model())
    runtime = ssdtrain_ds.runtime_of(engine)
    skipped: list[bool] = []
    step_end = runtime.step_end

    def noted(skipped_: bool = False, number: int | None = None) -> None:
        skipped.append(skipped_)
        step_end(skipped_, number)

    runtime.step_end = noted  # type: ignore[method-assign]
    one_step(engine)
    engine.load_checkpoint(str(tmp_path / "saved"), tag="five")
    assert engine.skipped_steps == 5
    one_step(engine)
    engine.optimizer.overflow = True
    one_step(engine)
    assert engine.skipped_steps == 6
    engine.optimizer.overflow = False
    one_step(engine)
    assert skipped == [False, False, True, False]
    assert not [record for record in caplog.records if record.levelno > logging.WARNING]
