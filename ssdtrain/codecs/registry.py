"""Codecs by name: "int4:block=64,round=stochastic,hadamard".

Names and parameters are declared in `ssdtrain.config.codecs`, so that a config is validated when it is read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ssdtrain.codecs.base import Codec, FixedSizeCodec
from ssdtrain.codecs.block import IntBlock
from ssdtrain.codecs.cast import Cast, Raw
from ssdtrain.codecs.exact import Exact
from ssdtrain.codecs.fp8 import Float8Block
from ssdtrain.codecs.hadamard import Hadamard
from ssdtrain.codecs.lossless import Lossless
from ssdtrain.codecs.mask import Mask, SparseMask
from ssdtrain.codecs.zfp import Zfp
from ssdtrain.config.codecs import CODEC_KINDS, parse_codec
from ssdtrain.config.errors import InvalidValue

BACKENDS = ("auto", "torch", "native", "triton")
_DEFAULT_HADAMARD = 128


Values = Mapping[str, Any]
"""Parameters of a spec; a switch is True."""


def _rotated(inner: FixedSizeCodec, values: Values, default: int, backend: str) -> FixedSizeCodec:
    size = values.get("hadamard")
    return inner if size is None else Hadamard(inner, default if size is True else size, backend)


def _integer(bits: int) -> Callable[[Values, str], Codec]:
    def build(values: Values, backend: str) -> Codec:
        block = values.get("block", 128)
        symmetric = "asymmetric" not in values
        codec = IntBlock(bits, block, values.get("round", "nearest"), symmetric, backend)
        return _rotated(codec, values, block, backend)

    return build


def _cast(target: str) -> Callable[[Values, str], Codec]:
    return lambda values, backend: _rotated(Cast(target, backend), values, _DEFAULT_HADAMARD, backend)


def _fp8(values: Values, backend: str) -> Codec:
    block = values.get("block", 128)
    return _rotated(Float8Block(values.get("format", "e4m3"), block, backend), values, block, backend)


def _zfp(values: Values, backend: str) -> Codec:
    return _rotated(Zfp(values.get("rate", 8.0), backend), values, _DEFAULT_HADAMARD, backend)


_BUILD: dict[str, Callable[[Values, str], Codec]] = {
    "raw": lambda values, backend: Raw(),
    "exact": lambda values, backend: Exact(backend),
    "bf16": _cast("bf16"),
    "fp16": _cast("fp16"),
    "int8": _integer(8),
    "int4": _integer(4),
    "int2": _integer(2),
    "fp8": _fp8,
    "zfp": _zfp,
    "lossless": lambda values, backend: Lossless(values.get("level", 1), backend),
    "mask": lambda values, backend: SparseMask(backend) if "sparse" in values else Mask(backend),
}


def available() -> dict[str, str]:
    """Description and parameters by name."""
    return {
        name: kind.about + (f" ({', '.join(kind.parameters)})" if kind.parameters else "")
        for name, kind in CODEC_KINDS.items()
    }


def make_codec(spec: str, backend: str = "auto") -> Codec:
    """The codec that `spec` describes.

    Args:
        spec: "name" or "name:key=value,switch", such as "int4:block=64,round=stochastic,hadamard".
        backend: "auto" (C in host memory, Triton on CUDA, plain torch elsewhere), or a fixed implementation.

    Raises:
        ValueError: unknown name (the message lists all), parameter or value.
    """
    try:
        asked = parse_codec(spec)
    except InvalidValue as error:
        raise ValueError(f"codec {spec!r} {error}") from None
    if backend not in BACKENDS:
        raise ValueError(f"unknown codec backend {backend!r}; allowed: {', '.join(BACKENDS)}")
    return _BUILD[asked.name](asked.values, backend)


def make_fixed_size_codec(spec: str, backend: str = "auto") -> FixedSizeCodec:
    """`make_codec` for a fixed-shape collective.

    Raises:
        ValueError: also where the payload's size depends on the data.
    """
    codec = make_codec(spec, backend)
    if not isinstance(codec, FixedSizeCodec):
        raise ValueError(
            f"codec {spec!r} has a payload size that depends on the data; collectives need a fixed size"
        )
    return codec
