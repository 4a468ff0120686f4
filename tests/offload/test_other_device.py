"""A tensor on another GPU of the process is not the engine's: its streams, events and pinned buffers are those of one device."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ssdtrain.offload.tensors import eligible
from ssdtrain.offload.tensors.eligible import Eligibility


class CudaTensor:
    """As much of a tensor on a GPU as eligibility looks at."""

    is_quantized = is_nested = False
    _base = grad_fn = None
    untyped_storage = torch.empty(1).untyped_storage

    def __init__(self, index: int) -> None:
        self.device = torch.device("cuda", index)

    def __getattr__(self, name: str) -> Any:
        assert name in ("is_conj", "is_neg"), name
        return lambda: False


@pytest.mark.parametrize("device", [torch.device("cuda", 1), torch.device("cuda")])
def test_the_whole_device_is_compared(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "cuda", SimpleNamespace(current_device=lambda: 1))
    monkeypatch.setattr(eligible, "_Tensor", CudaTensor)
    monkeypatch.setattr(eligible, "_is_copy_on_write", lambda tensor: False)
    found = Eligibility(1, device)
    assert found.may_move(CudaTensor(1))
    assert not found.may_move(CudaTensor(0))
