"""Keys that ask for copies in host memory, on a device: what they would copy goes to the tiers, equal to the bit.

These are the classes that the keys of other projects use: `offload_wrapper` is accelerate's `activation_checkpointing_offload`,
`OffloadActivations` of TRL its `activation_offloading`. TRL is installed without what it needs for its trainers (pyarrow and
others), of which that class uses nothing. Lightning has no such key.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.graph import save_on_cpu

import ssdtrain
from tests.integration.test_host_copies import Net, inside_of, plain, wrapped

pytestmark = pytest.mark.gpu


def of_trl(streams: bool) -> Any:
    from trl.models.activation_offloading import OffloadActivations

    return OffloadActivations(use_streams=streams, min_offload_size=1)


WAYS: dict[str, tuple[Callable[[nn.Module, torch.Tensor], torch.Tensor], Callable[[], Any], str]] = {
    "save_on_cpu": (inside_of(partial(save_on_cpu, pin_memory=True)), nullcontext, "save_on_cpu"),
    "accelerate": (wrapped, nullcontext, "save_on_cpu"),
    "TRL": (plain, partial(of_trl, False), "OffloadActivations"),
    "TRL with streams": (plain, partial(of_trl, True), "OffloadActivations"),
}


def trained(
    call: Callable[..., torch.Tensor], around: Callable[[], Any], directory: Path | None
) -> tuple[list[torch.Tensor], float]:
    """Train four steps on the device. Returns the weights, and bytes that left it."""
    torch.manual_seed(0)
    net, x, moved = Net(call).cuda(), torch.randn(64, 32).cuda(), 0.0
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    runtime = None
    if directory is not None:
        section = {"directories": str(directory), "amount": "all", "min_bytes": 1}
        runtime = ssdtrain.attach(net, {"offload": section})
    for _ in range(4):
        optimizer.zero_grad()
        with around():
            loss = net(x).square().mean()
        loss.backward()
        optimizer.step()
    if runtime is not None:
        statistics = runtime.statistics()
        assert statistics is not None
        moved = statistics.offload.offloaded_bytes + statistics.offload.avoided_write_bytes
        runtime.close()
    return [parameter.detach().cpu() for parameter in net.parameters()], moved


@pytest.mark.parametrize("way", WAYS)
def test_goes_to_the_tiers(way: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "ssdtrain")
    call, around, name = WAYS[way]
    expected, _ = trained(plain, nullcontext, None)
    weights, moved = trained(call, around, tmp_path)
    assert all(map(torch.equal, weights, expected)) and moved > 0
    assert [text for text in caplog.messages if "would copy to host memory" in text and name in text]
