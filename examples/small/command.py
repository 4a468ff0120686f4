"""What these programs share: their flags, and the comparison of the two trainings."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence

Train = Callable[[str | None], list[float]]
"""Trains with spill files in a directory, or without SSDTrain for None; the loss of each step."""


def parse(arguments: Sequence[str] | None, *, plot: bool = False) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--directory", default="./spill", help="on a local SSD")
    if plot:
        parser.add_argument("--plot", help="a PNG of activation memory over the last step; needs matplotlib")
    return parser.parse_args(arguments)


def compare(train: Train, directory: str, *, rank: int = 0) -> int:
    """Trains both ways; 0 where all losses are equal to the bit, else 1."""
    without, with_it = train(None), train(directory)
    equal = [loss.hex() for loss in without] == [loss.hex() for loss in with_it]
    if rank == 0:
        for step, pair in enumerate(zip(without, with_it, strict=True), start=1):
            print(f"step {step}: loss {pair[0]:.6f} without SSDTrain, {pair[1]:.6f} with it")
        print("losses are equal to the bit" if equal else "LOSSES DIFFER")
    return 0 if equal else 1
