"""The figures of all ranks since the last time they were gathered, for log lines, TensorBoard and wandb."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from ssdtrain.config import DIMENSIONS
from ssdtrain.telemetry.text import duration_text, size_text

if TYPE_CHECKING:
    from ssdtrain_megatron.attachment import Attachment

__all__ = ["Figures"]

_SUMS = ("offloaded_bytes", "loaded_bytes", "cancelled_bytes", "kept_full_bytes", "kept_late_bytes")
_MOSTS = ("store_wait_seconds", "load_wait_seconds")
# Of the collectives: sums over ranks for each parallel dimension, and the seconds of the rank that took longest for all of them.
_SENT = tuple(f"comm_{name}_{kind}_bytes" for name in DIMENSIONS for kind in ("raw", "wire"))
_COMM_SECONDS = ("codec_seconds", "wait_seconds", "device_seconds")


class Figures:
    """Sums of bytes over all ranks, and the rank that waited longest, per step.

    Args:
        attachment: enabled; every rank has one, and every rank calls `gather` at the same step.
    """

    def __init__(self, attachment: Attachment) -> None:
        self._runtime = attachment.runtime
        self._offloads = self._runtime.engine is not None
        self._compresses = self._runtime.comm is not None
        self._before: dict[str, float] = {}
        self._found = dict.fromkeys((*_SUMS, *_SENT, *_MOSTS, *_COMM_SECONDS, "peak_bytes"), 0.0)

    def gather(self) -> None:
        """Take the figures since the last call. A collective over all ranks: two small all_reduces."""
        present = self._present()
        change = {name: value - self._before.get(name, 0.0) for name, value in present.items()}
        self._before = present
        steps = max(1.0, change.pop("steps"))
        change = {name: value / steps for name, value in change.items()}
        statistics = self._runtime.statistics()
        assert statistics is not None
        change["peak_bytes"] = float(statistics.offload.activation_peak_bytes)
        totals, mosts = (*_SUMS, *_SENT), (*_MOSTS, *_COMM_SECONDS, "peak_bytes")
        sums = torch.tensor([change[name] for name in totals], dtype=torch.float64)
        most = torch.tensor([change[name] for name in mosts], dtype=torch.float64)
        if dist.is_initialized():
            sums, most = sums.to(self._runtime.device), most.to(self._runtime.device)
            dist.all_reduce(sums)
            dist.all_reduce(most, op=dist.ReduceOp.MAX)
        self._found = dict(zip((*totals, *mosts), [*sums.tolist(), *most.tolist()], strict=True))
        self._runtime.reset_peak()

    def _present(self) -> dict[str, float]:
        """This rank's totals since the start."""
        statistics = self._runtime.statistics()
        assert statistics is not None
        found = {name: float(getattr(statistics.offload, name)) for name in (*_SUMS, *_MOSTS)}
        found["steps"] = float(statistics.steps)
        found.update(dict.fromkeys((*_SENT, *_COMM_SECONDS), 0.0))
        for dimension, figures in statistics.comm.items():
            found[f"comm_{dimension}_raw_bytes"] = float(figures.raw_bytes)
            found[f"comm_{dimension}_wire_bytes"] = float(figures.wire_bytes)
            for name in _COMM_SECONDS:
                found[name] += getattr(figures, name)
        return found

    def scalars(self) -> dict[str, float]:
        """By name: bytes per step of all ranks, seconds per step and peak bytes of the rank that has most.

        Of the collectives: what each parallel dimension sent, and what the framework's own would have sent, where that is
        anything.
        """
        found, scalars = self._found, {}
        if self._offloads:
            scalars = {
                "written_bytes": found["offloaded_bytes"],
                "read_bytes": found["loaded_bytes"],
                "avoided_write_bytes": found["cancelled_bytes"],
                "kept_bytes": found["kept_full_bytes"] + found["kept_late_bytes"],
                "store_wait_seconds": found["store_wait_seconds"],
                "load_wait_seconds": found["load_wait_seconds"],
                "activation_peak_bytes": found["peak_bytes"],
            }
        if self._compresses:
            for dimension in DIMENSIONS:
                raw = found[f"comm_{dimension}_raw_bytes"]
                if raw:
                    scalars[f"comm_{dimension}_raw_bytes"] = raw
                    scalars[f"comm_{dimension}_wire_bytes"] = found[f"comm_{dimension}_wire_bytes"]
            scalars.update({f"comm_{name}": found[name] for name in _COMM_SECONDS})
        return scalars

    def line(self) -> str:
        """One line for people."""
        scalars, parts = self.scalars(), []
        if self._offloads:
            waited = scalars["store_wait_seconds"] + scalars["load_wait_seconds"]
            parts += [
                f"written/step: {size_text(scalars['written_bytes'])}",
                f"read/step: {size_text(scalars['read_bytes'])}",
                f"writes avoided/step: {size_text(scalars['avoided_write_bytes'])}",
                f"waited/step (most): {duration_text(waited)}",
                f"activation peak (most): {size_text(scalars['activation_peak_bytes'])}",
            ]
            if scalars["kept_bytes"]:
                parts.append(f"kept for want of room or time/step: {size_text(scalars['kept_bytes'])}")
        for dimension in DIMENSIONS:
            raw = scalars.get(f"comm_{dimension}_raw_bytes")
            if raw:
                wire = scalars[f"comm_{dimension}_wire_bytes"]
                parts.append(f"{dimension} sent/step: {size_text(wire)} of {size_text(raw)}")
        return " | ".join(parts)
