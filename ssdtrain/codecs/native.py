"""Python bindings of the `_native` C extension, for tensors in host memory. Results are bit-identical to the torch reference.

Functions take contiguous tensors and release the GIL. Large tensors are processed by up to torch.get_num_threads() threads with
identical results. `usable` returns False if the extension was not built; the torch reference is used then.
"""

from __future__ import annotations

import logging
from functools import cache
from types import ModuleType

import torch
from torch import Tensor

from ssdtrain.codecs import scales
from ssdtrain.codecs.base import Key
from ssdtrain.codecs.scales import ASYMMETRIC, BlockFormat, Rotation

_log = logging.getLogger(__name__)
_DTYPE = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}


@cache
def module() -> ModuleType | None:
    """The extension, or None with one warning if it was not built."""
    try:
        from ssdtrain.codecs import _native  # type: ignore[attr-defined]
    except ImportError as error:
        _log.warning("codecs run in plain torch on the CPU, several times slower: %s", error)
        return None
    return _native


def usable(backend: str, *tensors: Tensor) -> bool:
    """Whether to use the C implementation: `backend` allows it and all tensors are in host memory.

    Raises:
        RuntimeError: `backend` is "native" and the extension is missing or a tensor is elsewhere.
    """
    if backend not in ("auto", "native"):
        return False
    host = all(t.device.type == "cpu" for t in tensors)
    if host and module() is not None:
        return True
    if backend == "native":
        elsewhere = f"the tensor is on {tensors[0].device}, not in host memory"
        where = "the C extension is not built" if host else elsewhere
        raise RuntimeError(f"codec backend native: {where}")
    return False


def _native() -> ModuleType:
    extension = module()
    assert extension is not None, "call usable() first"
    return extension


def _address(tensor: Tensor) -> tuple[int, int]:
    return tensor.data_ptr(), _DTYPE[tensor.dtype]


def _values(tensor: Tensor) -> tuple[int, int, int]:
    return *_address(tensor), tensor.numel()


def block_encode(
    codec: BlockFormat, flat: Tensor, body: Tensor, key: Key | None, rotation: Rotation | None = None
) -> bool:
    """Encode `flat` [numel], rotated first if asked, into `body`; returns whether every block is finite."""
    blocks, codes, _ = scales.sections(flat.numel(), codec.block, codec.vectors, codec.bits)
    body[2 * blocks * codec.vectors : codes].zero_()
    key = key if codec.stochastic and key is not None else Key(0)
    source = torch.float32 if rotation else flat.dtype  # a rotation leaves the range of its input
    cap = scales.LARGEST[source]
    if codec.kind != ASYMMETRIC:
        cap = scales.largest_scale(codec.largest_code, source)
    start = body.data_ptr()
    return _native().block_encode(
        *_values(flat), codec.block, codec.bits, codec.kind, codec.stochastic, start, start + codes,
        cap, -scales.largest_scale(1, source),
        key.seed & 0xFFFFFFFFFFFFFFFF, key.step & 0xFFFFFFFF, key.tensor & 0xFFFFFFFF, key.rank & 0xFFFFFFFF,
        *_rotation(rotation), torch.get_num_threads(),
    )  # fmt: skip


def _rotation(rotation: Rotation | None) -> tuple[int, float]:
    return (rotation.signs.data_ptr(), rotation.unit) if rotation else (0, 0.0)


def block_decode(
    codec: BlockFormat, body: Tensor, out: Tensor, accumulate: bool, rotation: Rotation | None = None
) -> None:
    """Decode into `out` [numel], or add to it, rotated back if asked."""
    _, codes, _ = scales.sections(out.numel(), codec.block, codec.vectors, codec.bits)
    start = body.data_ptr()
    _native().block_decode(
        start, start + codes, out.numel(), codec.block, codec.bits, codec.kind, *_address(out), accumulate,
        *_rotation(rotation), torch.get_num_threads(),
    )  # fmt: skip


def all_finite(flat: Tensor) -> bool:
    """Whether float32, float16 or bfloat16 `flat` [numel] holds neither Inf nor NaN."""
    return _native().all_finite(*_values(flat))


def bf16_encode(flat: Tensor, data: Tensor) -> bool:
    """Round `flat` [numel] to bfloat16 `data` [numel]; returns whether every result is finite."""
    return _native().bf16_encode(*_values(flat), data.data_ptr(), torch.get_num_threads())


def bf16_decode(data: Tensor, out: Tensor, accumulate: bool) -> None:
    """Write bfloat16 `data` [numel] to `out` [numel], or add it."""
    _native().bf16_decode(data.data_ptr(), out.numel(), *_address(out), accumulate, torch.get_num_threads())


def rotate(flat: Tensor, rotated: Tensor, rotation: Rotation) -> None:
    """Rotate blocks as long as the signs; `rotated` is float32, padded to whole blocks."""
    signs, unit = rotation
    _native().rotate(
        *_values(flat), signs.data_ptr(), signs.numel(), unit, rotated.data_ptr(), torch.get_num_threads()
    )


def unrotate(rotated: Tensor, out: Tensor, rotation: Rotation, accumulate: bool) -> None:
    """Rotate back into `out` [numel], or onto it; overwrites `rotated`."""
    signs, unit = rotation
    _native().unrotate(
        rotated.data_ptr(), out.numel(), signs.data_ptr(), signs.numel(), unit, *_address(out), accumulate,
        torch.get_num_threads(),
    )  # fmt: skip


def zfp_encode(flat: Tensor, body: Tensor, block_bits: int) -> bool:
    """Encode `flat` [numel]; returns whether every block is finite."""
    return _native().zfp_encode(
        *_values(flat), block_bits, body.data_ptr(), body.numel(), torch.get_num_threads()
    )


def zfp_decode(body: Tensor, out: Tensor, block_bits: int, accumulate: bool) -> None:
    """Decode into `out` [numel], or add to it."""
    _native().zfp_decode(
        body.data_ptr(), body.numel(), block_bits, out.numel(), *_address(out), accumulate, torch.get_num_threads()
    )  # fmt: skip


def exact_encode(flat: Tensor, records: Tensor) -> tuple[bool, bool]:
    """Encode `flat` [whole blocks]; returns whether all values are finite, and whether a pool overflows."""
    flags = _native().exact_encode(*_values(flat), records.data_ptr(), torch.get_num_threads())
    return bool(flags & 1), not flags & 2


def exact_decode(records: Tensor, out: Tensor) -> None:
    """Decode into `out` [whole blocks]."""
    _native().exact_decode(records.data_ptr(), *_values(out), torch.get_num_threads())


def mask_pack(flat: Tensor, packed: Tensor) -> None:
    """Pack bool `flat` [numel] into bits."""
    _native().mask_pack(flat.data_ptr(), flat.numel(), packed.data_ptr())


def mask_unpack(packed: Tensor, out: Tensor) -> None:
    """Unpack bits into bool `out` [numel]."""
    _native().mask_unpack(packed.data_ptr(), out.numel(), out.data_ptr())


def split_planes(flat: Tensor, planes: Tensor, turn: bool) -> None:
    """Split values of 2 or 4 bytes into uint8 `planes` [2 or 4, numel], rotated left by one bit first if `turn`."""
    _native().split_planes(flat.data_ptr(), flat.numel(), flat.dtype.itemsize, turn, planes.data_ptr())


def merge_planes(planes: Tensor, out: Tensor, turn: bool) -> None:
    """Invert `split_planes`."""
    _native().merge_planes(planes.data_ptr(), out.numel(), out.dtype.itemsize, turn, out.data_ptr())
