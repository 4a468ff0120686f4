"""Fork handling: a forked child shares neither descriptors, worker threads nor memory maps with its parent.

Storage objects are unusable in a forked child: their files are closed, their maps are absent, and no worker thread exists.
Methods raise `StoreClosed`; `release`, `free` and `close` do nothing.
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
    """Number of forks between the first process and this one; an object with another generation belongs to an ancestor."""
    return _Process.generation


def track(thing: Inheritable) -> None:
    """Call `thing.after_fork()` in every child that is forked while `thing` is alive."""
    _tracked.add(thing)


def check(made_in: int, what: str) -> None:
    if made_in != _Process.generation:
        raise StoreClosed(
            f"{what} belongs to the parent process and cannot be used after a fork; create a new one in the"
            " child, or use the 'spawn' start method"
        )


def _in_child() -> None:
    _Process.generation += 1
    failed: BaseException | None = None
    for thing in list(_tracked):
        try:
            thing.after_fork()
        except BaseException as error:  # noqa: BLE001 - call the remaining ones first
            failed = error
    if failed is not None:
        raise failed


os.register_at_fork(after_in_child=_in_child)
