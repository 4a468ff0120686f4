"""The codec `exact` on its way off a GPU: the kernel that puts what overflowed into pinned memory, behind late producers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import ssdtrain
from tests.gpu.test_streams import LATE
from tests.support.saved import SaveGiven, any_bits, bits

pytestmark = pytest.mark.gpu

COUNT = 1 << 20


@pytest.mark.parametrize("tier", [{"host": "64MiB"}, {"host": 0}], ids=["host", "drive"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_every_bit_comes_back_also_of_what_exact_cannot_hold(
    dtype: torch.dtype, tier: dict[str, Any], gpu: torch.device, tmp_path: Path
) -> None:
    tensors = [torch.randn(COUNT).to(dtype), any_bits(COUNT, dtype), any_bits(COUNT + 1, dtype, 1)] * 2
    offload = ssdtrain.offload(tmp_path, device=gpu, min_bytes=1024, amount="all", codec="exact", **tier)
    try:
        for step in range(3):
            came: list[torch.Tensor] = []
            y = torch.ones(4, device=gpu, requires_grad=True)
            with offload:
                for tensor in tensors:
                    given = tensor.to(gpu)
                    torch.cuda._sleep(LATE if step else 0)
                    y = SaveGiven.apply(y, given.clone(), came)  # type: ignore[no-untyped-call]
                    given.zero_()
            if step == 2:
                torch.cuda.synchronize()
            y.sum().backward()
            assert all(torch.equal(bits(a), bits(b)) for a, b in zip(came[::-1], tensors, strict=True))
        found = offload.runtime.statistics()
    finally:
        offload.close()
    assert found.offload.overflowed_bytes and found.offload.encoded_bytes
