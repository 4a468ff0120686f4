"""Searches for plans while a profiler records the thread that trains."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

__all__ = ["untraced"]

P = ParamSpec("P")
T = TypeVar("T")


def untraced(search: Callable[P, T]) -> Callable[P, T]:
    """Make `search` run on a thread of its own where a profiler records every call of the calling thread.

    `torch.profiler` with `with_stack` records the threads that were there when it began. The millions of calls of a search
    would fill its memory, and take many times as long. Exceptions reach the caller.
    """

    @functools.wraps(search)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        if sys.getprofile() is None:
            return search(*args, **kwargs)
        with ThreadPoolExecutor(1, "ssdtrain-plan") as pool:
            return pool.submit(search, *args, **kwargs).result()

    return run
