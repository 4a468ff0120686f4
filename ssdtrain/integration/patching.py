"""Replaces functions of other modules, classes and objects, and puts the originals back.

Note: [One dispatcher]
    What takes the place of a function calls the outermost of our wrappers, which calls the next one, down to the original. So
    several users may replace the same function and undo that in any order: the wrappers that are left are linked anew.

Note: [Replaced again]
    Other code may replace our function by one that calls it. Restoring the original would remove that one, so it is left in
    place, with a warning; our function then passes every call on to the original.
"""

from __future__ import annotations

import functools
import inspect
import logging
import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from types import FunctionType
from typing import Any

__all__ = ["Function", "Patches", "Wrap", "call_after", "is_patched", "run_inside"]

logger = logging.getLogger("ssdtrain")

Function = Callable[..., Any]
"""A function of a framework, whatever its arguments."""

Wrap = Callable[[Any], Any]
"""Takes what stands in a place and returns what is to stand there instead. May be called again when others are undone."""

_SITES = "_ssdtrain_sites"
_ABSENT = object()
_lock = threading.RLock()  # finalizers undo patches, too


class _Site:
    """One attribute of one object, replaced: the original and the wrappers around it.

    Args:
        holder: module, class or object.
        name: of the attribute.
    """

    def __init__(self, holder: Any, name: str) -> None:
        self.holder = holder
        self.name = name
        self._original = vars(holder).get(name, _ABSENT)
        self._plain = getattr(holder, name)
        self._outermost = self._plain
        # Innermost first. The same wrapper may be there several times, and is applied once.
        self._wraps: list[Wrap] = []
        self._static = isinstance(inspect.getattr_static(holder, name, None), staticmethod)
        self._placed: Any = None
        if callable(self._plain) and not inspect.isclass(self._plain):

            @functools.wraps(self._plain)
            def dispatch(*args: Any, **kwargs: Any) -> Any:
                return self._outermost(*args, **kwargs)

            self._placed = staticmethod(dispatch) if self._static and inspect.isclass(holder) else dispatch
            self._dispatches = True
        else:
            self._dispatches = False

    @property
    def in_place(self) -> bool:
        """Whether the holder has our replacement now."""
        return vars(self.holder).get(self.name, _ABSENT) is self._placed

    def add(self, wrap: Wrap) -> None:
        begins = not self._wraps
        self._link([*self._wraps, wrap])
        if begins or not self._dispatches:
            setattr(self.holder, self.name, self._placed)
            _sites_of(self.holder)[self.name] = self

    def remove(self, wrap: Wrap) -> None:
        left = list(self._wraps)
        # The last of several equal ones: the order of the others stays.
        del left[len(left) - 1 - left[::-1].index(wrap)]
        in_place = self.in_place
        self._link(left)
        if left:
            if in_place and not self._dispatches:
                setattr(self.holder, self.name, self._placed)
            return
        if in_place:
            self._restore()
        elif vars(self.holder).get(self.name, _ABSENT) is not self._original:
            self._warn()
        sites = _sites_of(self.holder)
        if sites.get(self.name) is self:
            del sites[self.name]
        if not sites:
            delattr(self.holder, _SITES)

    def _link(self, wraps: list[Wrap]) -> None:
        found = self._plain
        for wrap in dict.fromkeys(wraps):
            inner, found = found, wrap(found)
            if isinstance(found, FunctionType) and found is not inner:
                functools.update_wrapper(found, inner)  # the next wrapper may read its signature
        self._outermost, self._wraps = found, wraps
        if not self._dispatches:
            self._placed = found

    def _restore(self) -> None:
        if self._original is _ABSENT:
            delattr(self.holder, self.name)
        else:
            setattr(self.holder, self.name, self._original)

    def _warn(self) -> None:
        """See Note: [Replaced again]."""
        found = getattr(self.holder, self.name, None)
        where = getattr(self.holder, "__qualname__", None) or getattr(self.holder, "__name__", None)
        logger.warning(
            "%s.%s was replaced by %s.%s after ssdtrain had replaced it: it is left in place, and ssdtrain's function passes "
            "calls on to the original",
            where or type(self.holder).__qualname__,
            self.name,
            getattr(found, "__module__", "?"),
            getattr(found, "__qualname__", type(found).__qualname__),
        )


def _sites_of(holder: Any) -> dict[str, _Site]:
    """Return the places by name, kept on the holder, so that they live as long as the replacements."""
    found: dict[str, _Site] | None = vars(holder).get(_SITES)
    if found is None:
        found = {}
        setattr(holder, _SITES, found)
    return found


def is_patched(holder: Any, name: str) -> bool:
    """Whether the attribute `name` of `holder` is replaced now."""
    return name in vars(holder).get(_SITES, {})


def run_inside(context: Callable[..., AbstractContextManager[Any]]) -> Wrap:
    """Run a function in the context that `context` makes for the arguments of the call."""

    def wrap(plain: Callable[..., Any]) -> Callable[..., Any]:
        def function(*args: Any, **kwargs: Any) -> Any:
            with context(*args, **kwargs):
                return plain(*args, **kwargs)

        return function

    return wrap


def call_after(then: Callable[[Any, Mapping[str, Any]], object]) -> Wrap:
    """Call `then(result, arguments by name)` each time a function has returned."""

    def wrap(plain: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(plain)

        def function(*args: Any, **kwargs: Any) -> Any:
            result = plain(*args, **kwargs)
            then(result, signature.bind(*args, **kwargs).arguments)
            return result

        return function

    return wrap


class Patches:
    """Replacements of one user, undone together.

    With nothing replaced, every holder has its original objects: the same functions and descriptors, and no attribute that it
    inherited before.

    Example:
        >>> patches = Patches()
        >>> patches.replace(module, "function", lambda plain: lambda *args: plain(*args))
        >>> patches.undo()
    """

    def __init__(self) -> None:
        self._made: list[tuple[_Site, Wrap]] = []

    @property
    def active(self) -> bool:
        """Whether anything is replaced."""
        return bool(self._made)

    def replace(self, holder: Any, name: str, wrap: Wrap) -> None:
        """Put `wrap(what stands there)` in the place of the attribute `name` of `holder`, until `undo`.

        A function keeps its name, docstring and signature. The same `wrap` given several times, by one user or by many, is
        applied once, until all of them have undone it.

        Args:
            holder: module, class or object; of a class also a static method.
            wrap: its argument is bound where the holder is an object.

        Raises:
            AttributeError: `holder` has no such attribute.
        """
        with _lock:
            site: _Site | None = vars(holder).get(_SITES, {}).get(name)
            if site is None or not site.in_place:
                site = _Site(holder, name)
            site.add(wrap)
            self._made.append((site, wrap))

    def replace_all(self, places: Mapping[str, Iterable[tuple[Any, str]]], wraps: Mapping[str, Wrap]) -> None:
        """`replace` by each of `wraps` what stands in the places of its name, each (holder, attribute)."""
        for name, wrap in wraps.items():
            for place in places[name]:
                self.replace(*place, wrap)

    def undo(self) -> None:
        """Undo all replacements, the last first. Idempotent. See Note: [Replaced again]."""
        with _lock:
            while self._made:
                site, wrap = self._made.pop()
                site.remove(wrap)
