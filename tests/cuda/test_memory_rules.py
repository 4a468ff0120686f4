"""Memory: of the device, pinned, pageable, and what copies between them do to the host."""

from __future__ import annotations

import ctypes
import mmap
import signal
import time

import emulated_cuda
import numpy as np
import torch

from tests.cuda import calls
from tests.cuda.calls import POINTER, allocate, call, new_stream, ok, sleep

MEBIBYTE = 1 << 20


def pages(size: int) -> tuple[mmap.mmap, int]:
    memory = mmap.mmap(-1, size)
    return memory, ctypes.addressof(ctypes.c_char.from_buffer(memory))


def test_the_host_cannot_touch_memory_of_the_device() -> None:
    read = calls.process(
        "import ctypes, torch; ctypes.string_at(torch.zeros(4, device='cuda').data_ptr(), 4)"
    )
    assert read.returncode == -signal.SIGSEGV


def test_fresh_memory_is_poisoned(device: torch.device) -> None:
    torch.cuda.empty_cache()
    fresh = torch.empty(5 * MEBIBYTE, dtype=torch.uint8, device=device)
    assert bool((fresh == 0xCB).all())
    pinned = POINTER()
    ok("cudaHostAlloc", ctypes.byref(pinned), 4096, 0)
    assert set(ctypes.string_at(pinned, 4096)) == {0xCB}
    ok("cudaFreeHost", pinned)


def test_memory_has_an_end() -> None:
    done = calls.process("""
import os
os.environ["EMULATED_MEMORY_GB"] = "0.1"
import torch
kept = torch.empty(60 << 20, dtype=torch.uint8, device="cuda")
try:
    torch.empty(60 << 20, dtype=torch.uint8, device="cuda")
except torch.OutOfMemoryError as error:
    print("out of memory")
del kept  # the cache gives it back and there is room
torch.empty(80 << 20, dtype=torch.uint8, device="cuda")
free, total = torch.cuda.mem_get_info()
print(total, free < 20_000_000)
""")
    assert done.stdout.split("\n")[:2] == ["out of memory", "100000000 True"], done.stderr


def test_free_waits_for_the_device_and_takes_only_what_was_allocated() -> None:
    address = allocate(MEBIBYTE)
    stream = new_stream()
    sleep(100, stream)
    assert call("cudaFree", address + 512) == "cudaErrorInvalidValue"
    ok("cudaFree", address)
    ok("cudaStreamQuery", stream)
    assert call("cudaFree", address) == "cudaErrorInvalidValue"
    ok("cudaFree", None)


def test_memory_in_the_order_of_a_stream() -> None:
    stream, address = new_stream(), POINTER()
    before = free_bytes()
    ok("cudaMallocAsync", ctypes.byref(address), 32 * MEBIBYTE, stream)
    assert free_bytes() == before - 32 * MEBIBYTE
    sleep(100, stream)
    ok("cudaFreeAsync", address, stream)
    assert free_bytes() == before - 32 * MEBIBYTE, "the stream has not come to it"
    ok("cudaStreamSynchronize", stream)
    assert free_bytes() == before


def free_bytes() -> int:
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    ok("cudaMemGetInfo", ctypes.byref(free), ctypes.byref(total))
    return free.value


def test_pinning_what_overlaps_pinned_memory_is_refused() -> None:
    memory, address = pages(4 * 4096)
    ok("cudaHostRegister", address + 4096, 4096, 0)
    for start, size in ((address, 8192), (address + 4096, 4096), (address + 4096, 100), (address, 4 * 4096)):
        assert call("cudaHostRegister", start, size, 0) == "cudaErrorHostMemoryAlreadyRegistered"
    ok("cudaHostRegister", address, 4096, 0)
    assert call("cudaHostUnregister", address + 100) == "cudaErrorHostMemoryNotRegistered"
    ok("cudaHostUnregister", address)
    ok("cudaHostUnregister", address + 4096)
    assert call("cudaHostUnregister", address) == "cudaErrorHostMemoryNotRegistered"
    assert call("cudaHostRegister", address, 0, 0) == "cudaErrorInvalidValue"
    assert len(memory) == 4 * 4096


def test_unpinning_waits_for_the_device() -> None:
    memory, address = pages(4096)
    ok("cudaHostRegister", address, 4096, 0)
    stream = new_stream()
    sleep(100, stream)
    ok("cudaHostUnregister", address)
    ok("cudaStreamQuery", stream)
    assert len(memory) == 4096


def test_copies_of_pinned_memory_leave_the_host_alone(device: torch.device) -> None:
    host = torch.arange(1000.0).pin_memory()
    back = torch.empty(1000, pin_memory=True)
    x = torch.empty(1000, device=device)
    torch.cuda.synchronize()
    before = emulated_cuda.counts()
    sleep(100)
    x.copy_(host, non_blocking=True)
    back.copy_(x, non_blocking=True)
    assert not emulated_cuda.host_waits(before)
    host.fill_(7)  # too early: the copy has not begun
    torch.cuda.synchronize()
    assert bool((back == 7).all())
    assert emulated_cuda.counts()["bytes:h2d"] - before.get("bytes:h2d", 0) == 4000


def test_a_copy_from_pageable_memory_takes_the_bytes_at_once(device: torch.device) -> None:
    host = torch.arange(1000.0)
    x = torch.empty(1000, device=device)
    torch.cuda.synchronize()
    before = emulated_cuda.counts()
    sleep(100)
    x.copy_(host, non_blocking=True)
    assert not emulated_cuda.host_waits(before)
    expected = host.clone()
    host.fill_(7)
    assert torch.equal(x.cpu(), expected)
    assert emulated_cuda.counts()["pageable copies"] - before.get("pageable copies", 0) == 2


def test_a_device_that_reads_pageable_memory_itself_reads_it_when_the_copy_runs(device: torch.device) -> None:
    host = torch.arange(1000.0)
    x = torch.empty(1000, device=device)
    torch.cuda.synchronize()
    with emulated_cuda.settings(pageable_late=1):
        sleep(100)
        x.copy_(host, non_blocking=True)
    host.fill_(7)  # too early
    assert bool((x.cpu() == 7).all())


def test_a_copy_to_pageable_memory_returns_when_it_has_ended(device: torch.device) -> None:
    x = torch.arange(1000.0, device=device)
    host = torch.zeros(1000)
    torch.cuda.synchronize()
    before = emulated_cuda.counts()
    sleep(100)
    host.copy_(x, non_blocking=True)
    assert host.tolist() == list(range(1000))
    assert sum(emulated_cuda.host_waits(before).values()) == 1


def test_a_copy_must_lie_within_one_registration_and_go_the_way_it_says() -> None:
    address = allocate(3 * 4096)
    memory, host = pages(2 * 4096)
    ok("cudaHostRegister", host, 4096, 0)
    ok("cudaHostRegister", host + 4096, 4096, 0)
    stream = new_stream()
    ok("cudaMemcpyAsync", address, host, 4096, calls.TO_DEVICE, stream)
    assert call("cudaMemcpyAsync", address, host, 8192, calls.TO_DEVICE, stream) == "cudaErrorInvalidValue"
    assert call("cudaMemcpyAsync", address, host, 4096, calls.FROM_DEVICE, stream) == "cudaErrorInvalidValue"
    assert (
        call("cudaMemcpyAsync", address + 8192, host, 8192, calls.ANY_DIRECTION, stream)
        == "cudaErrorInvalidValue"
    )
    ok("cudaHostUnregister", host)
    ok("cudaHostUnregister", host + 4096)
    ok("cudaFree", address)
    assert len(memory) == 8192


def test_each_direction_has_its_bandwidth(device: torch.device) -> None:
    host = torch.zeros(10 * MEBIBYTE, dtype=torch.uint8, pin_memory=True)
    x = torch.zeros(10 * MEBIBYTE, dtype=torch.uint8, device=device)
    torch.cuda.synchronize()
    with emulated_cuda.settings(h2d_gbps=0.5, d2h_gbps=0.1):
        times = {}
        for name, target, source in (("h2d", x, host), ("d2h", host, x)):
            begin = time.monotonic()
            target.copy_(source, non_blocking=True)
            torch.cuda.synchronize()
            times[name] = time.monotonic() - begin
    assert times["h2d"] >= 0.0209 and times["d2h"] >= 0.104, "no copy is faster than its bandwidth"


def test_kinds_of_addresses(device: torch.device) -> None:
    class Attributes(ctypes.Structure):
        _fields_ = [("type", ctypes.c_int), ("device", ctypes.c_int), ("on_device", POINTER), ("on_host", POINTER),
                    ("reserved", ctypes.c_long * 8)]  # fmt: skip

    def kind(address: int) -> int:
        attributes = Attributes()
        ok("cudaPointerGetAttributes", ctypes.byref(attributes), address)
        return attributes.type

    x = torch.zeros(4, device=device)
    assert [kind(tensor.data_ptr()) for tensor in (torch.zeros(4), torch.zeros(4).pin_memory(), x)] == [
        0,
        1,
        2,
    ]
    assert torch.zeros(4).pin_memory().is_pinned() and not torch.zeros(4).is_pinned()


def test_expandable_segments_map_and_unmap_physical_memory(device: torch.device) -> None:
    torch.cuda.empty_cache()
    torch._C._accelerator_setAllocatorSettings("expandable_segments:True")
    try:
        mapped = emulated_cuda.counts().get("cuMemMap", 0)
        before = free_bytes()
        tensors = [torch.full((5 * MEBIBYTE,), float(number), device=device) for number in range(4)]
        assert emulated_cuda.counts()["cuMemMap"] > mapped and free_bytes() <= before - 80 * MEBIBYTE
        assert [tensor.mean().item() for tensor in tensors] == [0, 1, 2, 3]
        del tensors
        torch.cuda.empty_cache()
        assert free_bytes() >= before - 4 * MEBIBYTE
    finally:
        torch._C._accelerator_setAllocatorSettings("expandable_segments:False")


def test_the_caching_allocator_reuses_memory_in_the_order_of_one_stream(device: torch.device) -> None:
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        x = torch.ones(MEBIBYTE, device=device)
    address = x.data_ptr()
    x.record_stream(torch.cuda.current_stream())
    torch.cuda.current_stream().wait_stream(side)
    sleep(100)
    y = x * 2
    del x
    with torch.cuda.stream(side):
        z = torch.zeros(MEBIBYTE, device=device)
    assert z.data_ptr() != address, "the other stream still uses it"
    assert y.sum().item() == 2 * MEBIBYTE


def test_numpy_arrays_and_the_device(device: torch.device) -> None:
    array = np.arange(6.0).reshape(2, 3)
    assert np.array_equal(torch.from_numpy(array).to(device).t().cpu().numpy(), array.T)
