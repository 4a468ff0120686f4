"""Codecs on the way to a tier: masks always, floating-point tensors where the user asks."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch import nn

from ssdtrain.codecs import make_codec
from ssdtrain.config import ConfigError
from ssdtrain.storage import Faults
from tests.offload import zoo
from tests.offload.conftest import VARIANTS, MakeRuntime, Variant, settled, stored_forward
from tests.offload.test_equality import same
from tests.offload.test_races import chain, expected, pool_of, until

WAYS = [VARIANTS[0], VARIANTS[2], VARIANTS[3], VARIANTS[4]]


@pytest.fixture(params=WAYS, ids=lambda way: way.name)
def way(request: pytest.FixtureRequest) -> Variant:
    return request.param


CASES = [
    zoo.gpt_with_dropout,
    zoo.swiglu,
    zoo.overlapping_qkv,
    zoo.views,
    zoo.autocast,
    zoo.returns_modified_saved,
]
CASES += [zoo.retain_graph, zoo.dead_branches, zoo.conv_channels_last, zoo.gpt_with_our_checkpoint]


@pytest.mark.parametrize("codec", ["lossless", "exact"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_a_codec_that_restores_all_bits_changes_no_gradient(
    case: zoo.Case, codec: str, way: Variant, make_runtime: MakeRuntime
) -> None:
    plain = zoo.run(case, nullcontext)
    runtime = make_runtime(way, codec=codec)
    assert same(plain, zoo.run(case, runtime.forward))
    found = runtime.statistics()
    assert found.offload.encoded_bytes > 0


@pytest.mark.parametrize("codec", ["int8", "bf16", "int4:block=64,hadamard", "fp8_e4m3"])
def test_what_backward_gets_is_the_codecs_own_round_trip(
    codec: str, way: Variant, make_runtime: MakeRuntime
) -> None:
    """Whether it was read back, forwarded from a slow store or taken back from a cancelled one."""
    if codec == "fp8_e4m3":
        codec = next(name for name in ("fp8", "e4m3", "fp8_e4m3", "fp8:e4m3") if _exists(name))
    x = zoo.noise(64, 96).requires_grad_()
    # d/dx of y * y.detach() is the saved y.
    wanted = make_codec(codec).roundtrip(x.detach() + 1)
    for hold in (None, {}, {"begun": True}):
        runtime = make_runtime(way, codec=codec)
        pool = runtime.offload.store.pool
        if hold is not None:
            pool.hold(reads=False, **hold)
        with runtime.forward():
            y = x + 1
            loss = (y * y.detach()).sum()
        if hold is None:
            settled(runtime)
        (slope,) = torch.autograd.grad(loss, y)
        pool.release()
        assert torch.equal(slope, wanted)
        del loss, y, slope


def _exists(name: str) -> bool:
    try:
        make_codec(name)
    except ValueError:
        return False
    return True


def test_masks_are_packed_without_being_asked(way: Variant, make_runtime: MakeRuntime) -> None:
    def case(recording: zoo.Recording) -> list[torch.Tensor]:
        model = nn.Sequential(nn.Linear(64, 512), nn.Dropout(0.5), nn.Linear(512, 64))
        return zoo.train(model, zoo.noise(64, 64), recording)

    runtime = make_runtime(way, min_bytes=1024)
    assert same(zoo.run(case, nullcontext), zoo.run(case, runtime.forward))

    settled(runtime)
    x = zoo.noise(256, 256).requires_grad_()
    with runtime.forward():
        before = runtime.statistics().store.bytes_written
        loss = x.masked_fill(zoo.noise(256, 256) > 0, 0.0).sum()
    settled(runtime)
    written = runtime.statistics().store.bytes_written - before
    assert 0 < written <= 256 * 256 // 8 + 64
    loss.backward()


def test_int8_writes_about_a_quarter(make_runtime: MakeRuntime) -> None:
    written = {}
    for codec in ("off", "int8"):
        runtime = make_runtime(codec=codec, prefetch=0)
        x = zoo.noise(512, 512).requires_grad_()
        with runtime.forward():
            loss = x.sin().cos().exp().sum()
        settled(runtime)
        written[codec] = runtime.statistics().store.bytes_written
        loss.backward()
    assert written["int8"] < 0.26 * written["off"]


def test_a_failed_write_keeps_the_encoded_bytes(way: Variant, make_runtime: MakeRuntime) -> None:
    plain = zoo.run(zoo.gpt, nullcontext)
    runtime = make_runtime(way, codec="lossless", faults=Faults(fail_writes=frozenset({2, 5})))
    assert same(plain, zoo.run(zoo.gpt, partial(stored_forward, runtime)))
    assert runtime.statistics().offload.failed_stores > 0


def test_infinities_and_nans_come_back_as_such(make_runtime: MakeRuntime) -> None:
    runtime = make_runtime(codec="int8")
    x = zoo.noise(64, 64).requires_grad_()
    with runtime.forward():
        y = x + 0
        y.data[3, 5], y.data[7, 7] = float("inf"), float("nan")
        loss = (y * y.detach()).sum()
    settled(runtime)
    (slope,) = torch.autograd.grad(loss, y)
    assert not torch.isfinite(slope[3, 5]) and torch.isnan(slope[7, 7])


def test_an_unknown_codec_is_refused_with_what_there_is(make_runtime: MakeRuntime) -> None:
    with pytest.raises(ConfigError, match=r"ssdtrain\.offload\.codec") as caught:
        make_runtime(codec="gzip")
    assert "int8" in str(caught.value)


@pytest.mark.parametrize("way", [VARIANTS[0], VARIANTS[2]], ids=["c", "staged"])
def test_what_is_encoded_in_memory_when_backward_comes_near_is_not_read_back(
    way: Variant, make_runtime: MakeRuntime
) -> None:
    """1. a store has begun; 2. backward is about to begin; 3. the store ends; 4. backward, twice."""
    runtime = make_runtime(way, codec="lossless", prefetch="16MiB")
    pool_of(runtime).hold(begun=True)
    x, loss = chain(runtime, depth=1)
    (store,) = [region.transfer.operation for region in runtime.engine.mover.stores]
    pool_of(runtime).flush()
    until(lambda: store is not None and store.begun(), "the store")
    runtime.engine.prefetch(runtime.offload.tape(0, -1))
    pool_of(runtime).release()
    settled(runtime)
    loss.backward(retain_graph=True)
    found = runtime.statistics()
    assert found.offload.encoded_bytes > 0
    assert found.offload.loaded_bytes == 0 and found.offload.forwarded_bytes == found.offload.offloaded_bytes
    assert torch.equal(x.grad, expected(1))
    loss.backward()
    assert torch.equal(x.grad, 2 * expected(1))


@pytest.mark.parametrize("held", [None, {"begun": True}, {}], ids=["stored", "being-written", "not-begun"])
def test_payloads_leave_the_device_with_the_tape_and_not_when_their_writes_end(
    held: dict[str, bool] | None, make_runtime: MakeRuntime
) -> None:
    """Of what has departed backward gets the bytes from the staging buffer, or from the tier."""
    runtime = make_runtime(VARIANTS[2], codec="lossless")
    pool, mover = pool_of(runtime), runtime.engine.mover
    if held is not None:
        pool.hold(reads=False, **held)
    x, loss = chain(runtime, depth=6)
    if held is None:
        settled(runtime)
    regions = runtime.offload.tape(0, -1).regions
    on_device = [region for region in regions if region.transfer.payload is not None]
    assert (
        sum(region.nbytes for region in on_device) <= mover.departures.limit < sum(r.nbytes for r in regions)
    )
    assert held is None or len(on_device) == 2
    del regions, on_device
    pool.release() if held == {"begun": True} else None
    loss.backward()
    pool.release()
    assert torch.equal(x.grad, expected(6))
    assert runtime.statistics().offload.encoded_bytes > 0
