"""Inputs of layers that have no memory of their own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import ssdtrain


@pytest.mark.parametrize(
    "section", [{"mode": "quant"}, {"mode": "reconstruct"}], ids=["quant", "reconstruct"]
)
def test_layers_of_torchs_tensor_parallelism_are_refused_by_name(
    section: dict[str, Any], tmp_path: Path
) -> None:
    """A codec would read from the address 0."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'ranks'}", rank=0, world_size=1)
    try:
        model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64))
        parallelize_module(
            model, init_device_mesh("cpu", (1,)), {"0": ColwiseParallel(), "2": RowwiseParallel()}
        )
        runtime = ssdtrain.attach(model, {"compact": section, "report": {"interval": 0}})
        with pytest.raises(
            RuntimeError, match=r"the input of 0, a DTensor: name this layer in compact\.exclude"
        ):
            model(torch.randn(4, 64))
        runtime.close()
        model(torch.randn(4, 64)).sum().backward()
    finally:
        dist.destroy_process_group()
