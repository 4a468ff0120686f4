"""Streams, events and copies of a device; no-ops on the CPU.

The engine copies between device memory and pinned host buffers on side streams. Three rules ensure correctness, each known from
a data corruption in other projects:

- The current stream is resolved at each use, on the calling thread, and never inside a `with stream:` block (torchtitan #2581).
- A side stream waits for an event of the producing stream before it reads the data. A restore target is allocated on the load
  stream and written after the event of the previous user of its memory (`ssdtrain.offload.transfer.targets`).
- Memory is kept alive by a reference until the event has completed. `record_stream` is only used with the stream that saves a
  tensor (`record_use`): for memory that this stream allocated it does nothing, and for memory of another stream it is needed.
  With the side streams it would make reuse, and therefore the peak, depend on timing.
"""

from __future__ import annotations

import functools
import logging

import torch

from ssdtrain.device.cpu import CpuDevice
from ssdtrain.device.cuda import CudaDevice
from ssdtrain.device.interface import Device, Event
from ssdtrain.device.timestamps import HostTimestamp, Timestamp

__all__ = ["CpuDevice", "CudaDevice", "Device", "Event", "HostTimestamp", "Timestamp", "device_for"]

logger = logging.getLogger("ssdtrain")

TESTED_TORCH = ("2.13.0", "2.14.1", "2.15.0")


@functools.cache
def warn_of_untested_torch() -> None:
    """Warn once if this torch version was not tested with this version of SSDTrain."""
    version = torch.__version__.partition("+")[0]
    if version not in TESTED_TORCH:
        logger.warning(
            "torch %s was not tested with this version of SSDTrain (tested: %s)",
            version,
            ", ".join(TESTED_TORCH),
        )


def device_for(device: torch.device) -> Device:
    """The device layer for `device`.

    Raises:
        ValueError: neither a CPU nor a CUDA device, or torch was built for ROCm, whose devices it calls "cuda" too.
    """
    if device.type == "cpu":
        return CpuDevice()
    if device.type == "cuda" and torch.version.hip is None:
        return CudaDevice(device)
    name = f"{device} (ROCm {torch.version.hip})" if device.type == "cuda" else str(device)
    raise ValueError(
        f"device {name} is not supported yet: SSDTrain offloads from CUDA devices and the CPU. Leave out the sections offload, "
        "plan and state on this machine"
    )
