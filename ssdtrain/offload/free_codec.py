"""`offload.codec: "auto"`: the codec `exact` where it takes less time than the link saves.

Note: [Where a codec is free]
A bit-exact codec is worth its time if encoding and decoding take less than what the link to host memory saves by the bytes that
it does not carry; drives are slower than the link. Both are measured at start, for each dtype. On a GPU with Triton kernels and
PCIe the codec takes a part of that; where the link is as fast as memory, or there are no kernels, it may take more. It is the
computation's time that it takes, so that it gains where transfers are waited for, and costs where they are hidden: with `amount:
"auto"`, whose cost model does not know of it, there is no codec. It takes device memory too, and is not the default.

On a CPU there is no link, and encoding takes the cores, and the thread, that train: 12 to 28% of a step
(`benchmarks/spill_exact.py`, two cores that others use too). So there, as with GPUDirect Storage, whose transfers no thread of
the host sees, tensors are stored as they are.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch

from ssdtrain.codecs import FixedSizeCodec, kernels, make_fixed_size_codec
from ssdtrain.codecs.warm_up import warm_up
from ssdtrain.config.units import MiB
from ssdtrain.device import Device
from ssdtrain.offload.transfer.coding import CodecRule

__all__ = ["free_codec", "is_free"]

logger = logging.getLogger("ssdtrain")

SPEC = "exact"
DTYPES = (torch.bfloat16, torch.float32)
"""Dtypes of which it makes fewer bytes."""
CODEC_PROBE = 64 * MiB  # bytes of the tensor that is encoded
REPEATS = 3


def free_codec(device: torch.device, layer: Device) -> CodecRule | None:
    """Return the rule of the codec that is free on `device`, or None. Blocks the host."""
    if device.type != "cuda" or not kernels.compiled() or not layer.writes_pinned():
        return None
    link = layer.link_bandwidth()
    assert link is not None
    codec = make_fixed_size_codec(SPEC)
    warm_up(codec, device, DTYPES)
    with torch.cuda.device(device):
        dtypes = tuple(
            dtype for dtype in DTYPES if is_free(_saved(codec, dtype), _seconds(codec, device, dtype), link)
        )
    logger.info('offload.codec "auto": %s for %s', SPEC if dtypes else "no codec", dtypes or "any dtype")
    return CodecRule(SPEC, dtypes, automatic=True) if dtypes else None


def is_free(saved: float, seconds: float, link: tuple[float, float]) -> bool:
    """Return whether a codec takes less time than it saves on the link.

    Args:
        saved: share of the bytes that need not be carried.
        seconds: of encoding and decoding, per byte.
        link: bytes per second to the host and from it.
    """
    return seconds < saved * sum(1 / rate for rate in link)


def _saved(codec: FixedSizeCodec, dtype: torch.dtype) -> float:
    return 1 - codec.payload_bytes(CODEC_PROBE // dtype.itemsize, dtype) / CODEC_PROBE


def _seconds(codec: FixedSizeCodec, device: torch.device, dtype: torch.dtype) -> float:
    """Measure encoding and decoding, in seconds per byte."""
    values = torch.randn(CODEC_PROBE // dtype.itemsize, device=device, generator=torch.Generator(device)).to(
        dtype
    )
    payload = torch.empty(codec.payload_bytes(values.numel(), dtype), dtype=torch.uint8, device=device)
    encode = min(_elapsed(lambda: codec.encode(values, payload)) for _ in range(REPEATS))
    return (
        encode + min(_elapsed(lambda: codec.decode(payload, values)) for _ in range(REPEATS))
    ) / CODEC_PROBE


def _elapsed(work: Callable[[], object]) -> float:
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    began.record()
    work()
    ended.record()
    ended.synchronize()
    return began.elapsed_time(ended) / 1e3
