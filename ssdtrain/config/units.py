"""Parsing and formatting of sizes, durations and fractions.

Parsers take a number or a string and raise `InvalidValue` with the reason and the allowed values. Ambiguous values are invalid:
"64M" could be 64 MB or 64 MiB, and "64Mb" could be bits.
"""

import math
import re
from decimal import Decimal
from typing import Any

from ssdtrain.config.errors import InvalidValue

KiB, MiB, GiB, TiB = 2**10, 2**20, 2**30, 2**40

_DECIMAL_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "PB": 10**15}
_BINARY_UNITS = {"KiB": KiB, "MiB": MiB, "GiB": GiB, "TiB": TiB, "PiB": 2**50}
SIZE_UNITS = {**_DECIMAL_UNITS, **_BINARY_UNITS}
DURATION_UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0}

SIZE_ALLOWED = (
    'bytes as a whole number, or a number and a unit such as "64MiB" or "0.5TB" '
    f"(units: {', '.join(SIZE_UNITS)})"
)
DURATION_ALLOWED = (
    'seconds as a number, or a number and a unit such as "10s" or "500ms" '
    f"(units: {', '.join(DURATION_UNITS)}), at most 24h"
)
SHARE_ALLOWED = 'a fraction from 0 to 1 such as 0.6 or "60%"'

LARGEST_SIZE = 2**63 - 1
"""Bytes; the largest file offset."""
LONGEST_DURATION = 86400
"""Seconds; a day."""

_LARGEST_BITS = 128  # of an integer that is converted exactly

_NUMBER_AND_UNIT = re.compile(
    r"\s*([+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d{1,6})?)\s*([A-Za-z%]*)\s*", re.ASCII
)


def _number_and_unit(value: Any, allowed: str) -> tuple[Decimal, str]:
    """Split a value into a finite, non-negative number and a unit ("" if there is none)."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise InvalidValue(f"is a {type(value).__name__}", allowed)
    if isinstance(value, str):
        match = _NUMBER_AND_UNIT.fullmatch(value)
        if match is None:
            raise InvalidValue("is not a number with or without a unit", allowed)
        number, unit = Decimal(match[1]), match[2]
    else:
        if isinstance(value, float) and not math.isfinite(value):
            raise InvalidValue("is not finite", allowed)
        # repr() of a float is the shortest text that reads back as it: 0.1 stays 0.1 and does not become
        # 0.1000000000000000055. An integer of a million digits takes seconds to convert, and is above every limit.
        if isinstance(value, int) and value.bit_length() > _LARGEST_BITS:
            value = 1 << _LARGEST_BITS if value > 0 else -1
        number, unit = Decimal(repr(value) if isinstance(value, float) else value), ""
    if number < 0:
        raise InvalidValue("is negative", allowed)
    return number, unit


def _size_unit(unit: str) -> int:
    """Bytes per unit. Case-insensitive where unambiguous: MiB, mib and MIB are equal, but Mb would be bits."""
    for name, scale in SIZE_UNITS.items():
        if unit in {name, name.lower(), name.upper()}:
            return scale
    near = [name for name in SIZE_UNITS if name[0].lower() == unit[:1].lower() and name != "B"]
    hint = f' (did you mean "{near[-1]}" or "{near[0]}"?)' if near else ""
    raise InvalidValue(f'has the unknown unit "{unit}"{hint}', SIZE_ALLOWED)


def parse_size(value: int | float | str) -> int:
    """Bytes of `value`: 67108864, "64MiB", "0.5TB", "1e9". KB, MB, ... are decimal and KiB, MiB, ... binary.

    With a unit a fraction of a byte is dropped ("0.1GiB" is 107374182); without one the number must be whole.

    Raises:
        InvalidValue: unknown unit, negative, not finite, not a whole number of bytes, above 2**63 - 1, or not a
            number.
    """
    number, unit = _number_and_unit(value, SIZE_ALLOWED)
    scale = _size_unit(unit) if unit else 1
    # The number by itself first: "9e999999PB" is more than a Decimal holds, and "1e999999" an integer of a million digits.
    if number > LARGEST_SIZE or number * scale > LARGEST_SIZE:
        raise InvalidValue("is more than 2**63 - 1 bytes", SIZE_ALLOWED)
    if not unit and number != number.to_integral_value():
        raise InvalidValue("is not a whole number of bytes and has no unit", SIZE_ALLOWED)
    return int(number * scale)


def parse_duration(value: int | float | str) -> float:
    """Seconds of `value`: 10, 0.5, "10s", "500ms", "2min".

    Raises:
        InvalidValue: unknown unit, negative, not finite, more than a day, or not a number.
    """
    number, unit = _number_and_unit(value, DURATION_ALLOWED)
    if unit and unit not in DURATION_UNITS:
        raise InvalidValue(f'has the unknown unit "{unit}"', DURATION_ALLOWED)
    scale = Decimal(repr(DURATION_UNITS.get(unit, 1.0)))
    if number > LONGEST_DURATION / scale:
        raise InvalidValue("is more than a day", DURATION_ALLOWED)
    return float(number * scale)


def parse_fraction(value: int | float | str) -> float:
    """The fraction `value` as a float in [0, 1]: 0.6, "0.6", "60%".

    Raises:
        InvalidValue: outside [0, 1], another unit than %, or not a number.
    """
    number, unit = _number_and_unit(value, SHARE_ALLOWED)
    if unit not in {"", "%"}:
        raise InvalidValue(f'has the unit "{unit}"', SHARE_ALLOWED)
    if unit == "%":
        number /= 100
    if number > 1:
        raise InvalidValue("is more than 1", SHARE_ALLOWED)
    return float(number)


def exact_size(size: int) -> str:
    """The shortest text without rounding: 67108864 is "64MiB", 10**9 is "1GB", 1000001 is "1000001B"."""
    texts = [f"{size // scale}{unit}" for unit, scale in SIZE_UNITS.items() if size % scale == 0]
    return min(texts, key=len) if size else "0B"


def format_size(size: float) -> str:
    """Format `size` bytes with three digits: "1.5GiB", "64MiB", "-512B"."""
    sign, size = ("-" if size < 0 else ""), abs(size)
    unit, scale = "B", 1
    for name, larger in _BINARY_UNITS.items():
        # 1023.7 MiB would round to "1024MiB": the next unit takes over just before.
        if size >= larger * 0.9995:
            unit, scale = name, larger
    return f"{sign}{_three_digits(size / scale)}{unit}"


def format_duration(seconds: float) -> str:
    """Format seconds with three digits: "1.5s", "12ms", "80us", "2.5min"."""
    if not math.isfinite(seconds):
        return str(seconds)
    sign, seconds = ("-" if seconds < 0 else ""), abs(seconds)
    unit, scale = ("s", 1.0) if seconds == 0 else ("us", 1e-6)
    for name, larger in DURATION_UNITS.items():
        if seconds >= larger * 0.9995:
            unit, scale = name, larger
    return f"{sign}{_three_digits(seconds / scale)}{unit}"


def _three_digits(number: float) -> str:
    digits = 2 if number < 9.995 else 1 if number < 99.95 else 0
    text = f"{number:.{digits}f}"
    return text.rstrip("0").rstrip(".") if digits else text
