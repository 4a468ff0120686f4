"""Types of config values: parsing, serialisation and the description of allowed values.

The schema annotates its fields with these types. Error messages, flags and the generated documentation take the description
from `kind_of`, so they always agree with the schema.
"""

import json
import os
import re
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Le
from pydantic import BeforeValidator, GetCoreSchemaHandler
from pydantic.fields import FieldInfo
from pydantic_core import CoreSchema, core_schema

from ssdtrain.config import codecs, units
from ssdtrain.config.amount import AMOUNT_ALLOWED, Amount, parse_amount
from ssdtrain.config.errors import InvalidValue
from ssdtrain.config.paths import DIRECTORIES_ALLOWED, DIRECTORY_ALLOWED, parse_directories, parse_directory


@dataclass(frozen=True)
class ValueKind:
    """Parsing and serialisation of one type of value. As an annotation of a field it is also the validator."""

    name: str
    """Shown as the type in the documentation and as a flag's metavar."""
    allowed: str
    """Completes the sentence "allowed: ..."."""
    parse: Callable[[Any], Any] = lambda value: value
    """Parser of a value of JSON, YAML, Python or a flag to the typed value. Raises `InvalidValue`."""
    plain: Callable[[Any], Any] = lambda value: value
    """Converter to a JSON value, without loss."""
    text: Callable[[str], Any] = str
    """Converter of a flag's text to a JSON value."""
    choices: tuple[str, ...] = ()
    many: bool = False
    """A flag takes several values."""
    accepts_auto: bool = False
    """"auto" is a value of its own, and not that of a key left out."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_before_validator_function(self.parse, handler(source))


DRIVE_BLOCK = 4096
"""Block size of drives, and minimum size of a spill file, bytes."""
UNITLESS = 64 * units.KiB
"""Bytes below which a number without a unit is not taken for a size of memory: it was meant with one."""


def _size(least: int = 0, why: str = "", bound: str = "", *, unit: bool = False) -> ValueKind:
    """Make the kind of sizes in bytes.

    Args:
        least: smallest size.
        why: reason against less.
        bound: what is allowed, before the description of sizes.
        unit: a small number needs a unit.
    """
    allowed = f"{bound}: {units.SIZE_ALLOWED}" if bound else units.SIZE_ALLOWED

    def parse(value: Any) -> int:
        try:
            size = units.parse_size(value)
        except InvalidValue as error:
            raise InvalidValue(error.why, allowed) from None
        if size < least:
            raise InvalidValue(why, allowed)
        if unit and 0 < size < UNITLESS and not (isinstance(value, str) and value.strip()[-1].isalpha()):
            guess = f'has no unit, and would be {size} bytes (did you mean "{size}GiB"?)'
            raise InvalidValue(guess, allowed)
        return size

    return ValueKind("size", allowed, parse, units.exact_size)


def _number(name: str, allowed: str, why: str, fits: Callable[[float], bool]) -> ValueKind:
    def parse(value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not fits(value):
            raise InvalidValue(why, allowed)
        return float(value)

    return ValueKind(name, allowed, parse, text=float)


def _names(name: str, allowed: str, *, empty: bool) -> ValueKind:
    def parse(value: Any) -> tuple[str, ...]:
        names = [value] if isinstance(value, str) else value
        if (
            not isinstance(names, list | tuple)
            or not (names or empty)
            or not all(isinstance(each, str) and each for each in names)
        ):
            raise InvalidValue("is not a list of names", allowed)
        return tuple(names)

    return ValueKind(name, allowed, parse, list, many=True)


def _switch(value: Any) -> Any:
    # YAML 1.1 reads a bare `on` or `off` as a boolean.
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else value


FILE_ALLOWED = "the path of a file; ~ is expanded"


def _file(value: Any) -> str:
    text = os.fspath(value) if isinstance(value, str | os.PathLike) else None
    if not isinstance(text, str) or not text.strip() or "\0" in text:
        raise InvalidValue("names no file", FILE_ALLOWED)
    return text


MOST_STEPS = 100
STEPS_ALLOWED = f'numbers of steps from 1, and ranges such as "10-12", at most {MOST_STEPS} steps'


def _steps(value: Any) -> tuple[int, ...]:
    found: set[int] = set()
    for item in value if isinstance(value, list | tuple) else [value]:
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", str(item)) if isinstance(item, int | str) else None
        if match is None or isinstance(item, bool):
            raise InvalidValue("is not a list of steps", STEPS_ALLOWED)
        first, last = int(match[1]), int(match[2] or match[1])
        if first < 1 or last < first:
            raise InvalidValue(f"holds {item}", STEPS_ALLOWED)
        if last - first >= MOST_STEPS or len(found := found | set(range(first, last + 1))) > MOST_STEPS:
            raise InvalidValue("is too many steps", STEPS_ALLOWED)
    return tuple(sorted(found))


RATIO_ALLOWED = (
    'a number above 0 and at most 1, or such numbers by patterns of layers: {"*.mlp.*": 0.125, "*": 0.25}'
)


def _ratio_rules(value: Any) -> tuple[tuple[str, float], ...]:
    if isinstance(value, list | tuple):
        value = (
            dict(value) if all(isinstance(rule, list | tuple) and len(rule) == 2 for rule in value) else None
        )
    rules = value if isinstance(value, Mapping) else {"*": value}
    if not rules:
        raise InvalidValue("holds no ratio", RATIO_ALLOWED)
    for pattern, ratio in rules.items():
        if not isinstance(pattern, str) or not pattern:
            raise InvalidValue(f"has the pattern {pattern!r}", RATIO_ALLOWED)
        if isinstance(ratio, bool) or not isinstance(ratio, int | float) or not 0 < ratio <= 1:
            raise InvalidValue(
                "is not a ratio" if rules is not value else f"has the ratio {ratio!r} for {pattern!r}",
                RATIO_ALLOWED,
            )
    return tuple((pattern, float(ratio)) for pattern, ratio in rules.items())


def _plain_ratio(rules: tuple[tuple[str, float], ...]) -> Any:
    return rules[0][1] if len(rules) == 1 and rules[0][0] == "*" else dict(rules)


PLACES = ("keep", "offload", "host", "ssd")
"""Where a rule of `offload.modules` leaves saved tensors."""
MODULE_RULES_ALLOWED = (
    'patterns of names or classes of modules, each with "keep", "offload", "host" or "ssd": '
    '{"*.self_attn": "keep", "*.mlp": "ssd"}'
)


def _module_rules(value: Any) -> tuple[tuple[str, str], ...]:
    if isinstance(value, tuple):
        value = dict(value)
    if not isinstance(value, Mapping):
        raise InvalidValue("is not a block of patterns", MODULE_RULES_ALLOWED)
    for pattern, place in value.items():
        if not isinstance(pattern, str) or not pattern:
            raise InvalidValue(f"has the pattern {pattern!r}", MODULE_RULES_ALLOWED)
        if place not in PLACES:
            raise InvalidValue(f"has {place!r} for {pattern!r}", MODULE_RULES_ALLOWED)
    return tuple(value.items())


Size = Annotated[int, _size()]
"""Bytes, 0 or more."""
PositiveSize = Annotated[int, _size(1, "is zero", "more than zero")]
"""Bytes, 1 or more."""
MemorySize = Annotated[int, _size(1, "is zero", "more than zero", unit=True)]
"""Bytes of a device, 1 or more, written with a unit."""
HostMemorySize = Annotated[int, _size(unit=True)]
"""Bytes of host memory, 0 or more, written with a unit."""
Capacity = Annotated[int, _size(DRIVE_BLOCK, "is less than one block of a drive", "at least 4KiB")]
"""Bytes of a drive, a block or more."""
Seconds = Annotated[float, ValueKind("seconds", units.DURATION_ALLOWED, units.parse_duration)]
AmountField = Annotated[
    Amount, ValueKind("amount", AMOUNT_ALLOWED, parse_amount, Amount.plain, accepts_auto=True)
]
Directory = Annotated[str, ValueKind("directory", DIRECTORY_ALLOWED, parse_directory)]
File = Annotated[str, ValueKind("file", FILE_ALLOWED, _file)]
Directories = Annotated[
    tuple[str, ...], ValueKind("directories", DIRECTORIES_ALLOWED, parse_directories, list, many=True)
]
CodecName = Annotated[
    str, ValueKind("codec", codecs.OFFLOAD_ALLOWED, codecs.parse_offload_codec, accepts_auto=True)
]
"""Codec of saved tensors, "auto" or "off"."""
CommRule = Annotated[str, ValueKind("codec", codecs.RULE_ALLOWED, codecs.parse_rule)]
"""Codecs of messages between ranks, which require payloads of known size."""
Fraction = Annotated[
    float,
    _number(
        "fraction", "a number above 0 and below 1, such as 0.1", "is not a fraction", lambda v: 0 < v < 1
    ),
]
Slowdown = Annotated[
    float,
    _number(
        "number",
        "a number from 0 (no slowdown), such as 0.02 (2% longer) or 1.0 (twice the time)",
        "is not such a number",
        lambda v: 0 <= v < 1e6,
    ),
]
Positive = Annotated[
    float,
    _number(
        "number above 0",
        "a number above 0 and below a million, such as 1 or 0.3",
        "is not such a number",
        lambda v: 0 < v < 1e6,
    ),
]
RatioRules = Annotated[
    tuple[tuple[str, float], ...],
    ValueKind("ratio", RATIO_ALLOWED, _ratio_rules, _plain_ratio, text=json.loads),
]
"""(pattern of layers, ratio), of which the first that fits counts."""
ModuleRules = Annotated[
    tuple[tuple[str, str], ...],
    ValueKind("rules", MODULE_RULES_ALLOWED, _module_rules, dict, text=json.loads),
]
"""(pattern of modules, one of `PLACES`), of which the first that fits counts."""
Names = Annotated[tuple[str, ...], _names("names", 'a list of names or patterns, or "none"', empty=False)]
StepNumbers = Annotated[tuple[int, ...], ValueKind("steps", STEPS_ALLOWED, _steps, list, many=True)]
"""Numbers of steps, in ascending order."""
Patterns = Annotated[
    tuple[str, ...],
    _names(
        "patterns", 'names or classes of modules, * for any text, such as ["*.mlp", "LayerNorm"]', empty=True
    ),
]
"""Patterns of modules, by qualified name or class."""
Switch = Annotated[Literal["auto", "on", "off"], BeforeValidator(_switch)]
PlanMode = Annotated[Literal["auto", "off"], BeforeValidator(_switch)]


def kind_of(field: FieldInfo) -> ValueKind:
    """The kind of a schema field: its annotation, or derived from its type."""
    annotation, metadata = _unwrap(field.annotation, list(field.metadata))
    for item in metadata:
        if isinstance(item, ValueKind):
            return item
    if get_origin(annotation) is Literal:
        choices = get_args(annotation)
        return ValueKind("choice", ", ".join(f'"{choice}"' for choice in choices), choices=choices)
    if annotation is bool:
        return ValueKind("boolean", "true or false")
    if annotation is int:
        return ValueKind("number", _range(metadata), text=int)
    raise TypeError(f"the schema contains {annotation!r}, which has no kind")


def _unwrap(annotation: Any, metadata: list[Any]) -> tuple[Any, list[Any]]:
    """Remove `| None` and Annotated, collecting the metadata of Annotated."""
    while True:
        if get_origin(annotation) in (Union, types.UnionType):
            (annotation,) = [part for part in get_args(annotation) if part is not type(None)]
        elif get_origin(annotation) is Annotated:
            annotation, *carried = get_args(annotation)
            metadata += carried
        else:
            return annotation, metadata


def _range(metadata: list[Any]) -> str:
    limits: list[str] = []
    for item in [*metadata, *(m for info in metadata if isinstance(info, FieldInfo) for m in info.metadata)]:
        if isinstance(item, Ge):
            limits.append(f"from {item.ge}")
        if isinstance(item, Le):
            limits.append(f"to {item.le}")
    return " ".join(["a whole number", *limits])
