"""Which stores are verified (`offload.verify: "sample"`)."""

from __future__ import annotations

from ssdtrain.storage.faults import mix

__all__ = ["Sampling", "next_verified"]


def next_verified(draw: int, verified: int) -> int:
    """In how many stores the next one is verified: in `verified` on average, and spread over the regions of a tape, however
    many there are."""
    return 1 + mix(draw + 1) % (2 * verified - 1)


class Sampling:
    """Chooses one of `verified` stores; 0: none."""

    __slots__ = ("_draws", "_verified", "left")

    def __init__(self, verified: int) -> None:
        self._verified = verified
        self._draws = 0
        self.left = next_verified(0, verified) if verified else 0
        """The store that is chosen next is the so manieth from here; 0 or less: none."""

    def draw(self) -> None:
        """The one that was chosen has begun."""
        self._draws += 1
        self.left = next_verified(self._draws, self._verified)
