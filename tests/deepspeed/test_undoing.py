"""Attaching that fails leaves nothing, and detaching that fails leaves as little."""

from __future__ import annotations

import gc
import inspect
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TextIO

import deepspeed
import pytest
from deepspeed.runtime.engine import DeepSpeedEngine
from torch import nn

import ssdtrain
import ssdtrain_ds
from ssdtrain.offload.tensors.eligible import GatheredStorages
from ssdtrain.runtime import Runtime
from ssdtrain.telemetry import journal
from ssdtrain_ds import _compat, _compat_comm, attach, checkpointing
from ssdtrain_ds.comm import CommAttachment, attachment, gradients, weights
from tests.deepspeed import models
from tests.deepspeed.conftest import MakeEngine, train
from tests.deepspeed.test_attach import METHODS, PLAIN, checkpointing_is_untouched, spill_files

ZERO_3 = {"zero_optimization": {"stage": 3}}


class Full(OSError):
    pass


def fail(*_: Any, **__: Any) -> Any:
    raise Full("no space left")


def full_file(_: Path) -> TextIO:
    return Path("/dev/full").open("a")


def is_plain(engine: Any, model: nn.Module) -> bool:
    methods = all(getattr(engine, name).__func__ is PLAIN[DeepSpeedEngine, name] for name in METHODS)
    hooks = [hook for module in model.modules() for hook in module._forward_pre_hooks.values()]
    ours = [
        hook
        for hook in hooks
        if isinstance(getattr(inspect.unwrap(hook), "__self__", None), GatheredStorages)
    ]
    return methods and not ours and checkpointing_is_untouched() and ssdtrain_ds.runtime_of(engine) is None


class WithComm(Runtime):
    """One whose collectives are compressed, as far as attaching can see."""

    comm = SimpleNamespace(metrics=dict)  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("where", "name"),
    [
        (attach, "InnerHooks"),
        (checkpointing, "function_for"),
        (attach, "_Monitor"),
        (attach, "CommAttachment"),
        (Runtime, "step_begin"),
    ],
)
def test_attaching_that_fails_half_way_is_undone_and_raises(
    where: Any, name: str, make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    engines: list[Any] = []
    model = models.GPT()
    with monkeypatch.context() as patch:
        patch.setattr(_compat, "check_engine", engines.append)
        patch.setattr(where, name, fail)
        if name == "CommAttachment":
            patch.setattr(attach, "Runtime", WithComm)
        with pytest.raises(Full, match="no space left"):
            make_engine(model=model, **ZERO_3)
    assert is_plain(engines[0], model)
    assert not spill_files(tmp_path)
    train(engines[0], 1)  # somebody may hold it
    engines.clear()
    gc.collect()
    train(make_engine(**ZERO_3), 1)


def test_destroy_puts_everything_back_and_runs_deepspeeds_own_even_if_closing_fails(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    destroyed = []
    close, destroy = Runtime.close, DeepSpeedEngine.destroy

    def closing_fails(self: Runtime) -> None:
        close(self)
        fail()

    def noted(self: DeepSpeedEngine) -> None:
        destroyed.append(self)
        destroy(self)

    model = models.GPT()
    with monkeypatch.context() as patch:
        patch.setattr(Runtime, "close", closing_fails)
        patch.setattr(DeepSpeedEngine, "destroy", noted)
        engine = make_engine(model=model, **ZERO_3)
        train(engine, 1)
        with pytest.raises(Full):
            engine.destroy()
        assert destroyed == [engine]
    assert is_plain(engine, model)
    engine.destroy()


def test_a_full_disk_under_the_report_stops_no_training(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    plain = train(make_engine(None))
    monkeypatch.setattr(journal, "open_to_append", full_file)
    offload = {"directories": str(tmp_path / "ssd"), "min_bytes": models.MIN_BYTES}
    engine = make_engine({"offload": offload, "report": {"path": str(tmp_path / "report")}})
    losses = train(engine)
    assert losses == plain
    assert "No space left on device" in caplog.text
    engine.destroy()
    assert deepspeed.checkpointing.CheckpointFunction is PLAIN_FUNCTION


PLAIN_FUNCTION = deepspeed.checkpointing.CheckpointFunction


def test_a_model_that_an_engine_offloads_is_not_offloaded_call_by_call(
    make_engine: MakeEngine, tmp_path: Path
) -> None:
    """The inner one would see all of it, and the outer one, enabled, nothing."""
    model = models.GPT()
    engine = make_engine(model=model)
    with pytest.raises(ValueError, match="DeepSpeed's ssdtrain block offloads this model already"):
        ssdtrain.attach(model, {"offload": {"directories": str(tmp_path)}})
    engine.destroy()
    ssdtrain.attach(model, {"offload": {"directories": str(tmp_path)}}).close()


PLACES: list[tuple[Any, str]] = [
    (attachment._INTERCEPTED, "recv"),  # the last of the backend's methods
    (_compat_comm, "expert_functions"),  # half-way through the layers
    (_compat_comm, "repeated_parameters"),
    (gradients, "patch_gradients"),
    (gradients, "Buckets"),  # half-way through the gradients
    (weights, "patch_weights"),
    (weights, "_all_gather_dp_groups"),
    (_compat_comm, "bypasses"),  # the last of all
]


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize(("where", "name"), PLACES, ids=[name for _, name in PLACES])
def test_compression_that_fails_half_way_puts_everything_back(
    where: Any, name: str, stage: int, make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(None, zero_optimization={"stage": stage})
    holders = [engine, engine.optimizer, engine.module, _compat_comm.coordinator_of(engine)]
    holders += list(engine.module.parameters())
    holders += [_compat_comm.TorchBackend, *_compat_comm.modules_that_gather()]
    holders += [*_compat_comm.tensor_parallel_functions(), *_compat_comm.expert_functions()]
    before = [dict(vars(holder)) for holder in holders if holder is not None]
    plain = _compat_comm.TorchBackend.all_reduce
    comm: Any = SimpleNamespace(
        policy=SimpleNamespace(exclude=()),
        rank=0,
        device=engine.device,
        forget_weights=lambda: None,
        keep_excluded=lambda _: None,
        notices=SimpleNamespace(add=lambda *_: None),
    )
    with monkeypatch.context() as patch:
        (patch.setitem if isinstance(where, dict) else patch.setattr)(where, name, fail)
        with pytest.raises(Full):
            CommAttachment(engine, comm)
    found = [dict(vars(holder)) for holder in holders if holder is not None]
    for old, new in zip(before, found, strict=True):
        assert old.keys() == new.keys()
        assert [
            key for key, value in old.items() if callable(value) and _bare(new[key]) is not _bare(value)
        ] == []
    attached = CommAttachment(engine, comm)  # nothing counts the one that failed
    assert _compat_comm.TorchBackend.all_reduce is not plain
    attached.detach()
    attached.detach()
    assert _compat_comm.TorchBackend.all_reduce is plain


def _bare(value: Any) -> Any:
    """A static method's function: it is wrapped anew when it is put back."""
    return getattr(value, "__func__", value) if isinstance(value, staticmethod) else value
