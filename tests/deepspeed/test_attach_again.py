"""A model that is given to `deepspeed.initialize` again, and engines that nobody destroys."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch

import ssdtrain_ds
from tests.deepspeed import models
from tests.deepspeed.conftest import MakeEngine, train
from tests.support.tensors import all_equal


class OutOfMemory(Exception):
    """What ends a forward."""


@pytest.mark.parametrize("stage", [0, 2])
@pytest.mark.parametrize("mode", ["quant", "reconstruct"])
def test_a_model_with_compressed_inputs_begins_anew_after_an_error_in_forward(
    mode: str, stage: int, make_engine: MakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    """As Hugging Face's `auto_find_batch_size` does, which destroys no engine."""
    block, zero = {"compact": {"mode": mode}}, {"stage": stage}
    losses = []
    for destroyed in (True, False):
        torch.manual_seed(0)
        model = models.GPT()
        first = make_engine(block, model=model, zero_optimization=zero)

        def fail(*_: Any) -> None:
            raise OutOfMemory

        hook = model.blocks[1].register_forward_pre_hook(fail)
        with pytest.raises(OutOfMemory):
            train(first, 1)
        hook.remove()
        if destroyed:
            first.destroy()
        caplog.clear()
        again = make_engine(block, model=model, zero_optimization=zero)
        losses.append(train(again))
        found = [r for r in caplog.records if "engine was not destroyed" in r.getMessage()]
        assert len(found) == (not destroyed)
        first.destroy()
        runtime = ssdtrain_ds.runtime_of(again)
        before = runtime.compact.compression.counted.input_bytes
        train(again, 1)
        assert runtime.compact.compression.counted.input_bytes > before > 0
        again.destroy()
        assert "forward" not in vars(model.blocks[0].q_proj)
    assert all_equal(*losses)


def test_an_engine_that_a_trainer_leaves_behind_goes(
    process_group: None, installed: None, tmp_path: Path
) -> None:
    trainer = pytest.importorskip("transformers.trainer").Trainer
    plain = trainer.log

    def gone(block: Any) -> bool:
        model = models.GPT()
        config: dict[str, Any] = {"train_micro_batch_size_per_gpu": models.BATCH}
        if block is not None:
            config["ssdtrain"] = block
        engine, *_ = deepspeed.initialize(
            model=model, optimizer=torch.optim.AdamW(model.parameters()), config=config
        )
        train(engine, 1)
        reference = weakref.ref(engine)
        del engine, model, _
        gc.collect()
        return reference() is None

    if not gone(None):
        pytest.skip(f"DeepSpeed {deepspeed.__version__} holds an engine that nobody else holds")
    assert gone({"offload": {"directories": str(tmp_path), "min_bytes": models.MIN_BYTES}})
    assert trainer.log is plain
