"""Parts of regions: their leading pages go to a tier, the others stay in memory, and backward gets the bits that were saved."""

from __future__ import annotations

import gc
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import pytest
import torch

from ssdtrain.offload.policy import Action
from ssdtrain.offload.transfer import gpudirect
from ssdtrain.offload.transfer.rests import PAGE, moved_bytes
from ssdtrain.runtime import Runtime
from ssdtrain.storage import Faults
from tests.offload import zoo
from tests.offload.conftest import (
    VARIANTS,
    MakeRuntime,
    Variant,
    holds_nothing,
    offload_parts,
    stored_forward,
)
from tests.offload.test_equality import same
from tests.offload.test_gpudirect import ON
from tests.offload.test_races import SIZE, chain, expected, pool_of
from tests.support.kvikio_stand_in import KvikioStandIn, install
from tests.support.tiers import tiered

REGION = SIZE * SIZE * 4  # of `chain`
WAYS = [VARIANTS[0], *VARIANTS[2:5]]
CASES = [
    zoo.gpt,
    zoo.overlapping_qkv,
    zoo.views,
    zoo.double_backward,
    zoo.retain_graph,
    zoo.returns_modified_saved,
    zoo.dead_branches,
]


@pytest.fixture(params=tiered(WAYS, quick=WAYS[:2]), ids=lambda way: way.name)
def way(request: pytest.FixtureRequest) -> Variant:
    return request.param


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
@pytest.mark.parametrize("forward", [Runtime.forward, stored_forward], ids=["at-once", "stored"])
def test_parts_change_no_bit(
    case: zoo.Case, forward: object, way: Variant, make_runtime: MakeRuntime
) -> None:
    """Backward finds stores that are over (`stored`), and such as have not begun or are under way."""
    runtime = make_runtime(way)
    offload_parts(runtime, 0.25, 0.5, 0.75)
    assert same(zoo.run(case, nullcontext), zoo.run(case, partial(forward, runtime)))
    found = runtime.statistics().offload
    assert found.kept_bytes > 0 and found.offloaded_bytes + found.avoided_write_bytes > 0
    if forward is stored_forward and case is zoo.gpt:
        assert found.loaded_bytes > 0


def test_each_part_is_counted_as_what_it_is(way: Variant, make_runtime: MakeRuntime) -> None:
    runtime = make_runtime(way, prefetch=0)
    offload_parts(runtime, 0.75)
    with stored_forward(runtime):
        x, loss = chain(runtime, depth=4)
    found = runtime.statistics()
    whole = found.offload.saved_bytes
    assert found.offload.offloaded_bytes == 0.75 * whole == found.store.bytes_written
    assert found.offload.kept_bytes == 0.25 * whole
    # The input of the first operator is `x`, which is alive whatever becomes of it.
    assert found.offload.activation_bytes - found.offload.buffer_bytes == REGION + 0.25 * whole
    assert found.offload.unoffloaded_peak_bytes == whole
    loss.backward()
    del loss
    found = runtime.statistics()
    assert found.offload.loaded_bytes == 0.75 * whole == found.offload.offloaded_bytes
    assert torch.equal(x.grad, expected(4))


def test_while_a_store_is_under_way_what_stays_is_counted_twice(make_runtime: MakeRuntime) -> None:
    runtime = make_runtime()
    offload_parts(runtime, 0.5)
    pool_of(runtime).hold()
    _, loss = chain(runtime, depth=4)
    found = runtime.statistics().offload
    assert found.activation_bytes - found.buffer_bytes == 1.5 * found.saved_bytes
    pool_of(runtime).release()
    del loss


@pytest.mark.parametrize("way", VARIANTS[:3], ids=lambda way: way.name)
def test_a_cancelled_store_leaves_one_copy(way: Variant, make_runtime: MakeRuntime) -> None:
    runtime = make_runtime(way)
    offload_parts(runtime, 0.5)
    pool_of(runtime).hold(reads=False)
    x, loss = chain(runtime)
    loss.backward(retain_graph=True)
    found = runtime.statistics()
    assert found.offload.avoided_write_bytes == 0.5 * found.offload.saved_bytes > 0
    assert found.offload.offloaded_bytes == found.store.bytes_written == found.offload.in_flight_bytes == 0
    assert not any(region.transfer.rest is not None for region in regions(runtime))
    pool_of(runtime).release()
    assert torch.equal(x.grad, expected())
    loss.backward()
    assert torch.equal(x.grad, 2 * expected())


def regions(runtime: Runtime) -> list:
    return [region for region in runtime.offload.tape(0, -1).regions if region is not None]


def test_a_slow_store_is_forwarded(way: Variant, make_runtime: MakeRuntime) -> None:
    runtime = make_runtime(way, threads=8)
    offload_parts(runtime, 0.5)
    pool_of(runtime).hold(begun=True, reads=False)
    x, loss = chain(runtime, depth=2)
    loss.backward()
    assert runtime.statistics().offload.loaded_bytes == 0
    assert torch.equal(x.grad, expected(2))
    pool_of(runtime).release()


def test_torn_and_verified_transfers_change_no_bit(way: Variant, make_runtime: MakeRuntime) -> None:
    faults = Faults(seed=1, delay=0.3, max_delay=0.003, short=0.5, interrupt=0.3, torn=True)
    runtime = make_runtime(way, faults=faults, verify="all")
    offload_parts(runtime, 0.5, 0.75)
    assert same(zoo.run(zoo.gpt, nullcontext), zoo.run(zoo.gpt, partial(stored_forward, runtime)))
    found = runtime.statistics().offload
    assert found.verified_bytes == found.loaded_bytes > 0


def test_a_write_after_the_save_is_the_error_of_autograd(way: Variant, make_runtime: MakeRuntime) -> None:
    runtime = make_runtime(way)
    offload_parts(runtime, 0.5)
    x = torch.randn(SIZE, SIZE, requires_grad=True)
    with stored_forward(runtime):
        y = x.exp()
        loss = y.sum()
    y.detach()[SIZE - 1].add_(1)  # in the part that stayed
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_what_is_written_behind_the_back_of_torch_gets_into_neither_part(make_runtime: MakeRuntime) -> None:
    """Both parts are those of one moment: the copy of what stays is not made later than the store begins."""
    runtime = make_runtime()
    offload_parts(runtime, 0.5)
    x = torch.randn(SIZE, SIZE, requires_grad=True)
    with stored_forward(runtime):
        y = x.exp()
        loss = y.sin().sum()
    wanted = (y.detach().cos() * y.detach()).clone()
    y.detach().numpy()[SIZE - 1] = 7.0
    loss.backward()
    assert torch.equal(x.grad, wanted)


def test_a_dropped_loss_frees_both_parts(way: Variant, make_runtime: MakeRuntime) -> None:
    runtime = make_runtime(way)
    offload_parts(runtime, 0.5)
    for hold in ({}, {"begun": True}, None):
        if hold is not None:
            pool_of(runtime).hold(**hold)
        _, loss = chain(runtime, depth=2)
        del _, loss
        gc.collect()
        pool_of(runtime).release()
        holds_nothing(runtime)
        found = runtime.statistics().offload
        assert found.activation_bytes == found.buffer_bytes


def test_without_memory_for_the_copy_a_region_leaves_whole(
    way: Variant, make_runtime: MakeRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = make_runtime(way)
    offload_parts(runtime, 0.5)

    def clone(source: torch.Tensor) -> torch.Tensor:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(runtime.engine.device, "clone", clone)
    with stored_forward(runtime):
        x, loss = chain(runtime)
    found = runtime.statistics().offload
    assert found.offloaded_bytes + found.avoided_write_bytes == found.saved_bytes > 0 == found.kept_bytes
    loss.backward()
    assert torch.equal(x.grad, expected())


def test_a_part_is_whole_pages_and_one_at_least() -> None:
    assert moved_bytes(10 * PAGE, Action(True, part=0.5)) == 5 * PAGE
    assert moved_bytes(10 * PAGE + 100, Action(True, part=0.55)) == 5 * PAGE
    assert moved_bytes(10 * PAGE, Action(True, part=1e-9)) == PAGE
    assert moved_bytes(PAGE - 1, Action(True, part=0.5)) == PAGE - 1
    assert moved_bytes(PAGE + 1, Action(True, part=1)) == PAGE + 1


@pytest.mark.parametrize("part", [0.0, -0.5, 1.5, float("nan")])
def test_no_part_is_an_error_that_names_it(part: float, make_runtime: MakeRuntime) -> None:
    runtime = make_runtime()
    offload_parts(runtime, part)
    with pytest.raises(ValueError, match="part must be above 0 and up to 1"):
        chain(runtime)


def test_by_gpudirect_what_stays_is_put_behind_what_is_read(
    make_runtime: MakeRuntime, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(gpudirect, "PROBE", 64 << 10)
    stand_in: KvikioStandIn = install(monkeypatch, tmp_path)
    runtime = make_runtime(ON, prefetch="512KiB")
    offload_parts(runtime, 0.25, 0.75)
    written = stand_in.written
    with stored_forward(runtime):
        x, loss = chain(runtime)
    found = runtime.statistics().offload
    assert stand_in.written - written == found.offloaded_bytes == found.saved_bytes // 2
    loss.backward()
    assert torch.equal(x.grad, expected())
