"""A training loop in plain PyTorch: `ssdtrain.attach` is the one line that is added.

With `--plot` it trains a third time, recomputing every block, and draws the memory of a step of all three.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import torch

import ssdtrain
from examples.small.command import compare, parse
from examples.support.data import batches, corpus
from examples.support.figures import figures_of
from examples.support.model import GPT, GPTConfig
from examples.support.plot import plot_activation_memory

STEPS = 4
SHAPE = GPTConfig(layers=8, hidden=128, heads=4, sequence=128)
measured: list[SimpleNamespace] = []
"""What the plot needs of each run: its name, and the memory of its last steps."""


def train(directory: str | None, *, recompute: bool = False) -> list[float]:
    torch.manual_seed(0)
    model = GPT(SHAPE, recomputed_blocks=SHAPE.layers if recompute else 0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    source = batches(corpus(), microbatch=4, sequence=SHAPE.sequence, seed=0)
    runtime = None
    if directory is not None:
        options = {
            "directories": directory,
            "amount": "all",
            "in_flight": "2MiB",
            "prefetch": "2MiB",
            "min_bytes": "64KiB",
        }
        runtime = ssdtrain.attach(model, {"offload": options, "report": {"path": f"{directory}-report"}})
    figures = figures_of(model, runtime)
    losses = []
    for step in range(STEPS):
        with figures.step() as record:
            loss = model(*next(source))
            record.mark("backward")
            loss.backward()
        if step > 0:
            figures.take(record, record.marks["backward"])
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if runtime is not None:
            runtime.log_values(loss=losses[-1])
            runtime.step_end()  # for the report
    name = "recompute" if recompute else "keep" if runtime is None else "SSDTrain"
    measured.append(SimpleNamespace(name=name, **figures.fields()))
    if runtime is not None:
        runtime.close()  # prints a table
    return losses


def main(arguments: Sequence[str] | None = None) -> int:
    chosen = parse(arguments, plot=True)
    status = compare(train, chosen.directory)
    if chosen.plot:
        train(None, recompute=True)
        plot_activation_memory(measured, Path(chosen.plot))
    return status


if __name__ == "__main__":
    sys.exit(main())
