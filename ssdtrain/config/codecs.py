"""Codec specifications in a config: "int4:block=64,round=stochastic,hadamard".

Syntax: a name, optionally followed by a colon and comma-separated parameters, each `key=value` or a switch `key`. Names and
parameters are declared here, so that a config is validated when it is read; `ssdtrain.codecs.registry` creates the codecs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ssdtrain.config.errors import InvalidValue
from ssdtrain.config.similar import closest
from ssdtrain.config.units import parse_size

AUTO = "auto"
"""Value that stands for the key's default, as if the key were omitted, unless the key has a meaning for it."""
OFF = "off"


@dataclass(frozen=True)
class CodecParameter:
    """How a parameter's value is parsed."""

    allowed: str
    """Allowed values, for error messages: "one of 32, 64, 128, 256"."""
    read: Callable[[str], Any]
    """Raises ValueError."""
    switch: bool = False
    """May be written without a value."""


@dataclass(frozen=True)
class CodecKind:
    """A codec and its parameters."""

    about: str
    parameters: Mapping[str, CodecParameter]
    floats: bool = True
    """Encodes floating-point tensors."""
    fixed_size: bool = True
    """The payload's size follows from shape and dtype alone, which a collective needs."""
    lossless: bool = False
    """Restores every bit."""


@dataclass(frozen=True)
class CodecSpec:
    """A parsed codec specification."""

    name: str
    values: Mapping[str, Any]
    """The given parameters. A switch without a value is True."""


def _among(*choices: Any) -> CodecParameter:
    texts = {str(choice): choice for choice in choices}

    def read(text: str) -> Any:
        if text not in texts:
            raise ValueError
        return texts[text]

    return CodecParameter(f"one of {', '.join(texts)}", read)


def _level(text: str) -> int:
    level = int(text) if text.isdecimal() and len(text) <= 2 else 0
    if not 1 <= level <= 22:
        raise ValueError
    return level


def _rate(text: str) -> float:
    rate = float(text)
    if not 2.25 <= rate <= 32 or 4 * rate != int(4 * rate):
        raise ValueError
    return rate


def _no_value(text: str) -> bool:
    raise ValueError


_SWITCH = CodecParameter("no value", _no_value, switch=True)
_BLOCK = _among(32, 64, 128, 256)
_ROTATION = _among(16, 32, 64, 128, 256)
_HADAMARD = CodecParameter(f"no value, or {_ROTATION.allowed}", _ROTATION.read, switch=True)
_INTEGER = {
    "block": _BLOCK,
    "round": _among("nearest", "stochastic"),
    "asymmetric": _SWITCH,
    "hadamard": _HADAMARD,
}

CODEC_KINDS: dict[str, CodecKind] = {
    "raw": CodecKind("the bits, unchanged", {}, lossless=True),
    "exact": CodecKind("every bit, exponents of bfloat16 and float32 in four bits", {}, lossless=True),
    "bf16": CodecKind("bfloat16", {"hadamard": _HADAMARD}),
    "fp16": CodecKind("float16", {"hadamard": _HADAMARD}),
    "int8": CodecKind("8-bit integers, a scale per block", _INTEGER),
    "int4": CodecKind("4-bit integers, a scale per block", _INTEGER),
    "int2": CodecKind("2-bit integers, a scale per block", _INTEGER),
    "fp8": CodecKind(
        "float8 e4m3 or e5m2, a scale per block",
        {"format": _among("e4m3", "e5m2"), "block": _BLOCK, "hadamard": _HADAMARD},
    ),
    "zfp": CodecKind(
        "ZFP in one dimension at a fixed rate",
        {
            "rate": CodecParameter("a multiple of 0.25 from 2.25 to 32 bits per value", _rate),
            "hadamard": _HADAMARD,
        },
    ),
    "lossless": CodecKind(
        "byte planes and zstandard, in host memory, size depends on the data",
        {"level": CodecParameter("a whole number from 1 to 22", _level)},
        fixed_size=False,
        lossless=True,
    ),
    "mask": CodecKind(
        "one bit per bool; sparse: positions where that is smaller",
        {"sparse": _SWITCH},
        floats=False,
        lossless=True,
    ),
}

OFFLOAD_ALLOWED = (
    f'"auto", "off", or one of {", ".join(name for name, kind in CODEC_KINDS.items() if kind.floats)}, with its '
    'parameters as in "int8:block=64"'
)


def parse_codec(text: str) -> CodecSpec:
    """Parse a codec specification.

    Raises:
        InvalidValue: unknown name, parameter or value; an empty parameter.
    """
    name, colon, rest = text.strip().partition(":")
    kind = CODEC_KINDS.get(name)
    if kind is None:
        near = closest(name, CODEC_KINDS)
        hint = f' (did you mean "{near}"?)' if near else ""
        raise InvalidValue(f"is not a codec{hint}", f"one of {', '.join(CODEC_KINDS)}")
    takes = f"{name} takes {', '.join(kind.parameters) or 'no parameters'}"
    values: dict[str, Any] = {}
    for part in rest.split(",") if colon else ():
        key, equals, value = part.strip().partition("=")
        parameter = kind.parameters.get(key)
        if parameter is None:
            why = f"has the unknown parameter {key[:40]!r}" if key else "has an empty parameter"
            raise InvalidValue(why, takes)
        if key in values:
            raise InvalidValue(f"has {key} twice", "each parameter once")
        try:
            if not equals and not parameter.switch:
                raise ValueError
            values[key] = parameter.read(value) if equals else True
        except ValueError:
            given = f"has {key}={value[:40]}" if equals else f"has {key} without a value"
            raise InvalidValue(given, f"{key} takes {parameter.allowed}") from None
    return CodecSpec(name, values)


def parse_offload_codec(value: Any) -> str:
    """Validate the specification of a codec for saved floating-point tensors, "auto" or "off".

    Raises:
        InvalidValue: not a string, as `parse_codec`, or a codec of other dtypes.
    """
    if value is False:
        return OFF  # YAML 1.1 reads a bare `off` as a boolean
    if not isinstance(value, str):
        raise InvalidValue(f"is a {type(value).__name__}", OFFLOAD_ALLOWED)
    if value in (AUTO, OFF):
        return value
    if not CODEC_KINDS[parse_codec(value).name].floats:
        raise InvalidValue(
            "does not encode floating-point tensors (boolean masks are always packed)", OFFLOAD_ALLOWED
        )
    return value


RULE_ALLOWED = (
    f'a codec ({", ".join(name for name, kind in CODEC_KINDS.items() if kind.floats and kind.fixed_size)}), "off", '
    'or "inside/between" such as "off/int8", each with its parameters, and "@64KiB" behind any of them'
)


def split_rule(rule: str) -> tuple[str, str, int | None]:
    """Split a rule of the `comm` section.

    Args:
        rule: "int8", "off/int8@64KiB".

    Returns:
        (codec or "off" within a node, codec or "off" between nodes, minimum message size in bytes or None).

    Raises:
        InvalidValue: a codec that is unknown or unsuitable for messages; no size after the @.
    """
    body, at, size = rule.partition("@")
    inside, slash, between = (part.strip() for part in body.partition("/"))
    for text in (inside, between) if slash else (inside,):
        if text == OFF:
            continue
        try:
            kind = CODEC_KINDS[parse_codec(text).name]
        except InvalidValue as error:
            why = error.why if text == rule else f"asks for {text[:40]!r}, which {error.why}"
            raise InvalidValue(
                why, RULE_ALLOWED if error.allowed.startswith("one of raw") else error.allowed
            ) from None
        if not kind.floats:
            raise InvalidValue(f"asks for {text}, which does not encode floating-point tensors", RULE_ALLOWED)
        if not kind.fixed_size:
            why = (
                f'asks for {text}, whose size depends on the data: "exact" restores every bit at a fixed size'
            )
            raise InvalidValue(why, RULE_ALLOWED)
    return inside, between if slash else inside, parse_size(size.strip()) if at else None


def parse_rule(value: Any) -> str:
    """Validate a rule of the `comm` section with `split_rule`.

    Raises:
        InvalidValue: not a string, or as `split_rule`.
    """
    # YAML 1.1 reads a bare `off` as a boolean.
    text = OFF if value is False else value
    if not isinstance(text, str) or not text.strip():
        raise InvalidValue("is not a codec", RULE_ALLOWED)
    split_rule(text.strip())
    return text.strip()
