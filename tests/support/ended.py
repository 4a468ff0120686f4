"""Metrics of a runtime when nothing is under way."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import TYPE_CHECKING

from tests.support.filesystems import eventually

if TYPE_CHECKING:
    from ssdtrain.runtime import RuntimeMetrics


def ended(statistics: Callable[[], RuntimeMetrics | None]) -> RuntimeMetrics:
    """The metrics when garbage is collected and writes under way have ended: until then a write that was cancelled too late has
    its slot. After a while as they are."""

    def taken() -> int:
        found = statistics()
        return int(found.store.live_slots)

    gc.collect()
    eventually(lambda: not taken())
    found = statistics()
    assert found is not None
    return found
