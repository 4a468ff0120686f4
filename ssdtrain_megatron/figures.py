"""The figures of all ranks since the last time they were gathered, for log lines, TensorBoard and wandb."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from ssdtrain.report.text import duration_text, size_text

if TYPE_CHECKING:
    from ssdtrain_megatron.attachment import Attachment

__all__ = ["Figures"]

_SUMS = ("offloaded_bytes", "loaded_bytes", "cancelled_bytes", "kept_full_bytes", "kept_late_bytes")
_MOSTS = ("store_wait_seconds", "load_wait_seconds")


class Figures:
    """Sums of bytes over all ranks, and the rank that waited longest, per step.

    Args:
        attachment: enabled; every rank has one, and every rank calls `gather` at the same step.
    """

    def __init__(self, attachment: Attachment) -> None:
        self._runtime = attachment.runtime
        self._before = dict.fromkeys((*_SUMS, *_MOSTS, "steps"), 0.0)
        self._found = dict.fromkeys((*_SUMS, *_MOSTS, "peak_bytes"), 0.0)

    def gather(self) -> None:
        """Take the figures since the last call. A collective over all ranks: two small all_reduces."""
        statistics = self._runtime.statistics()
        assert statistics is not None
        present = {name: float(getattr(statistics.offload, name)) for name in (*_SUMS, *_MOSTS)}
        present["steps"] = statistics.steps
        steps = max(1.0, present["steps"] - self._before["steps"])
        change = {name: (present[name] - self._before[name]) / steps for name in (*_SUMS, *_MOSTS)}
        self._before = present
        sums = torch.tensor([change[name] for name in _SUMS], dtype=torch.float64)
        peak = statistics.offload.activation_peak_bytes
        mosts = torch.tensor([*(change[name] for name in _MOSTS), peak], dtype=torch.float64)
        if dist.is_initialized():
            sums, mosts = sums.to(self._runtime.device), mosts.to(self._runtime.device)
            dist.all_reduce(sums)
            dist.all_reduce(mosts, op=dist.ReduceOp.MAX)
        self._found = dict(
            zip((*_SUMS, *_MOSTS, "peak_bytes"), [*sums.tolist(), *mosts.tolist()], strict=True)
        )
        self._runtime.reset_peak()

    def scalars(self) -> dict[str, float]:
        """By name: bytes per step of all ranks, seconds per step and peak bytes of the rank that has most."""
        found = self._found
        return {
            "written_bytes": found["offloaded_bytes"],
            "read_bytes": found["loaded_bytes"],
            "avoided_write_bytes": found["cancelled_bytes"],
            "kept_bytes": found["kept_full_bytes"] + found["kept_late_bytes"],
            "store_wait_seconds": found["store_wait_seconds"],
            "load_wait_seconds": found["load_wait_seconds"],
            "activation_peak_bytes": found["peak_bytes"],
        }

    def line(self) -> str:
        """One line for people."""
        scalars = self.scalars()
        parts = [
            f"written/step: {size_text(scalars['written_bytes'])}",
            f"read/step: {size_text(scalars['read_bytes'])}",
            f"writes avoided/step: {size_text(scalars['avoided_write_bytes'])}",
            f"waited/step (most): {duration_text(scalars['store_wait_seconds'] + scalars['load_wait_seconds'])}",
            f"activation peak (most): {size_text(scalars['activation_peak_bytes'])}",
        ]
        if scalars["kept_bytes"]:
            parts.append(f"kept for want of room or time/step: {size_text(scalars['kept_bytes'])}")
        return " | ".join(parts)
