"""Virtual time: a clock that moves only when the simulated host spends time or waits."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable

__all__ = ["Deadlock", "Timeline"]


class Deadlock(RuntimeError):
    """The host waits for something that nothing under way will bring about."""


class Timeline:
    """What happens when. Actions run in the order of their times, those of one time in the order in which they were added.

    Attributes:
        now: seconds since the simulation began, on the host.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._serial = itertools.count()

    def at(self, when: float, action: Callable[[], None]) -> None:
        """Run `action` when the time is `when` seconds, not before now."""
        heapq.heappush(self._due, (max(when, self.now), next(self._serial), action))

    def spend(self, seconds: float) -> None:
        """The host is busy for `seconds`; what is due meanwhile happens."""
        until = self.now + seconds
        while self._due and self._due[0][0] <= until:
            self._step()
        self.now = until

    def wait_for(self, ready: Callable[[], bool], timeout: float | None = None) -> bool:
        """The host waits until `ready()`, at most `timeout` seconds.

        Returns:
            False: time ran out.

        Raises:
            Deadlock: nothing is under way that could make it ready, and no timeout was given.
        """
        until = None if timeout is None else self.now + timeout
        while not ready():
            if until is not None and (not self._due or self._due[0][0] > until):
                self.now = until
                return False
            if not self._due:
                raise Deadlock(f"at {self.now * 1e3:.3f} ms the host waits, and nothing is under way")
            self._step()
        return True

    def _step(self) -> None:
        when, _, action = heapq.heappop(self._due)
        self.now = max(self.now, when)
        action()
