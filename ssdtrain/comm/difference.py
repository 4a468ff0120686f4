"""Weights gathered as what changed since the last time.

After a step of ZeRO-1 or ZeRO-2 each rank has new weights for its shard, and all others still have the old ones. The difference
is small, and so is its error; weights themselves, quantised anew in every step, cost accuracy (SDP4Bit, arXiv 2410.15526).

Note: [What the others have]
    The owner keeps what the others hold of its shard, the reference: the sum of all differences as they were decoded, not its
    own exact weights. The next difference is taken from the reference, so what one loses is in the next: no error adds up.
    The owner uses the decoded weights as well, so all replicas hold the same bits; its exact weights live on in the optimizer's
    master copy.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor


class Change(NamedTuple):
    """One gather by difference."""

    sent: Tensor
    """This rank's difference, float32 [n]."""
    into: Tensor
    """All ranks' references, float32 [ranks x n]: decoded differences are added to them."""
    finish: Callable[[], None]
    """Once all have been added."""


class Differences:
    """The references of one rank, by bucket: as large as its shards."""

    def __init__(self) -> None:
        self._references: dict[str, Tensor] = {}

    def known(self, name: str, tensor: Tensor) -> bool:
        """Whether the others' copy of this shard is known."""
        found = self._references.get(name)
        return found is not None and found.numel() == tensor.numel() and found.dtype == tensor.dtype

    def remember(self, name: str, tensor: Tensor) -> None:
        """`tensor` is gathered as it is now."""
        self._references[name] = tensor.detach().reshape(-1).clone()

    def start(self, name: str, out: Tensor, mine: Tensor, own: int) -> Change:
        """What to send, and where what arrives is added.

        Args:
            out: flat [ranks x n]: what all ranks have of each other.
            mine: flat [n]: this rank's new weights; may be its part of `out`.
            own: this rank's place in `out`.
        """
        reference = self._references[name]
        sent = mine.float() - reference.float()
        place = out[own * mine.numel() : (own + 1) * mine.numel()]
        place.copy_(reference)
        into = out if out.dtype == torch.float32 else out.float()

        def finish() -> None:
            # One float32 sum, rounded once, on every rank from the same bits.
            if into is not out:
                out.copy_(into)
            reference.copy_(place)

        return Change(sent, into, finish)

    @property
    def nbytes(self) -> int:
        """Memory that the references take."""
        return sum(found.numel() * found.element_size() for found in self._references.values())

    def clear(self) -> None:
        """Forget what the others have: the next gather is in full."""
        self._references.clear()
