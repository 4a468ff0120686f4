"""Variants of one training, alive at once on the same nodes and stepped in turn; what each took and sent."""

from __future__ import annotations

import contextlib
import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.two_nodes.network import Network
from benchmarks.two_nodes.ranks import Ranks

__all__ = ["LAYOUTS", "PLAIN", "SILENT", "Layout", "Measured", "comm_arguments", "measure"]

PLAIN, SILENT = "plain", "silent"


@dataclass(frozen=True)
class Layout:
    """A workload and how many ranks it has on each node."""

    command: tuple[str, ...]
    ranks_per_node: int = 1


LAYOUTS: dict[str, Layout] = {
    **{
        f"deepspeed_zero{stage}": Layout(
            ("-m", "benchmarks.two_nodes.deepspeed_zero2", "--stage", str(stage))
        )
        for stage in range(4)
    },
    "megatron_tp2_dp2": Layout(
        ("-m", "tests.megatron.cpu", "-m", "benchmarks.two_nodes.megatron_gpt", "--tensor", "2"), 2
    ),
    "megatron_pp2_dp2": Layout(
        ("-m", "tests.megatron.cpu", "-m", "benchmarks.two_nodes.megatron_gpt", "--pipeline", "2"), 2
    ),
}


@dataclass
class Measured:
    """One variant; lists have an entry for each step that counts, warm-up left out."""

    name: str
    about: dict[str, Any]
    seconds: list[float] = field(default_factory=list)
    """Of the slowest rank."""
    sent_bytes: list[list[int]] = field(default_factory=list)
    """By node, at the interface, headers included."""
    metered: list[dict[str, Any] | None] = field(default_factory=list)
    """SSDTrain's own count over the steps that count, by rank."""
    results: list[dict[str, Any]] = field(default_factory=list)

    @property
    def tokens_per_s(self) -> float:
        return float(self.about["tokens_per_step"] / statistics.median(self.seconds))

    @property
    def sent_per_step(self) -> float:
        """Bytes of all nodes, the median step."""
        return statistics.median(sum(step) for step in self.sent_bytes)

    def metered_total(self, name: str) -> float:
        """Of all ranks and dimensions over the steps that count: `wire_bytes`, `raw_bytes` or `codec_seconds`."""
        return sum(
            figures[name] for by_name in self.metered if by_name is not None for figures in by_name.values()
        )

    @property
    def replicas_equal(self) -> bool:
        digests: dict[str, set[str]] = {}
        for result in self.results:
            digests.setdefault(result["replica"], set()).add(result["sha256"])
        return all(len(found) == 1 for found in digests.values())


def measure(
    network: Network,
    layout: Layout,
    variants: Mapping[str, Sequence[str]],
    *,
    steps: int,
    warmup: int = 2,
    extra: Sequence[str] = (),
    note: Callable[[str], None] = print,
) -> dict[str, Measured]:
    """Start every variant, then let them take steps in turn: `warmup` that do not count and `steps` that do.

    Args:
        variants: name -> what is added to the command.
        extra: added to the command of all.
        note: told what goes on.

    Raises:
        RankFailed: a rank of any variant ended; all ranks of all variants are ended then.
    """
    world = layout.ranks_per_node * len(network.nodes)
    with contextlib.ExitStack() as stack:
        note(f"starting {len(variants)} x {world} ranks at {network.rate}")
        alive = {
            name: stack.enter_context(Ranks([*layout.command, *extra, *added], world, network))
            for name, added in variants.items()
        }
        found = {name: Measured(name, ranks.tell("about")[0]) for name, ranks in alive.items()}
        names = list(variants)
        before: dict[str, list[Any]] = {}
        for step in range(warmup + steps):
            # The order turns, so that no variant always runs in another's wake.
            for name in names[step % len(names) :] + names[: step % len(names)]:
                one = found[name]
                counted = network.counters()
                answers = alive[name].tell("step")
                after = network.counters()
                meters = [answer["meter"] for answer in answers]
                seconds = max(answer["seconds"] for answer in answers)
                sent = [b["sent"] - a["sent"] for a, b in zip(counted, after, strict=True)]
                note(
                    f"{name:<14} step {step + 1:>2} of {warmup + steps}: {seconds:6.2f} s, {sum(sent) / 1e6:8.2f} MB sent"
                )
                if step < warmup:
                    before[name] = meters
                    continue
                one.seconds.append(seconds)
                one.sent_bytes.append(sent)
                one.metered = [
                    _difference(a, b) for a, b in zip(before.get(name, meters), meters, strict=True)
                ]
        for name, ranks in alive.items():
            found[name].results = ranks.finish()
    return found


def comm_arguments(comm: Mapping[str, Any]) -> list[str]:
    """What the command of a variant with this `comm` block gets."""
    return ["--comm", json.dumps(comm)]


def _difference(before: dict[str, Any] | None, after: dict[str, Any] | None) -> dict[str, Any] | None:
    """What a meter counted in between, by dimension."""
    if after is None:
        return None
    earlier = before or {}
    return {
        dimension: {
            name: value - earlier.get(dimension, {}).get(name, 0)
            for name, value in figures.items()
            if isinstance(value, int | float)
        }
        for dimension, figures in after.items()
    }
