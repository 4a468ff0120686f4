"""Codecs as a config names them: "int4:block=64,round=stochastic,hadamard".

A name, and after a colon parameters separated by commas: `key=value`, or a key alone for a switch. Which names and
parameters there are is written here, so that a config with an unknown one is refused when it is read;
`ssdtrain.codecs.registry` makes the codecs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ssdtrain.config.errors import Refusal
from ssdtrain.config.similar import closest
from ssdtrain.config.units import parse_size

OFF = "off"


@dataclass(frozen=True)
class Parameter:
    """How the value of one parameter is read."""

    allowed: str
    """As in "one of 32, 64, 128, 256"."""
    read: Callable[[str], Any]
    """Raises ValueError."""
    switch: bool = False
    """May be written without a value."""


@dataclass(frozen=True)
class CodecKind:
    """What a config may ask of one codec."""

    about: str
    parameters: Mapping[str, Parameter]
    floats: bool = True
    """Encodes floating-point tensors."""
    fixed_size: bool = True
    """The payload's size follows from shape and dtype alone, which a collective needs."""


@dataclass(frozen=True)
class CodecSpec:
    """A codec that was asked for."""

    name: str
    values: Mapping[str, Any]
    """Parameters that were given. A switch without a value is True."""


def _among(*choices: Any) -> Parameter:
    texts = {str(choice): choice for choice in choices}

    def read(text: str) -> Any:
        if text not in texts:
            raise ValueError
        return texts[text]

    return Parameter(f"one of {', '.join(texts)}", read)


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


_SWITCH = Parameter("no value", _no_value, switch=True)
_BLOCK = _among(32, 64, 128, 256)
_ROTATION = _among(16, 32, 64, 128, 256)
_HADAMARD = Parameter(f"no value, or {_ROTATION.allowed}", _ROTATION.read, switch=True)
_INTEGER = {
    "block": _BLOCK,
    "round": _among("nearest", "stochastic"),
    "asymmetric": _SWITCH,
    "hadamard": _HADAMARD,
}

CODECS: dict[str, CodecKind] = {
    "raw": CodecKind("the bits as they are", {}),
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
            "rate": Parameter("a multiple of 0.25 from 2.25 to 32 bits per value", _rate),
            "hadamard": _HADAMARD,
        },
    ),
    "lossless": CodecKind(
        "byte planes and zstandard, in host memory, size depends on the data",
        {"level": Parameter("a whole number from 1 to 22", _level)},
        fixed_size=False,
    ),
    "mask": CodecKind(
        "one bit per bool; sparse: positions where that is smaller", {"sparse": _SWITCH}, floats=False
    ),
}

OFFLOAD_ALLOWED = (
    f"one of {', '.join(name for name, kind in CODECS.items() if kind.floats)}, with its parameters as in "
    '"int8:block=64", or leaving it out'
)


def parse_codec(text: str) -> CodecSpec:
    """The codec that `text` asks for.

    Raises:
        Refusal: unknown name, parameter or value; nothing behind a colon or a comma.
    """
    name, colon, rest = text.strip().partition(":")
    kind = CODECS.get(name)
    if kind is None:
        near = closest(name, CODECS)
        hint = f' (did you mean "{near}"?)' if near else ""
        raise Refusal(f"is no codec{hint}", f"one of {', '.join(CODECS)}")
    takes = f"{name} takes {', '.join(kind.parameters) or 'no parameters'}"
    values: dict[str, Any] = {}
    for part in rest.split(",") if colon else ():
        key, equals, value = part.strip().partition("=")
        parameter = kind.parameters.get(key)
        if parameter is None:
            why = f"has the unknown parameter {key[:40]!r}" if key else "has an empty parameter"
            raise Refusal(why, takes)
        if key in values:
            raise Refusal(f"has {key} twice", "each parameter once")
        try:
            if not equals and not parameter.switch:
                raise ValueError
            values[key] = parameter.read(value) if equals else True
        except ValueError:
            given = f"has {key}={value[:40]}" if equals else f"has {key} without a value"
            raise Refusal(given, f"{key} takes {parameter.allowed}") from None
    return CodecSpec(name, values)


def parse_offload_codec(value: Any) -> str:
    """The text of a codec that can encode saved floating-point tensors.

    Raises:
        Refusal: not text, or as `parse_codec`, or a codec of something else.
    """
    if not isinstance(value, str):
        raise Refusal(f"is a {type(value).__name__}", OFFLOAD_ALLOWED)
    if not CODECS[parse_codec(value).name].floats:
        raise Refusal(
            "does not encode floating-point tensors (boolean masks are always packed)", OFFLOAD_ALLOWED
        )
    return value


RULE_ALLOWED = (
    f'a codec ({", ".join(name for name, kind in CODECS.items() if kind.floats and kind.fixed_size)}), "off", '
    'or "inside/between" such as "off/int8", each with its parameters, and "@64KiB" behind any of them'
)
FRAMED_RULE_ALLOWED = RULE_ALLOWED.replace("), ", ", lossless), ", 1)


def split_rule(rule: str, *, framed: bool) -> tuple[str, str, int | None]:
    """(codec or "off" between ranks of one node, the same between nodes, bytes below which messages go as they are) of a value
    of the `comm` section; the last is None where the rule does not say.

    Args:
        rule: "int8", "off/int8@64KiB".
        framed: the traffic carries the size of each message, so a payload of unknown size fits.

    Raises:
        Refusal: a codec that is unknown, or that cannot serve this traffic; no size behind the @.
    """
    allowed = FRAMED_RULE_ALLOWED if framed else RULE_ALLOWED
    body, at, size = rule.partition("@")
    inside, slash, between = (part.strip() for part in body.partition("/"))
    for text in (inside, between) if slash else (inside,):
        if text == OFF:
            continue
        try:
            kind = CODECS[parse_codec(text).name]
        except Refusal as refusal:
            why = refusal.why if text == rule else f"asks for {text[:40]!r}, which {refusal.why}"
            raise Refusal(
                why, allowed if refusal.allowed.startswith("one of raw") else refusal.allowed
            ) from None
        if not kind.floats:
            raise Refusal(f"asks for {text}, which does not encode floating-point tensors", allowed)
        if not kind.fixed_size and not framed:
            why = f"asks for {text}, whose size depends on the data: only pipeline messages carry their size"
            raise Refusal(why, allowed)
    return inside, between if slash else inside, parse_size(size.strip()) if at else None


def parse_rule(value: Any, *, framed: bool) -> str:
    """A value of the `comm` section as text, checked by `split_rule`.

    Raises:
        Refusal: not text, or as `split_rule`.
    """
    # YAML 1.1 reads a bare `off` as a boolean.
    text = OFF if value is False else value
    if not isinstance(text, str) or not text.strip():
        raise Refusal("is no codec", FRAMED_RULE_ALLOWED if framed else RULE_ALLOWED)
    split_rule(text.strip(), framed=framed)
    return text.strip()
