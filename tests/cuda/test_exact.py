"""The codec `exact` on the device: what backward gets has the bits that were saved, also of tensors that the codec cannot hold.

The host does not wait to hear of those. Triton's kernels, one of which writes to pinned memory itself, run in its interpreter
where `TRITON_INTERPRET=1` is set, as in `make test-cuda`; elsewhere plain torch takes their place.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import emulated_cuda
import pytest
import torch

from ssdtrain.codecs import kernels
from ssdtrain.config import load_config
from ssdtrain.device.cuda import CudaDevice
from ssdtrain.offload import free_codec
from ssdtrain.runtime import Runtime, Seams
from ssdtrain.storage import Faults
from tests.offload.conftest import offload_parts
from tests.support.filesystems import eventually
from tests.support.saved import SaveGiven, any_bits, bits

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
COUNT = 1 << 14  # values of a superblock


def saved_tensors() -> list[torch.Tensor]:
    """Tensors of several dtypes and sizes; the codec cannot hold every third one."""
    tensors = []
    for seed, dtype in enumerate([torch.bfloat16, torch.float32, torch.float16, torch.bfloat16] * 3):
        count = COUNT + 517 * (seed % 2)
        values = torch.randn(count, generator=torch.Generator().manual_seed(seed)).to(dtype)
        tensors.append(any_bits(count, dtype, seed) if seed % 3 == 1 else values)
    return tensors


OVERFLOWING = sum(one.nbytes for one in saved_tensors()[1::3] if one.dtype is not torch.float16)


@contextmanager
def running(directory: Path, faults: Faults | None = None, **section: Any) -> Iterator[Runtime]:
    whole = {"directories": str(directory), "amount": "all", "min_bytes": 1, "codec": "exact", **section}
    config = load_config({"offload": whole, "report": {"interval": 0}})
    with Runtime(config, "cuda", logs=False, seams=Seams(faults)) as runtime:
        yield runtime


def forward(runtime: Runtime, tensors: list[torch.Tensor]) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return a loss whose backward appends what was saved to a list."""
    came: list[torch.Tensor] = []
    y = torch.ones(4, device="cuda", requires_grad=True)
    with runtime.forward():
        for tensor in tensors:
            y = SaveGiven.apply(y, tensor.to("cuda"), came)
    return y.sum(), came


def assert_same(came: list[torch.Tensor], tensors: list[torch.Tensor]) -> None:
    assert len(came) == len(tensors)
    assert all(torch.equal(bits(a), bits(b)) for a, b in zip(came, reversed(tensors), strict=True))


@pytest.mark.usefixtures("late")
@pytest.mark.parametrize(
    "section", [{}, {"host": "16MiB"}, {"verify": "off", "engine": "python"}, {"prefetch": 0}], ids=str
)
def test_bits_are_equal_and_what_overflows_is_counted(section: dict[str, Any], tmp_path: Path) -> None:
    tensors = saved_tensors()
    with running(tmp_path, **section) as runtime:
        for _ in range(2):
            with runtime.step():
                loss, came = forward(runtime, tensors)
                with runtime.backward():
                    loss.backward()
            assert_same(came, tensors)
        found = runtime.statistics().offload
        assert found.encoded_bytes > 0 and found.overflowed_bytes == 2 * OVERFLOWING


@pytest.mark.parametrize("copied", [True, False])
@pytest.mark.parametrize("section", [{}, {"host": "16MiB"}], ids=str)
def test_backward_gets_the_bits_where_the_host_does_not_know_yet_what_overflowed(
    section: dict[str, Any], copied: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1. no store has been seen to end; what departed is in pinned memory, where it is `copied`, or on the way; 2. backward."""
    tensors = saved_tensors()
    with emulated_cuda.settings(delay_ms=0 if copied else 5, h2d_gbps=1, d2h_gbps=1 if copied else 0.05):
        with running(tmp_path, **section) as runtime:
            pool = runtime.offload.store.pool
            pool.hold(reads=False)
            with monkeypatch.context() as unseen:
                unseen.setattr(runtime.offload.engine.mover, "reap", lambda: None)
                loss, came = forward(runtime, tensors)
            regions = [
                region for region in runtime.offload.tape(0, -1).regions if region.transfer.spare_bytes
            ]
            assert any(not region.on_device for region in regions), "something has departed"
            del regions
            if copied:
                torch.cuda.synchronize()
            loss.backward()
            torch.cuda.synchronize()
            pool.release()
            assert_same(came, tensors)
            assert section or runtime.statistics().offload.loaded_bytes == 0


@pytest.mark.parametrize("known", [True, False])
def test_what_stays_on_the_device_encoded_has_its_bits(known: bool, tmp_path: Path) -> None:
    """Also where backward comes before the host knows what overflowed."""
    tensors = saved_tensors()
    with emulated_cuda.settings(delay_ms=0 if known else 20), running(tmp_path) as runtime:
        offload_parts(runtime, 1.0, tier="device", codec="exact")
        loss, came = forward(runtime, tensors)
        if known:
            torch.cuda.synchronize()
            runtime.engine.drain()
            found = runtime.statistics().offload
            halves = sum(one.nbytes for one in tensors if one.dtype is torch.float16)
            assert found.kept_encoded_bytes == sum(one.nbytes for one in tensors) - OVERFLOWING - halves
            assert found.overflowed_bytes == OVERFLOWING
        loss.backward()
        torch.cuda.synchronize()
        assert_same(came, tensors)
        assert runtime.statistics().store.ssd_bytes_written == 0


def test_what_overflowed_survives_a_drive_that_fails(tmp_path: Path) -> None:
    """Written to another slot, and where there is none, back on the device."""
    tensors = saved_tensors()
    for faults, capacity in ((Faults(fail_writes=frozenset({2, 4, 5})), "1GiB"), (None, "128KiB")):
        with running(tmp_path, faults, capacity=capacity) as runtime:
            loss, came = forward(runtime, tensors)
            torch.cuda.synchronize()
            loss.backward()
            assert_same(came, tensors)
            found = runtime.statistics().offload
            assert found.failed_stores or found.kept_full_bytes


def test_what_overflowed_on_a_drive_that_is_full_goes_to_the_host_tier(tmp_path: Path) -> None:
    """There it begins where the slot does, and not behind a header, as it would after a copy of the device."""
    tensors = [any_bits(COUNT, torch.bfloat16, seed) for seed in range(3)]
    with running(tmp_path, capacity="32KiB", host="16MiB", prefetch=0) as runtime:
        offload_parts(runtime, 1.0, tier="ssd")
        for tensor in tensors:
            loss, came = forward(runtime, [tensor])
            assert eventually(lambda: not runtime.statistics().offload.in_flight_bytes)
            loss.backward()
            assert_same(came, [tensor])
        found = runtime.statistics()
        assert found.store.host_bytes_read == 3 * tensors[0].nbytes and found.store.ssd_bytes_written


@pytest.mark.skipif(INTERPRETED, reason="the interpreter waits")
def test_the_host_waits_for_nothing(tmp_path: Path) -> None:
    tensors = [tensor.cuda() for tensor in saved_tensors()]
    with running(tmp_path) as runtime:
        came: list[torch.Tensor] = []
        for _ in range(2):
            torch.cuda.synchronize()
            with emulated_cuda.settings(delay_ms=2):
                y = torch.ones(4, device="cuda", requires_grad=True)
                before = emulated_cuda.counts()
                with runtime.forward():
                    for tensor in tensors:
                        y = SaveGiven.apply(y, tensor, came)
                assert emulated_cuda.host_waits(before, emulated_cuda.counts(), ("ssdtrain-",)) == {}
            y.sum().backward()
        assert runtime.statistics().offload.overflowed_bytes


@pytest.mark.parametrize(
    ("link", "amount", "tried"),
    [((1.0, 1.0), "all", True), ((1.0, 1.0), "auto", False), ((1e15, 1e15), "all", False)],
)
def test_auto_tries_the_codec_where_the_link_is_slower_and_may_be_waited_for(
    link: tuple[float, float], amount: str, tried: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here plain torch is measured, as if it were kernels. For the trial itself see tests/simulation/test_codec_trial.py."""
    monkeypatch.setattr(kernels, "compiled", lambda: True)
    monkeypatch.setattr(free_codec, "CODEC_PROBE", 1 << 16)
    monkeypatch.setattr(CudaDevice, "link_bandwidth", lambda device: link)
    tensors = [torch.randn(2 << 20).to(torch.bfloat16), torch.randn(COUNT)]
    with running(tmp_path, codec="auto", amount=amount) as runtime:
        loss, came = forward(runtime, tensors)
        loss.backward()
        assert_same(came, tensors)
        assert ("exact is tried" in runtime.offload.description()) is tried
        assert runtime.statistics().offload.encoded_bytes == 0


@pytest.mark.usefixtures("late")
def test_steps_are_proven_to_the_bit(tmp_path: Path) -> None:
    tensors = saved_tensors()
    with running(tmp_path, prove_steps=2, host="128KiB") as runtime:
        for _ in range(2):
            with runtime.step():
                loss, came = forward(runtime, tensors)
                loss.backward()
            assert_same(came, tensors)
