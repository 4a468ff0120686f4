"""A training loop in plain PyTorch: `ssdtrain.attach` is the one line that is added."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import nn

import ssdtrain
from examples.small.command import compare, parse
from examples.support.activation_meter import SavedTensorMeter
from examples.support.data import batches, corpus
from examples.support.model import GPT, GPTConfig
from ssdtrain.config.units import MiB

STEPS = 4
SHAPE = GPTConfig(layers=8, hidden=128, heads=4, sequence=128)

Samples = list[float]
memory: dict[str, Samples] = {}
"""MiB of activations after each block, forward and then backward, of the last step, by run."""


def train(directory: str | None) -> list[float]:
    torch.manual_seed(0)
    model = GPT(SHAPE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    source = batches(corpus(), microbatch=4, sequence=SHAPE.sequence, seed=0)
    meter = SavedTensorMeter(model)
    runtime = None
    if directory is not None:
        options = {"directories": directory, "in_flight": "2MiB", "prefetch": "2MiB", "min_bytes": "64KiB"}
        runtime = ssdtrain.attach(model, {"offload": options, "report": {"path": f"{directory}-report"}})
    samples: Samples = []
    _sample(model, samples, lambda: _alive(runtime, meter))
    losses = []
    for _ in range(STEPS):
        samples.clear()
        with meter.step():
            loss = model(*next(source))
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    memory["keep" if runtime is None else "SSDTrain"] = samples
    if runtime is not None:
        print(runtime.statistics())
        runtime.close()
    return losses


def _alive(runtime: ssdtrain.runtime.Runtime | None, meter: SavedTensorMeter) -> float:
    if runtime is None:
        return sum(change for _, change in list(meter._events)) / MiB
    found = runtime.statistics()
    return found.offload.activation_bytes / MiB if found is not None else 0.0


def _sample(model: GPT, samples: Samples, alive: Callable[[], float]) -> None:
    def take(module: nn.Module, *_: object) -> None:
        samples.append(alive())

    for block in model.blocks:
        block.register_forward_hook(take)
        block.register_full_backward_hook(take)


def plot(file: Path) -> None:
    from matplotlib.figure import Figure

    axes = (figure := Figure(figsize=(8, 4), layout="constrained")).add_subplot()
    for name, samples in memory.items():
        axes.plot(samples, drawstyle="steps-mid", label=f"{name}: peak {max(samples):.1f} MiB")
    axes.axvline(SHAPE.layers - 0.5, color="grey", linestyle=":")
    axes.set(
        xlabel="blocks of one step (dotted: backward begins)", ylabel="activations alive, MiB", ylim=(0, None)
    )
    axes.legend()
    figure.savefig(file, dpi=120)


def main(arguments: Sequence[str] | None = None) -> int:
    chosen = parse(arguments, plot=True)
    status = compare(train, chosen.directory)
    if chosen.plot:
        plot(Path(chosen.plot))
    return status


if __name__ == "__main__":
    sys.exit(main())
