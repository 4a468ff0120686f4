"""Waits that end when nothing ends any more: a device or a drive that is minutes behind its host is no hang."""

from __future__ import annotations

import time
from collections.abc import Callable

LONGEST = 0.5
"""Seconds between two looks at what has ended."""


class Patience:
    """A limit for several waits together, which begins anew whenever an operation ends.

    Args:
        seconds: time without an end after which waiting is given up.
        ended: returns how many operations have ended so far.
    """

    def __init__(self, seconds: float, ended: Callable[[], int]) -> None:
        self._seconds = seconds
        self._ended = ended
        self._count = ended()
        self._until = time.monotonic() + seconds

    def wait(self, passed: Callable[[float], bool]) -> bool:
        """Wait for one operation.

        Args:
            passed: blocks for so many seconds at most; True if the operation has ended.

        Returns:
            False: none has ended for the limit.
        """
        while not passed(min(self._seconds / 4, LONGEST)):
            now, count = time.monotonic(), self._ended()
            if count != self._count:
                self._count, self._until = count, now + self._seconds
            elif now >= self._until:
                return False
        self._until = time.monotonic() + self._seconds
        return True
