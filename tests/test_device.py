"""The device layer where it can be looked at without a GPU."""

from __future__ import annotations

import logging
from collections import deque
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ssdtrain import device
from ssdtrain.config import load_config
from ssdtrain.device import cuda
from ssdtrain.device import runtime as cuda_runtime
from ssdtrain.device.streams import PythonStreams
from ssdtrain.runtime import Runtime


def test_an_untested_torch_is_said_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    for version, lines in (("2.13.0+cpu", 0), ("2.7.1", 1)):
        monkeypatch.setattr(torch, "__version__", version)
        device.warn_of_untested_torch.cache_clear()
        caplog.clear()
        with caplog.at_level(logging.WARNING, "ssdtrain"):
            device.warn_of_untested_torch()
            device.warn_of_untested_torch()
        assert len(caplog.records) == lines
    device.warn_of_untested_torch.cache_clear()


@pytest.mark.parametrize("name", ["xpu:1", "hpu", "mtia:0", "meta"])
def test_other_devices_are_rejected_by_name(name: str) -> None:
    with pytest.raises(ValueError, match=f"device {name} is not supported yet: .* Leave out the sections"):
        device.device_for(torch.device(name))


def test_rocm_is_rejected_by_name_although_torch_calls_its_devices_cuda(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.version, "hip", "7.1.2")
    with pytest.raises(ValueError, match=r"device cuda:0 \(ROCm 7\.1\.2\) is not supported yet"):
        device.device_for(torch.device("cuda", 0))


def test_a_runtime_for_such_a_device_is_an_error_at_start(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="device xpu:0 is not supported yet"):
        Runtime(load_config({"offload": {"directories": str(tmp_path)}}), torch.device("xpu", 0))


def test_load_targets_are_not_filled_where_algorithms_are_deterministic() -> None:
    """The fill would run on the load stream at once, over memory that the compute stream may still read."""
    filled: list[str] = []

    class Fills(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            found = func(*args, **(kwargs or {}))
            if "fill" in str(func) or ("empty" in str(func) and found.numel()):
                filled.append(str(func))
            return found

    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        with Fills():
            target = device.CpuDevice().load_target(1 << 20)
    finally:
        torch.use_deterministic_algorithms(before)
    assert target.dtype == torch.uint8 and target.shape == (1 << 20,)
    assert not filled


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_copies_to_and_from_a_device_wait_for_what_made_the_data() -> None:
    layer = device.CudaDevice(torch.device("cuda", 0))
    host = torch.empty(1 << 24, dtype=torch.uint8, pin_memory=True)
    source = torch.randint(0, 255, (1 << 24,), device="cuda").to(torch.uint8)
    event = layer.copy_to_host(source.data_ptr(), host.data_ptr(), host.numel())
    assert event is not None and layer.event_handle(event)
    event.synchronize()
    assert torch.equal(host, source.cpu())
    target = torch.empty_like(source)
    copied = layer.copy_to_device(host.data_ptr(), target.data_ptr(), host.numel())
    assert copied is not None
    layer.wait(copied)
    assert torch.equal(target, source)
    assert set(layer.event_functions()) == {"event_query", "set_device", "exchange_capture_mode", "device"}


def test_a_failed_pinning_does_not_leave_its_error_for_the_next_kernel_launch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The caller may do without the memory; torch would raise the error that the runtime remembers in the user's forward."""
    remembered: list[int] = []

    class Runtime:
        def __init__(self, code: int) -> None:
            self.code = code

        def _answer(self, *arguments: int) -> int:
            if self.code:
                remembered.append(self.code)
            return self.code

        cudaHostRegister = cudaHostUnregister = _answer

        def cudaGetLastError(self) -> int:
            return remembered.pop()

    def check(code: int) -> None:
        if code:
            raise RuntimeError(f"code {code}")

    runtime = Runtime(0)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    current: list[Any] = []

    def make_current(chosen: torch.device) -> Any:
        current.append(chosen)
        return nullcontext()

    monkeypatch.setattr(torch.cuda, "device", make_current)
    monkeypatch.setattr(device.CudaDevice, "_wait_for_copies", lambda self: None)
    monkeypatch.setattr(torch.cuda, "check_error", check)
    monkeypatch.setattr(cuda_runtime, "loaded_cuda_runtime", lambda: runtime)
    layer = object.__new__(device.CudaDevice)
    layer.device = torch.device("cuda", 0)
    register = layer.host_register()
    unregister = register(4096, 4096)
    assert current == [layer.device], "else a context appears on another one"
    runtime.code = 2
    for call in (lambda: register(8192, 4096), unregister):
        with pytest.raises(RuntimeError, match="code 2"):
            call()
        assert not remembered

    def unloaded() -> None:
        raise OSError("no libcudart")

    monkeypatch.setattr(cuda_runtime, "loaded_cuda_runtime", unloaded)
    with pytest.raises(RuntimeError, match="code 2"):
        register(8192, 4096)


def test_the_numa_node_is_that_of_the_devices_pci_slot(tmp_path: Path) -> None:
    slot = tmp_path / "bus/pci/devices/0000:1b:00.0"
    slot.mkdir(parents=True)
    properties = SimpleNamespace(pci_domain_id=0, pci_bus_id=0x1B, pci_device_id=0)
    for written, node in (("1\n", 1), ("-1\n", None)):  # -1: the firmware does not say
        (slot / "numa_node").write_text(written)
        assert cuda_runtime.numa_node_of(properties, tmp_path) == node
    assert (
        cuda_runtime.numa_node_of(
            SimpleNamespace(pci_domain_id=0, pci_bus_id=0x1C, pci_device_id=0), tmp_path
        )
        is None
    )
    assert cuda_runtime.numa_node_of(SimpleNamespace(), tmp_path) is None, "an older torch"


class NeverPasses:
    def query(self) -> bool:
        return False

    def synchronize(self) -> None:
        raise AssertionError("nothing waits for it without a limit")


class NeverPass(PythonStreams):
    """Streams on which nothing ends."""

    def __init__(self) -> None:
        super().__init__(0, None)

    def record(self, stream: int) -> NeverPasses:
        return NeverPasses()


def test_memory_that_the_device_may_still_use_stays_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    """A collective whose peer is gone never ends, and with it the end of the process would not either."""
    unpinned: list[int] = []

    class Runtime:
        cudaHostRegister = staticmethod(lambda *arguments: 0)
        cudaHostUnregister = staticmethod(unpinned.append)

    monkeypatch.setattr(torch.cuda, "cudart", Runtime)
    monkeypatch.setattr(torch.cuda, "device", lambda chosen: nullcontext())
    monkeypatch.setattr(cuda, "raw_current_stream", lambda index: 0)
    monkeypatch.setattr(cuda, "UNPIN_TIMEOUT", 0.02)
    layer = object.__new__(device.CudaDevice)
    layer.device = torch.device("cuda", 0)
    layer._index, layer._store, layer._load, layer._streams = 0, 1, 2, NeverPass()
    layer._recent = deque()
    unregister = layer.host_register()(4096, 4096)
    with pytest.raises(TimeoutError, match="a collective whose peer is gone"):
        unregister()
    assert not unpinned


def test_of_several_cuda_runtimes_the_one_that_torch_is_linked_with_is_taken() -> None:
    def line(path: str) -> str:
        return f"7f00-7f01 r-xp 00000000 08:01 123 {path}"

    libraries = [
        "/usr/lib/libc.so.6",
        "/other/libcudart.so.13",
        "/torch/lib/libc10_cuda.so",
        "/cu12/libcudart.so.12",
    ]
    found = cuda_runtime._cuda_runtime_path
    assert found("\n".join(map(line, libraries))) == "/torch/lib/libc10_cuda.so"
    assert found("\n".join(map(line, libraries[:2]))) == "/other/libcudart.so.13"
    with pytest.raises(OSError, match="linked statically"):
        found(line(libraries[0]))
