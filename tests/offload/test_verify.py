"""`offload.verify`: a drive that returns other bytes than were written is an error that says where; `offload.prove_steps`:
so is a saved tensor that comes back with another bit, whoever changed it."""

from __future__ import annotations

import ctypes
import logging
import os
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from ssdtrain.config import ConfigError, load_config
from ssdtrain.offload.checks.proof import ProofFailed
from ssdtrain.offload.transfer.state import State
from ssdtrain.runtime import Runtime
from ssdtrain.storage import CorruptedData, SpillStore, drive_of
from tests.offload.conftest import VARIANTS, MakeRuntime, Variant, stored_forward

ON_DRIVES = [v for v in VARIANTS if v.name in ("c", "python", "staged", "two-drives")]
SIZE = 64


def model() -> nn.Module:
    return nn.Sequential(*(nn.Sequential(nn.Linear(SIZE, SIZE), nn.GELU()) for _ in range(3)))


def attached(runtime: Runtime) -> nn.Module:
    made = model()
    runtime.register(made)
    return made


def store_of(runtime: Runtime) -> SpillStore:
    return runtime.offload.store


def flip(runtime: Runtime, region: Any, place: int | None = None) -> None:
    """Change one bit of a region where it is stored: of a byte of it, or else at a place that no sample of words sees."""
    store = store_of(runtime)
    queue, offset, _ = region.transfer.slot._extents[:3]
    at = offset + region.transfer.page_offset + (region.nbytes // 2 + 3 if place is None else place)
    path = f"/proc/self/fd/{store._slabs[queue].fd}"
    fd = os.open(path, os.O_RDWR)  # without O_DIRECT
    try:
        [byte] = os.pread(fd, 1, at)
        os.pwrite(fd, bytes([byte ^ 0x10]), at)
        os.fsync(fd)
    finally:
        os.close(fd)


def backward(runtime: Runtime, loss: torch.Tensor) -> None:
    with runtime.backward():
        loss.backward()


@pytest.mark.parametrize("codec", ["off", "exact"])
@pytest.mark.parametrize("variant", ON_DRIVES, ids=lambda variant: variant.name)
def test_a_bit_that_changed_on_the_drive_is_an_error_that_names_tensor_and_directory(
    make_runtime: MakeRuntime, variant: Variant, codec: str
) -> None:
    runtime = make_runtime(variant, verify="all", prefetch=0, codec=codec)
    net = attached(runtime)
    with stored_forward(runtime) as tape:
        loss = net(torch.randn(256, SIZE)).square().sum()
    region = [one for one in tape.regions if one.transfer.state is State.STORED][2]
    flip(runtime, region)
    with pytest.raises(CorruptedData) as caught:
        backward(runtime, loss)
    error, text = caught.value, str(caught.value)
    assert "the data came back changed" in text and f"at offset {error.offset} of the spill file" in text
    assert (error.nbytes, error.offset) == (region.transfer.stored_bytes, region.transfer.slot._extents[1])
    assert drive_of(str(error.filename)).device in text
    assert f"region {region.index} of chunk 0" in text
    assert 'parameter "1.0.' in text or 'parameter "0.0.' in text or 'parameter "2.0.' in text
    assert store_of(runtime).metrics.drives[region.transfer.slot.drive].path in text
    assert str(pickle.loads(pickle.dumps(caught.value))) == text
    del loss, tape, region, caught, error


@pytest.mark.parametrize("verify", ["off", "all"])
@pytest.mark.parametrize("variant", ON_DRIVES, ids=lambda variant: variant.name)
def test_a_changed_word_that_is_sampled_is_not_blamed_on_the_users_code(
    make_runtime: MakeRuntime, variant: Variant, verify: str
) -> None:
    """The first word is always sampled. Without checksums the error names both causes; with them, the one that it was."""
    runtime = make_runtime(variant, verify=verify, prefetch=0)
    net = attached(runtime)
    with stored_forward(runtime) as tape:
        loss = net(torch.randn(256, SIZE)).square().sum()
    region = [one for one in tape.regions if one.transfer.state is State.STORED][2]
    flip(runtime, region, 0)
    with pytest.raises(CorruptedData if verify == "all" else RuntimeError) as caught:
        backward(runtime, loss)
    text = str(caught.value)
    directory = store_of(runtime).metrics.drives[region.transfer.slot.drive].path
    assert directory in text and f"offset {region.transfer.slot._extents[1]}" in text
    assert "dmesg" in text and "PyTorch does not see" not in text
    del loss, tape, region, caught


def run_steps(runtime: Runtime, net: nn.Module, steps: int) -> None:
    for _ in range(steps):
        with runtime.step():
            with stored_forward(runtime):
                loss = net(torch.randn(256, SIZE)).square().sum()
            backward(runtime, loss)


@pytest.mark.parametrize("variant", ON_DRIVES, ids=lambda variant: variant.name)
@pytest.mark.parametrize("verify", ["off", "all"])
def test_what_comes_back_is_verified_as_the_config_says(
    make_runtime: MakeRuntime, variant: Variant, verify: str
) -> None:
    runtime = make_runtime(variant, verify=verify)
    run_steps(runtime, attached(runtime), 20)
    found = runtime.statistics()
    assert found.offload.loaded_bytes
    share = found.offload.verified_bytes / found.offload.loaded_bytes
    assert share == {"off": 0, "all": 1}[verify]


def test_all_is_the_default() -> None:
    assert load_config({"offload": {"directories": "/nvme"}}).offload.verify == "all"


def flipped_reads(runtime: Runtime, which: Callable[[int], bool]) -> None:
    """From now on the store flips a bit of what it reads."""
    store = store_of(runtime)
    read, count = store.read, 0

    def read_wrong(slot: Any, address: int, *, defer: bool = False) -> Any:
        nonlocal count
        operation = read(slot, address)
        operation.wait(60)
        count += 1
        if which(count):
            memory = torch.frombuffer((ctypes.c_uint8 * slot.nbytes).from_address(address), dtype=torch.uint8)
            memory[slot.nbytes // 2] ^= 1
        return operation

    store.read = read_wrong


@pytest.mark.parametrize("codec", ["off", "exact"])
@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.name)
def test_a_store_that_flips_a_bit_is_found_with_the_name_of_the_module(
    make_runtime: MakeRuntime, variant: Variant, codec: str
) -> None:
    """What is compared is decoded."""
    runtime = make_runtime(variant, prove_steps=2, verify="off", codec=codec)
    net = attached(runtime)
    flipped_reads(runtime, lambda count: count == 2)
    with runtime.step():
        with stored_forward(runtime):
            loss = net(torch.randn(256, SIZE)).square().sum()
        with pytest.raises(
            ProofFailed, match=r'saved by module "\d\.\d".*1 of \d+ bytes differ, the first at \d+'
        ):
            backward(runtime, loss)
    del loss


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.name)
def test_a_proof_ends_after_its_steps_and_says_what_it_saw(
    make_runtime: MakeRuntime, variant: Variant, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "ssdtrain")
    runtime = make_runtime(variant, prove_steps=2)
    net = attached(runtime)
    run_steps(runtime, net, 3)
    assert runtime.engine.prover is None
    [line] = [record.getMessage() for record in caplog.records if "prove_steps" in record.getMessage()]
    assert "first 2 steps" in line and " 0 saved tensors" not in line


def test_a_proof_needs_a_codec_that_keeps_bits() -> None:
    with pytest.raises(ConfigError, match="prove_steps"):
        load_config({"offload": {"directories": "/nvme", "prove_steps": 1, "codec": "int8"}})
