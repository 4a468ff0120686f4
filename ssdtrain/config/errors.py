"""Errors of a config: the key, its value, the reason, and what is allowed."""

import reprlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

_SHOWN = 120  # characters of a value
_SHOWN_KEY = 60  # of a key
_SHOWN_PATH = 200  # of a full key, or of a file's name
_SHOWN_WHY, _SHOWN_ALLOWED = 400, 600  # of a reason, which may quote a value, and of what is allowed
_LISTED = 21  # errors of one config: its unknown keys, and how many more there are
_SHOWN_BITS = 10_000  # of an integer; Python writes up to 4300 digits, which is about 14,000 bits


class InvalidValue(ValueError):
    """A value is invalid. Raised by parsers and validators, which do not know the key.

    Attributes:
        why: completes the sentence "<value> ...", for example "is negative".
        allowed: allowed values.
    """

    def __init__(self, why: str, allowed: str) -> None:
        super().__init__(why, allowed)
        self.why = why
        self.allowed = allowed

    def __str__(self) -> str:
        return f"{self.why}; allowed: {self.allowed}"


class ConflictingValues(ValueError):
    """Values that are valid individually conflict. Carries (key, value, why, allowed) for each conflict."""

    def __init__(self, found: Sequence[tuple[str, Any, str, str]]) -> None:
        super().__init__(list(found))
        self.found = list(found)

    def __str__(self) -> str:
        return "\n".join(str(ConfigIssue(*conflict)) for conflict in self.found)


@dataclass(frozen=True)
class ConfigIssue:
    """One error in a config."""

    path: str
    """The full key, for example "ssdtrain.offload.prefetch"."""
    value: Any
    """The given value."""
    why: str
    """Completes the sentence "<value> ...", for example "is negative"."""
    allowed: str
    """Allowed values."""

    def __str__(self) -> str:
        path, why = shortened(self.path, _SHOWN_PATH), shortened(self.why, _SHOWN_WHY)
        return f"{path}: {shown(self.value)} {why}; allowed: {shortened(self.allowed, _SHOWN_ALLOWED)}"


class ConfigError(ValueError):
    """A config is invalid. The message lists the first 21 errors, and says how many there are.

    Attributes:
        problems: one `ConfigIssue` per error.
        source: the file that was read, or None.
    """

    def __init__(self, problems: Sequence[ConfigIssue], source: str | None = None) -> None:
        super().__init__(tuple(problems), source)
        self.problems = tuple(problems)
        self.source = source

    @classmethod
    def of(cls, path: str, value: Any, why: str, allowed: str) -> "ConfigError":
        """Make the error of one `ConfigIssue`."""
        return cls([ConfigIssue(path, value, why, allowed)])

    def __str__(self) -> str:
        count = "1 error" if len(self.problems) == 1 else f"{len(self.problems)} errors"
        origin = f" in {shortened(printable(self.source), _SHOWN_PATH)}" if self.source else ""
        lines = [f"invalid SSDTrain config{origin} ({count}):", *map(str, self.problems[:_LISTED])]
        if len(self.problems) > _LISTED:
            lines.append(f"and {len(self.problems) - _LISTED} more, shown once these are right")
        return "\n  ".join(lines)


def shortened(text: str, most: int) -> str:
    """`text` in at most so many characters: its beginning and its end."""
    return text if len(text) <= most else f"{text[: most * 2 // 3]} ... {text[5 - most // 3 :]}"


class _BoundedRepr(reprlib.Repr):
    """repr in time and memory that do not grow with the size of a value."""

    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxother = _SHOWN + 2
        self.maxlist = self.maxtuple = self.maxdict = self.maxset = self.maxfrozenset = _SHOWN // 3

    def repr_int(self, x: int, level: int) -> str:
        return f"<a number of {x.bit_length()} bits>" if x.bit_length() > _SHOWN_BITS else repr(x)

    repr__Mapping = repr_mappingproxy = reprlib.Repr.repr_dict


def shown(value: Any) -> str:
    """Return repr(value) in at most 120 characters."""
    text = _BoundedRepr().repr(value)
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."


def shown_key(key: Any) -> str:
    """A mapping's key for an error message: without quotes if it is a short printable string."""
    if isinstance(key, str) and len(key) <= _SHOWN_KEY and key.isprintable():
        return key
    text = shown(key)
    return text if len(text) <= _SHOWN_KEY else f"{text[: _SHOWN_KEY - 3]}..."


def printable(text: str) -> str:
    """`text` if it is printable on one line, else its repr (lone surrogates, control characters)."""
    return text if text.isprintable() else repr(text)
