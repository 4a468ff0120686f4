"""Replacing functions and putting the originals back."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import pytest

from ssdtrain.integration.patching import Patches, Wrap, call_after, is_patched, run_inside


class Holder:
    def method(self, x: int) -> list[Any]:
        """Doubles."""
        return [2 * x]

    @staticmethod
    def static(x: int) -> list[Any]:
        return [x]


class Derived(Holder):
    pass


def noting(name: str) -> Wrap:
    def wrap(plain: Any) -> Any:
        return lambda *args, **kwargs: [name, *plain(*args, **kwargs)]

    return wrap


def module() -> Any:
    made: Any = ModuleType("made")
    made.function = lambda x: [x]
    return made


@pytest.mark.parametrize("name", ["method", "static"])
@pytest.mark.parametrize("derived", [False, True])
def test_undone_a_class_has_the_very_objects_that_it_had(name: str, derived: bool) -> None:
    cls = Derived if derived else Holder
    before = dict(vars(cls))
    patches = Patches()
    patches.replace(cls, name, noting("a"))
    assert patches.active and is_patched(cls, name)
    assert getattr(cls(), name)(3) == ["a", 6 if name == "method" else 3]
    assert inspect.signature(getattr(cls(), name)) == inspect.signature(getattr(Holder(), name))
    patches.undo()
    patches.undo()
    assert dict(vars(cls)) == before and not patches.active
    assert all(found is before[key] for key, found in vars(cls).items())


def test_an_object_gets_an_attribute_of_its_own_and_loses_it() -> None:
    one, other = Holder(), Holder()
    patches = Patches()
    patches.replace(one, "method", noting("a"))
    assert one.method(1) == ["a", 2] and other.method(1) == [2]
    assert one.method.__doc__ == "Doubles."
    patches.undo()
    assert not vars(one)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2), (1, 2, 0), (0, 2, 1), (2, 0, 1)])
def test_several_users_undo_in_any_order(order: tuple[int, ...]) -> None:
    holder = module()
    plain = holder.function
    users = [Patches(), Patches(), Patches()]
    for user, name in zip(users, "abc", strict=True):
        user.replace(holder, "function", noting(name))
    left = ["c", "b", "a"]
    assert holder.function(0) == [*left, 0]
    for index in order:
        users[index].undo()
        left.remove("abc"[index])
        assert holder.function(0) == [*left, 0]
    assert holder.function is plain


def test_the_same_wrapper_is_applied_once_until_all_have_undone_it() -> None:
    holder = module()
    wrap, plain = noting("a"), holder.function
    first, second = Patches(), Patches()
    for user in (first, second):
        user.replace(holder, "function", wrap)
    assert holder.function(0) == ["a", 0]
    first.undo()
    assert holder.function(0) == ["a", 0]
    second.undo()
    assert holder.function is plain


def test_what_somebody_else_put_over_ours_stays_and_ours_passes_on(caplog: pytest.LogCaptureFixture) -> None:
    holder = module()
    plain = holder.function
    patches = Patches()
    patches.replace(holder, "function", noting("ours"))
    theirs = noting("theirs")(holder.function)
    ours, holder.function = holder.function, theirs
    later = Patches()
    later.replace(holder, "function", noting("later"))
    assert holder.function(0) == ["later", "theirs", "ours", 0]
    with caplog.at_level(logging.WARNING, "ssdtrain"):
        patches.undo()
    assert "made.function was replaced by" in caplog.text
    assert holder.function(0) == ["later", "theirs", 0]
    later.undo()
    assert holder.function is theirs and not is_patched(holder, "function")
    assert ours(0) == plain(0)


def test_what_somebody_else_has_put_back_is_no_reason_to_warn(caplog: pytest.LogCaptureFixture) -> None:
    holder = module()
    plain = holder.function
    patches = Patches()
    patches.replace(holder, "function", noting("ours"))
    holder.function = plain
    patches.undo()
    assert holder.function is plain and not caplog.text


def test_classes_and_tables_are_replaced_too() -> None:
    holder = module()
    holder.table, holder.cls = {"a": 1}, Holder
    table = holder.table
    first, second = Patches(), Patches()
    first.replace(holder, "table", lambda plain: {**plain, "b": 2})
    second.replace(holder, "table", lambda plain: {**plain, "c": 3})
    second.replace(holder, "cls", lambda plain: type("Other", (plain,), {}))
    assert holder.table == {"a": 1, "b": 2, "c": 3} and holder.cls.__name__ == "Other"
    first.undo()
    assert holder.table == {"a": 1, "c": 3}
    second.undo()
    assert holder.table is table and holder.cls is Holder


def test_a_wrapper_that_raises_leaves_nothing() -> None:
    holder = module()
    before = dict(vars(holder))
    patches = Patches()

    def fails(plain: Any) -> Any:
        raise ValueError

    with pytest.raises(ValueError):
        patches.replace(holder, "function", fails)
    with pytest.raises(AttributeError):
        patches.replace(holder, "missing", noting("a"))
    assert dict(vars(holder)) == before and not patches.active


def test_a_function_runs_inside_of_a_context_and_is_followed_by_a_call() -> None:
    heard: list[Any] = []

    @contextmanager
    def around(holder: Any, x: int) -> Iterator[None]:
        heard.append(("in", x))
        yield
        heard.append("out")

    patches = Patches()
    patches.replace(Derived, "method", run_inside(around))
    patches.replace(Derived, "method", call_after(lambda result, given: heard.append((result, given["x"]))))
    assert Derived().method(x=3) == [6]
    assert heard == [("in", 3), "out", ([6], 3)]
    with pytest.raises(TypeError):
        Derived().method("one", 2)
    patches.undo()
    assert "method" not in vars(Derived)
