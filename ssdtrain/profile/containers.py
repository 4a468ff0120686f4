"""What is in the containers that a block is called with, and copies of these containers.

A container is exactly a tuple, a list, a dict, an OrderedDict, a named tuple or a slice. Any other class, also one that is
registered with torch's pytrees, may keep more than its leaves: it is an object.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator
from typing import Any


def _is_tuple(kind: type) -> bool:
    return kind is tuple or (kind.__bases__ == (tuple,) and hasattr(kind, "_fields"))


def _parts(one: Any) -> Collection[Any] | None:
    """What is in a container, in order; None: it is none."""
    kind = type(one)
    if kind is slice:
        return one.start, one.stop, one.step
    if kind is list or _is_tuple(kind):
        return one  # type: ignore[no-any-return]
    return one.values() if kind in (dict, OrderedDict) else None


def leaves(value: Any) -> Iterator[Any]:
    """Everything in `value` that is no container. A container that comes several times is opened once."""
    pending, opened = [value], dict[int, Any]()
    while pending:
        one = pending.pop()
        parts = _parts(one)
        if parts is None:
            yield one
        elif id(one) not in opened:
            opened[id(one)] = one
            pending.extend(reversed(list(parts)))


def copy_containers(value: Any, leaf: Callable[[Any], Any]) -> Any:
    """A copy of all containers in `value`, with `leaf(one)` in the place of each leaf, in the order of `leaves`.

    A list or dict that comes several times is one in the copy, too; it may hold itself.
    """
    return _copy(value, leaf, {})


def _copy(one: Any, leaf: Callable[[Any], Any], copied: dict[int, Any]) -> Any:
    # No closure that calls itself: such a cycle keeps tensors until the next collection of garbage.
    kind: Any = type(one)
    if _is_tuple(kind):
        return tuple.__new__(kind, [_copy(part, leaf, copied) for part in one])
    if kind is slice:
        return slice(*[_copy(part, leaf, copied) for part in (one.start, one.stop, one.step)])
    if kind is not list and kind not in (dict, OrderedDict):
        return leaf(one)
    if id(one) not in copied:
        made = copied[id(one)] = kind()
        if kind is list:
            made.extend(_copy(part, leaf, copied) for part in one)
        else:
            made.update((key, _copy(part, leaf, copied)) for key, part in one.items())
    return copied[id(one)]
