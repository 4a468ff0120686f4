"""Memory of transfers that may never end.

Note: [Transfers that never end]
A system call on a drive ends, or the kernel fails it. A transfer of cuFile may hang in a driver, and a copy of a device behind a
collective whose peer is gone: they are waited for until none has ended for a bounded time (`ssdtrain.patience`). After that they
may still read or fill their memory, which therefore stays as long as the process lives.
"""

from __future__ import annotations

__all__ = ["keep_for_ever"]

_HUNG: list[object] = []


def keep_for_ever(*memory: object) -> None:
    """Keep what a transfer uses that may never end."""
    _HUNG.extend(memory)
