"""`offload.endurance` under `amount: "auto"`: how fast a plan may write the drives."""

from __future__ import annotations

import logging

from ssdtrain.planner.drift import Backoff
from ssdtrain.storage import Endurance, StoreMetrics
from ssdtrain.text import size_text

__all__ = ["WearLimit"]

logger = logging.getLogger("ssdtrain")

SLACK = 1.05
"""Of the allowed rate of the drives, in two steps in turn: plan again."""

MARGIN = 0.9
"""By which the rate of the next plan is reduced then."""


class WearLimit:
    """The bytes per second that may be offloaded, from the rating of the drives and the bytes that reach them.

    Args:
        endurance: of the drives of this rank.
    """

    def __init__(self, endurance: Endurance) -> None:
        self.rate: float | None = None
        """Bytes per second of saved tensors; None: the drives have no known rating."""
        self._endurance = endurance
        self._written: dict[str, int] = {}
        self._allowed: float | None = None
        self._over = 0  # steps in turn
        self._margin = self._followed = 1.0
        self._steps, self._backoff = 0, Backoff()
        self._lowered = False  # since the latest plan
        self._warned = self._warned_of_life = False

    def observe(self, store: StoreMetrics, offloaded: int, seconds: float) -> None:
        """A step of `seconds` has ended, after `offloaded` bytes of saved tensors in all."""
        self._steps += 1
        written = {drive.path: drive.bytes_written for drive in store.drives}
        step = {path: nbytes - self._written.get(path, 0) for path, nbytes in written.items()}
        self._allowed = self._endurance.allowed_rate(written)
        total = sum(step.values())
        # Of what is offloaded a part goes to the host tier, a codec makes it smaller, and stores are cancelled.
        share = offloaded / sum(written.values()) if any(written.values()) else 1.0
        self._written = written
        if self._allowed is None:
            return
        self._over = self._over + 1 if seconds and total / seconds > SLACK * self._allowed else 0
        self.rate = self._margin * self._allowed * max(share, 0.1)

    def exceeded(self) -> bool:
        """The drives were written faster than allowed, in two steps in turn: the next plan writes less. Where that
        brought nothing new, True comes after ever more steps (`Backoff`)."""
        if self._over < 2 or not self._backoff.due(self._steps):
            return False
        self._over, self._lowered = 0, True
        self._margin *= MARGIN
        if self.rate is not None:
            self.rate *= MARGIN
        return True

    def failed(self) -> bool:
        """No plan was found, and the one before is followed, with its rate. True: it was searched for because the drives wear too
        fast, which they go on doing; logged once."""
        self._over, self._margin = 0, self._followed
        if not self._lowered:
            return False
        self._lowered = False
        self._backoff.searched(self._steps, new=False)
        if not self._warned_of_life and self._allowed is not None:
            self._warned_of_life = True
            logger.warning(
                "offload.endurance: more than the allowed %s/s are written to %s, which wear out before %g years, because no "
                "plan within the limits writes less",
                *self._budget(),
            )
        return True

    def _budget(self) -> tuple[str, str, float]:
        """As the warnings say it: bytes per second, the drives, years."""
        return size_text(self._allowed or 0), ", ".join(self._endurance.devices), self._endurance.years

    def planned(self, *, bound: bool, new: bool) -> None:
        """A plan begins.

        Args:
            bound: it offloads less than could be hidden, which is logged once.
            new: it was not followed before.
        """
        if self._lowered:
            self._backoff.searched(self._steps, new=new)
        self._over, self._followed, self._lowered = 0, self._margin, False
        if bound and not self._warned and self._allowed is not None:
            self._warned = True
            logger.warning(
                "offload.endurance: at most %s/s are written to %s, for a life of %g years: less is offloaded than could be "
                "hidden",
                *self._budget(),
            )
