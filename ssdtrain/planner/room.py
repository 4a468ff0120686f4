"""How much activations may take on a device where the user set no budget.

Note: [What may stay on a device]
Without a budget of the user's, a plan keeps what cannot be hidden. But more was offloaded while steps were profiled, and may have
to be for the job to fit. So on a device a plan's peak is bounded by what is free beside everything else: the model, the states of
optimizers, and what comes and goes inside of operators.
"""

from __future__ import annotations

import logging
from typing import NamedTuple

import torch

from ssdtrain.config.units import format_size
from ssdtrain.device import CudaDevice
from ssdtrain.offload.engine import OffloadEngine

__all__ = ["DeviceHeadroom", "DeviceMemory"]

logger = logging.getLogger("ssdtrain")

LEFT_FREE = 0.05
"""Fraction of the device's memory that is left for fragments and what grows later."""


class DeviceMemory(NamedTuple):
    """Bytes of a device."""

    total: int
    foreign: int
    """Bytes of other processes, of CUDA's own, and of libraries that allocate past torch."""
    allocated: int
    """Bytes of torch's tensors, now."""
    most_allocated: int
    """The same at most, since somebody reset it."""


class DeviceHeadroom:
    """Bytes that activations may take at most. See Note: [What may stay on a device]."""

    def __init__(self, engine: OffloadEngine) -> None:
        self._engine = engine
        self._transient = 0  # the most that was allocated beside the model and the activations
        self._warned = False

    def __call__(self) -> int | None:
        """Between steps; None: the device has no memory of its own. Does not wait for the device."""
        memory = self.memory()
        if memory is None:
            return None
        now = self._engine.snapshot()
        return self.left(memory, now.activation_bytes, now.activation_peak_bytes)

    def exceeded(self, room: int, why: ValueError) -> None:
        """No plan stays under `room` bytes, and the nearest one is followed: said once."""
        if not self._warned:
            self._warned = True
            logger.warning(
                "ssdtrain.plan: about %s of the device are left for activations, and the plan that is nearest to it is "
                "followed, because %s",
                format_size(room),
                why,
            )

    def memory(self) -> DeviceMemory | None:
        """Read what a CUDA device's memory holds now; None: it is no CUDA device."""
        if not isinstance(self._engine.device, CudaDevice):
            return None
        device = self._engine.device.device
        free, total = torch.cuda.mem_get_info(device)
        return DeviceMemory(
            total,
            max(0, total - free - torch.cuda.memory_reserved(device)),
            torch.cuda.memory_allocated(device),
            torch.cuda.max_memory_allocated(device),
        )

    def left(self, memory: DeviceMemory, live: int, peak: int) -> int:
        """Where activations take `live` bytes now and took `peak` at most so far."""
        others = memory.allocated - live
        self._transient = max(self._transient, memory.most_allocated - others - peak)
        left_free = int(LEFT_FREE * memory.total)
        return max(0, memory.total - memory.foreign - others - self._transient - left_free)
