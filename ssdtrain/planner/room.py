"""How much activations may take on a device where the user set no budget.

Note: [What may stay on a device]
Without a budget of the user's, a plan keeps what cannot be hidden. But more was offloaded while steps were profiled, and may have
to be for the job to fit. So on a device a plan's peak is bounded by what is free beside everything else: the model, the states of
optimizers, and what comes and goes inside of operators.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

__all__ = ["DeviceMemory", "device_memory", "room"]

LEFT_FREE = 0.05
"""Of the device's memory, for fragments and what grows later."""


class DeviceMemory(NamedTuple):
    """Bytes of a device."""

    total: int
    foreign: int
    """Of other processes, of CUDA's own, and of libraries that allocate past torch."""
    allocated: int
    """By torch's tensors, now."""
    most_allocated: int
    """The same at most, since somebody reset it."""


def device_memory(device: torch.device) -> DeviceMemory:
    """Of a CUDA device now. Does not wait for it."""
    free, total = torch.cuda.mem_get_info(device)
    return DeviceMemory(
        total,
        max(0, total - free - torch.cuda.memory_reserved(device)),
        torch.cuda.memory_allocated(device),
        torch.cuda.max_memory_allocated(device),
    )


def room(memory: DeviceMemory | None, live: int, peak: int) -> int | None:
    """Bytes that activations may take at most, between steps; None: the device has no memory of its own.

    Args:
        memory: of the device now.
        live: bytes of activations now.
        peak: the most of them so far.
    """
    if memory is None:
        return None
    others = memory.allocated - live
    transient = max(0, memory.most_allocated - others - peak)
    return max(0, memory.total - memory.foreign - others - transient - int(LEFT_FREE * memory.total))
