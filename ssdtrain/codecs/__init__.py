"""Codecs: a tensor becomes bytes in a buffer the caller owns, and comes back.

What lives here: the contract (`base`), the counter-based randomness (`philox`), the codecs (`cast`, `block`,
`fp8`, `hadamard`, `zfp`, `lossless`, `mask`), the registry that builds one from a string (`registry`), and
two faster implementations of the same
arithmetic: C for tensors in host memory (`_native`, reached through `native`) and Triton for CUDA
    (`kernels`).

What may be imported: the names below. Plain torch is the reference of every codec and runs anywhere.

What it never does: draw from a global random generator, change global torch state, allocate the payload,
keep a thread beyond a call, talk to a file or a process group.
"""

from ssdtrain.codecs.base import (
    ALIGNMENT,
    FORMAT_VERSION,
    HEADER_BYTES,
    Codec,
    FixedSizeCodec,
    Key,
    PayloadError,
    VariableSizeCodec,
    payload_finite,
)
from ssdtrain.codecs.registry import available, make_codec, make_fixed_size_codec

__all__ = [
    "ALIGNMENT",
    "FORMAT_VERSION",
    "HEADER_BYTES",
    "Codec",
    "FixedSizeCodec",
    "Key",
    "PayloadError",
    "VariableSizeCodec",
    "available",
    "make_codec",
    "make_fixed_size_codec",
    "payload_finite",
]
