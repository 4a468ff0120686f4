"""The sections `compact`, `checkpoint` and their company on the device, whose work comes late.

`compact` changes gradients on purpose: its oracle is the same run on the CPU, whose kernels the emulated device computes with,
and the run without offloading.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ssdtrain
from benchmarks.compact_training import Llama, LlamaConfig
from tests.support.tensors import all_equal

QUIET = {"report": {"interval": 0}}

PROJECTED: dict[str, dict[str, Any]] = {
    "orthonormal": {"ratio": 0.25},
    "gaussian": {"ratio": 0.25, "projection": "gaussian"},
    "hadamard": {"ratio": 0.5, "projection": "hadamard"},
    "lowrank": {"mode": "lowrank", "update_every": 2},
}
QUANT: dict[str, dict[str, Any]] = {
    "int8": {"mode": "quant", "codec": "int8"},
    "int4": {"mode": "quant"},
    "int2 rotated": {"mode": "quant", "codec": "int2_rotated"},
}
"""Their codecs are Triton's kernels on a device."""

COMPACT = QUANT if os.environ.get("TRITON_INTERPRET") == "1" else PROJECTED


def compacted(
    device: str, section: dict[str, Any], offload: dict[str, Any] | None = None
) -> list[torch.Tensor]:
    """Losses of four steps, and the weights after them."""
    torch.manual_seed(0)
    model = Llama(LlamaConfig()).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    config: dict[str, Any] = {"compact": section, **QUIET}
    if offload is not None:
        config["offload"] = offload
    found = []
    with ssdtrain.attach(model, config, optimizer=optimizer) as runtime:
        for step in range(4):
            generator = torch.Generator().manual_seed(step)
            tokens = torch.randint(256, (2, 17), generator=generator).to(device)
            loss = model(tokens[:, :-1], tokens[:, 1:])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            runtime.step_end()
            found.append(loss.detach().cpu())
        found += [value.cpu() for value in model.state_dict().values()]
        if offload is not None:
            statistics = runtime.statistics()
            assert statistics.offload.offloaded_bytes + statistics.offload.avoided_write_bytes > 0
    return found


@pytest.mark.usefixtures("late")
@pytest.mark.parametrize("name", COMPACT)
def test_compact_has_the_bits_of_the_cpu_with_and_without_offload(name: str, tmp_path: Path) -> None:
    expected = compacted("cpu", COMPACT[name])
    offload = {"directories": str(tmp_path), "amount": "all", "min_bytes": 1}
    assert all_equal(expected, compacted("cuda", COMPACT[name]))
    assert all_equal(expected, compacted("cuda", COMPACT[name], offload))


def _reentrant(function: Callable[..., Any], *args: Any) -> Any:
    return ssdtrain.checkpoint(function, *args, use_reentrant=True)


class Dropping(nn.Module):
    """A block whose recomputation must draw the device's numbers again."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 128), nn.Linear(128, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = nn.functional.dropout(nn.functional.gelu(self.up(x)), 0.2, self.training)
        return x + nn.functional.dropout(self.down(y), 0.2, self.training)


@pytest.mark.usefixtures("late")
@pytest.mark.parametrize("function", ["torch", "ssdtrain", "reentrant"])
def test_checkpoint_functions_with_offloaded_inputs(
    function: str, device: torch.device, tmp_path: Path
) -> None:
    functions: dict[str, Callable[..., Any]] = {
        "torch": lambda block, x: torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False),
        "ssdtrain": ssdtrain.checkpoint,
        "reentrant": _reentrant,
    }

    def run(recompute: Callable[..., Any] | None, offload: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        blocks = nn.ModuleList(Dropping() for _ in range(4)).to(device)
        first = nn.Linear(32, 32).to(device)

        class Whole(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.first, self.blocks = first, blocks

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                x = self.first(x)
                for block in self.blocks:
                    x = block(x) if recompute is None else recompute(block, x)
                return x

        model = Whole()
        section = {"directories": str(tmp_path), "amount": "all", "min_bytes": 1}
        runtime = ssdtrain.attach(model, {"offload": section, **QUIET}) if offload else None
        found = []
        try:
            for step in range(3):
                x = torch.randn(16, 32, generator=torch.Generator().manual_seed(step)).to(device)
                model.zero_grad()
                model(x).square().mean().backward()
                found += [
                    parameter.grad.cpu() for parameter in model.parameters() if parameter.grad is not None
                ]
        finally:
            if runtime is not None:
                statistics = runtime.statistics()
                assert statistics.offload.offloaded_bytes + statistics.offload.avoided_write_bytes > 0
                runtime.close()
        return found

    expected = run(None, False)
    assert all_equal(expected, run(functions[function], False))
    assert all_equal(expected, run(functions[function], True))
