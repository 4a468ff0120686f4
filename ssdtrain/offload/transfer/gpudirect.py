"""Device tensors between the device and the drives by GPUDirect Storage, where it is faster than staging buffers.

Note: [Device memory of transfers]
A store reads the tensor itself: the tensor stays until its write has ended, so `offload.in_flight` is device memory here, and the
peak depends on the drive. A load fills the memory that backward gets: what is read ahead is device memory, so its default is that
of the CPU (`Prefetcher.size`). A write begins when the event of the stream that made the tensor has passed, a read when all work
has that used its memory before (`ssdtrain.offload.transfer.targets`) and what is queued on the load stream.

No thread of the host sees these bytes, so it is used with `offload.verify: "off"` only. Slots of the host tier go through staging
buffers. After an error of cuFile everything does, also what was written without: its bytes are at the same place. Whether the
drive is faulty shows then.
"""

from __future__ import annotations

import logging
import time

import torch

from ssdtrain.config import OffloadConfig
from ssdtrain.config.units import MiB
from ssdtrain.device import Device
from ssdtrain.offload.pacing.closing import wait_quietly
from ssdtrain.offload.tensors.region import Region
from ssdtrain.offload.transfer.staged import StagedTransfer
from ssdtrain.offload.transfer.state import Arrival, Read, Write
from ssdtrain.offload.transfer.transfer import address_of
from ssdtrain.storage import Arena, Operation, Slot, SpillStore, StoreFull, gpudirect

logger = logging.getLogger("ssdtrain")

PROBE = 8 * MiB  # bytes of one transfer of the probe
TRANSFERS = 4  # at once
TIMEOUT = 30.0  # seconds for the transfers of a probe


class GpuDirectTransfer(StagedTransfer):
    """Device tensors, to the drives and back without host memory. See Note: [Device memory of transfers]."""

    _works = True
    _reads_into_targets = True

    @property
    def largest(self) -> int | None:
        return None if self._works else super().largest

    def stop_in_place(self, error: OSError) -> None:
        if self._works:
            self._works = False
            logger.warning(
                "GPUDirect Storage is not used any more after an error, but host memory: %s", error
            )

    def begin_store(self, region: Region, *, defer: bool) -> Write | None:
        if region.transfer.spare_bytes or not self._is_direct(region):  # the host has to see an overflow
            return super().begin_store(region, defer=defer)
        slot = region.transfer.slot
        assert slot is not None
        if region.transfer.payload is not None:
            self._leave_to_payload(region)
        event = self.device.record(self.device.current_stream())
        handle = self.device.event_handle(event)
        operation = self.store.transfer_device(slot, address_of(region), into=True, after_event=handle)
        return Write(operation, 0, None, event, True)

    def _is_direct(self, region: Region) -> bool:
        transfer = region.transfer
        return self._works and transfer.slot is not None and transfer.slot.tier == "ssd"

    def begin_load(self, region: Region, *, on_demand: bool, allow_unpooled: bool = False) -> Read | None:
        transfer = region.transfer
        if not self._is_direct(region):
            return super().begin_load(region, on_demand=on_demand, allow_unpooled=allow_unpooled)
        assert transfer.slot is not None
        target = transfer.target
        if target is None or target.tensor is None:  # none yet, or that of an earlier load
            try:
                target = self.reserve_target(region)
            except torch.OutOfMemoryError:
                if on_demand:
                    raise
                return None  # it is not needed yet
        tensor = self.targets.take(target)
        event = self.device.load_event(target.memory.awaited)
        event = self._put_back(region, tensor) or event
        operation = self.store.transfer_device(
            transfer.slot, tensor.data_ptr(), into=False, after_event=self.device.event_handle(event)
        )
        loaded, payload = (tensor, None) if transfer.codec is None else (None, tensor)
        return Read(operation, None, loaded, payload, target, event, True)

    def advance_load(self, region: Region) -> Arrival:
        transfer = region.transfer
        if not transfer.in_place:
            return super().advance_load(region)
        return Arrival(transfer.loaded, transfer.payload, transfer.target, transfer.load_event)


def attach_gpudirect(offload: OffloadConfig, device: Device, store: SpillStore) -> bool:
    """Let `store` transfer device memory by GPUDirect Storage, if the config wants it and it works; where the config leaves the
    choice, if it is also faster than staging buffers. Otherwise the log says why not, once.

    Raises:
        ValueError: the config demands it, and it is not possible; says why.
    """
    if offload.gpudirect == "off" or not offload.directories:
        return False
    reason = gpudirect.unavailable()
    if not reason and offload.verify == "all":
        reason = 'offload.verify is "all", and no thread of the host sees what it transfers'
    elif not reason:
        reason = _attach(offload, device, store)
        store.counted_from = store.pool.counters()  # not the probe
    if not reason:
        logger.info("GPUDirect Storage is used for %s", ", ".join(offload.directories))
        return True
    if offload.gpudirect == "on":
        raise gpudirect_refused(reason)
    logger.info("GPUDirect Storage is not used: %s", reason)
    return False


def gpudirect_refused(reason: str) -> ValueError:
    """Return the error where `offload.gpudirect: "on"` cannot be had."""
    return ValueError(f'offload.gpudirect is "on", but {reason}; or set it to "auto" or "off"')


def _attach(offload: OffloadConfig, device: Device, store: SpillStore) -> str:
    """Returns why not; then the store is as before."""
    buffers: list[torch.Tensor | Arena] = []
    try:
        gpudirect.attach(
            store, threads=offload.threads, new_stream=device.new_stream, **device.event_functions()
        )
    except OSError as error:
        return f"{error}"
    try:
        reason = probe(device, store, buffers, wins=offload.gpudirect == "auto")
    except TimeoutError as error:
        gpudirect.abandon(store, buffers)
        return f"a transfer of the probe has not ended: {error}"
    except (OSError, MemoryError, torch.OutOfMemoryError) as error:
        reason = f"the probe failed: {error}"
    except BaseException:
        gpudirect.abandon(store, buffers)  # Ctrl-C does not wait for what may never end
        raise
    for buffer in buffers:
        if isinstance(buffer, Arena):
            buffer.close()
    if reason:
        gpudirect.detach(store)
    return reason


def probe(device: Device, store: SpillStore, buffers: list[torch.Tensor | Arena], *, wins: bool) -> str:
    """Write and read some device memory. Returns what is wrong with it: "" if nothing is.

    Args:
        buffers: gets the memory of its transfers.
        wins: being slower than staging buffers is wrong too.

    Raises:
        TimeoutError: a transfer has not ended, and may still use that memory.
        OSError: one failed; all have ended.
        MemoryError, torch.OutOfMemoryError: there is no memory for it.
    """
    slots: list[Slot] = []
    try:
        try:
            for _ in range(TRANSFERS):
                slots.append(store.reserve(PROBE, "ssd"))
        except StoreFull as error:
            return f"there is no room for its probe: {error}"
        if any(slot.tier != "ssd" for slot in slots):
            return "the drives have no room for its probe"
        source, target = device.load_target(TRANSFERS * PROBE), device.load_target(TRANSFERS * PROBE)
        buffers += [source, target]
        source.view(torch.int32).copy_(torch.arange(source.numel() // 4, dtype=torch.int32))
        target.zero_()
        direct = min(_seconds(device, store, slots, source, target) for _ in range(2))
        if not torch.equal(source, target):
            return "the bytes that the probe read back differ from those it wrote: update the driver and nvidia-fs"
        if not wins:
            return ""
        arena = Arena(TRANSFERS * PROBE, register=device.host_register(), node=device.numa_node())
        buffers.append(arena)
        staged = min(_staged_seconds(device, store, slots, source, target, arena) for _ in range(2))
        return "" if direct < staged else slower(direct, staged)
    finally:
        for slot in slots:
            store.free(slot)


def slower(direct: float, staged: float) -> str:
    """Return what is said where GPUDirect loses; seconds for the same bytes both ways."""
    rate = 2 * TRANSFERS * PROBE / 1e9
    return (
        f"it is slower here: {rate / direct:.1f} GB/s, through host memory {rate / staged:.1f} GB/s "
        "(each written and read back at start)"
    )


def _seconds(
    device: Device, store: SpillStore, slots: list[Slot], source: torch.Tensor, target: torch.Tensor
) -> float:
    """Measure writing `source` and reading `target` (TRANSFERS * PROBE bytes each) by GPUDirect Storage."""
    ready = device.record(device.current_stream())
    handle = device.event_handle(ready)
    began = time.perf_counter()
    for memory, into, event in ((source, True, handle), (target, False, 0)):
        parts = zip(slots, memory.split(PROBE), strict=True)
        _finish(
            [
                store.transfer_device(slot, part.data_ptr(), into=into, after_event=event)
                for slot, part in parts
            ]
        )
    return time.perf_counter() - began


def _staged_seconds(
    device: Device,
    store: SpillStore,
    slots: list[Slot],
    source: torch.Tensor,
    target: torch.Tensor,
    arena: Arena,
) -> float:
    """Return the same through host memory."""
    lease = arena.acquire(source.numel())
    assert lease is not None
    host = torch.frombuffer(lease.view(), dtype=torch.uint8)
    parts = list(zip(slots, source.split(PROBE), host.split(PROBE), target.split(PROBE), strict=True))
    began = time.perf_counter()
    copies = [device.copy_to_host(part.data_ptr(), staged.data_ptr(), PROBE) for _, part, staged, _ in parts]
    handles = [device.event_handle(copy) for copy in copies]
    _finish(
        [
            store.write(slot, staged.data_ptr(), after_event=handle)
            for (slot, _, staged, _), handle in zip(parts, handles, strict=True)
        ]
    )
    reads = [store.read(slot, staged.data_ptr()) for slot, _, staged, _ in parts]
    copies = []
    for read, (_, _, staged, part) in zip(reads, parts, strict=True):
        _finish([read])
        copies.append(device.copy_to_device(staged.data_ptr(), part.data_ptr(), PROBE))
    if copies[-1] is not None:
        device.block(copies[-1])
    seconds = time.perf_counter() - began
    lease.release()
    return seconds


def _finish(operations: list[Operation]) -> None:
    """Wait for operations of the probe, for all of them also where one fails.

    Raises:
        TimeoutError: one has not ended in `TIMEOUT` seconds.
        OSError: one failed.
    """
    for operation in operations:
        if not wait_quietly(operation, TIMEOUT):
            raise TimeoutError(f"{operation.nbytes} bytes have taken more than {TIMEOUT:g} seconds")
    for operation in operations:
        operation.wait()
