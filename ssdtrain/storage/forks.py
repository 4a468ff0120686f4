"""What a forked child must not share with its parent: descriptors, worker threads, maps.

Nothing of storage works in a child: files are closed there, maps are absent, and no worker thread came along.
Methods raise, and release, free and close do nothing.
"""

import os
import weakref
from typing import Protocol

from ssdtrain.storage.errors import StoreClosed


class Inheritable(Protocol):
    def after_fork(self) -> None: ...


class _Process:
    generation = 0


_tracked: "weakref.WeakSet[Inheritable]" = weakref.WeakSet()


def generation() -> int:
    """Changes in every forked child: an object made under another generation belongs to an ancestor."""
    return _Process.generation


def track(thing: Inheritable) -> None:
    """Call `thing.after_fork()` in every child forked while it lives."""
    _tracked.add(thing)


def check(made_in: int, what: str) -> None:
    if made_in != _Process.generation:
        raise StoreClosed(
            f"{what} belongs to the parent process and cannot be used after a fork; build a new one in the"
            " child, or use the 'spawn' start method"
        )


def _in_child() -> None:
    _Process.generation += 1
    failed: BaseException | None = None
    for thing in list(_tracked):
        try:
            thing.after_fork()
        except BaseException as error:  # noqa: BLE001 - the others have to hear of it all the same
            failed = error
    if failed is not None:
        raise failed


os.register_at_fork(after_in_child=_in_child)
