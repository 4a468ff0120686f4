"""Names of Megatron's `--offload-modules` in the config mean the modules that Megatron means by them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from megatron.core.transformer import transformer_config

from ssdtrain.config import load_config
from ssdtrain.profile.modules import Running, matches
from ssdtrain_megatron import _compat
from ssdtrain_megatron.attachment import attach
from ssdtrain_megatron.module_names import with_plain_patterns
from tests.megatron.rows import MOE, Row
from tests.megatron.training import Trainer


def running(model: torch.nn.Module, name: str) -> tuple[Running, ...]:
    """What runs while the module `name` does."""
    parts = name.split(".")
    outer = [".".join(parts[: count + 1]) for count in range(len(parts))]
    return tuple(Running(each, type(model.get_submodule(each)).__name__) for each in outer)


def chosen(model: torch.nn.Module, name: str) -> set[str]:
    """Names of modules, without the number of the layer, in which a tensor is saved that `name` is said of."""
    read = load_config({"offload": {"host": "1MiB", "modules": {name: "keep"}}})
    rules = with_plain_patterns(read).offload.modules  # type: ignore[union-attr]
    assert rules and all(place == "keep" for _, place in rules)
    patterns = tuple(pattern for pattern, _ in rules)
    names = (each for each, _ in model.named_modules() if each)
    return {
        each.split(".layers.0.")[1]
        for each in names
        if ".layers.0." in each and matches(running(model, each), patterns)
    }


def test_each_name_of_megatron_is_of_its_modules_alone() -> None:
    model = Trainer(Row("experts", options=MOE)).chunks[0]
    found = {name: chosen(model, name) for name in _compat.OFFLOAD_MODULES}
    experts = [f"mlp.experts.local_experts.{number}" for number in range(MOE["num_moe_experts"])]
    assert {"input_layernorm"} == found["attn_norm"]
    assert {"pre_mlp_layernorm"} == found["mlp_norm"]
    assert {"self_attention.linear_qkv"} == found["qkv_linear"]
    assert {"self_attention.linear_proj"} == found["attn_proj"]
    assert "self_attention.core_attention" in found["core_attn"]
    assert all(each.startswith("self_attention.core_attention") for each in found["core_attn"])
    assert {f"{each}.linear_fc1" for each in experts} == found["expert_fc1"]
    assert {"mlp.experts", *experts} == found["moe_act"]


def test_the_names_are_all_that_megatron_has() -> None:
    source = Path(transformer_config.__file__).read_text()
    if "offload_modules" in source:
        listed = source.split("allowed_modules = {")[-1].split("}")[0]
        assert {each.strip().strip('"') for each in listed.split(",") if each.strip()} == set(
            _compat.OFFLOAD_MODULES
        )


def test_what_a_name_keeps_stays(tmp_path: Path) -> None:
    def offloaded(modules: dict[str, Any]) -> int:
        trainer = Trainer(Row("one process"))
        section = {"directories": str(tmp_path), "min_bytes": 1024, "amount": "all", "modules": modules}
        with attach(trainer.chunks, {"offload": section}) as attachment:
            trainer.step(0)
            found = attachment.statistics()
            return found.offload.saved_bytes - found.offload.kept_bytes

    assert 0 < offloaded({"core_attn": "keep"}) < offloaded({})
