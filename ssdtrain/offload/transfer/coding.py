"""Codecs between a region and its tier: fewer bytes on the drive, for time on the device.

Boolean masks are packed, eight to a byte, which loses nothing. Floating-point tensors are encoded where the user named a codec,
or one is free (`ssdtrain.offload.free_codec`); which regions are is in Note: [Codecs and views]. A lossy codec changes gradients:
what backward gets is then the decoded tensor whenever the region was encoded, also when its store was cancelled or forwarded, so
that the result does not depend on timing. (A region that no tier has room for is not encoded.)

Note: [Overflow]
A codec that restores every bit at a fixed size cannot hold every tensor (`Codec.may_overflow`), and such a tensor is stored as it
is. On a CPU that is known when it has been encoded. A device is not waited for: the payload has room for the values themselves,
in device memory and in the pinned memory that it is copied to, and the device puts them there where it overflowed
(`ssdtrain.codecs.overflow`). The host reads the flag when the store has ended, and then has the values written too. Who needs the
region before gets it from the payload, or from a copy of all of that memory, where the device looks at the flag again.

Note: [Kept encoded]
A region may stay in its memory, encoded (`Action.tier` "device"). Then its payload has no room for the values, or nothing would
be saved: the tensor is let go of when the host has the flag.
"""

from __future__ import annotations

import ctypes
import functools
from typing import NamedTuple, TypeGuard

import torch

from ssdtrain.codecs import Codec, Key, VariableSizeCodec, make_codec
from ssdtrain.codecs.base import FLOATS, HEADER_BYTES
from ssdtrain.codecs.exact import Exact
from ssdtrain.codecs.overflow import keep_values, restore_values, room
from ssdtrain.config import ConfigError, OffloadConfig
from ssdtrain.config.codecs import AUTO, OFF, OFFLOAD_ALLOWED
from ssdtrain.config.units import MiB
from ssdtrain.offload.policy import Action
from ssdtrain.offload.tensors.geometry import bytes_at, place_of
from ssdtrain.offload.tensors.region import Region
from ssdtrain.offload.tensors.sharing import Extent, no_overlap
from ssdtrain.offload.transfer.state import Encoded

MASK = "mask"
OWN_MEMORY = "device"
"""The tier of `Action` that is the memory which a region is in."""
AUTOMATIC_BYTES = 4 * MiB
"""Smallest region that is encoded on a GPU to save time: to launch the kernels of a smaller one takes the host about as long as a
link saves by them."""


class CodecRule(NamedTuple):
    """Which floating-point tensors are encoded where the policy does not say."""

    spec: str
    """The codec, as `make_codec` names it."""
    dtypes: tuple[torch.dtype, ...] = FLOATS
    automatic: bool = False
    """It is only to save time: small tensors, and those that leave in part, are stored as they are."""
    encode: float = 0.0
    """Seconds of a device that computes for encoding one byte; 0: a CPU, or not known."""
    decode: float = 0.0
    """The same for decoding."""
    least_bytes: int = 0
    """Size of the smallest tensor that is encoded to save time."""


class Coding:
    """Chooses the codec of a region, encodes and decodes.

    Args:
        floats: of floating-point tensors, or None for their plain bytes.
        rank: of this process; ranks draw independent errors.
        writes_pinned: see `Device.writes_pinned`.

    Raises:
        ValueError: no such codec; the text lists those that exist.
    """

    def __init__(self, floats: CodecRule | None, rank: int = 0, *, writes_pinned: bool = False) -> None:
        self._masks = make_codec(MASK)
        self.device_seconds = 0.0
        """Seconds that encoding and decoding took of the device that computes so far, by the price of the rule."""
        self._rank = rank
        self._count = 0
        self._writes_pinned = writes_pinned
        self.use(floats)

    def use(self, floats: CodecRule | None) -> None:
        """Encode floating-point tensors by this rule from the next saved one on."""
        self.rule = floats
        self._floats = make_codec(floats.spec) if floats is not None else None
        self._automatic = floats is not None and floats.automatic
        self._least = 0 if floats is None else floats.least_bytes
        self.dtypes = {torch.bool, *(floats.dtypes if floats is not None else ())}
        """Dtypes of regions that may be encoded where the policy names no codec."""

    def choose(self, tensor: torch.Tensor, extent: Extent, region: Region, action: Action) -> Codec | None:
        """Return the codec for the region that `tensor`, of `extent`, has made, or None: its plain bytes.

        Args:
            action: of the policy. Where it names a codec, that encodes floating-point tensors; else the config's does.

        Raises:
            ValueError: the policy's does not exist, or cannot encode on this device.
        """
        codec: Codec | None = None
        if region.dtype is torch.bool:
            codec = self._masks
        elif action.codec is not None and region.dtype in FLOATS:
            codec = _made(action.codec, tensor.device.type)
        elif region.dtype in self.dtypes and self._is_worth_it(region, action):
            codec = self._floats
        if codec is None:
            return None
        if codec.lossless and region.dtype is not torch.bool:  # see Note: [Codecs and views]
            return codec if region.nbytes % region.dtype.itemsize == 0 and _shrinks(codec, region) else None
        own = extent[2] == region.nbytes
        return codec if own and (tensor.is_contiguous() or no_overlap(tensor)) else None

    def _is_worth_it(self, region: Region, action: Action) -> bool:
        return not self._automatic or (region.nbytes >= self._least and action.part == 1)

    def _fits(self, region: Region) -> bool:
        """False if the codec of the region, as it is now, would not give back its bytes: bools that were written as another
        dtype, with other bytes than 0 and 1. Of device memory this is not asked, since the host would have to wait."""
        if region.transfer.codec is not self._masks or region.tensor.device.type != "cpu":
            return True
        return int(_values(region, region.tensor, region.start).view(torch.uint8).max()) <= 1

    def encode(self, region: Region) -> Encoded | None:
        """Return the payload of the region's tensor; None: its codec cannot hold what it is."""
        codec = region.transfer.codec
        assert codec is not None
        if not self._fits(region):
            return None
        if self.rule is not None:
            self.device_seconds += region.nbytes * self.rule.encode
        values = _values(region, region.tensor, region.start)
        size = values.numel(), values.dtype
        known = values.device.type == "cpu"  # at once; a device is not waited for
        stays = region.transfer.tier == OWN_MEMORY  # see Note: [Kept encoded]
        limit = (
            codec.max_payload_bytes(*size)
            if known or stays or not _may_overflow(codec)
            else room(codec, *size)
        )
        payload = torch.empty(limit, dtype=torch.uint8, device=values.device)
        self._count += 1
        written = codec.encode(
            values, payload, Key(0, region.tape.microbatch & 0xFFFFFFFF, self._count, self._rank)
        )
        if _may_overflow(codec):
            return None if known and codec.overflow_flag(payload).item() else Encoded(payload, written)
        payload = payload[:written].clone() if written < limit // 2 else payload[:written]
        return Encoded(payload, written)

    def flag(self, region: Region) -> torch.Tensor | None:
        """Return what says whether the payload of the region overflowed, uint8 [1] on its device; None: it did not."""
        codec, payload = region.transfer.codec, region.transfer.payload
        assert payload is not None and codec is not None
        if payload.device.type == "cpu" or not _may_overflow(codec):
            return None
        return codec.overflow_flag(payload)

    def keep_values(self, region: Region, host: int) -> int:
        """Have the values themselves in the payload of the region if it has overflowed. Returns how much of it is to be copied to
        `host` in pinned memory. See Note: [Overflow]."""
        transfer = region.transfer
        codec, payload = transfer.codec, transfer.payload
        assert payload is not None and codec is not None and _may_overflow(codec)
        values = _values(region, region.tensor, region.start)
        return keep_values(codec, values, payload, transfer.stored_bytes, host if self._writes_pinned else 0)

    def has_overflowed(self, region: Region, host: int) -> bool:
        """Whether the payload at the address `host`, where its copy has ended, has overflowed."""
        codec = region.transfer.codec
        assert codec is not None and _may_overflow(codec)
        header = torch.frombuffer((ctypes.c_uint8 * HEADER_BYTES).from_address(host), dtype=torch.uint8)
        return bool(codec.overflow_flag(header).item())

    def decode(self, region: Region, payload: torch.Tensor) -> torch.Tensor:
        """Return the bytes of the region (uint8) from its payload."""
        codec = region.transfer.codec
        assert codec is not None
        if self.rule is not None:
            self.device_seconds += region.nbytes * self.rule.decode
        decoded = bytes_at(region.transfer.lead, region.nbytes, payload.device)
        values = _values(region, decoded, place_of(decoded))
        codec.decode(payload, values)
        if _may_overflow(codec) and payload.numel() >= room(codec, values.numel(), values.dtype):
            restore_values(codec, payload, values)
        return decoded


@functools.cache
def _made(name: str, device: str) -> Codec:
    """Return the codec that a policy names.

    Raises:
        ValueError: no such codec, or it cannot encode on this device.
    """
    codec = make_codec(name)
    if not _encodes_on(codec, device):
        raise ValueError(
            f"an offload policy asks for the codec {name!r}, which encodes in host memory and is not in this version for tensors "
            f"of a {device} device: use a codec of fixed size, such as int8"
        )
    return codec


def _may_overflow(codec: Codec) -> TypeGuard[Exact]:
    return codec.may_overflow


def _shrinks(codec: Codec, region: Region) -> bool:
    """False where a codec of fixed size makes no fewer bytes: of float16, or of few values."""
    size = region.nbytes // region.dtype.itemsize, region.dtype
    return not _may_overflow(codec) or codec.payload_bytes(*size) < region.nbytes


def _encodes_on(codec: Codec, device: str) -> bool:
    return device == "cpu" or not isinstance(codec, VariableSizeCodec)


def _values(region: Region, base: torch.Tensor, start: int) -> torch.Tensor:
    """Return the region in `base`'s storage as a vector of its dtype."""
    values = torch.empty(0, dtype=region.dtype, device=base.device)
    count = region.nbytes // region.dtype.itemsize
    return values.set_(base.untyped_storage(), start // region.dtype.itemsize, (count,), (1,))


def check_codec(offload: OffloadConfig, device: str) -> None:
    """Checks that the codec of a config, which exists, can be used here.

    Raises:
        ConfigError: a package that it needs is not installed, or it cannot encode on this device.
    """
    if offload.codec in (AUTO, OFF):
        return
    try:
        codec = make_codec(offload.codec)
    except RuntimeError as error:
        raise ConfigError.of(
            "ssdtrain.offload.codec", offload.codec, f"cannot be used: {error}", OFFLOAD_ALLOWED
        ) from None
    if not _encodes_on(codec, device):
        why = f"encodes in host memory and is not in this version for tensors of a {device} device"
        raise ConfigError.of(
            "ssdtrain.offload.codec", offload.codec, why, "a codec of fixed size, such as int8"
        )
