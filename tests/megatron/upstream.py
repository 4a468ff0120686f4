"""Side by side on one GPT: no plugin, full recomputation, megatron-core's own fine-grained activation offloading, SSDTrain.

```
torchrun --nproc-per-node 1 -m tests.megatron.cpu -m tests.megatron.upstream [directory]
```

Prints a line for each, and a JSON object at the end: bytes moved per step, the peak of activation bytes that are not moved
(saved storages and reloaded tensors alive, the same count for all), and the CPU seconds of a step (all threads, median). On the
CPU both sides of upstream's copies are in
host memory; what it copied to counts as moved, not as alive.
"""

from __future__ import annotations

import functools
import gc
import json
import logging
import statistics
import sys
import tempfile
import time
import types
import warnings
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from examples.support.activation_meter import SavedTensorMeter
from ssdtrain.text import size_text
from ssdtrain_megatron.attachment import attach
from tests.megatron import training
from tests.megatron.rows import FULL, Row
from tests.megatron.training import Trainer, layout

MODULES = ["attn_norm", "core_attn", "attn_proj", "qkv_linear", "mlp_norm"]
STEPS = 8
# As small a window of transfers as upstream's, which moves one group of a layer at a time.
SMALL = {"amount": "all", "min_bytes": 1, "in_flight": "1MiB", "prefetch": "256KiB"}
SHAPE = {"num_layers": 8, "hidden_size": 128}

Found = dict[str, Any]


class Clock:
    """CPU seconds of steps, of all threads of this process."""

    def __init__(self) -> None:
        self._seconds: list[float] = []

    def step(self, trainer: Trainer, number: int) -> Any:
        began = time.process_time()
        result = trainer.step(number)
        self._seconds.append(time.process_time() - began)
        return result

    def median(self) -> float:
        """Without the first step, which prepares what the others use."""
        return statistics.median(self._seconds[1:])


def without(**options: Any) -> Found:
    trainer = Trainer(Row("keep"), **SHAPE, **options)
    meter = meter_of(trainer)
    clock = Clock()
    losses, peak = [], 0
    for number in range(STEPS):
        with meter.step() as record:
            losses.append(clock.step(trainer, number))
        peak = record.peak_bytes
    return {"steps": losses, "peak_bytes": peak, "moved_bytes_per_step": 0, "cpu_seconds": clock.median()}


def meter_of(trainer: Trainer) -> SavedTensorMeter:
    meter = SavedTensorMeter()
    for chunk in trainer.chunks:
        meter.exclude(chunk.module)
    return meter


def upstream() -> Found:
    """Needs nothing of Transformer Engine but the object that holds one of its flags."""
    from megatron.core.extensions import transformer_engine
    from megatron.core.pipeline_parallel import fine_grained_activation_offload as theirs

    transformer_engine.cpu_offload = types.SimpleNamespace(CPUOffloadEnabled=False)
    trainer = Trainer(
        Row("upstream"),
        fine_grained_activation_offloading=True,
        offload_modules=MODULES,
        min_offloaded_tensor_size=1,
        **SHAPE,
    )
    meter = meter_of(trainer)
    moved = 0

    def saving(plain: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(plain)
        def on_save_for_backward(self: Any, tensor: Any) -> Any:
            meter._pack(tensor)  # its hooks are the innermost: the meter's own see nothing inside of them
            return plain(self, tensor)

        return on_save_for_backward

    def offloading(plain: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(plain)
        def offload(self: Any, tensor: Any, *args: Any, **kwargs: Any) -> Any:
            nonlocal moved
            moved += tensor.nbytes
            return plain(self, tensor, *args, **kwargs)

        return offload

    def reloading(plain: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(plain)
        def reload(self: Any, *args: Any, **kwargs: Any) -> Any:
            tensor = plain(self, *args, **kwargs)
            meter._pack(tensor)
            return tensor

        return reload

    manager, handler = theirs.PipelineOffloadManager, theirs.ChunkOffloadHandler
    manager.on_save_for_backward = saving(manager.on_save_for_backward)
    handler.offload, handler.reload = offloading(handler.offload), reloading(handler.reload)
    clock = Clock()
    losses, peak = [], 0
    for number in range(STEPS):
        moved = 0
        with meter.step() as record:
            losses.append(clock.step(trainer, number))
        peak = record.peak_bytes
    return {"steps": losses, "peak_bytes": peak, "moved_bytes_per_step": moved, "cpu_seconds": clock.median()}


def ours(directory: str, settings: dict[str, Any]) -> Found:
    trainer = Trainer(Row("SSDTrain"), **SHAPE)
    offload = {"directories": directory, **settings}
    clock = Clock()
    losses = []
    with attach(trainer.chunks, {"offload": offload}) as attachment:
        for number in range(STEPS):
            before = attachment.statistics()
            attachment.runtime.reset_peak()
            losses.append(clock.step(trainer, number))
            after = attachment.statistics()
            assert before is not None and after is not None
        moved = after.offload.offloaded_bytes + after.offload.avoided_write_bytes
        moved -= before.offload.offloaded_bytes + before.offload.avoided_write_bytes
        return {
            "steps": losses,
            "peak_bytes": after.offload.activation_peak_bytes,
            "moved_bytes_per_step": moved,
            "cpu_seconds": clock.median(),
        }


def main() -> int:
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    training.LENGTH = 128
    dist.init_process_group("gloo")
    found: dict[str, Found] = {}
    with layout(Row("one process")), tempfile.TemporaryDirectory(prefix="ssdtrain-") as directory:
        where = sys.argv[1] if len(sys.argv) > 1 else directory
        found["none"] = without()
        gc.collect()
        found["recompute"] = without(**FULL)
        gc.collect()
        found["ssdtrain, all"] = ours(where, {"amount": "all"})
        gc.collect()
        found["ssdtrain, small window"] = ours(where, SMALL)
        gc.collect()
        found["upstream"] = upstream()
    for name, figures in found.items():
        same = "equal to the bit" if figures["steps"] == found["none"]["steps"] else "NOT EQUAL"
        print(
            f"{name:<22} moved per step {size_text(figures['moved_bytes_per_step'])}, activation peak "
            f"{size_text(figures['peak_bytes'])} (x{figures['peak_bytes'] / found['none']['peak_bytes']:.2f}), CPU per step "
            f"{figures['cpu_seconds']:.3f} s (x{figures['cpu_seconds'] / found['none']['cpu_seconds']:.2f}), losses {same}"
        )
    print(json.dumps(found))
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
