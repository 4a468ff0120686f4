"""`offload.codec: "auto"`, the default: the codec `exact` where steps are shorter with it.

Note: [What a codec costs]
Encoding and decoding take time of the device that computes, which nothing hides; what they save is time of transfers, which is
hidden as long as none is waited for. So a codec pays only where steps wait, and longer than it takes. Three questions are asked,
the cheapest first:

1. At start: do its kernels take less time for a byte than the link to host memory saves by what it does not carry? Both are
   measured. Drives are slower than the link. A CPU has no link: there only the codec in C is measured.
2. In the first steps, which have no codec (`PRICED_STEPS`): are transfers waited for longer than the codec would take?
3. In more, half of which have it (`TRIAL`): is each of these shorter than its neighbour, by seconds for a byte that is saved, and
   their peak of activation memory no higher? Of two neighbours the first has it, or the second, since steps may be of two kinds
   in turn, as of two sets of data.

A payload lies beside its tensor for a while, and the peak of a trial may be higher. So there is none where the device has less
memory free than activations take at their peak. A step that an exception ends is not counted. With the codec it may have wanted
for memory: then the trial is over.

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
from collections import deque
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
"""Number of steps at the start, and of a trial, which have costs of their own."""
PRICED_STEPS = 2
TRIAL = (True, False, True, False, False, True, True, False)
"""Whether each step of a trial has the codec. The first `UNTRIED_STEPS` do not count; the others are compared two by two."""
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
        return _waited(_regions(self.record)) if self.record.order else self.host


class _Tried(NamedTuple):
    """A step of the trial."""

    encoded: bool
    peak: int
    """Bytes of activation memory."""
    saved: int
    """Bytes of saved tensors."""
    seconds: float
    """Duration of forwards and backwards."""


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
        self._unread: deque[tuple[bool, int, StepRecord]] = (
            deque()
        )  # of the same, which the device has not passed
        self._trying = self._chosen is not None
        if self._trying or self._engine.device.kind != "cpu":
            self._engine.recorder.request("codec", True)

    def step_ended(self, *, failed: bool = False) -> None:
        """A step is over, by an exception where it has `failed`, and none has begun."""
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
        encoded = engine.coding.rule is not None
        if failed and self._trying and encoded:
            self.end(None, "a step with it has failed")
        if failed or not (nbytes or record.order):
            return
        # 1. What this step is for.
        self._number += 1
        if self._trying and UNTRIED_STEPS < self._number <= len(TRIAL):
            self._unread.append((encoded, peak, record))
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
            free = engine.device.free_bytes()
            if free is not None and free < peak:
                why = f"a trial needs free device memory of the peak of activations, {size_text(peak)}"
                self.end(None, f"{why}, and {size_text(free)} are free")
                return
            self._trying, self._number, self._priced = True, 0, []
            engine.recorder.request("codec", True)
        # 3. The next step, or the end.
        self._read()
        if self._number < len(TRIAL):
            engine.coding.use(self._rule if TRIAL[self._number] else None)
        elif not self._unread:
            self._judge()

    def _read(self) -> None:
        """Note the times of the steps that the device has passed: the records of a step with many microbatches are large."""
        while self._unread and self._unread[0][2].passed():
            encoded, peak, record = self._unread.popleft()
            regions = _regions(record)
            saved = sum(region.nbytes for region in regions)
            self._tried.append(_Tried(encoded, peak, saved, _total(regions)))

    def _judge(self) -> None:
        # Steps of other sequence lengths save other bytes, and take other times.
        saved = median(one.saved for one in self._tried)
        coded, plain = (
            [one.seconds / max(1, one.saved) * saved for one in self._tried if one.encoded is way]
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
        self._unread.clear()
        self._engine.recorder.request("codec", False)
        self._engine.coding.use(rule)
        if rule != self._chosen or not self.decision:
            name = SPEC if rule is not None else "no codec"
            self.decision = f'offload.codec "auto": {name}, because {why}'
            logger.info("%s", self.decision)
        self._chosen = rule

    def close(self) -> None:
        """Record nothing any more, and decide nothing: the engine, which tapes may hold, is closed."""
        self.over, self._rest = True, 0  # of which no step leaves none
        self._priced, self._tried = [], []
        self._unread.clear()
        self._engine.recorder.request("codec", False)


def _regions(record: StepRecord) -> list[RegionTimes]:
    return [region for tape in record.tapes() for region in tape.regions]


def _waited(regions: list[RegionTimes]) -> float:
    """Seconds that the device waited for transfers."""
    return sum(region.store_stall + region.load_stall for region in regions)


def _total(regions: list[RegionTimes]) -> float:
    """Seconds of forwards and backwards."""
    computed = (one.forward + one.backward + one.storing + one.loading for one in regions)
    return _waited(regions) + sum(computed)


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
