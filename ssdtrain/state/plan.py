"""The plan of the chunks that stay on the device under a limit, and of how many pass through it at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ssdtrain.config import ConfigError, exact_size
from ssdtrain.config.units import format_size

CHUNK_BUFFERS = 2
"""Chunks in memory at a time beside those that stay: one that computes, one that is loaded or stored."""


@dataclass(frozen=True)
class StateChunk:
    """A chunk as a plan of blocks sees it, in bytes.

    Attributes:
        name: of its block.
        values: parameters, which come for a forward and for a backward.
        gradients: that leave after a backward, and come again for that of a further microbatch.
        staying: on the device where it stays there.
        passing: on the device at most while it passes.
        stepped: parameters that the CPU steps, wherever they are; 0: the device does.
    """

    name: str
    values: int
    gradients: int
    staying: int
    passing: int
    stepped: int = 0


@dataclass(frozen=True)
class StateChoice:
    """What of the model state is on the device: see `ModelState.follow`.

    Attributes:
        persistent: the first so many chunks stay; where the CPU steps them, their parameters.
        buffers: chunks that may be in memory beside these; 1.5: one, and parts of the next.
        limit: bytes on the device at most.
    """

    persistent: int
    buffers: float
    limit: int


@dataclass(frozen=True)
class StatePlan:
    """Bytes are those of parameters, gradients and optimizer state.

    Attributes:
        limit: on the device at most.
        fixed: of what stays: the persistent chunks, and all that is in no chunk.
        total: of the whole model.
        persistent: the first so many chunks stay.
        buffers: chunks that may be in memory beside them: 1 or 2; 0 where all stay.
        kept: the parameters of so many chunks after those stay, and nothing else of them.
    """

    limit: int
    fixed: int
    total: int
    persistent: int
    buffers: int
    kept: int = 0


def plan_state(
    chunks: Sequence[int],
    outside: int,
    limit: int | None,
    passing: Sequence[int] | None = None,
    values: Sequence[int] = (),
) -> StatePlan:
    """Plan the most persistent chunks that leave room for two others; for one other where two do not fit.

    With `values`, parameters stay first, which saves the most transfers for a byte of memory; then whole chunks.

    Args:
        chunks: bytes of each, in the order of execution.
        outside: bytes that are in no chunk.
        limit: bytes on the device at most; None: what two chunks take.
        passing: bytes of each on the device while it passes through; None: all of it.
        values: bytes of the parameters of each, which may stay without the rest; (): they may not.

    Raises:
        ConfigError: no plan meets the limit; names the smallest limit that can be met.
    """
    total = outside + sum(chunks)
    passing = chunks if passing is None else passing
    largest = max(passing, default=0)
    if limit is None:
        limit = min(total, outside + CHUNK_BUFFERS * largest)
    if limit < outside + largest:
        why = (
            f"is less than any plan needs: {format_size(outside)} are in no chunk (embeddings, heads, shared, frozen and small "
            f"parameters), and the largest chunk takes {format_size(largest)} with its gradients and optimizer state"
        )
        allowed = (
            f"at least {exact_size(outside + largest)}, and {exact_size(outside + CHUNK_BUFFERS * largest)} for loads ahead; or "
            "smaller chunks by state.blocks, which may also name embeddings and heads"
        )
        raise ConfigError.of("ssdtrain.state.device_limit", exact_size(limit), why, allowed)
    if total <= limit:
        return StatePlan(limit, total, total, len(chunks), 0)
    count = len(chunks)
    falling = list(reversed(range(count)))
    choices = [(persistent, count - persistent if values else 0) for persistent in falling]
    choices += [(0, kept) for kept in falling] if values else []
    for persistent, kept in choices:
        stays = persistent + kept
        fixed = outside + sum(chunks[:persistent]) + sum(values[persistent:stays])
        moving = [
            nbytes - (values[at] if at < stays else 0)
            for at, nbytes in enumerate(passing)
            if at >= persistent
        ]
        if fixed + CHUNK_BUFFERS * max(moving) <= limit:
            return StatePlan(limit, fixed, total, persistent, CHUNK_BUFFERS, kept)
    return StatePlan(limit, outside, total, 0, 1)
