"""Compiles the kernels of a codec before training needs them."""

from collections.abc import Iterable

import torch

from ssdtrain.codecs import kernels
from ssdtrain.codecs.base import HEADER_BYTES, Codec, Key
from ssdtrain.codecs.exact import Exact
from ssdtrain.codecs.overflow import keep_values, room

NUMELS = (1 << 16, (1 << 16) + 1)
"""A multiple of every kernel's values per program, and one value more: whole programs and a partial one. Triton compiles a kernel
for each."""

NOWHERE = 1 << 40
"""Address of host memory that is not written to, as long as one in use: by that a kernel is compiled."""


def warm_up(codec: Codec, device: torch.device, dtypes: Iterable[torch.dtype]) -> None:
    """Run `codec` once for each dtype, so that no step waits for a compiler; takes seconds where nothing is cached on disk.

    Does nothing on a CPU, where nothing is compiled.

    Args:
        dtypes: of the tensors that it will encode; others are compiled at their first use.
    """
    if device.type != "cuda":
        return
    with torch.cuda.device(device):
        for dtype in dtypes:
            for numel in NUMELS if dtype in codec.inputs else ():
                run_once(codec, device, dtype, numel)


def run_once(codec: Codec, device: torch.device, dtype: torch.dtype, numel: int) -> None:
    """Encode and decode, into the same dtype and onto float32, as collectives do."""
    x = torch.zeros(numel, dtype=dtype, device=device)
    buf = torch.empty(codec.max_payload_bytes(x.numel(), dtype), dtype=torch.uint8, device=device)
    codec.encode(x, buf, Key(0))
    codec.decode(buf, x)
    if isinstance(codec, Exact):
        buf = torch.zeros(room(codec, x.numel(), dtype), dtype=torch.uint8, device=device)
        for host in (0, NOWHERE):
            keep_values(codec, x, buf, HEADER_BYTES, host)  # no flag is set
    if not codec.lossless and kernels.usable("auto", x):
        codec.decode(buf, torch.zeros(x.numel(), device=device), accumulate=True)
