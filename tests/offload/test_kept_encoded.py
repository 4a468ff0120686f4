"""A saved tensor that stays in its memory, encoded (`Action.tier` "device")."""

from __future__ import annotations

import pytest
import torch

from ssdtrain.runtime import Runtime
from tests.offload.conftest import MakeRuntime, Variant, offload_parts
from tests.support.saved import SaveGiven, any_bits, bits

COUNT = 1 << 16
DTYPES = [torch.bfloat16, torch.float32]


def encoding(make_runtime: MakeRuntime, *variant: Variant, codec: str = "exact") -> Runtime:
    runtime = make_runtime(*variant)
    offload_parts(runtime, 1.0, tier="device", codec=codec)
    return runtime


def saved(dtype: torch.dtype) -> list[torch.Tensor]:
    """Two tensors that the codec holds, one that overflows, and what it makes no smaller."""
    return [
        torch.randn(COUNT).to(dtype),
        torch.zeros(COUNT, dtype=dtype),
        any_bits(COUNT, dtype),
        torch.randn(COUNT).to(torch.float16),
        torch.arange(COUNT),
    ]


@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_come_back_from_fewer_bytes_of_memory(
    dtype: torch.dtype, variant: Variant, make_runtime: MakeRuntime
) -> None:
    runtime = encoding(make_runtime, variant)
    tensors = saved(dtype)
    came: list[torch.Tensor] = []
    y = torch.ones(1, requires_grad=True)
    with runtime.forward():
        for tensor in tensors:
            y = SaveGiven.apply(y, tensor.clone(), came)
    found = runtime.statistics()
    assert found.offload.kept_encoded_bytes == 2 * tensors[0].nbytes
    assert found.offload.overflowed_bytes == tensors[0].nbytes
    whole = sum(tensor.nbytes for tensor in tensors)
    assert found.offload.kept_bytes == whole and found.offload.offloaded_bytes == 0
    saved_bytes = 2 * tensors[0].nbytes * (0.234 if dtype is torch.bfloat16 else 0.117)
    assert found.offload.activation_bytes - found.offload.buffer_bytes <= whole - 0.98 * saved_bytes
    y.sum().backward(retain_graph=True)
    y.sum().backward()
    assert all(torch.equal(bits(a), bits(b)) for a, b in zip(came[::-1], 2 * tensors, strict=True))
    assert runtime.statistics().store.bytes_written == 0


def test_masks_take_a_bit_for_each(make_runtime: MakeRuntime) -> None:
    runtime = encoding(make_runtime)
    mask, came = torch.rand(8 * COUNT) > 0.5, []
    y = torch.ones(1, requires_grad=True)
    with runtime.forward():
        y = SaveGiven.apply(y, mask.clone(), came)
    assert runtime.statistics().offload.activation_bytes <= 1.01 * mask.nbytes / 8
    y.sum().backward()
    assert torch.equal(came[0], mask)


def test_what_is_not_needed_any_more_leaves_nothing(make_runtime: MakeRuntime) -> None:
    runtime = encoding(make_runtime, codec="int8")
    y = torch.ones(1, requires_grad=True)
    with runtime.forward():
        y = SaveGiven.apply(y, torch.randn(COUNT), [])
    assert runtime.statistics().offload.live_regions == 1
    del y
    found = runtime.statistics().offload
    assert found.live_regions == 0 and found.activation_bytes == 0
