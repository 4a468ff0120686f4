"""Keys that ask for copies in host memory, on a device: what they would copy goes to the tiers, equal to the bit.

These are the classes that the keys of other projects use: `offload_wrapper` is accelerate's `activation_checkpointing_offload`,
`OffloadActivations` of TRL its `activation_offloading`. Lightning has no such key.
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

from tests.integration.test_host_copies import inside_of, plain, trained, wrapped

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


@pytest.mark.parametrize("way", WAYS)
def test_goes_to_the_tiers(way: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "ssdtrain")
    call, around, name = WAYS[way]
    expected, _ = trained(plain, None, device="cuda")
    weights, moved = trained(call, tmp_path, around, "cuda")
    assert all(map(torch.equal, weights, expected)) and moved > 0
    assert [text for text in caplog.messages if "would copy to host memory" in text and name in text]
