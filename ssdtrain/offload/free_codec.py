"""`offload.codec: "auto"`, the default: the codec `exact` where steps are shorter with it.

Note: [What a codec costs]
Encoding and decoding take time of the device that computes, which nothing hides; what they save is time of transfers, which is
hidden as long as none is waited for. So a codec pays only where steps wait, and longer than it takes. Three questions are asked,
the cheapest first:

1. At start: do its kernels take less time for a byte than the link to host memory saves by what it does not carry? Both are
   measured. Drives are slower than the link. A CPU has no link: there only the codec in C is measured.
2. In the first steps, which have no codec (`PRICED_STEPS`): are transfers waited for longer than the codec would take?
3. In `TRIED_STEPS` more, every other one of which has it: is each of these shorter than its neighbour, by seconds for a byte that
   is saved, and their peak of activation memory no higher?

They are asked again every `ASKED_AGAIN` steps, since a drive, a sequence length or another job may change the answer.

With `amount: "auto"`, and under a plan, what leaves is chosen so that nothing waits, and there is no codec: encoding would be the
only thing that is waited for. There is none with GPUDirect Storage, whose transfers no thread of the host sees, nor where Triton
or the codec in C is missing, or nothing may leave.

Each rank decides for itself: bits are equal either way, and no rank sees how another stores its tensors.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

import torch

from ssdtrain.codecs import FixedSizeCodec, Key, kernels, make_fixed_size_codec, native
from ssdtrain.codecs.base import FLOATS
from ssdtrain.codecs.warm_up import warm_up
from ssdtrain.config.units import MiB
from ssdtrain.device import Device
from ssdtrain.offload.transfer.coding import AUTOMATIC_BYTES, CodecRule
from ssdtrain.profile.passes import RegionTimes, StepRecord
from ssdtrain.text import size_text

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
ASKED_AGAIN = 1000
"""Number of steps after which the answer is looked for again."""
MINIMUM_GAIN = 0.01
"""Share of a step without the codec by which its neighbour has to be shorter with it, in every pair."""
PEAK_TOLERANCE = 0.02
"""Share of the peak of activation memory by which two measurements of it differ."""


def free_codec(device: torch.device, layer: Device) -> CodecRule | None:
    """Return the rule of a codec that may take less time than it saves, or None. Blocks the host."""
    try:
        rule = _on_cpu() if device.type == "cpu" else _on_gpu(device, layer)
    except Exception as error:  # noqa: BLE001 - no memory for a measurement, a kernel that does not compile: training needs neither
        logger.warning('offload.codec "auto": no codec, because it could not be measured: %s', error)
        return None
    if rule is not None:
        logger.info('offload.codec "auto": %s is tried for %s', SPEC, rule.dtypes)
    return rule


def _on_gpu(device: torch.device, layer: Device) -> CodecRule | None:
    if not kernels.compiled() or not layer.writes_pinned():
        return None
    link = layer.link_bandwidth()
    assert link is not None
    codec = make_fixed_size_codec(SPEC)
    warm_up(codec, device, DTYPES)
    prices = {dtype: _seconds(codec, device, dtype) for dtype in DTYPES}
    dtypes = tuple(dtype for dtype in DTYPES if is_free(_saved(codec, dtype), sum(prices[dtype]), link))
    if not dtypes:
        logger.info(
            'offload.codec "auto": no codec, because the link to host memory is as fast as its kernels'
        )
        return None
    return CodecRule(SPEC, dtypes, True, *prices[dtypes[0]], least_bytes=AUTOMATIC_BYTES)


@functools.cache
def _on_cpu() -> CodecRule | None:
    if native.module() is None:
        return None
    return CodecRule(SPEC, DTYPES, True, *codec_seconds(SPEC, torch.device("cpu")))


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


class _Priced(NamedTuple):
    """A step without the codec."""

    nbytes: int
    """Bytes that left."""
    host: float
    """Seconds that the host waited for transfers."""
    record: StepRecord
    """Empty where the host computes."""

    def waited(self) -> float:
        """Seconds that what computes waited for transfers."""
        return _waited(self.record) if self.record.order else self.host


class _Tried(NamedTuple):
    """A step of the trial."""

    encoded: bool
    record: StepRecord
    peak: int
    """Bytes of activation memory."""


class CodecTrial:
    """Uses a codec where steps are shorter with it: questions 2 and 3 of Note: [What a codec costs].

    Args:
        engine: encodes nothing so far.
        rule: of the codec, with its price.

    Attributes:
        over: it has been decided, until it is asked again.
        decision: what was decided, and why; "" so far.
    """

    def __init__(self, engine: OffloadEngine, rule: CodecRule) -> None:
        self._engine, self._rule = engine, rule
        self.over = False
        self.decision = ""
        self._chosen: CodecRule | None = None
        self._rest = 0  # steps until it is asked again
        self._left, self._waited = 0, 0.0  # of the engine's counters, at the end of the last step
        self._begin()

    def _begin(self) -> None:
        self.over = False
        self._number = 0
        self._priced: list[_Priced] = []
        self._tried: list[_Tried] = []
        self._trying = self._chosen is not None
        if self._trying or self._engine.device.kind != "cpu":
            self._engine.recorder.request("codec", True)

    def step_ended(self) -> None:
        """A step is over, and none has begun."""
        if self.over:
            self._rest -= 1
            if not self._rest:
                self._begin()
            return
        engine, metrics, record = self._engine, self._engine.metrics, self._engine.recorder.take("codec")
        left, waited = metrics.offloaded_bytes + metrics.avoided_write_bytes, metrics.stall_seconds
        nbytes, seconds = left - self._left, waited - self._waited
        self._left, self._waited = left, waited
        peak = engine.meter.begin_recent().alive
        if not (nbytes or record.order):
            return
        # 1. What this step is for.
        self._number += 1
        encoded = engine.coding.rule is not None
        if self._trying and len(self._tried) < TRIED_STEPS and self._number > UNTRIED_STEPS:
            self._tried.append(_Tried(encoded, record, peak))
        elif not self._trying and UNTRIED_STEPS < self._number <= UNTRIED_STEPS + PRICED_STEPS:
            self._priced.append(_Priced(nbytes, seconds, record))
        # 2. Whether it is worth a trial, when the device has passed all.
        if not self._trying:
            if len(self._priced) < PRICED_STEPS or not all(one.record.passed() for one in self._priced):
                return
            price = self._rule.encode + self._rule.decode
            if any(one.waited() <= one.nbytes * price for one in self._priced):
                self.end(None, "transfers are waited for less than it would take")
                return
            self._trying, self._number = True, 0
            engine.recorder.request("codec", True)
        # 3. The next step, or the end.
        if len(self._tried) < TRIED_STEPS:
            engine.coding.use(None if encoded else self._rule)
        elif all(one.record.passed() for one in self._tried):
            self._judge()

    def _judge(self) -> None:
        # Steps of other sequence lengths save other bytes, and take other times.
        saved = median(_saved_bytes(one.record) for one in self._tried)
        coded, plain = (
            [
                _total(record) / max(1, _saved_bytes(record)) * saved
                for encoded, record, _ in self._tried
                if encoded is way
            ]
            for way in (True, False)
        )
        high, low = (max(one.peak for one in self._tried if one.encoded is way) for way in (True, False))
        why = f"forward and backward take {median(coded) * 1e3:.1f} ms with it, {median(plain) * 1e3:.1f} without"
        shorter = all(a <= (1 - MINIMUM_GAIN) * b for a, b in zip(coded, plain, strict=True))
        fits = high <= (1 + PEAK_TOLERANCE) * low
        if shorter and not fits:
            why = f"activations take {size_text(high)} with it, {size_text(low)} without, although {why}"
        elif median(coded) < median(plain) and not shorter:
            why += ", but not in each pair of steps"
        self.end(self._rule if shorter and fits else None, why)

    def end(self, rule: CodecRule | None, why: str) -> None:
        """Encode by `rule` from here on, or nothing."""
        self.over, self._rest = True, ASKED_AGAIN
        self._priced, self._tried = [], []
        self._engine.recorder.request("codec", False)
        self._engine.coding.use(rule)
        if rule != self._chosen or not self.decision:
            name = SPEC if rule is not None else "no codec"
            self.decision = f'offload.codec "auto": {name}, because {why}'
            logger.info("%s", self.decision)
        self._chosen = rule


def _regions(record: StepRecord) -> list[RegionTimes]:
    return [region for tape in record.tapes() for region in tape.regions]


def _saved_bytes(record: StepRecord) -> int:
    return sum(region.nbytes for region in _regions(record))


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
