"""Codecs by name: "int4:block=64,round=stochastic,hadamard".

A spec is a name, and after a colon parameters separated by commas: `key=value`, or a key alone for a switch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ssdtrain.codecs.base import Codec, FixedSizeCodec
from ssdtrain.codecs.block import IntBlock
from ssdtrain.codecs.cast import Cast, Raw
from ssdtrain.codecs.fp8 import Float8Block
from ssdtrain.codecs.hadamard import Hadamard
from ssdtrain.codecs.lossless import Lossless
from ssdtrain.codecs.mask import Mask, SparseMask
from ssdtrain.codecs.zfp import Zfp

BACKENDS = ("auto", "torch", "native", "triton")
_DEFAULT_HADAMARD = 128


@dataclass(frozen=True)
class _Entry:
    build: Callable[[_Parameters, str], Codec]
    parameters: tuple[str, ...]
    about: str


class _Parameters:
    """The parameters of one spec; remembers what was read."""

    def __init__(self, spec: str, text: str, known: tuple[str, ...]) -> None:
        self._spec = spec
        self._known = known
        self._values: dict[str, str | None] = {}
        for part in filter(None, (p.strip() for p in text.split(","))):
            key, _, value = part.partition("=")
            if key not in known:
                raise ValueError(f"codec {spec!r}: no parameter {key!r}; {self._listed()}")
            if key in self._values:
                raise ValueError(f"codec {spec!r}: {key} is given twice")
            self._values[key] = value if "=" in part else None

    def _listed(self) -> str:
        return f"it takes {', '.join(self._known)}" if self._known else "it takes none"

    def text(self, key: str, default: str) -> str:
        value = self._values.get(key, default)
        if not value:
            raise ValueError(f"codec {self._spec!r}: {key} needs a value, such as {key}={default}")
        return value

    def integer(self, key: str, default: int) -> int:
        value = self.text(key, str(default))
        if not value.isdecimal():
            raise ValueError(f"codec {self._spec!r}: {key}={value} is not a whole number")
        return int(value)

    def number(self, key: str, default: float) -> float:
        value = self.text(key, str(default))
        try:
            return float(value)
        except ValueError:
            raise ValueError(f"codec {self._spec!r}: {key}={value} is not a number") from None

    def switch(self, key: str) -> bool:
        if self._values.get(key) is not None:
            raise ValueError(f"codec {self._spec!r}: {key} is a switch and takes no value")
        return key in self._values

    def hadamard(self, inner: FixedSizeCodec, default: int, backend: str) -> FixedSizeCodec:
        if "hadamard" not in self._values:
            return inner
        bare = self._values["hadamard"] is None
        size = default if bare else self.integer("hadamard", default)
        return Hadamard(inner, size, backend)


def _integer(bits: int) -> Callable[[_Parameters, str], Codec]:
    def build(p: _Parameters, backend: str) -> Codec:
        block = p.integer("block", 128)
        codec = IntBlock(bits, block, p.text("round", "nearest"), not p.switch("asymmetric"), backend)
        return p.hadamard(codec, block, backend)

    return build


def _cast(target: str) -> Callable[[_Parameters, str], Codec]:
    return lambda p, backend: p.hadamard(Cast(target, backend), _DEFAULT_HADAMARD, backend)


def _fp8(p: _Parameters, backend: str) -> Codec:
    block = p.integer("block", 128)
    return p.hadamard(Float8Block(p.text("format", "e4m3"), block, backend), block, backend)


def _zfp(p: _Parameters, backend: str) -> Codec:
    return p.hadamard(Zfp(p.number("rate", 8.0), backend), _DEFAULT_HADAMARD, backend)


def _lossless(p: _Parameters, backend: str) -> Codec:
    return Lossless(p.integer("level", 1), backend)


def _mask(p: _Parameters, backend: str) -> Codec:
    return SparseMask(backend) if p.switch("sparse") else Mask(backend)


_BLOCK = ("block", "round", "asymmetric", "hadamard")
_CODECS: dict[str, _Entry] = {
    "raw": _Entry(lambda p, backend: Raw(), (), "the bits as they are"),
    "bf16": _Entry(_cast("bf16"), ("hadamard",), "bfloat16"),
    "fp16": _Entry(_cast("fp16"), ("hadamard",), "float16"),
    "int8": _Entry(_integer(8), _BLOCK, "8-bit integers, a scale per block"),
    "int4": _Entry(_integer(4), _BLOCK, "4-bit integers, a scale per block"),
    "int2": _Entry(_integer(2), _BLOCK, "2-bit integers, a scale per block"),
    "fp8": _Entry(_fp8, ("format", "block", "hadamard"), "float8 e4m3 or e5m2, a scale per block"),
    "zfp": _Entry(_zfp, ("rate", "hadamard"), "ZFP in one dimension at a fixed rate"),
    "lossless": _Entry(
        _lossless, ("level",), "byte planes and zstandard, in host memory, size depends on the data"
    ),
    "mask": _Entry(_mask, ("sparse",), "one bit per bool; sparse: positions where that is smaller"),
}


def available() -> dict[str, str]:
    """Name -> what it is and which parameters it takes."""
    return {
        name: entry.about + (f" ({', '.join(entry.parameters)})" if entry.parameters else "")
        for name, entry in _CODECS.items()
    }


def make_codec(spec: str, backend: str = "auto") -> Codec:
    """The codec that `spec` describes.

    Args:
        spec: "name" or "name:key=value,switch", such as "int4:block=64,round=stochastic,hadamard".
        backend: "auto" (C in host memory, Triton on CUDA, plain torch elsewhere), or the one implementation
            to use.

    Raises:
        ValueError: unknown name (the message lists the known ones), parameter or value.
    """
    name, _, text = spec.strip().partition(":")
    if name not in _CODECS:
        raise ValueError(f"no codec {name!r}; there are {', '.join(_CODECS)}")
    if backend not in BACKENDS:
        raise ValueError(f"no codec backend {backend!r}; there are {', '.join(BACKENDS)}")
    entry = _CODECS[name]
    return entry.build(_Parameters(spec, text, entry.parameters), backend)


def make_fixed_size_codec(spec: str, backend: str = "auto") -> FixedSizeCodec:
    """`make_codec` for a fixed-shape collective.

    Raises:
        ValueError: also where the payload's size depends on the data.
    """
    codec = make_codec(spec, backend)
    if not isinstance(codec, FixedSizeCodec):
        raise ValueError(
            f"codec {spec!r}: its payload size depends on the data, a collective needs a fixed one"
        )
    return codec
