"""Codecs: encode a tensor into bytes in a caller-owned buffer, and decode it.

Contains the interface (`base`), counter-based random numbers (`philox`), the codecs (`cast`, `block`, `fp8`, `hadamard`, `zfp`,
`exact`, `lossless`, `mask`), and the registry that creates a codec from a string (`registry`). Plain torch is the reference
implementation of every codec and runs on any device. Two faster implementations compute the same bytes: C for host memory
(`native`) and Triton for CUDA (`kernels`).

The public names are in `__all__`. Codecs use no global random generator or torch state, do not allocate the payload, keep no
threads after a call, and access neither files nor process groups.
"""

from ssdtrain.codecs.base import (
    FORMAT_VERSION,
    HEADER_BYTES,
    PAYLOAD_ALIGNMENT,
    Codec,
    ExactCodec,
    FixedSizeCodec,
    Key,
    PayloadError,
    PayloadOverflow,
    VariableSizeCodec,
    payload_finite,
)
from ssdtrain.codecs.registry import available, make_codec, make_fixed_size_codec

__all__ = [
    "FORMAT_VERSION",
    "HEADER_BYTES",
    "PAYLOAD_ALIGNMENT",
    "Codec",
    "ExactCodec",
    "FixedSizeCodec",
    "Key",
    "PayloadError",
    "PayloadOverflow",
    "VariableSizeCodec",
    "available",
    "make_codec",
    "make_fixed_size_codec",
    "payload_finite",
]
