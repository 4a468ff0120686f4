"""What an engine gets, what one without the block does not get, and what is left afterwards."""

from __future__ import annotations

import gc
import json
import logging
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import deepspeed
import pytest
import torch
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.pipe.schedule import PipeInstruction

import ssdtrain_ds
from ssdtrain.config import ConfigError
from ssdtrain_ds import _compat
from tests.deepspeed import models
from tests.deepspeed.conftest import MakeEngine, train
from tests.deepspeed.upstream import LACKS
from tests.support.tensors import all_equal
from tests.support.tiers import tiered

METHODS = [
    "forward",
    "backward",
    "step",
    "destroy",
    "__call__",
    "train",
    "eval",
    "save_checkpoint",
    "load_checkpoint",
]
PLAIN_INIT = DeepSpeedEngine.__init__
PLAIN = {(cls, name): getattr(cls, name) for cls in (DeepSpeedEngine, PipelineEngine) for name in METHODS}
PLAIN_CHECKPOINTING = dict(vars(deepspeed.checkpointing))


def checkpointing_is_untouched() -> bool:
    now = vars(deepspeed.checkpointing)
    return all(now[name] is plain for name, plain in PLAIN_CHECKPOINTING.items() if callable(plain))


@pytest.mark.parametrize("block", [None, {"enabled": False, "offload": {"directories": "/nowhere"}}, {}])
def test_without_an_active_block_all_methods_are_the_original_functions(
    block: dict[str, Any] | None, make_engine: MakeEngine
) -> None:
    gc.collect()  # a model that another test attached and dropped keeps `nn.Module.__call__` replaced until then
    engine = make_engine(block)
    for name in METHODS:
        assert getattr(engine, name).__func__ is PLAIN[DeepSpeedEngine, name]
    for (cls, name), plain in PLAIN.items():
        assert getattr(cls, name) is plain
    assert checkpointing_is_untouched()
    assert ssdtrain_ds.runtime_of(engine) is None
    assert not [name for name in engine.__dict__ if "ssdtrain" in name]
    train(engine)


def test_the_classes_keep_their_methods_when_an_engine_has_the_block(make_engine: MakeEngine) -> None:
    engine, plain = make_engine(), make_engine(None)
    for (cls, name), function in PLAIN.items():
        assert getattr(cls, name) is function
    assert plain.forward.__func__ is PLAIN[DeepSpeedEngine, "forward"]
    assert engine.forward is not plain.forward
    assert engine.module.forward.__func__ is models.GPT.forward


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize(
    ("block", "key"),
    [
        ({"offload": {"directories": "/tmp", "prefetsch": 1}}, "ssdtrain.offload.prefetsch"),
        ({"offload": {"directories": "/tmp", "amount": 7}}, "ssdtrain.offload.amount"),
        ({"offload": {"directories": "/tmp", "codec": "mask"}}, "ssdtrain.offload.codec"),
        ({"offload": {"directories": "/proc/ssdtrain"}}, "ssdtrain.offload.directories[0]"),
        ({"planner": {}}, "ssdtrain.planner"),
        ({"compact": {"mode": "lowrank"}}, "ssdtrain.compact.mode"),
        ("on", "ssdtrain"),
    ],
)
def test_a_mistake_in_the_block_comes_out_of_initialize(
    block: Any, key: str, stage: int, make_engine: MakeEngine
) -> None:
    model = models.GPT()
    with pytest.raises(ConfigError) as error:
        make_engine(block, model=model, zero_optimization={"stage": stage})
    assert error.value.problems[0].path == key
    # It was found before DeepSpeed touched the model.
    assert not any(hasattr(parameter, "ds_id") for parameter in model.parameters())


def test_a_schedule_that_is_not_deepspeeds_is_rejected_by_its_instructions(
    installed: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A zero-bubble schedule's weight pass sets gradients on saved tensors; with hooks these are not the parameters."""

    class WeightPass(PipeInstruction):
        pass

    monkeypatch.setitem(PipelineEngine._INSTRUCTION_MAP, WeightPass, lambda engine: None)
    config = SimpleNamespace(_param_dict={"ssdtrain": {"offload": {"directories": "/nowhere"}}})
    with pytest.raises(ConfigError, match="WeightPass") as error:
        PipelineEngine(has_bool_tensors=False, config_class=config, args=None, model=None)
    assert error.value.problems[0].path == "ssdtrain.offload"


def test_a_config_in_a_file_is_read_too(process_group: None, installed: None, tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    block = {"offload": {"directories": str(tmp_path / "ssd")}}
    file.write_text(json.dumps({"train_micro_batch_size_per_gpu": 4, "ssdtrain": block}))
    model = models.GPT()
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=torch.optim.AdamW(model.parameters()), config=str(file)
    )
    assert ssdtrain_ds.runtime_of(engine) is not None
    engine.destroy()


def test_destroy_gives_back_methods_and_space(make_engine: MakeEngine) -> None:
    engine = make_engine()
    runtime = ssdtrain_ds.runtime_of(engine)
    train(engine)
    engine.destroy()
    assert ssdtrain_ds.runtime_of(engine) is None
    for name in METHODS:
        assert getattr(engine, name).__func__ is PLAIN[DeepSpeedEngine, name]
    assert checkpointing_is_untouched()
    assert runtime.engine.prefetcher.closed
    engine.destroy()  # as often as one likes


def test_an_engine_that_is_dropped_without_destroy_leaves_nothing(
    process_group: None, installed: None, tmp_path: Path
) -> None:
    plain, *_ = deepspeed.initialize(
        model=models.GPT(), config={"train_micro_batch_size_per_gpu": models.BATCH, **SGD}
    )
    plain_engine = weakref.ref(plain)
    del plain, _
    gc.collect()
    if plain_engine() is not None:
        pytest.skip(f"DeepSpeed {deepspeed.__version__} holds an engine that nobody else holds")
    model = models.GPT()
    block = {"offload": {"directories": str(tmp_path / "ssd"), "min_bytes": models.MIN_BYTES}}
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters()),
        config={"train_micro_batch_size_per_gpu": models.BATCH, "ssdtrain": block},
    )
    train(engine, 2)
    runtime = weakref.ref(ssdtrain_ds.runtime_of(engine))
    files = spill_files(tmp_path)
    assert files
    del engine, model, _
    gc.collect()
    assert runtime() is None
    assert not spill_files(tmp_path)
    assert checkpointing_is_untouched()


SGD = {"optimizer": {"type": "SGD", "params": {"lr": 0.1}}, "zero_allow_untested_optimizer": True}


def spill_files(directory: Path) -> list[str]:
    """The files without a name that this process has open below `directory`."""
    links = [file.readlink() for file in Path("/proc/self/fd").iterdir() if file.is_symlink()]
    return [str(link) for link in links if str(link).startswith(str(directory))]


def test_two_engines_have_a_runtime_each(make_engine: MakeEngine) -> None:
    alone = train(make_engine(None))
    one, other = make_engine(), make_engine()
    runtimes = [ssdtrain_ds.runtime_of(engine) for engine in (one, other)]
    assert runtimes[0] is not runtimes[1]
    losses: list[list[torch.Tensor]] = [[], []]
    for ids, labels in models.batches(1, 3):  # their forwards and backwards interleaved
        pair = [engine(ids, labels) for engine in (one, other)]
        for engine, loss, kept in zip((one, other), pair, losses, strict=True):
            engine.backward(loss)
            engine.step()
            kept.append(loss.detach().clone())
    for kept in losses:
        assert all_equal(alone, kept)
    found = [runtime.statistics() for runtime in runtimes if runtime is not None]
    assert found[0] is not None and found[1] is not None
    assert found[0].offload.saved_bytes == found[1].offload.saved_bytes > 0
    one.destroy()
    assert ssdtrain_ds.runtime_of(other) is not None
    assert not checkpointing_is_untouched()
    train(other, 1)


def test_uninstall_leaves_engines_that_exist_alone(make_engine: MakeEngine) -> None:
    engine = make_engine()
    ssdtrain_ds.uninstall()
    assert DeepSpeedEngine.__init__ is PLAIN_INIT
    runtime = ssdtrain_ds.runtime_of(engine)
    train(engine)
    found = runtime.statistics()
    assert found.offload.saved_bytes > 0
    assert ssdtrain_ds.runtime_of(make_engine()) is None
    ssdtrain_ds.install()
    ssdtrain_ds.install()
    assert ssdtrain_ds.runtime_of(make_engine()) is not None
    ssdtrain_ds.uninstall()
    assert DeepSpeedEngine.__init__ is PLAIN_INIT


def test_evaluation_offloads_nothing_and_changes_nothing(make_engine: MakeEngine) -> None:
    ids, labels = next(models.batches(7, 1))
    found = []
    for block in (None, "default"):
        engine = make_engine(block)
        engine.eval()
        with torch.no_grad():
            evaluated = [engine(ids, labels)]
        runtime = ssdtrain_ds.runtime_of(engine)
        if runtime is not None:
            statistics = runtime.statistics()
            assert statistics.offload.saved_tensors == 0
        evaluated.append(engine(ids, labels).detach())  # with gradients that nobody asks for
        engine.train()
        found.append([*evaluated, *train(engine)])
    assert all_equal(*found)


@pytest.mark.parametrize("stage", tiered([1, 3], quick=[3]))
def test_a_run_resumes_exactly_with_or_without_the_block(
    stage: int, make_engine: MakeEngine, tmp_path: Path
) -> None:
    """The checkpoint of a run with the block continues a run without it and the other way round."""
    zero = {"zero_optimization": {"stage": stage}}
    whole = train(make_engine(None, **zero), 4)
    for before, after in ((None, "default"), ("default", None), ("default", "default")):
        engine = make_engine(before, **zero)
        losses = train(engine, 2)
        engine.save_checkpoint(str(tmp_path / "saved"), tag="two")
        engine.destroy()
        resumed = make_engine(after, **zero)
        path, _ = resumed.load_checkpoint(str(tmp_path / "saved"), tag="two")
        assert path is not None
        assert resumed.global_steps == 2
        losses += train(resumed, 2, done=2)
        assert all_equal(whole, losses)


def test_a_skipped_backward_and_an_exception_in_forward_leave_nothing(make_engine: MakeEngine) -> None:
    engine = make_engine()
    ids, labels = next(models.batches(1, 1))
    dropped = engine(ids, labels)
    del dropped
    handle = engine.module.blocks[1].register_forward_hook(_fail)
    with pytest.raises(ZeroDivisionError):
        engine(ids, labels)
    handle.remove()
    runtime = ssdtrain_ds.runtime_of(engine)
    before = runtime.statistics()
    outside = torch.ones(64, 64, requires_grad=True)
    outside.sin().sum().backward()  # no hook of ours is left on the thread
    after = runtime.statistics()
    assert after.offload.saved_tensors == before.offload.saved_tensors
    train(engine)


def _fail(*_: Any) -> None:
    raise ZeroDivisionError


@pytest.mark.skipif("loss_backward" in LACKS, reason=LACKS.get("loss_backward", ""))
def test_loss_may_go_backward_by_itself(make_engine: MakeEngine) -> None:
    """`loss.backward()` instead of `engine.backward(loss)`, which DeepSpeed allows from ZeRO-1 on."""
    found = []
    for block in (None, "default"):
        engine = make_engine(block, zero_optimization={"stage": 1})
        losses = []
        for ids, labels in models.batches(1, 3):
            loss = engine(ids, labels)
            loss.backward()
            engine.step()
            losses.append(loss.detach().clone())
        found.append(losses)
    assert all_equal(*found)


def test_each_missing_name_is_rejected_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    _compat.check()
    for holder, names in _compat._NEEDED:
        for name in names:
            with monkeypatch.context() as patch:
                patch.setattr(_compat, "_NEEDED", ((_Without(holder, name), names),))
                with pytest.raises(ImportError, match=rf"\.{name}: .*0\.19\.8"):
                    _compat.check()


class _Without:
    def __init__(self, holder: Any, missing: str) -> None:
        self._holder, self._missing = holder, missing

    def __getattr__(self, name: str) -> Any:
        if name == self._missing:
            raise AttributeError(name)
        return getattr(self._holder, name)


def test_an_engine_without_an_attribute_that_is_read_is_rejected(make_engine: MakeEngine) -> None:
    engine = make_engine(None)
    _compat.check_engine(engine)
    for name in _compat._NEEDED_ON_ENGINE:
        with pytest.raises(ImportError, match=f"has no {name}: .*0.19.8"):
            _compat.check_engine(_Without(engine, name))


def test_an_engine_is_driven_as_megatron_deepspeed_drives_it(make_engine: MakeEngine) -> None:
    """A scheduler that counts samples, `step(lr_kwargs=...)`, attributes of the model through the engine."""
    found = []
    for block in (None, "default"):
        engine = make_engine(block, gradient_accumulation_steps=2)
        engine.lr_scheduler = _SampleScheduler()
        losses = []
        for ids, labels in models.batches(1, 4):
            loss = engine(ids, labels=labels)
            assert engine.blocks is engine.module.blocks
            engine.backward(loss)
            engine.step(lr_kwargs={"increment": 8})
            losses.append(loss.detach().clone())
        assert engine.lr_scheduler.samples == 16
        found.append(losses)
    assert all_equal(*found)


class _SampleScheduler:
    def __init__(self) -> None:
        self.samples = 0

    def step(self, increment: int) -> None:
        self.samples += increment


def test_a_checkpoint_function_that_holds_its_inputs_elsewhere_is_rejected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Changed:
        @staticmethod
        def forward(ctx: Any, *_: Any) -> None:
            ctx.saved_elsewhere = None

        @staticmethod
        def backward(ctx: Any) -> None:
            pass

    monkeypatch.setattr(deepspeed.checkpointing, "CheckpointFunction", Changed)
    with pytest.raises(ImportError, match="deepspeed_saved_tensors"):
        _compat.check()


def test_another_version_is_tried_with_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(deepspeed, "__version__", "0.18.0+abc")
    with caplog.at_level(logging.WARNING, "ssdtrain"):
        _compat.check()
    assert "DeepSpeed 0.18.0 was never run" in caplog.text
    caplog.clear()
    monkeypatch.setattr(deepspeed, "__version__", "0.19.8+abc")
    _compat.check()
    assert not caplog.text
