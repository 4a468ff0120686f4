"""The layer of --spec: which model it makes, what it offloads, and with nothing replaced in Megatron's schedules."""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import runpy
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import megatron.core
import pytest
import torch
import yaml
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.pipeline_parallel import schedules
from megatron.core.tensor_parallel import layers, random
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.transformer_config import MLATransformerConfig

import ssdtrain
from ssdtrain.config import ConfigError
from ssdtrain.integration.patching import Patches
from ssdtrain.offload.eligible import Eligibility
from ssdtrain_megatron import _compat, spec
from ssdtrain_megatron.attachment import attach
from ssdtrain_megatron.identity import read_inputs_once
from tests.megatron import training
from tests.megatron.rows import FUSED, MOE, Row, selective
from tests.megatron.training import Trainer
from tests.support.tensors import all_equal

MLA = {
    "multi_latent_attention": True,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_head_dim": 16,
    "qk_pos_emb_head_dim": 16,
    "v_head_dim": 32,
    "kv_channels": 32,
    "rope_type": "rope",
}
UP = {**MLA, **selective("mla_up_proj", "layernorm")}


class Attention(DotProductAttention):  # type: ignore[misc]
    """Megatron's local one, which does not know the names that latent attention calls its sizes by."""

    def __init__(self, *args: Any, k_channels: int = 0, v_channels: int = 0, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)


@pytest.fixture(autouse=True)
def attention_for_mla(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LocalSpecProvider, "core_attention", lambda self: Attention)
    # Its import of Transformer Engine's names always succeeds, with None in their place.
    monkeypatch.setattr(multi_latent_attention, "HAVE_TE", False, raising=False)


@pytest.fixture
def trainer(monkeypatch: pytest.MonkeyPatch) -> Trainer:
    monkeypatch.setattr(training, "gpt_layer_spec", lambda **_: spec.layer_spec)
    return Trainer(Row("one process"))


@pytest.fixture
def runtime_file(config: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    file = tmp_path / "ssdtrain.yaml"
    file.write_text(yaml.safe_dump(config))
    monkeypatch.setenv(spec.CONFIG, str(file))
    monkeypatch.setattr(spec, "_recorder", None)
    yield file
    if spec._recorder is not None:
        spec._recorder.close()


def test_a_model_of_that_spec_offloads_what_its_layers_save(runtime_file: Path, trainer: Trainer) -> None:
    plain = schedules.forward_step
    assert isinstance(trainer.chunks[0].module.decoder.layers[0], spec.OffloadedTransformerLayer)
    expected = _plain_steps(2)
    assert [trainer.step(number) for number in range(2)] == expected
    assert schedules.forward_step is plain
    gc.collect()
    assert spec._recorder is not None
    found = spec._recorder.runtime.statistics()
    assert found is not None
    assert (
        found.offload.offloaded_bytes + found.offload.avoided_write_bytes == found.offload.saved_bytes > 2**20
    )
    assert found.offload.live_regions == 0


def _trainer(row: Row, wanted: Callable[[], Any], **options: Any) -> Trainer:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training, "gpt_layer_spec", lambda **_: wanted())
        if row.options.get("multi_latent_attention"):
            patch.setattr(training, "TransformerConfig", MLATransformerConfig)
        return Trainer(row, **options)


def _plain(row: Row, **options: Any) -> Trainer:
    """With the layer that Megatron's builder would choose."""
    known = {
        "num_experts": row.options.get("num_moe_experts"),
        "multi_latent_attention": row.options.get("multi_latent_attention", False),
        "qk_layernorm": options.get("qk_layernorm", False),
        "normalization": options.get("normalization"),
    }
    return _trainer(row, lambda: get_gpt_layer_local_spec(**known), **options)


def _plain_steps(count: int) -> list[tuple[str | None, str]]:
    plain = _plain(Row("one process"))
    assert not isinstance(plain.chunks[0].module.decoder.layers[0], spec.OffloadedTransformerLayer)
    return [plain.step(number) for number in range(count)]


def _run(trainer: Trainer, count: int = 2) -> list[Any]:
    """Losses, norms and all gradients, every bit of them."""
    found: list[Any] = []
    for number in range(count):
        found.append(trainer.step(number))
        parameters = [p for chunk in trainer.chunks for p in chunk.parameters()]
        found.append([p.main_grad.clone() for p in parameters])
    return found


def _same(one: list[Any], other: list[Any]) -> bool:
    return all(a == b if isinstance(a, tuple) else all_equal(a, b) for a, b in zip(one, other, strict=True))


FREEING = [
    Row("layernorm", options=selective("layernorm")),
    Row("mla_up_proj, layernorm", options=UP),
    Row("moe, layernorm", options={**MOE, **selective("layernorm")}),
]


@pytest.mark.parametrize("row", FREEING, ids=lambda row: row.name)
def test_outputs_that_megatron_frees_stay(runtime_file: Path, row: Row) -> None:
    expected = _run(_plain(row))
    assert _same(_run(_trainer(row, lambda: spec.layer_spec)), expected)
    gc.collect()
    assert spec._recorder is not None
    found = spec._recorder.runtime.statistics()
    assert found is not None and found.offload.saved_bytes > 2**20
    assert found.offload.live_regions == 0


@pytest.mark.parametrize("row", FREEING, ids=lambda row: row.name)
def test_a_loop_of_ones_own_needs_no_adapter_for_them(
    config: dict[str, Any], row: Row, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before 0.16 Megatron's function does not stand hooks of any kind, and is mended by hand."""
    expected = _run(_plain(row))
    patches = Patches()
    if megatron.core.__version__.split(".")[:2] < ["0", "16"]:
        read_inputs_once(patches)
    own = _plain(row)
    kept: list[Any] = []
    monkeypatch.setattr(Eligibility, "_exclude_storage", lambda _, storage: kept.append(storage.nbytes()))
    with ssdtrain.attach(own.chunks[0].module, config) as runtime:
        assert _same(_run(own), expected)
        assert kept  # or a store may write what has been freed, which is seen, and an error
        assert runtime.statistics().offload.saved_bytes > 2**20  # type: ignore[union-attr]
    patches.undo()


def test_inputs_are_read_once_and_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """Recomputation and backward as before megatron-core 0.16, below hooks that only pass tensors on."""
    function = random.CheckpointWithoutOutputFunction
    contexts: list[Any] = []

    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        inputs = ctx.saved_tensors
        torch.autograd.backward(ctx.outputs, gradients)
        contexts.append(ctx)
        return (None, None, *(tensor.grad for tensor in inputs))

    def recompute(self: Any, _: torch.Tensor) -> None:
        with torch.enable_grad():
            output = self.run_function(*self.ctx.saved_tensors)
        storage = self.outputs[0].untyped_storage()
        storage.resize_(output.untyped_storage().nbytes())
        storage.copy_(output.untyped_storage())
        self.ctx.outputs = (output,)
        self.ctx = None

    def gradients() -> list[torch.Tensor | None]:
        x = torch.linspace(0, 1, 8, requires_grad=True)
        weight = torch.linspace(1, 2, 8, requires_grad=True)
        inner = random.CheckpointWithoutOutput()
        inner.fp8 = False
        y = inner.checkpoint(torch.mul, x * 1, weight)
        z = y * y
        inner.discard_output_and_register_recompute(z)
        z.sum().backward()
        return [x.grad, weight.grad]

    monkeypatch.setattr(function, "backward", backward)
    monkeypatch.setattr(random.CheckpointWithoutOutput, "_recompute", recompute)
    expected = gradients()
    passing = torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)
    with passing:
        assert gradients() == [None, None]
    before = function.forward, function.backward
    patches = Patches()
    read_inputs_once(patches)
    with passing:
        found = gradients()
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))  # type: ignore[arg-type]
    assert contexts[-1].ssdtrain_inputs is None
    patches.undo()
    assert (function.forward, function.backward) == before


def test_the_function_whose_outputs_are_freed_is_known_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    assert random.CheckpointWithoutOutputFunction.__name__ + "Backward" == _compat.FREED_FUNCTION
    monkeypatch.delattr(random, "CheckpointWithoutOutputFunction")
    with pytest.raises(ImportError, match="CheckpointWithoutOutputFunction"):
        _compat.check()


@pytest.mark.parametrize(
    ("options", "more"),
    [
        (MOE, {"moe_layer_freq": [0, 1, 0, 1]}),
        (MLA, {"qk_layernorm": True}),
        ({}, {"qk_layernorm": True, "normalization": "RMSNorm"}),
    ],
    ids=["experts", "latent attention", "norms"],
)
def test_the_model_is_the_one_that_the_options_ask_for(options: dict[str, Any], more: dict[str, Any]) -> None:
    row = Row("", options=options)
    mine, plain = _trainer(row, lambda: spec.layer_spec, **more), _plain(row, **more)

    def kinds(trainer: Trainer) -> list[list[str]]:
        blocks = trainer.chunks[0].module.decoder.layers
        return [[type(module).__name__ for module in list(block.modules())[1:]] for block in blocks]

    expected = kinds(plain)
    if "moe_layer_freq" in more:  # which a single layer's spec does not know
        dense = kinds(_plain(Row("", options={"add_bias_linear": False})))
        expected = [dense[0], expected[1], dense[2], expected[3]]
        experts = [
            any(isinstance(module, MoELayer) for module in block.modules())
            for block in mine.chunks[0].module.decoder.layers
        ]
        assert experts == [False, True, False, True]
    else:
        mine_named, plain_named = (
            {name: p.shape for name, p in trainer.chunks[0].named_parameters()} for trainer in (mine, plain)
        )
        assert mine_named == plain_named
    assert kinds(mine) == expected


def test_submodules_of_ones_own_are_taken() -> None:
    own = dataclasses.replace(
        spec.layer_spec, submodules=get_gpt_layer_local_spec(qk_layernorm=True).submodules
    )
    layer = _trainer(Row(""), lambda: own).chunks[0].module.decoder.layers[0]
    assert type(layer.self_attention.q_layernorm).__name__ != "IdentityOp"


@pytest.mark.parametrize(
    ("option", "value"), [("heterogeneous_block_specs", True), ("transformer_impl", "inference_optimized")]
)
def test_layers_of_other_classes_are_rejected_by_their_option(option: str, value: object) -> None:
    config = _plain(Row("")).config
    setattr(config, option, value)
    with pytest.raises(ConfigError, match=f"--{option.replace('_', '-')}.*launcher"):
        spec.layer_spec.module(config, spec.layer_spec.submodules)


def test_steps_are_told_and_reported(
    runtime_file: Path, config: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    report = {"interval": 2, "path": str(tmp_path / "report")}
    runtime_file.write_text(yaml.safe_dump({**config, "report": report}))
    trainer = _trainer(Row(""), lambda: spec.layer_spec)
    with caplog.at_level("INFO", logger="ssdtrain"):
        for number in range(3):
            trainer.step(number)
            with torch.no_grad():
                trainer.step(number, forward_only=True)
    assert spec._recorder is not None
    assert spec._recorder.runtime.steps == 3
    assert len([line for line in caplog.messages if line.startswith("[ssdtrain] step 2 |")]) == 1
    spec._recorder.close()
    lines = [json.loads(line) for line in (tmp_path / "report" / "rank-0.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert all(line["saved_bytes"] > 2**20 for line in lines)


@pytest.mark.parametrize(
    ("section", "option", "said"),
    [
        ({"comm": {"preset": "safe"}}, None, r"ssdtrain\.comm.*ssdtrain_megatron\.attach"),
        ({}, "cpu_offloading", "--cpu-offloading"),
        ({}, "recompute_mlp", r"--recompute-modules.*bias.*--disable-bias-linear"),
    ],
)
def test_what_cannot_be_had_is_rejected_at_the_first_forward(
    runtime_file: Path, config: dict[str, Any], section: dict[str, Any], option: str | None, said: str
) -> None:
    runtime_file.write_text(yaml.safe_dump({**config, **section}))
    options = selective("mlp") if option == "recompute_mlp" else {}
    trainer = _trainer(Row("", options=options), lambda: spec.layer_spec)
    if option is not None:
        setattr(trainer.config, option, True)
    with pytest.raises(ConfigError, match=said):
        trainer.step(0)
    assert spec._recorder is None


def _imported_for(monkeypatch: pytest.MonkeyPatch, **options: Any) -> None:
    """Import the module as Megatron's builder does for --spec, with these options on the command line."""
    args = argparse.Namespace(spec=["ssdtrain_megatron.spec", "layer_spec"], **options)
    module = types.SimpleNamespace(_GLOBAL_ARGS=args)
    monkeypatch.setitem(sys.modules, "megatron.training.global_vars", module)  # type: ignore[arg-type]
    runpy.run_module("ssdtrain_megatron.spec")


def test_without_its_variable_the_module_of_spec_cannot_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(spec.CONFIG, raising=False)
    with pytest.raises(ConfigError, match=r"SSDTRAIN_CONFIG: None names no file.*the path of a YAML"):
        _imported_for(monkeypatch)
    # The launcher attaches.
    _imported_for(monkeypatch, ssdtrain_offload_directories=["/tmp"])


@pytest.mark.parametrize(
    ("section", "options", "said"),
    [
        ({"offload": {"directory": "/a"}}, {}, r"ssdtrain\.offload\.directory: .*did you mean"),
        ({}, {"cpu_offloading": True}, "--cpu-offloading"),
        ({}, {**selective("mlp"), "add_bias_linear": True}, "--recompute-modules.*--disable-bias-linear"),
    ],
)
def test_what_cannot_be_had_with_spec_is_rejected_before_the_model_is_built(
    runtime_file: Path,
    config: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    section: dict[str, Any],
    options: dict[str, Any],
    said: str,
) -> None:
    _imported_for(monkeypatch, **{**selective("mlp"), "add_bias_linear": False})
    runtime_file.write_text(yaml.safe_dump({**config, **section}))
    with pytest.raises(ConfigError, match=said):
        _imported_for(monkeypatch, **options)


def test_a_fused_gradient_is_marked_on_the_weight_itself(runtime_file: Path) -> None:
    linear = layers.LinearWithGradAccumulationAndAsyncCommunication
    before = linear.forward, linear.backward
    row = Row("", ddp={"overlap_grad_reduce": True}, options=FUSED)
    assert _same(_run(_trainer(row, lambda: spec.layer_spec)), _run(_plain(row)))
    assert spec._recorder is not None
    spec._recorder.close()
    assert (linear.forward, linear.backward) == before


def test_evaluation_needs_no_config(trainer: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(spec.CONFIG, raising=False)
    monkeypatch.setattr(spec, "_recorder", None)
    with torch.no_grad():
        trainer.step(0, forward_only=True)
    with pytest.raises(ConfigError, match="SSDTRAIN_CONFIG"):
        trainer.step(0)


def test_under_an_attachment_these_layers_are_ordinary(
    config: dict[str, Any], trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(spec.CONFIG, raising=False)
    monkeypatch.setattr(spec, "_recorder", None)
    with attach(trainer.chunks, config):
        trainer.step(0)
    assert spec._recorder is None


def test_a_layer_of_another_class_is_not_replaced() -> None:
    with pytest.raises(ValueError, match="only a TransformerLayer"):
        spec.offloaded(gpt_layer_specs.ModuleSpec(module=torch.nn.Linear))
