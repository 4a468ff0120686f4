"""`offload.amount`: what stays of a tape, and what a tape that was no like the others teaches."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ssdtrain.config import parse_amount
from ssdtrain.offload.policy import AmountPolicy, ForwardProfile, ForwardSizes, SavedTensorInfo
from tests.offload import zoo
from tests.offload.conftest import MakeRuntime

LAYERS = 10


class Chain(nn.Module):
    """Saves one tensor for each layer."""

    def __init__(self) -> None:
        super().__init__()
        self.fails_at = LAYERS

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in range(LAYERS):
            if layer == self.fails_at:
                raise ValueError("no forward")
            x = x.sin()
        return x.sum()


@pytest.mark.parametrize("amount", [0.8, "32KiB"])
@pytest.mark.parametrize("odd", ["a forward that raised", "a short batch", "a long batch"])
def test_an_odd_microbatch_does_not_change_what_the_next_one_keeps(
    odd: str, amount: float | str, make_runtime: MakeRuntime
) -> None:
    runtime = make_runtime(amount=amount, min_bytes=256)
    model = Chain()

    def kept(rows: int) -> int:
        before = runtime.engine.snapshot().kept_bytes
        x = zoo.noise(rows, 64).requires_grad_()
        with runtime.forward():
            loss = model(x)
        loss.backward()
        return runtime.engine.snapshot().kept_bytes - before

    full = 64 * 64 * 4
    assert [kept(64), kept(64), kept(64)] == [0, 2 * full, 2 * full]
    if odd == "a forward that raised":
        model.fails_at = 3
        with pytest.raises(ValueError, match="no forward"):
            kept(64)
        model.fails_at = LAYERS
    else:
        kept(1 if odd == "a short batch" else 80)
    assert kept(64) <= 2 * full


def test_shorter_microbatches_are_learnt_when_they_have_come_to_stay() -> None:
    policy = AmountPolicy(parse_amount(0.5))

    def offloads(nbytes: int, chunk: int = 0) -> bool:
        return policy.decide(SavedTensorInfo(chunk, 0, 0, 0, nbytes, torch.float32, ())).offload

    for nbytes in [1000] + [100] * (ForwardSizes.REMEMBERED - 1):
        policy.observe(ForwardProfile(0, 0, nbytes, 0.0, 0.0))
    assert offloads(500)
    policy.observe(ForwardProfile(0, 0, 100, 0.0, 0.0))
    assert offloads(50) and not offloads(51)
    assert offloads(500, chunk=1), "another chunk"
