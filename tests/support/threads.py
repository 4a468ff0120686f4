"""What other threads may do at a moment."""

from __future__ import annotations

import threading
from typing import Any


def others_may_take(lock: Any) -> bool:
    """Whether another thread would get the lock now."""
    free: list[bool] = []

    def take() -> None:
        free.append(lock.acquire(blocking=False))
        if free[-1]:
            lock.release()

    other = threading.Thread(target=take)
    other.start()
    other.join()
    return free[0]
