"""The allocator's peak with the codec `exact` is that without, also where the link is slower than the model.

The codec's C runs on the device's memory in place of Triton's kernels: the reference in plain torch takes memory of its own.
"""

from __future__ import annotations

import ctypes
import gc
from pathlib import Path

import emulated_cuda
import pytest
import torch

import ssdtrain
from benchmarks.emulated_device import digest, model_of, tokens_of
from ssdtrain.codecs import kernels, native
from ssdtrain.codecs.base import HeaderFlags, Key
from ssdtrain.codecs.exact import Exact, _coded
from ssdtrain.config.units import MiB
from ssdtrain.device.cuda import CudaDevice
from ssdtrain.offload import free_codec

SHAPE = {"layers": 4, "hidden": 256, "heads": 4, "sequence": 256, "batch": 16, "vocabulary": 1572}
"""Logits are larger than all that may be on its way off the device, as those of large models are."""


def on_host(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a device's tensor, when its stream has passed all before."""
    torch.cuda.current_stream().synchronize()
    host_address = emulated_cuda.runtime().emulated_host_address
    host_address.restype, host_address.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
    memory = (ctypes.c_uint8 * tensor.nbytes).from_address(host_address(tensor.data_ptr()))
    return torch.frombuffer(memory, dtype=tensor.dtype)


def behind(values: torch.Tensor, body: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What whole groups leave of values, which is copied, and its place."""
    coded, nbytes = _coded(values.numel(), values.dtype)
    rest = on_host(values)[coded:].view(torch.uint8)
    return rest, on_host(body)[nbytes : nbytes + rest.numel()]


@pytest.fixture(autouse=True)
def codec_in_c(monkeypatch: pytest.MonkeyPatch) -> None:
    def encode(codec: Exact, flat: torch.Tensor, body: torch.Tensor, key: Key | None) -> HeaderFlags:
        rest, place = behind(flat, body)
        place.copy_(rest)
        return native.exact_encode(on_host(flat)[: _coded(flat.numel(), flat.dtype)[0]], on_host(body))

    def decode(codec: Exact, body: torch.Tensor, out: torch.Tensor, accumulate: bool) -> None:
        rest, place = behind(out, body)
        rest.copy_(place)
        native.exact_decode(on_host(body), on_host(out)[: _coded(out.numel(), out.dtype)[0]])

    monkeypatch.setattr(Exact, "_encode", encode)
    monkeypatch.setattr(Exact, "_decode", decode)


def trained(codec: str | None, directory: Path, steps: int = 3) -> tuple[int, str]:
    """The peak of all steps but two, in bytes, and the weights' digest. `codec` None: the default, whose trial they are."""
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    model = model_of("gpt", SHAPE).bfloat16()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    section = {"directories": str(directory), "amount": "all", "min_bytes": "64KiB", "buffer": "256MiB"}
    if codec is not None:
        section["codec"] = codec
    peak = 0
    with ssdtrain.attach(model, {"offload": section, "report": {"interval": 0}}) as runtime:
        for step in range(steps):
            tokens = tokens_of(SHAPE, step, 0)
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            model(tokens, tokens).backward()
            torch.cuda.synchronize()
            peak = max(peak, torch.cuda.max_memory_allocated() if step >= 2 else 0)
            optimizer.step()
            optimizer.zero_grad()
        found = runtime.statistics().offload
        if codec is None:
            assert "with it" in runtime.offload.decisions()  # type: ignore[union-attr]
            return peak - before, digest(list(model.parameters()))
        assert (codec == "off") == (found.uncoded_bytes == 0)
    return peak - before, digest(list(model.parameters()))


@pytest.mark.parametrize("gbps", [4.0, 0.1])
def test_the_peak_is_that_without_a_codec(gbps: float, tmp_path: Path) -> None:
    with emulated_cuda.settings(delay_ms=1.0, h2d_gbps=gbps, d2h_gbps=gbps):
        plain, weights = trained("off", tmp_path)
        peak, others = trained("exact", tmp_path)
    assert others == weights
    assert peak <= 1.02 * plain, f"{peak / MiB:.1f} MiB, {plain / MiB:.1f} without"


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Times are none of a GPU, and count for nothing here: peaks alone decide."""
    monkeypatch.setattr(kernels, "compiled", lambda: True)
    monkeypatch.setattr(free_codec, "_seconds", lambda *_: (1e-15, 1e-15))
    monkeypatch.setattr(free_codec, "PRICED_STEPS", 1)
    monkeypatch.setattr(free_codec, "MINIMUM_GAIN", -1e9)
    monkeypatch.setattr(CudaDevice, "link_bandwidth", lambda device: (1.0, 1.0))


@pytest.mark.usefixtures("tried")
def test_the_default_tries_it_and_changes_no_bit_and_no_peak(tmp_path: Path) -> None:
    steps = free_codec.UNTRIED_STEPS + 1 + len(free_codec.TRIAL) + 2
    with emulated_cuda.settings(delay_ms=0.0, h2d_gbps=0.5, d2h_gbps=0.5):
        plain, weights = trained("off", tmp_path, steps)
        peak, others = trained(None, tmp_path, steps)
    assert others == weights
    assert peak <= 1.02 * plain, f"{peak / MiB:.1f} MiB, {plain / MiB:.1f} without"


@pytest.mark.usefixtures("tried")
def test_there_is_no_trial_where_the_device_is_nearly_full(tmp_path: Path) -> None:
    model = model_of("gpt", SHAPE).bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    section = {"directories": str(tmp_path), "amount": "all", "min_bytes": "64KiB", "buffer": "256MiB"}
    with (
        emulated_cuda.settings(delay_ms=0.0, h2d_gbps=0.5, d2h_gbps=0.5),
        ssdtrain.attach(model, {"offload": section, "report": {"interval": 0}}) as runtime,
    ):
        others = None
        for step in range(free_codec.UNTRIED_STEPS + 2):
            tokens = tokens_of(SHAPE, step, 0)
            model(tokens, tokens).backward()
            torch.cuda.synchronize()
            optimizer.step()
            optimizer.zero_grad()
            if others is None:
                free, _ = torch.cuda.mem_get_info()
                others = torch.empty(free - 8 * MiB, dtype=torch.uint8, device="cuda")
            assert runtime.engine.coding.rule is None
        assert "are free" in runtime.offload.decisions()  # type: ignore[union-attr]
