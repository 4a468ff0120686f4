"""What is said when a config is refused: where, which value, why, and what is allowed."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


class Refusal(ValueError):
    """One value is refused. Raised by parsers and validators, which do not know the key they serve.

    Attributes:
        why: completes the sentence "<value> ...", as in "is negative".
        allowed: what could stand there instead.
    """

    def __init__(self, why: str, allowed: str) -> None:
        super().__init__(why, allowed)
        self.why = why
        self.allowed = allowed

    def __str__(self) -> str:
        return f"{self.why}; allowed: {self.allowed}"


class Contradiction(ValueError):
    """Values that are fine one by one do not go together. Carries one (key, value, why, allowed) for each."""

    def __init__(self, found: Sequence[tuple[str, Any, str, str]]) -> None:
        super().__init__(list(found))
        self.found = list(found)

    def __str__(self) -> str:
        return "\n".join(
            f"{key}: {_shown(value)} {why}; allowed: {allowed}" for key, value, why, allowed in self.found
        )


@dataclass(frozen=True)
class Problem:
    """One reason why a config is refused."""

    path: str
    """The full key, as in "ssdtrain.offload.prefetch"."""
    value: Any
    """What was written there."""
    why: str
    """Completes the sentence "<value> ...", as in "is negative"."""
    allowed: str
    """What could stand there instead."""

    def __str__(self) -> str:
        return f"{self.path}: {_shown(self.value)} {self.why}; allowed: {self.allowed}"


def _shown(value: Any) -> str:
    try:
        shown = repr(value)
    except ValueError:  # an integer of more digits than Python writes, or something that holds one
        return f"a {type(value).__name__} that is too long to be shown"
    return shown if len(shown) <= 120 else f"{shown[:117]}..."


class ConfigError(ValueError):
    """A config is refused. Its text lists every problem that was found.

    Attributes:
        problems: one `Problem` for each.
        source: the file that was read, or None.
    """

    def __init__(self, problems: Sequence[Problem], source: str | None = None) -> None:
        super().__init__(tuple(problems), source)
        self.problems = tuple(problems)
        self.source = source

    def __str__(self) -> str:
        count = "1 problem" if len(self.problems) == 1 else f"{len(self.problems)} problems"
        origin = f" in {self.source}" if self.source else ""
        return "\n  ".join([f"the SSDTrain config is refused, {count}{origin}:", *map(str, self.problems)])
