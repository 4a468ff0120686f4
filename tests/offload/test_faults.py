"""Drives that fail, fill up, or transfer less than asked: the next tier, then memory, then an error. Never zeros."""

from __future__ import annotations

import errno
import threading
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import pytest
import torch

from ssdtrain.storage import Faults, IOFailure, StoreFull
from tests.offload import zoo
from tests.offload.conftest import IN_PARTS, VARIANTS, MakeRuntime, Variant, settled, stored_forward
from tests.offload.test_equality import same

WAYS = [VARIANTS[0], VARIANTS[2], *IN_PARTS[:2]]  # the Python engine injects no faults


@pytest.fixture(params=WAYS, ids=lambda way: way.name)
def way(request: pytest.FixtureRequest) -> Variant:
    return request.param  # type: ignore[no-any-return]


@pytest.mark.parametrize("seed", range(4))
def test_short_interrupted_delayed_and_torn_transfers_change_no_bit(
    seed: int, way: Variant, make_runtime: MakeRuntime
) -> None:
    plain = zoo.run(zoo.gpt, nullcontext)
    faults = Faults(seed=seed, delay=0.3, max_delay=0.003, short=0.5, interrupt=0.3, torn=True)
    assert same(plain, zoo.run(zoo.gpt, make_runtime(way, faults=faults).forward))


@pytest.mark.parametrize("error", [errno.EIO, errno.ENOSPC, errno.EDQUOT])
def test_a_failed_write_keeps_the_bytes_in_memory_with_one_warning(
    error: int, way: Variant, make_runtime: MakeRuntime, caplog: pytest.LogCaptureFixture
) -> None:
    plain = zoo.run(zoo.gpt, nullcontext)
    runtime = make_runtime(way, faults=Faults(fail_writes=frozenset({3, 7, 8}), error=error))
    assert same(plain, zoo.run(zoo.gpt, partial(stored_forward, runtime)))
    found = runtime.statistics()
    assert found.offload.failed_stores >= 1
    assert found.offload.kept_full_bytes > 0
    assert found.store.drives[0].retired
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert sum("is not used any more" in text for text in warnings) == 1
    assert sum("stay in memory" in text for text in warnings) == 1


def test_a_failed_write_goes_to_the_other_drive(way: Variant, make_runtime: MakeRuntime) -> None:
    plain = zoo.run(zoo.gpt, nullcontext)
    runtime = make_runtime(replace(way, drives=2), faults=Faults(fail_writes=frozenset({2})))
    assert same(plain, zoo.run(zoo.gpt, partial(stored_forward, runtime)))
    found = runtime.statistics()
    assert found.offload.failed_stores >= 1 and found.offload.kept_full_bytes == 0
    assert sorted(drive.retired for drive in found.store.drives) == [False, True]


@pytest.mark.parametrize("amount_of_room", ["4KiB", "64KiB"])
def test_a_full_drive_keeps_what_does_not_fit(
    amount_of_room: str, way: Variant, make_runtime: MakeRuntime
) -> None:
    plain = zoo.run(zoo.gpt, nullcontext)
    runtime = make_runtime(way, capacity=amount_of_room)
    assert same(plain, zoo.run(zoo.gpt, runtime.forward))
    assert runtime.statistics().offload.kept_full_bytes > 0  # type: ignore[union-attr]


def test_where_the_config_says_raise_a_full_store_raises(make_runtime: MakeRuntime) -> None:
    runtime = make_runtime(capacity="64KiB", on_full="raise")
    with pytest.raises(StoreFull) as caught:
        zoo.run(zoo.gpt, runtime.forward)
    text = str(caught.value)
    assert "ssdtrain-0-0" in text and "bytes" in text and "raise the capacity" in text
    del caught


def test_a_failed_read_raises_on_the_thread_that_trains(way: Variant, make_runtime: MakeRuntime) -> None:
    runtime = make_runtime(way, faults=Faults(read_failure=1.0))
    x = torch.randn(128, 128, requires_grad=True)
    with runtime.forward():
        loss = x.sin().sin().sin().sum()
    settled(runtime)
    with pytest.raises(IOFailure) as caught:
        loss.backward()
    assert caught.value.errno == errno.EIO
    assert "ssdtrain-0-0" in str(caught.value) and "read" in str(caught.value)
    assert x.grad is None
    del caught


def test_after_a_failed_read_a_second_try_may_succeed(make_runtime: MakeRuntime) -> None:
    """Nothing of the failed load is left over: no half-filled buffer is handed out."""
    runtime = make_runtime(prefetch=0, faults=Faults(fail_reads=frozenset({0})))
    x = torch.randn(128, 128, requires_grad=True)
    with runtime.forward():
        loss = x.sin().sum()
    settled(runtime)
    with pytest.raises(IOFailure):
        loss.backward(retain_graph=True)
    loss.backward()
    assert torch.equal(x.grad, x.detach().cos())  # type: ignore[arg-type]


def test_several_threads_train_at_once(variant: Variant, make_runtime: MakeRuntime) -> None:
    slow = None if variant.name == "python" else Faults(seed=1, delay=0.2, max_delay=0.002)
    runtime = make_runtime(variant, faults=slow)
    cases = [zoo.swiglu, zoo.overlapping_qkv, zoo.tied_weights, zoo.lstm]
    # Each case draws its weights from the global generator: one after the other here, then all at once with ready weights.
    wanted: dict[int, list[torch.Tensor]] = {}
    found: dict[int, list[torch.Tensor]] = {}
    models = [
        torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64))
        for _ in cases
    ]
    start = [{name: value.clone() for name, value in model.state_dict().items()} for model in models]
    for index, model in enumerate(models):
        wanted[index] = zoo.train(model, zoo.noise(64 + index, 64), nullcontext, steps=5)
        model.load_state_dict(start[index])
    errors: list[BaseException] = []

    def train(index: int) -> None:
        try:
            torch.set_num_threads(1)
            found[index] = zoo.train(models[index], zoo.noise(64 + index, 64), runtime.forward, steps=5)
        except BaseException as error:  # noqa: BLE001 - shown by the assertion below
            errors.append(error)

    threads = [threading.Thread(target=train, args=(index,)) for index in range(len(models))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "a thread hangs"
    assert not errors, errors
    assert all(same(wanted[index], found[index]) for index in wanted)
