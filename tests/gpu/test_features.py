"""What stands beside offload, on a GPU: sections, plans, codecs and torch.compile leave the bits of a run without them."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import ssdtrain
from benchmarks.gpu.models import Model
from ssdtrain.planner.controller import PlanController
from tests.gpu.test_training import SMALL, TINY, of_hardware
from tests.support.tensors import all_equal

pytestmark = pytest.mark.gpu

AWAY = {"host": "1GiB", "min_bytes": 256, "amount": "all"}
STATE = {"host": "1GiB", "min_bytes": 256}
STEPS = 8
"""In which a plan is made and followed."""

SECTIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "state": ({}, {"state": STATE}),
    "state, offload": ({}, {"state": STATE, "offload": AWAY}),
    "state, plan": ({}, {"state": STATE | {"device_limit": "1GiB"}, "plan": "auto"}),
    "optimizer on the CPU": (
        {"state": STATE | {"optimizer": "cpu", "clip": "none"}},
        {"state": STATE | {"optimizer": "cpu", "clip": "none"}, "offload": AWAY},
    ),
    "plan": ({}, {"plan": {"max_slowdown": 10.0}}),
    "plan, offload": ({}, {"plan": {"max_slowdown": 1.0}, "offload": {"host": "1GiB", "min_bytes": 256}}),
    "plan, encode": ({}, {"plan": {"max_slowdown": 10.0, "encode": "exact", "recompute": "off"}}),
    "exact": ({}, {"offload": AWAY | {"codec": "exact"}}),
    "compact": ({"compact": {"ratio": 0.25}}, {"compact": {"ratio": 0.25}, "offload": AWAY}),
    "compact, quantized": (
        {"compact": {"mode": "quant", "codec": "int8"}},
        {"compact": {"mode": "quant", "codec": "int8"}, "offload": AWAY},
    ),
}
"""Two configs each whose runs have to have the same bits."""


def trained(
    device: torch.device,
    config: dict[str, Any],
    *,
    compiled: bool = False,
    around: AbstractContextManager[Any] | None = None,
) -> list[torch.Tensor]:
    """Losses of all steps, and the weights after them, of a GPT with dropout in bfloat16."""
    torch.manual_seed(7)
    shape = SMALL if of_hardware(device) else TINY
    model = Model("gpt", device=device, dtype=torch.bfloat16, **shape)
    if compiled:
        for block in model.decoder:
            block.compile(backend="inductor" if of_hardware(device) else "aot_eager")
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4, fused=True)
    runtime = (
        ssdtrain.attach(model, {**config, "report": {"interval": 0}}, optimizer=optimizer) if config else None
    )
    losses = []
    with around or nullcontext():
        for step in range(STEPS):
            torch.manual_seed(step)
            tokens = torch.randint(shape["vocabulary"], (4, shape["positions"]), device=device)
            loss = model(tokens, tokens)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach().cpu())
    if runtime is not None:
        found = runtime.statistics()
        if config.get("offload", {}).get("amount") == "all":
            assert found.offload.offloaded_bytes + found.offload.avoided_write_bytes > 0
        if "codec" in config.get("offload", {}):
            assert found.offload.encoded_bytes + found.offload.avoided_write_bytes > 0
        if config.get("plan", {}) == {"max_slowdown": 10.0}:
            plan = next(one.plan for one in runtime.features if isinstance(one, PlanController))
            assert plan is not None and plan.count("recompute")
        if "encode" in config.get("plan", ()):
            assert found.offload.kept_encoded_bytes > 0
        if "state" in config:
            assert found.values()["state/resident_peak_bytes"] > 0
        runtime.close()
    return losses + [value.detach().cpu() for value in nn.Module.state_dict(model).values()]


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("name", SECTIONS)
def test_a_section_changes_no_bit(name: str, device: torch.device) -> None:
    without, config = SECTIONS[name]
    assert all_equal(trained(device, without), trained(device, config))


@pytest.mark.usefixtures("deterministic")
def test_compiled_blocks_have_the_bits_of_a_run_without(device: torch.device) -> None:
    assert all_equal(trained(device, {}, compiled=True), trained(device, {"offload": AWAY}, compiled=True))


def test_attention_of_cudnn_has_the_bits_of_a_run_without(gpu: torch.device) -> None:
    """torch's choice for half precision on Hopper. Its seeds are in device memory."""
    if not of_hardware(gpu):
        pytest.skip("cuDNN's attention needs a GPU")
    without, again = (trained(gpu, {}, around=sdpa_kernel(SDPBackend.CUDNN_ATTENTION)) for _ in range(2))
    if not all_equal(without, again):
        pytest.skip("the same run twice has other bits: cuDNN adds in any order here")
    for config in ({"offload": AWAY}, {"plan": {"max_slowdown": 1.0}}):
        assert all_equal(without, trained(gpu, config, around=sdpa_kernel(SDPBackend.CUDNN_ATTENTION)))
