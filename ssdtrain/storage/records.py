"""Records of fixed fields, several of which are made for every saved tensor: in C, where that was built.

A record takes no dictionary and no call of Python to be made, and the cyclic collector does not look at it, unless it says so:
with ordinary objects it ran every few dozen saved tensors, for a tenth of the time of the hook.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from typing_extensions import dataclass_transform
else:

    def dataclass_transform() -> Any:
        return lambda decorator: decorator


T = TypeVar("T")


def _extension() -> Any:
    try:
        return importlib.import_module("ssdtrain.storage._records")
    except ImportError:
        return None


_native = _extension()


@dataclass_transform()
def record(
    *, collected: bool = False, told: tuple[str, ...] = (), tells: type | None = None
) -> Callable[[type[T]], type[T]]:
    """Make a class whose annotations are the fields of its instances, which it takes by place; those with a value may be left
    out. It has no subclasses, and no weak references to its instances.

    Args:
        collected: instances may be parts of cycles of references. Else a cycle through one is never freed. In either case a
            chain of a hundred thousand of them must not die at once: each is freed inside of the one before.
        told: fields: first an object whose `put` gets the others when an instance dies. That may be anywhere: `put` of a
            `SimpleQueue` runs no Python.
        tells: class of what it gets: a record that is not collected, of as many fields.
    """

    def made(cls: type[T]) -> type[T]:
        fields = tuple(cls.__annotations__)
        values = {name: cls.__dict__[name] for name in fields if name in cls.__dict__}
        rest = {
            name: value
            for name, value in vars(cls).items()
            if name not in values and name not in ("__dict__", "__weakref__")
        }
        if _native is None:
            return _in_python(cls.__name__, fields, tuple(values.values()), told, tells, rest)
        name = f"{cls.__module__}.{cls.__qualname__}"
        native: type[T] = _native.make(name, fields, tuple(values.values()), collected, told, tells)
        for attribute, value in rest.items():
            setattr(native, attribute, value)
        return native

    return made


def _in_python(
    name: str,
    fields: tuple[str, ...],
    defaults: tuple[Any, ...],
    told: tuple[str, ...],
    tells: Any,
    rest: dict[str, Any],
) -> Any:
    needed = len(fields) - len(defaults)

    def initialise(self: Any, *values: Any) -> None:
        if not needed <= len(values) <= len(fields):
            raise TypeError(f"a record takes {needed} to {len(fields)} values by place")
        for field, value in zip(fields, (*values, *defaults[len(values) - needed :]), strict=True):
            setattr(self, field, value)

    def tell(self: Any) -> None:
        getattr(self, told[0]).put(tells(*(getattr(self, field) for field in told[1:])))

    methods = {"__slots__": fields, "__init__": initialise, **({"__del__": tell} if told else {})}
    return type(name, (), {**rest, **methods})
