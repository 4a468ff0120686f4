"""What a plan leaves of the measured bandwidths, where its transfers are waited for though they are as measured.

Note: [Stalls that a margin does not end]
What makes transfers wait may be over, or come in every step: another job on the drive, a checkpoint, work on the processors. So a
margin is taken back, one reduction after the other, each time after twice as many calm steps. At the smallest margin stalls do
not count against calm steps: they have another cause. And a reduction that brought no other plan is tried again after a growing
number of steps only (`Backoff`).
"""

from __future__ import annotations

from ssdtrain.planner.drift import Backoff

__all__ = ["CALM", "STALLS", "StallMargin"]

STALL = 0.02
"""Of a step's time, more than predicted, in two steps in turn: plan again with a margin."""

REDUCTION = 0.85
"""Of the bandwidths, each time."""

LEAST = 0.1

CALM_STEPS = 64
"""Steps without stalls after which one reduction is taken back. Twice as many each time that stalls come again, up to
`MOST_CALM_STEPS`."""

MOST_CALM_STEPS = 4096

STALLS = "transfers were waited for"
CALM = "transfers were not waited for any more"


class StallMargin:
    """See Note: [Stalls that a margin does not end].

    Attributes:
        value: the part of the measured bandwidths that the next plan counts on.
    """

    def __init__(self) -> None:
        self.value = self._followed = 1.0
        self._stalled = 0  # steps in turn
        self._calm, self._calm_since = CALM_STEPS, 0
        self._backoff = Backoff()

    def reset(self) -> None:
        """The bandwidths are other ones now."""
        self.value = 1.0

    def observe(self, stalled: float, predicted: float) -> None:
        """A step waited for transfers for this part of its time, where the plan says `predicted`."""
        self._stalled = self._stalled + 1 if stalled > predicted + STALL else 0

    def changed(self, step: int) -> str:
        """Change `value` if it is time to.

        Returns:
            Why it is another one; "": it is not.
        """
        floored = self.value <= LEAST
        if self._stalled and not floored:
            self._calm_since = step
            if self._stalled < 2 or not self._backoff.due(step):
                return ""
            self.value = max(LEAST, self.value * REDUCTION)
            self._calm = min(MOST_CALM_STEPS, 2 * self._calm)
            return STALLS
        if self.value < 1 and step >= self._calm_since + self._calm:
            self.value, self._calm_since = min(1.0, self.value / REDUCTION), step
            return CALM
        return ""

    def requested(self) -> None:
        """A plan was requested, for whatever reason: stalls are counted from the next one on."""
        self._stalled = 0

    def planned(self, step: int, why: str, *, new: bool) -> None:
        """A plan was made with `value`, because of `why`. `new`: it was not followed before."""
        self._followed = self.value
        if why == STALLS:
            self._backoff.searched(step, new=new)

    def restore(self) -> None:
        """No plan was found with `value`: the one before is followed, with the margin that it was made with."""
        self.value = self._followed

    def failed(self, step: int) -> None:
        """Because of stalls a plan was searched for, and none was found: see `restore`."""
        self.restore()
        self._backoff.searched(step, new=False)
