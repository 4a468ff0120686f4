"""Log messages about the job: written once, by rank 0, with the ranks that they come from."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ssdtrain.comm.meter import CommMetrics
from ssdtrain.comm.policy import EXACT_CODEC, Policy, bits_of, codec_of
from ssdtrain.device.runtime import made_current
from ssdtrain.features import FIRST_STEPS

logger = logging.getLogger("ssdtrain")

# Ranks exchange messages at the ends of the first steps, then of one in this many.
EXCHANGE_INTERVAL = 50
ORDER_OF_SUMS = "an exact sum of more than two ranks, whose order is the framework's"
"""Reason of calls that go uncompressed, of which a preset gives no warning: all such jobs have them."""
# Share of the plain bytes from which on a job is told at start how few it saves.
MUCH = 0.9


class Notices:
    """Warnings of all ranks, one for each subject.

    Args:
        device: of this rank.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._waiting: dict[str, tuple[str, bool]] = {}
        self._written: set[str] = set()

    def add(self, subject: str, text: str, unanimous: bool = False) -> None:
        """Write `text` at the next exchange.

        Args:
            subject: what it is about: of several texts about one, from one rank or many, the first is written.
            unanimous: only if all ranks add one about it.
        """
        if subject not in self._written:
            self._waiting.setdefault(subject, (text, unanimous))

    def step_end(self, step: int, warmup_steps: int) -> None:
        """Exchange pending messages, if that is due. A collective call of the job."""
        if step <= FIRST_STEPS or step == warmup_steps + 1 or step % EXCHANGE_INTERVAL == 0:
            self.exchange()

    def exchange(self) -> None:
        """Write the pending messages of all ranks. A collective call of the job."""
        of_ranks: list[Any] = [None] * dist.get_world_size()
        with made_current(self._device):
            dist.all_gather_object(of_ranks, self._waiting)
        self._written |= {subject for waiting in of_ranks for subject in waiting}
        self._waiting = {}
        if dist.get_rank() != 0:
            return
        texts: dict[str, tuple[str, bool, list[int]]] = {}
        for rank, waiting in enumerate(of_ranks):
            for subject, (text, unanimous) in waiting.items():
                texts.setdefault(subject, (text, unanimous, []))[2].append(rank)
        for text, unanimous, ranks in texts.values():
            if not unanimous or len(ranks) == len(of_ranks):
                logger.warning("%s [%s]", text, _named(ranks, len(of_ranks)))


def add_inactive(notices: Notices, policy: Policy, metrics: Mapping[str, CommMetrics]) -> None:
    """Warn of dimensions of which the first steps compressed nothing."""
    if not metrics and not policy.configured:
        none = f"comm compressed nothing in the first {FIRST_STEPS} steps: none of its messages was sent between ranks"
        notices.add("inactive", none, unanimous=True)
    for dimension, counted in metrics.items():
        if dimension not in policy.configured and set(counted.fallbacks) == {ORDER_OF_SUMS}:
            continue
        if counted.calls and not counted.compressed and not policy.rules[dimension].off:
            reasons = ", ".join(f"{reason} ({count})" for reason, count in counted.fallbacks.items())
            inactive = f"comm.{dimension} compressed nothing in the first {FIRST_STEPS} steps: {reasons}"
            notices.add(f"{dimension} inactive", inactive)
    for dimension in policy.configured:
        # The second half of an all-reduce is counted with the first. Of two stages one sends.
        if dimension != "dp_gather" and (dimension not in metrics or not metrics[dimension].calls):
            unused = (
                f"comm.{dimension} is configured, and nothing of it was sent in the first {FIRST_STEPS} steps: this job has "
                "no such parallelism, or what sends its messages is not intercepted here"
            )
            notices.add(f"{dimension} unused", unused, unanimous=True)


def few_bytes_saved(
    policy: Policy,
    between_nodes: bool,
    parameters: Sequence[tuple[int, bool]],
    dtypes: Mapping[str, torch.dtype],
    *,
    rounds_excluded: bool = True,
) -> tuple[float, str] | None:
    """Return the share of the plain bytes sent after warm-up, with why and what to change, if it is `MUCH` or more; headers are
    left out.

    Args:
        between_nodes: the job has several nodes.
        parameters: elements of each, and whether they are excluded.
        dtypes: by dimension, what is sent in.
        rounds_excluded: whether `comm.excluded` holds here.
    """
    excluded = sum(numel for numel, is_excluded in parameters if is_excluded)
    coded = sum(numel for numel, _ in parameters) - excluded
    raw = sent = 0.0
    reasons: dict[str, None] = {}
    for dimension, dtype in dtypes.items():
        rule, plain = policy.rules[dimension], (excluded + coded) * dtype.itemsize
        raw += plain
        spec = rule.between if between_nodes else rule.inside
        if policy.is_identity(spec, dtype):
            sent += plain
            reasons[f"comm.{dimension} is {spec}, which saves nothing here: choose a codec for it"] = None
        elif plain < rule.min_bytes:
            sent += plain
            reasons["all of the model is smaller than comm.min_bytes: lower it"] = None
        else:
            of_gradients = rounds_excluded and dimension in ("dp", "dp_gather")
            excluded_dtype = policy.excluded_dtype(dtype) if of_gradients else dtype
            exact = policy.excluded == EXACT_CODEC
            excluded_bits = bits_of(EXACT_CODEC, dtype) if exact else 8 * excluded_dtype.itemsize
            if codec_of(spec).lossless:
                excluded_bits = bits_of(spec, dtype)
            sent += (excluded * excluded_bits + coded * bits_of(spec, dtype)) / 8
            if 2 * excluded > coded and not codec_of(spec).lossless:
                remedy = 'exclude less of it ("exclude": ["norm", "bias"] compresses embeddings)'
                if excluded_dtype == torch.float32 and of_gradients:
                    remedy += ', or set "excluded": "bf16"'
                reasons[f"{excluded / (excluded + coded):.0%} of the model is excluded: {remedy}"] = None
    if not reasons or sent < MUCH * raw:
        return None
    return sent / raw, "; ".join(reasons)


def _named(ranks: list[int], count: int) -> str:
    if len(ranks) == count:
        return "all ranks"
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks[:8]))}{', ...' if len(ranks) > 8 else ''}"
