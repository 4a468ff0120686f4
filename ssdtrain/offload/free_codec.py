"""`offload.codec: "auto"`: the codec `exact` where steps are shorter with it.

Note: [What a codec costs]
Encoding and decoding take time of the device that computes, which nothing hides; what they save is time of the link to host
memory, which is hidden as long as no transfer is waited for. So a codec pays only where steps wait, and longer than it takes.
Three questions are asked, the cheapest first:

1. At start: do its kernels take less time for a byte than the link saves by what it does not carry? Both are measured. Drives are
   slower than the link.
2. In the first steps, which have no codec (`PRICED_STEPS`): does the device wait longer than the codec would take?
3. In `TRIED_STEPS` more, every other one of which has it: are these shorter, by the device's own timestamps?

With `amount: "auto"`, and under a plan, what leaves is chosen so that nothing waits, and there is no codec. On a CPU there is no
link, and encoding takes the cores, and the thread, that train: 12 to 28% of a step (`benchmarks/spill_exact.py`, two cores that
others use too). So there, as with GPUDirect Storage, whose transfers no thread of the host sees, tensors are stored as they are.
It takes device memory too, and is not the default.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from statistics import median
from typing import TYPE_CHECKING

import torch

from ssdtrain.codecs import FixedSizeCodec, Key, kernels, make_fixed_size_codec
from ssdtrain.codecs.base import FLOATS
from ssdtrain.codecs.warm_up import warm_up
from ssdtrain.config.units import MiB
from ssdtrain.device import Device
from ssdtrain.offload.transfer.coding import CodecRule
from ssdtrain.profile.passes import RegionTimes, StepRecord

if TYPE_CHECKING:
    from ssdtrain.offload.engine import OffloadEngine

logger = logging.getLogger("ssdtrain")

SPEC = "exact"
DTYPES = (torch.bfloat16, torch.float32)
"""Dtypes of which it makes fewer bytes."""
CODEC_PROBE, CPU_CODEC_PROBE = 64 * MiB, 4 * MiB  # bytes of the tensor that is encoded
REPEATS = 3
UNTRIED_STEPS = 2
"""Number of steps before the trial, which have costs of their own."""
PRICED_STEPS = 2
TRIED_STEPS = 6
"""Number of steps with and without the codec in turn; even."""


def free_codec(device: torch.device, layer: Device) -> CodecRule | None:
    """Return the rule of a codec that takes less time on `device` than the link saves, or None. Blocks the host."""
    if device.type != "cuda" or not kernels.compiled() or not layer.writes_pinned():
        return None
    link = layer.link_bandwidth()
    assert link is not None
    codec = make_fixed_size_codec(SPEC)
    warm_up(codec, device, DTYPES)
    prices = {dtype: _seconds(codec, device, dtype) for dtype in DTYPES}
    dtypes = tuple(dtype for dtype in DTYPES if is_free(_saved(codec, dtype), sum(prices[dtype]), link))
    logger.info(
        'offload.codec "auto": %s for %s', f"{SPEC} is tried" if dtypes else "no codec", dtypes or "any dtype"
    )
    return CodecRule(SPEC, dtypes, True, *prices[dtypes[0]]) if dtypes else None


def priced(spec: str, device: torch.device) -> CodecRule:
    """Return the rule of a codec that a config names, with its price on a device that has kernels for it. Blocks the host."""
    rule = CodecRule(spec)
    if device.type != "cuda" or not kernels.compiled():
        return rule
    encode, decode = codec_seconds(spec, device)
    return rule._replace(encode=encode, decode=decode)


def codec_seconds(spec: str, device: torch.device) -> tuple[float, float]:
    """Measure encoding and decoding of a codec's most common dtype, in seconds per byte. Blocks the host."""
    codec = make_fixed_size_codec(spec)
    warm_up(codec, device, FLOATS)
    return _seconds(codec, device, next(dtype for dtype in (*DTYPES, *FLOATS) if dtype in codec.inputs))


class CodecTrial:
    """Uses a codec where steps are shorter with it: steps 2 and 3 of Note: [What a codec costs].

    Args:
        engine: of a device; it encodes nothing so far.
        rule: of the codec, with its price.

    Attributes:
        over: it has been decided.
    """

    def __init__(self, engine: OffloadEngine, rule: CodecRule) -> None:
        self._engine, self._rule = engine, rule
        self._number = self._left = 0  # steps; bytes that left a device so far
        self._priced: list[tuple[int, StepRecord]] = []  # bytes that left
        self._tried: list[tuple[bool, StepRecord]] = []  # whether encoded
        self._trying = self.over = False
        engine.recorder.request("codec", True)

    def step_ended(self) -> None:
        """A step is over, and none has begun."""
        if self.over:
            return
        engine, record = self._engine, self._engine.recorder.take("codec")
        before, self._left = self._left, engine.metrics.offloaded_bytes + engine.metrics.avoided_write_bytes
        if not record.order:
            return
        # 1. What this step is for.
        self._number += 1
        encoded = engine.coding.rule is not None
        if self._trying and len(self._tried) < TRIED_STEPS:
            self._tried.append((encoded, record))
        elif UNTRIED_STEPS < self._number <= UNTRIED_STEPS + PRICED_STEPS:
            self._priced.append((self._left - before, record))
        # 2. Whether it is worth a trial, when the device has passed all.
        if not self._trying:
            if len(self._priced) < PRICED_STEPS or not all(one.passed() for _, one in self._priced):
                return
            price = self._rule.encode + self._rule.decode
            if any(_waited(one) <= nbytes * price for nbytes, one in self._priced):
                self.end(None, "transfers are waited for less than it would take")
                return
            self._trying = True
        # 3. The next step, or the end.
        if len(self._tried) < TRIED_STEPS:
            engine.coding.use(None if encoded else self._rule)
        elif all(one.passed() for _, one in self._tried):
            plain, coded = (
                median(_total(one) for with_codec, one in self._tried if with_codec is whether)
                for whether in (False, True)
            )
            why = f"forward and backward take the device {coded * 1e3:.1f} ms with it, {plain * 1e3:.1f} without"
            self.end(self._rule if coded < plain else None, why)

    def end(self, rule: CodecRule | None, why: str) -> None:
        """Encode by `rule` from here on, or nothing."""
        self.over = True
        self._priced, self._tried = [], []
        self._engine.recorder.request("codec", False)
        self._engine.coding.use(rule)
        logger.info('offload.codec "auto": %s, because %s', SPEC if rule is not None else "no codec", why)


def _regions(record: StepRecord) -> list[RegionTimes]:
    return [region for tape in record.tapes() for region in tape.regions]


def _waited(record: StepRecord) -> float:
    """Seconds that the device waited for transfers."""
    return sum(region.store_stall + region.load_stall for region in _regions(record))


def _total(record: StepRecord) -> float:
    """Seconds of forwards and backwards."""
    computed = (one.forward + one.backward + one.storing + one.loading for one in _regions(record))
    return _waited(record) + sum(computed)


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


def _seconds(codec: FixedSizeCodec, device: torch.device, dtype: torch.dtype) -> tuple[float, float]:
    """Measure encoding and decoding, in seconds per byte."""
    size = CODEC_PROBE if device.type == "cuda" else CPU_CODEC_PROBE
    generator = torch.Generator(device)
    values = torch.randn(size // dtype.itemsize, device=device, generator=generator).to(dtype)
    payload = torch.empty(codec.payload_bytes(values.numel(), dtype), dtype=torch.uint8, device=device)
    ways = (lambda: codec.encode(values, payload, Key(0))), (lambda: codec.decode(payload, values))
    encode, decode = (min(_elapsed(way, device) for _ in range(REPEATS)) for way in ways)
    return encode / size, decode / size


def _elapsed(work: Callable[[], object], device: torch.device) -> float:
    if device.type != "cuda":
        start = time.perf_counter()
        work()
        return time.perf_counter() - start
    with torch.cuda.device(device):
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began.record()
        work()
        ended.record()
        ended.synchronize()
    return began.elapsed_time(ended) / 1e3
