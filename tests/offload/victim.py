"""Trains with offload in forked children until they are ended, as `tests.offload.test_ends` asks for.

For every line on standard input (directory, engine) it forks a child, prints its process id, and when the child has ended its
wait status. The parent imports torch once for all of them, and never runs any of it.
"""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType
from typing import NoReturn

import torch

import ssdtrain
from tests.offload.zoo import Gpt, tokens


class Stop(Exception):
    """What an alarm raises in the middle of the training."""


def train(directory: str, engine: str) -> NoReturn:
    """Steps of a small GPT without end; everything about them may be interrupted."""
    torch.set_num_threads(1)
    model = Gpt()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    offloading = ssdtrain.offload(directory, model=model, min_bytes=1024, engine=engine, capacity="32MiB")
    while True:
        optimizer.zero_grad()
        with offloading:
            loss = model(tokens()).square().mean()
        loss.backward()
        optimizer.step()


def stop(number: int, frame: FrameType | None) -> NoReturn:
    raise Stop


def child(directory: str, engine: str) -> int:
    """Status 3 after the exception, 4 after Ctrl-C, as a script that does not catch them would end with a status of its own."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGUSR1, stop)
    try:
        train(directory, engine)
    except Stop:
        return 3
    except KeyboardInterrupt:
        return 4


def main() -> None:
    for line in sys.stdin:
        directory, engine = line.split()
        pid = os.fork()
        if pid == 0:
            sys.exit(child(directory, engine))  # and so through the interpreter's own end
        print(pid, flush=True)
        print(os.waitpid(pid, 0)[1], flush=True)


if __name__ == "__main__":
    main()
