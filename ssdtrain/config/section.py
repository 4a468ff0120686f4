"""The base of the sections of the config schema."""

from collections.abc import Iterator
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, model_validator
from typing_extensions import Self

from ssdtrain.config.errors import ConflictingValues
from ssdtrain.config.kinds import kind_of

ValueConflict = tuple[str, Any, str, str]
"""A conflict: key within the section, value, reason, allowed values."""


class Section(BaseModel):
    """Base of all sections."""

    shorthand: ClassVar[str | None] = None
    """The key that a value written in place of the section stands for: with "mode", `"plan": "auto"` is
    `"plan": {"mode": "auto"}`. It is always written out by `to_dict`."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid", use_attribute_docstrings=True)

    @model_validator(mode="after")
    def _check_conflicts(self) -> Self:
        found = list(self.conflicts())
        if found:
            raise ConflictingValues(found)
        return self

    def conflicts(self) -> Iterator[ValueConflict]:
        """Conflicts between values that are valid individually."""
        yield from ()

    def to_dict(self) -> dict[str, Any]:
        """A JSON-compatible dict that `load_config` reads as an equal config, without keys at their defaults."""
        written: dict[str, Any] = {}
        for name, field in type(self).model_fields.items():
            value = getattr(self, name)
            if isinstance(value, Section):
                inner = value.to_dict()
                if inner or field.default is None:
                    written[name] = inner
            elif name == self.shorthand or value != field.get_default(call_default_factory=True):
                written[name] = kind_of(field).plain(value)
        return written
