"""Sizes and times of the offload engine."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

from ssdtrain.config import OffloadConfig
from ssdtrain.offload.transfer.coding import CodecRule


@dataclass(frozen=True)
class EngineOptions:
    """Settings of the engine; the runtime fills it from the config.

    Sizes in bytes, times in seconds. None: chosen by the engine from what it sees.
    """

    min_bytes: int = 256 << 10
    in_flight: int | None = None
    prefetch: int | None = None
    buffer: int | None = None
    buffer_limit: int | None = None  # up to which a pinned arena grows; None: `buffer` is its size
    buffer_room: Callable[[], int] | None = None  # bytes by which it may grow now; None: up to `buffer_limit`
    deadline: float = 10.0
    raise_when_full: bool = False
    staged: bool | None = None  # None: staged through pinned buffers on a GPU, in place on the CPU
    by_cufile: bool = False  # staged, but between device and drives by GPUDirect Storage
    verified: bool = False  # stores have a checksum of all their bytes, which is compared when they come back
    codec: CodecRule | None = None  # of floating-point tensors on their way to a tier
    rank: int = 0
    clock: Callable[[], float] = time.monotonic  # by which waits of the host are measured

    @classmethod
    def of(cls, config: OffloadConfig, **others: Any) -> EngineOptions:
        """Return the keys of `config` that are fields of this class, and `others`, which take precedence."""
        shared = [field.name for field in fields(cls) if field.name in OffloadConfig.model_fields]
        return cls(**{**{name: getattr(config, name) for name in shared}, **others})
