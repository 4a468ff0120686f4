"""The codec `exact` on the way to a tier: what it cannot hold is stored as it is; and where `codec: "auto"` uses it."""

from __future__ import annotations

import pytest
import torch

from ssdtrain.codecs import make_fixed_size_codec
from ssdtrain.codecs.base import FLOATS
from ssdtrain.offload.free_codec import is_free
from ssdtrain.offload.pacing import limits
from ssdtrain.offload.policy import Action
from ssdtrain.offload.transfer.coding import AUTOMATIC_BYTES, CodecRule, Coding
from ssdtrain.planner.derating import BandwidthDerating
from ssdtrain.runtime import Runtime
from tests.offload.conftest import MakeRuntime, Variant, offload_parts, settled
from tests.support.saved import SaveGiven, any_bits, bits

COUNT = 1 << 14
DTYPES = [torch.bfloat16, torch.float32]


def there_and_back(runtime: Runtime, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Tensors that backward has, when all are in a tier."""
    came: list[torch.Tensor] = []
    x = torch.ones(1, requires_grad=True)
    with runtime.forward():
        y = x
        for tensor in tensors:
            y = SaveGiven.apply(y, tensor, came)
    settled(runtime)
    y.sum().backward()
    return came[::-1]


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_exact_cannot_hold_is_stored_as_it_is(
    dtype: torch.dtype, variant: Variant, make_runtime: MakeRuntime
) -> None:
    runtime = make_runtime(variant, codec="exact")
    tensors = [torch.randn(COUNT).to(dtype), any_bits(COUNT, dtype), torch.zeros(COUNT, dtype=dtype)]
    came = there_and_back(runtime, tensors)
    assert all(torch.equal(bits(a), bits(b)) for a, b in zip(came, tensors, strict=True))
    found = runtime.statistics()
    nbytes = tensors[0].nbytes
    assert (found.offload.overflowed_bytes, found.offload.encoded_bytes) == (nbytes, 2 * nbytes)
    payload = make_fixed_size_codec("exact").payload_bytes(COUNT, dtype)
    assert found.store.bytes_written == nbytes + 2 * payload


def test_it_writes_three_quarters_of_bfloat16_and_no_more_of_what_it_does_not_shrink(
    make_runtime: MakeRuntime,
) -> None:
    runtime = make_runtime(codec="exact", prefetch=0)
    there_and_back(runtime, [torch.randn(1 << 20).to(torch.bfloat16)])
    assert runtime.statistics().store.bytes_written <= 0.766 * (2 << 20)
    before = runtime.statistics().store.bytes_written
    plain = [torch.randn(COUNT).to(torch.float16), torch.arange(COUNT)]
    there_and_back(runtime, plain)
    assert runtime.statistics().store.bytes_written - before == sum(tensor.nbytes for tensor in plain)


def test_views_of_one_storage_are_encoded_together(variant: Variant, make_runtime: MakeRuntime) -> None:
    """Queries, keys and values of a fused projection; and a tensor of another dtype that lies there too."""
    runtime = make_runtime(variant, codec="exact")
    fused = torch.randn(64, 3 * 128).to(torch.bfloat16)
    tensors = [*fused.chunk(3, dim=1), fused.view(torch.int16)]
    came = there_and_back(runtime, tensors)
    assert all(torch.equal(bits(a), bits(b)) for a, b in zip(came, tensors, strict=True))
    found = runtime.statistics().offload
    assert found.encoded_bytes == fused.nbytes and found.saved_bytes == 2 * fused.nbytes


def test_payloads_on_a_device_take_no_more_than_what_may_be_on_its_way(
    make_runtime: MakeRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tensor larger than that, as logits are, would have its payload beside it: it is stored as it is."""
    monkeypatch.setattr(limits, "PAYLOADS_MATTER", 0)
    sizes = [COUNT] * 24 + [16 * COUNT]
    peaks = {}
    for codec in ("off", "exact"):
        runtime = make_runtime(Variant("staged", {"buffer": "64MiB"}, staged=True), codec=codec)
        for _ in range(2):
            runtime.engine.meter.reset_peak()
            came: list[torch.Tensor] = []
            y = torch.ones(1, requires_grad=True)
            with runtime.forward():
                for size in sizes:
                    y = SaveGiven.apply(y, torch.randn(size).bfloat16(), came)
            peaks[codec] = runtime.statistics().offload.activation_peak_bytes
            y.sum().backward()
            runtime.step_end()
        limit = runtime.engine.mover.departures.limit
    assert 2 * COUNT < limit < 16 * 2 * COUNT
    found = runtime.statistics().offload
    assert 0 < found.encoded_bytes <= 2 * 24 * 2 * COUNT
    assert peaks["exact"] <= peaks["off"] + limit


def test_a_part_of_a_tensor_that_has_a_codec_leaves_whole(make_runtime: MakeRuntime) -> None:
    runtime = make_runtime(codec="exact")
    offload_parts(runtime, 0.5)
    tensors = [torch.randn(COUNT), any_bits(COUNT, torch.float32)]
    came = there_and_back(runtime, tensors)
    assert all(torch.equal(bits(a), bits(b)) for a, b in zip(came, tensors, strict=True))
    assert runtime.statistics().offload.kept_bytes == 0


def test_on_a_cpu_auto_is_no_codec(make_runtime: MakeRuntime) -> None:
    for options in ({}, {"codec": "auto"}, {"codec": "off"}):
        runtime = make_runtime(**options)
        there_and_back(runtime, [torch.randn(COUNT)])
        found = runtime.statistics()
        assert found.offload.encoded_bytes == 0 and found.store.bytes_written == 4 * COUNT


@pytest.mark.parametrize(
    ("rates", "link", "free"),
    [
        ((1e12, 1e12), (25e9, 25e9), True),  # PCIe 4
        ((500e9, 500e9), (50e9, 50e9), True),  # PCIe 5
        ((1e12, 1e12), (400e9, 400e9), False),  # a link as fast as memory
        ((20e9, 20e9), (25e9, 25e9), False),  # no kernels
    ],
)
def test_a_codec_is_free_where_the_link_saves_more_than_it_takes(
    rates: tuple[float, float], link: tuple[float, float], free: bool
) -> None:
    assert is_free(0.245, sum(1 / rate for rate in rates), link) is free


@pytest.mark.parametrize("dtype", FLOATS)
def test_what_is_encoded_to_save_time_is_large_and_leaves_whole(
    dtype: torch.dtype, make_runtime: MakeRuntime
) -> None:
    """And is of a dtype for which it was measured."""
    runtime = make_runtime()
    rule = CodecRule("exact", (torch.bfloat16,), automatic=True, least_bytes=AUTOMATIC_BYTES)
    runtime.engine.coding = Coding(rule)
    count = AUTOMATIC_BYTES // dtype.itemsize
    for numel, part in ((count, 1.0), (count - 512, 1.0), (count, 0.5)):
        before = runtime.statistics().offload.encoded_bytes
        runtime.engine.policy = _Always(Action(True, part=part))
        there_and_back(runtime, [torch.randn(numel).to(dtype)])
        encodes = dtype is torch.bfloat16 and numel == count and part == 1
        assert (runtime.statistics().offload.encoded_bytes > before) is encodes


class _Always:
    needs_modules = False

    def __init__(self, action: Action) -> None:
        self._action = action

    def decide(self, saved: object) -> Action:
        return self._action

    def observe(self, forward: object) -> None:
        pass


def test_a_plan_counts_the_bytes_that_are_moved(make_runtime: MakeRuntime) -> None:
    rates = {}
    for codec in ("off", "exact"):
        runtime = make_runtime(codec=codec)
        derating = BandwidthDerating(runtime.offload.store.metrics, None)
        derating.step_ended(runtime.offload.store.metrics, 0, 1.0)
        there_and_back(runtime, [torch.randn(1 << 18).to(torch.bfloat16)])
        derating.step_ended(runtime.offload.store.metrics, 0, 1.0)
        (tier,) = derating.machine(runtime.engine).tiers
        rates[codec] = tier.write / derating.rates.write
    assert rates["off"] == 1 and rates["exact"] == pytest.approx(1 / 0.766, rel=1e-3)


def test_what_is_decoded_as_it_comes_back_takes_no_more_than_what_is_not(make_runtime: MakeRuntime) -> None:
    """1. all stores have left the device, and no write has begun; 2. backward has them from the buffers."""
    runtime = make_runtime(Variant("staged", {"buffer": "64MiB"}, staged=True), codec="exact")
    tensor = 2 * COUNT
    for _ in range(2):
        runtime.offload.store.pool.hold(reads=False)
        came: list[torch.Tensor] = []
        y = torch.ones(1, requires_grad=True)
        with runtime.forward():
            for _ in range(64):
                y = SaveGiven.apply(y, torch.randn(COUNT).bfloat16(), came)
        runtime.engine.meter.reset_peak()
        y.sum().backward()
        found = runtime.statistics().offload
        runtime.offload.store.pool.release()
        runtime.step_end()
    limit = runtime.engine.mover.departures.limit
    assert limit >= 4 * tensor and found.encoded_bytes > 100 * tensor
    assert found.activation_peak_bytes - found.buffer_bytes <= limit + tensor
