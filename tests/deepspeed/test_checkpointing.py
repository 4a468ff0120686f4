"""DeepSpeed's checkpoint functions: the same objects, but what they hold leaves memory; and their generators."""

from __future__ import annotations

import gc
import logging
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import deepspeed
import pytest
import torch
from deepspeed.pipe import PipelineModule
from torch import nn

import ssdtrain
import ssdtrain_ds
from ssdtrain_ds import _compat
from tests.deepspeed import models
from tests.deepspeed.conftest import MakeEngine, train
from tests.support.tensors import all_equal

CHECKPOINT = deepspeed.checkpointing.checkpoint
NON_REENTRANT = deepspeed.checkpointing.non_reentrant_checkpoint


@pytest.fixture
def configured() -> Iterator[Callable[..., None]]:
    """`deepspeed.checkpointing.configure` without mpu; what it set is undone."""

    def configure(**keys: bool) -> None:
        deepspeed.checkpointing.configure(None, **keys)

    yield configure
    deepspeed.checkpointing.configure(None)
    deepspeed.checkpointing.deepspeed_checkpointing_enabled = False


def test_the_functions_are_the_same_objects_while_an_engine_offloads(make_engine: MakeEngine) -> None:
    make_engine()
    assert deepspeed.checkpointing.checkpoint is CHECKPOINT
    assert deepspeed.checkpointing.non_reentrant_checkpoint is NON_REENTRANT
    assert PipelineModule.__init__.__defaults__ is not None
    assert CHECKPOINT in PipelineModule.__init__.__defaults__


def inputs_of(engine: Any) -> list[weakref.ref[Any]]:
    """The storages of the blocks' inputs, as weak references, from the next forward on."""
    found: list[weakref.ref[Any]] = []

    def note(_: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        if torch._C._current_graph_task_id() == -1:
            found.append(weakref.ref(inputs[0].untyped_storage()))

    for block in engine.module.blocks:
        block.register_forward_pre_hook(note)
    return found


@pytest.mark.parametrize(
    ("function", "keys"),
    [
        (CHECKPOINT, None),
        (CHECKPOINT, {"checkpoint_in_cpu": True}),
        (CHECKPOINT, {"partition_activations": True}),
        (NON_REENTRANT, None),
        (NON_REENTRANT, {"checkpoint_in_cpu": True}),
        (ssdtrain.checkpoint, None),
        (ssdtrain_ds.checkpoint, None),
    ],
)
def test_after_a_forward_no_input_of_a_block_is_in_memory(
    function: Any, keys: dict[str, bool] | None, make_engine: MakeEngine, configured: Callable[..., None]
) -> None:
    if keys is not None:
        configured(**keys)
    engine = make_engine(model=models.GPT(function))
    storages = inputs_of(engine)
    ids, labels = next(models.batches(1, 1))
    loss = engine(ids, labels)
    runtime = ssdtrain_ds.runtime_of(engine)
    while (found := runtime.statistics()) is not None and found.offload.in_flight_bytes:
        time.sleep(0.001)
    gc.collect()
    assert len(storages) == models.LAYERS
    # cpu_checkpointing empties the tensors themselves.
    assert all(storage() is None or storage().nbytes() <= 8 for storage in storages)
    engine.backward(loss)
    engine.step()


def test_without_an_engine_that_offloads_the_inputs_stay(make_engine: MakeEngine) -> None:
    make_engine()  # DeepSpeed's names are replaced, but this engine is not the one that runs
    engine = make_engine(None, model=models.GPT(CHECKPOINT))
    storages = inputs_of(engine)
    ids, labels = next(models.batches(1, 1))
    loss = engine(ids, labels)
    gc.collect()
    assert len(storages) == models.LAYERS
    assert all(storage() is not None for storage in storages)
    engine.backward(loss)
    engine.step()


class ForkedDropout(nn.Module):
    """Draws from DeepSpeed's tracker, as Megatron's parallel regions do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with deepspeed.checkpointing.get_cuda_rng_tracker().fork("test"):
            return nn.functional.dropout(self.linear(x).sin(), 0.5)


@pytest.mark.parametrize(
    "function", [ssdtrain.checkpoint, ssdtrain_ds.checkpoint], ids=["ssdtrain", "ssdtrain_ds"]
)
def test_recomputation_draws_from_the_tracker_what_the_forward_drew(function: Any, installed: None) -> None:
    tracker = deepspeed.checkpointing.get_cuda_rng_tracker()

    def gradients(call: Callable[..., torch.Tensor]) -> tuple[list[torch.Tensor], torch.Tensor]:
        tracker.reset()
        tracker.add("test", 5)
        torch.manual_seed(0)
        block = ForkedDropout()
        x = torch.randn(16, 32, requires_grad=True)
        for _ in range(2):
            x = call(block, x)
        x.square().sum().backward()
        assert block.linear.weight.grad is not None
        return [block.linear.weight.grad], tracker.get_states()["test"]

    try:
        (plain, state), (recomputed, after) = gradients(lambda block, x: block(x)), gradients(function)
    finally:
        tracker.reset()
    assert all_equal(plain, recomputed)
    assert torch.equal(state, after)


def test_the_blocks_checkpoint_section_has_the_defaults(make_engine: MakeEngine, tmp_path: Any) -> None:
    """`use_reentrant: true` rejects keyword arguments, as torch's does: so it was that one."""
    offload = {"directories": str(tmp_path / "ssd"), "min_bytes": models.MIN_BYTES}
    features: tuple[dict[str, Any], ...] = ({"offload": offload}, {"comm": {"preset": "safe"}})
    for feature in features:
        for section, rejected in (({}, False), ({"use_reentrant": True}, True)):
            engine = make_engine(
                {**feature, "checkpoint": section},
                model=models.GPT(lambda block, x: ssdtrain_ds.checkpoint(block, x=x)),
            )
            if rejected:
                with pytest.raises(ValueError, match="Unexpected keyword"):
                    train(engine, 1)
            else:
                train(engine, 1)


def test_an_activation_checkpointing_block_that_nobody_configured_is_reported(
    make_engine: MakeEngine, caplog: pytest.LogCaptureFixture, configured: Callable[..., None]
) -> None:
    asked = {"activation_checkpointing": {"partition_activations": True, "profile": False}}
    deepspeed.checkpointing.deepspeed_checkpointing_enabled = False
    train(make_engine(**asked), 2)
    warnings = [record for record in caplog.records if "DeepSpeed ignores it" in record.getMessage()]
    assert len(warnings) == 1 and "(partition_activations)" in warnings[0].getMessage()
    caplog.clear()
    engine = make_engine(**asked)
    configured()  # also after initialize
    train(engine, 2)
    train(make_engine(activation_checkpointing={"profile": False}), 2)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


BEFORE_0_19 = (
    _compat.CHECKPOINT_FUNCTION,
    _compat.EXTRACT_TENSORS,
    _compat.COPY_TO_DEVICE,
    _compat.EMPTY_INPUTS,
    _compat.DETACH,
)


@pytest.mark.parametrize("function", [CHECKPOINT, NON_REENTRANT], ids=["reentrant", "non-reentrant"])
def test_cpu_checkpointing_goes_to_the_tiers_where_deepspeed_has_no_engine_for_it(
    function: Any, make_engine: MakeEngine, configured: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is replaced before 0.19, whichever version this is."""

    def model() -> models.GPT:
        torch.manual_seed(0)
        return models.GPT(function)

    plain = train(make_engine(None, model=model()))
    monkeypatch.setattr(_compat, "replaced_names", lambda: BEFORE_0_19)
    configured(checkpoint_in_cpu=True)
    upstreams = {name: getattr(deepspeed.checkpointing, name) for name in BEFORE_0_19}
    engine = make_engine(model=model())
    assert all(getattr(deepspeed.checkpointing, name) is not upstreams[name] for name in BEFORE_0_19)
    assert all_equal(plain, train(engine))
    runtime = ssdtrain_ds.runtime_of(engine)
    found = runtime.statistics()
    assert found.offload.saved_bytes > 0
    engine.destroy()
    assert all(getattr(deepspeed.checkpointing, name) is upstreams[name] for name in BEFORE_0_19)


def test_a_held_input_is_read_back_where_the_recomputation_detaches_it(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_compat, "replaced_names", lambda: BEFORE_0_19)
    seen: list[tuple[torch.Tensor, tuple[Any, ...], Any]] = []

    def look(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        held, *_ = deepspeed.checkpointing.extract_tensors(all_objects=(x,))
        seen.append((x.detach().clone(), held, x.requires_grad))
        return block(x)

    engine = make_engine(model=models.GPT(look))
    ids, labels = next(models.batches(1, 1))
    loss = engine(ids, labels)
    assert len(seen) == models.LAYERS
    for value, held, requires_grad in seen:
        assert held[0].numel() == 0
        (read,) = deepspeed.checkpointing.detach_variable(held)
        assert torch.equal(read, value)
        assert read.is_leaf and read.requires_grad == requires_grad
    seen.clear()
    del held, read
    engine.backward(loss)
    engine.step()


def test_a_version_without_a_name_that_stands_in_for_the_engine_is_rejected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr(deepspeed.checkpointing, _compat.CPU_CHECKPOINTING_ENGINE, raising=False)
    _compat.check()
    monkeypatch.delattr(deepspeed.checkpointing, _compat.EMPTY_INPUTS)
    with pytest.raises(ImportError, match=_compat.EMPTY_INPUTS):
        _compat.check()


class Biased(models.GPT):
    """Every block is given one more tensor.

    Args:
        make: of the bias, from the first block's input.
        after: what happens to it once every block has run.
    """

    def __init__(self, function: Any, make: Callable[..., torch.Tensor], after: Callable[..., Any]) -> None:
        torch.manual_seed(0)
        super().__init__(function)
        self.make, self.after = make, after

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        assert self.checkpoint is not None
        x = self.embedding(ids)
        bias = self.make(x)
        for block in self.blocks:
            x = self.checkpoint(lambda x, bias, block=block: block(x) + bias, x, bias)
        self.after(bias)
        return models.loss_of(self.head(x), labels)


def of_inference(x: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        return x.detach().cos()


@pytest.mark.parametrize("function", [CHECKPOINT, NON_REENTRANT], ids=["reentrant", "non-reentrant"])
def test_an_input_made_under_inference_mode_stays(
    function: Any, make_engine: MakeEngine, configured: Callable[..., None]
) -> None:
    def model() -> Biased:
        return Biased(function, of_inference, lambda bias: None)

    plain = train(make_engine(None, model=model()))
    for keys in ({}, {"checkpoint_in_cpu": True}):
        configured(**keys)
        engine = make_engine(model=model())
        assert all_equal(plain, train(engine))
        runtime = ssdtrain_ds.runtime_of(engine)
        found = runtime.statistics()
        assert found.offload.saved_bytes > 0


@pytest.mark.parametrize("function", [CHECKPOINT, NON_REENTRANT], ids=["reentrant", "non-reentrant"])
def test_an_input_that_is_written_after_its_block_is_rejected_with_a_way_out(
    function: Any, make_engine: MakeEngine
) -> None:
    message = r"activation checkpointing .* inplace operation .*\[torch.float32 \[4, 32, 32\]\].*x\.clone\(\)"
    engine = make_engine(model=Biased(function, torch.ones_like, torch.Tensor.zero_))
    with pytest.raises(RuntimeError, match=message):
        train(engine, 1)
    # The way out.
    given = Biased(lambda run, x, bias: function(run, x, bias.clone()), torch.ones_like, torch.Tensor.zero_)
    plain = train(make_engine(None, model=given), 2)
    again = Biased(given.checkpoint, torch.ones_like, torch.Tensor.zero_)
    assert all_equal(plain, train(make_engine(model=again), 2))


def test_deepspeeds_autograd_function_may_be_derived_from_while_an_engine_offloads(
    make_engine: MakeEngine,
) -> None:
    plain_function = deepspeed.checkpointing.CheckpointFunction
    plain = train(make_engine(None, model=models.GPT(CHECKPOINT)))
    nodes = []

    def derived(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        outputs: list[torch.Tensor] = []
        Derived.apply(block, outputs, x)
        nodes.append(outputs[0].grad_fn)
        return outputs[0]

    engine, other = make_engine(model=models.GPT(derived)), make_engine(None, model=models.GPT(derived))

    class Derived(deepspeed.checkpointing.CheckpointFunction):
        pass

    assert issubclass(Derived, plain_function)
    assert all_equal(plain, train(engine))
    assert {type(node).__name__ for node in nodes} == {"DerivedBackward"}
    nodes.clear()
    runtime = ssdtrain_ds.runtime_of(engine)
    found = runtime.statistics()
    assert found.offload.saved_bytes > 0
    engine.destroy()
    assert all_equal(plain, train(other))
