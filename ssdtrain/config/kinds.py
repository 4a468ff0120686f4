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
from pydantic import BeforeValidator
from pydantic.fields import FieldInfo

from ssdtrain.config import codecs, units
from ssdtrain.config.amount import AMOUNT_ALLOWED, Amount, parse_amount
from ssdtrain.config.errors import InvalidValue
from ssdtrain.config.paths import DIRECTORY_ALLOWED, parse_directories, parse_directory


@dataclass(frozen=True)
class ValueKind:
    """Parsing and serialisation of one type of value."""

    name: str
    """Shown as the type in the documentation and as a flag's metavar."""
    allowed: str
    """Completes the sentence "allowed: ..."."""
    parse: Callable[[Any], Any]
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


POSITIVE_SIZE_ALLOWED = f"more than zero: {units.SIZE_ALLOWED}"
DRIVE_BLOCK = 4096
"""Block size of drives, and minimum size of a spill file, bytes."""
CAPACITY_ALLOWED = f"at least 4KiB: {units.SIZE_ALLOWED}"


def _positive_size(value: Any) -> int:
    try:
        size = units.parse_size(value)
    except InvalidValue as error:
        raise InvalidValue(error.why, POSITIVE_SIZE_ALLOWED) from None
    if size == 0:
        raise InvalidValue("is zero", POSITIVE_SIZE_ALLOWED)
    return size


UNITLESS = 64 * units.KiB
"""Bytes below which a number without a unit is not taken for a size of memory: it was meant with one."""


def _memory(value: Any) -> int:
    return _with_unit(_positive_size(value), value, POSITIVE_SIZE_ALLOWED)


def _host_memory(value: Any) -> int:
    return _with_unit(units.parse_size(value), value, units.SIZE_ALLOWED)


def _with_unit(size: int, value: Any, allowed: str) -> int:
    if 0 < size < UNITLESS and not (isinstance(value, str) and value.strip()[-1].isalpha()):
        raise InvalidValue(f'has no unit, and would be {size} bytes (did you mean "{size}GiB"?)', allowed)
    return size


def _capacity(value: Any) -> int:
    try:
        size = units.parse_size(value)
    except InvalidValue as error:
        raise InvalidValue(error.why, CAPACITY_ALLOWED) from None
    if size < DRIVE_BLOCK:
        raise InvalidValue("is less than one block of a drive", CAPACITY_ALLOWED)
    return size


def _switch(value: Any) -> Any:
    # YAML 1.1 reads a bare `on` or `off` as a boolean.
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else value


SIZE = ValueKind("size", units.SIZE_ALLOWED, units.parse_size, units.exact_size)
POSITIVE_SIZE = ValueKind("size", POSITIVE_SIZE_ALLOWED, _positive_size, units.exact_size)
MEMORY = ValueKind("size", POSITIVE_SIZE_ALLOWED, _memory, units.exact_size)
HOST_SIZE = ValueKind("size", units.SIZE_ALLOWED, _host_memory, units.exact_size)
CAPACITY = ValueKind("size", CAPACITY_ALLOWED, _capacity, units.exact_size)
DURATION = ValueKind("seconds", units.DURATION_ALLOWED, units.parse_duration)
AMOUNT = ValueKind("amount", AMOUNT_ALLOWED, parse_amount, Amount.plain, accepts_auto=True)
DIRECTORY = ValueKind("directory", DIRECTORY_ALLOWED, parse_directory)
DIRECTORIES = ValueKind(
    "directories",
    f"one directory or a list of them; each is {DIRECTORY_ALLOWED}",
    parse_directories,
    list,
    many=True,
)

FILE_ALLOWED = "the path of a file; ~ is expanded"


def _file(value: Any) -> str:
    text = os.fspath(value) if isinstance(value, str | os.PathLike) else None
    if not isinstance(text, str) or not text.strip() or "\0" in text:
        raise InvalidValue("names no file", FILE_ALLOWED)
    return text


FRACTION_ALLOWED = "a number above 0 and below 1, such as 0.1"
NAMES_ALLOWED = 'a list of names or patterns, or "none"'


def _fraction(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1:
        raise InvalidValue("is not a fraction", FRACTION_ALLOWED)
    return float(value)


POSITIVE_ALLOWED = "a number above 0 and below a million, such as 1 or 0.3"


def _positive(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e6:
        raise InvalidValue("is not such a number", POSITIVE_ALLOWED)
    return float(value)


SLOWDOWN_ALLOWED = "a number from 0 (no slowdown), such as 0.02 (2% longer) or 1.0 (twice the time)"


def _slowdown(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e6:
        raise InvalidValue("is not such a number", SLOWDOWN_ALLOWED)
    return float(value)


PATTERNS_ALLOWED = 'names or classes of modules, * for any text, such as ["*.mlp", "LayerNorm"]'


def _patterns(value: Any) -> tuple[str, ...]:
    if value in ([], ()):
        return ()
    try:
        return _names(value)
    except InvalidValue as error:
        raise InvalidValue(error.why, PATTERNS_ALLOWED) from None


def _names(value: Any) -> tuple[str, ...]:
    names = [value] if isinstance(value, str) else value
    if (
        not isinstance(names, list | tuple)
        or not names
        or not all(isinstance(name, str) and name for name in names)
    ):
        raise InvalidValue("is not a list of names", NAMES_ALLOWED)
    return tuple(names)


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


def _json_text(text: str) -> Any:
    """A number, or a JSON object of patterns."""
    return json.loads(text)


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


FILE = ValueKind("file", FILE_ALLOWED, _file)
CODEC = ValueKind("codec", codecs.OFFLOAD_ALLOWED, codecs.parse_offload_codec, accepts_auto=True)
RULE = ValueKind("codec", codecs.RULE_ALLOWED, codecs.parse_rule)
FRACTION = ValueKind("fraction", FRACTION_ALLOWED, _fraction, text=float)
POSITIVE = ValueKind("number above 0", POSITIVE_ALLOWED, _positive, text=float)
SLOWDOWN = ValueKind("number", SLOWDOWN_ALLOWED, _slowdown, text=float)
RATIO = ValueKind("ratio", RATIO_ALLOWED, _ratio_rules, _plain_ratio, text=_json_text)
MODULE_RULES = ValueKind("rules", MODULE_RULES_ALLOWED, _module_rules, dict, text=_json_text)
NAMES = ValueKind("names", NAMES_ALLOWED, _names, list, many=True)
STEP_NUMBERS = ValueKind("steps", STEPS_ALLOWED, _steps, list, many=True)
PATTERNS = ValueKind("patterns", PATTERNS_ALLOWED, _patterns, list, many=True)

Size = Annotated[int, BeforeValidator(units.parse_size), SIZE]
"""Bytes, 0 or more."""
PositiveSize = Annotated[int, BeforeValidator(_positive_size), POSITIVE_SIZE]
"""Bytes, 1 or more."""
MemorySize = Annotated[int, BeforeValidator(_memory), MEMORY]
"""Bytes of a device, 1 or more, written with a unit."""
HostMemorySize = Annotated[int, BeforeValidator(_host_memory), HOST_SIZE]
"""Bytes of host memory, 0 or more, written with a unit."""
Capacity = Annotated[int, BeforeValidator(_capacity), CAPACITY]
"""Bytes of a drive, a block or more."""
Seconds = Annotated[float, BeforeValidator(units.parse_duration), DURATION]
AmountField = Annotated[Amount, BeforeValidator(parse_amount), AMOUNT]
Directory = Annotated[str, BeforeValidator(parse_directory), DIRECTORY]
File = Annotated[str, BeforeValidator(_file), FILE]
Directories = Annotated[tuple[str, ...], BeforeValidator(parse_directories), DIRECTORIES]
CodecName = Annotated[str, BeforeValidator(CODEC.parse), CODEC]
"""Codec of saved tensors, "auto" or "off"."""
CommRule = Annotated[str, BeforeValidator(RULE.parse), RULE]
"""Codecs of messages between ranks, which require payloads of known size."""
Fraction = Annotated[float, BeforeValidator(_fraction), FRACTION]
Slowdown = Annotated[float, BeforeValidator(_slowdown), SLOWDOWN]
Positive = Annotated[float, BeforeValidator(_positive), POSITIVE]
RatioRules = Annotated[tuple[tuple[str, float], ...], BeforeValidator(_ratio_rules), RATIO]
"""(pattern of layers, ratio), of which the first that fits counts."""
ModuleRules = Annotated[tuple[tuple[str, str], ...], BeforeValidator(_module_rules), MODULE_RULES]
"""(pattern of modules, one of `PLACES`), of which the first that fits counts."""
Names = Annotated[tuple[str, ...], BeforeValidator(_names), NAMES]
StepNumbers = Annotated[tuple[int, ...], BeforeValidator(_steps), STEP_NUMBERS]
"""Numbers of steps, in ascending order."""
Patterns = Annotated[tuple[str, ...], BeforeValidator(_patterns), PATTERNS]
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
        return ValueKind("choice", ", ".join(f'"{choice}"' for choice in choices), _identity, choices=choices)
    if annotation is bool:
        return ValueKind("boolean", "true or false", _identity)
    if annotation is int:
        return ValueKind("number", _range(metadata), _identity, text=int)
    raise TypeError(f"the schema contains {annotation!r}, which has no kind")


def _identity(value: Any) -> Any:
    return value


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
