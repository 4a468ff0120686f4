"""Two thousand steps of the demo's GPT with changing batches and sequence lengths: nothing grows."""

from __future__ import annotations

import os
import statistics
import time
from pathlib import Path

import pytest
import torch

from benchmarks.models import gpt
from examples.support.process_memory import GLIBC_STEADY, return_freed_blocks
from tests.offload.conftest import MakeRuntime, Variant, holds_nothing

MiB = 1 << 20

STEPS = 2000

# Every quarter of the run has each of these equally often.
SHAPES = [(batch, sequence) for batch in (1, 2, 3, 5) for sequence in (17, 32, 48, 65, 96)]


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_two_thousand_steps_of_changing_shapes_grow_nothing(
    make_runtime: MakeRuntime, capsys: pytest.CaptureFixture[str]
) -> None:
    runtime = make_runtime(Variant("c"), amount="0.9")
    engine, store = runtime.engine, runtime.offload.store
    assert store is not None
    model = gpt(layers=2, hidden=64, heads=2, sequence=96)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    runtime.register(model)
    return_freed_blocks(MiB)
    generator = torch.Generator().manual_seed(0)
    seconds: list[list[float]] = [[], [], [], []]
    resident, descriptors, slots, entries, capacity, file_bytes = ([0] * 4 for _ in range(6))
    for step in range(STEPS):
        batch, sequence = SHAPES[step % len(SHAPES)]
        tokens = torch.randint(256, (batch, sequence), generator=generator)
        began = time.perf_counter()
        with runtime.step():
            optimizer.zero_grad()
            with runtime.forward():
                loss = model(tokens, tokens)
            with runtime.backward():
                loss.backward()
            optimizer.step()
        quarter = 4 * step // STEPS
        seconds[quarter].append(time.perf_counter() - began)
        del loss
        if step % 20 == 19:
            holds_nothing(runtime)
            found = store.metrics
            engine.drain()
            now = (
                (resident, resident_bytes()),
                (descriptors, len(os.listdir("/proc/self/fd"))),
                (slots, found.live_slots),
                (entries, sum(1 + len(storage.regions) for storage in engine.meter._seen.values())),
                (capacity, engine.buffers.capacity),
                (file_bytes, found.drives[0].allocated),
            )
            for highest, value in now:
                highest[quarter] = max(highest[quarter], value)
    return_freed_blocks(GLIBC_STEADY)
    medians = [statistics.median(times) for times in seconds]
    with capsys.disabled():
        print(
            f"\nby quarter: step {[f'{m * 1e3:.1f} ms' for m in medians]}, resident {[r // MiB for r in resident]} MiB"
        )
    assert resident[3] <= resident[1] + 8 * MiB
    assert descriptors[3] == descriptors[1] and slots[3] == slots[1] == 0
    assert entries[3] <= entries[1] and capacity[3] == capacity[1] and file_bytes[3] == file_bytes[1]
    # What takes longer with every step is far over this in the last quarter, and a busy machine is not.
    assert medians[3] <= 3 * medians[0]
