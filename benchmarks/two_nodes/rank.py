"""A rank's end of `Ranks`: takes commands from standard input, answers through a pipe of its own."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from abc import ABC, abstractmethod
from typing import Any

import torch

from benchmarks.two_nodes.ranks import CHANNEL

__all__ = ["Workload", "add_sections", "comm_meter", "sections", "serve", "spill_meter"]


class Workload(ABC):
    """A training on this rank."""

    losses: list[float]
    """Of every step that was trained, where this rank knows it."""

    @abstractmethod
    def step(self) -> None:
        """Train one step."""

    @abstractmethod
    def about(self) -> dict[str, Any]:
        """What is known from the start: at least `tokens_per_step` of all ranks and `parameters` of this one."""

    @abstractmethod
    def digest(self) -> str:
        """Of this rank's weights, to the bit; equal on ranks that hold the same weights."""

    @abstractmethod
    def replica(self) -> str:
        """Names the part of the model that this rank holds: ranks of the same name are replicas."""

    @abstractmethod
    def meter(self) -> dict[str, Any] | None:
        """SSDTrain's own count of what went over the network so far; None where it is not in use."""

    def outcome(self) -> dict[str, Any]:
        """What else is to be said at the end, such as a held-out loss. All ranks are asked together."""
        return {}

    @abstractmethod
    def close(self) -> None:
        """Leave the process group in order."""


def add_sections(parser: argparse.ArgumentParser) -> None:
    """Add the options of `sections`."""
    for name in ("comm", "offload"):
        parser.add_argument(
            f"--{name}", type=json.loads, help=f"the `{name}` block as JSON; with none SSDTrain is absent"
        )


def sections(options: argparse.Namespace) -> dict[str, Any] | None:
    """SSDTrain's block of the config, from the options; None: it is absent."""
    given = {name: getattr(options, name) for name in ("comm", "offload")}
    found = {name: section for name, section in given.items() if section is not None}
    return {**found, "report": {"interval": 0}} if found else None


def spill_meter(runtime: Any) -> dict[str, int]:
    """Bytes that a `Runtime` offloaded, encoded and wrote."""
    found = runtime.statistics()
    if found.offload is None:
        return {}
    return {
        "offloaded_bytes": found.offload.offloaded_bytes,
        "overflowed_bytes": found.offload.overflowed_bytes,
        "written_bytes": found.store.ssd_bytes_written,
    }


def comm_meter(runtime: Any) -> dict[str, Any] | None:
    """The count of a `Runtime` as plain values, by dimension; None where it has none."""
    statistics = None if runtime is None else runtime.statistics()
    if statistics is None:
        return None
    # Not dataclasses.asdict: up to Python 3.11 it counts the entries of a Counter as if they were elements.
    return {
        name: {**vars(figures), "fallbacks": dict(figures.fallbacks)}
        for name, figures in statistics.comm.items()
    }


def serve(workload: Workload) -> None:
    """Answer until told to finish, or until whoever asks is gone.

    Commands: `about`; `step` (seconds of a step and the meter after it; `count` steps at once, 1 unless told); `finish` (the
    result).
    """
    seconds: list[float] = []
    with os.fdopen(int(os.environ.get(CHANNEL, "1")), "w", closefd=False) as channel:
        for line in sys.stdin:
            asked = json.loads(line)
            command = asked["command"]
            if command == "step":
                for _ in range(asked.get("count", 1)):
                    began = time.perf_counter()
                    workload.step()
                    seconds.append(time.perf_counter() - began)
                answer: dict[str, Any] = {"seconds": seconds[-1], "meter": workload.meter()}
            elif command == "about":
                answer = {**workload.about(), "torch": torch.__version__}
            elif command == "finish":
                answer = {
                    "seconds": seconds,
                    "tokens_per_step": workload.about()["tokens_per_step"],
                    "losses": workload.losses,
                    "sha256": workload.digest(),
                    "replica": workload.replica(),
                    "meter": workload.meter(),
                    **workload.outcome(),
                }
            else:
                raise ValueError(f"unknown command {command!r}; known: about, step, finish")
            print(json.dumps(answer), file=channel, flush=True)
            if command == "finish":
                workload.close()
                return
    raise EOFError("standard input ended before the command to finish")
