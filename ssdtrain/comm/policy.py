"""The compression policy of each parallel dimension: the `comm` section with its preset filled in, validated."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, replace
from functools import lru_cache

import torch

from ssdtrain.codecs import FORMAT_VERSION, FixedSizeCodec, make_fixed_size_codec
from ssdtrain.config import DIMENSIONS, CommConfig, ConfigError
from ssdtrain.config.codecs import OFF, split_rule
from ssdtrain.config.comm import EXCLUDED_OF_PRESETS, FEEDBACK, PRESETS

WARMUP_CODEC = "int8"
EXACT_CODEC = "exact"

DEVICE_CHUNK = 32 << 20
"""Bytes of a piece on a GPU, at least."""


@dataclass(frozen=True)
class Rule:
    """The codecs of one dimension."""

    inside: str
    """Codec between ranks of one node, or "off"."""
    between: str
    """Codec between ranks of different nodes, or "off"."""
    min_bytes: int

    @property
    def off(self) -> bool:
        return self.inside == self.between == OFF

    @property
    def exact(self) -> bool:
        """Whether no bit of what is sent changes."""
        return all(spec == OFF or codec_of(spec).lossless for spec in (self.inside, self.between))


@dataclass(frozen=True)
class Policy:
    """A validated `CommConfig`. It must be equal on all ranks."""

    rules: dict[str, Rule]
    exclude: tuple[str, ...]
    excluded: str
    """How excluded parameters are sent: "raw" or "exact", or "bf16", which rounds their gradients."""
    feedback: str
    warmup_steps: int
    adapt: float | None
    two_hop: str
    probe: bool
    chunk: int
    seed: int
    configured: tuple[str, ...]
    """Dimensions that the config gives a codec by name, not by a preset."""

    @classmethod
    def from_config(cls, config: CommConfig) -> Policy:
        """Fill in presets and split rules.

        Raises:
            ConfigError: `adapt` without error feedback, which depends on the preset.
        """
        preset = PRESETS.get(config.preset or "", {})
        rules = {}
        for dimension in DIMENSIONS:
            text = getattr(config, dimension) or preset.get(dimension, OFF)
            inside, between, min_bytes = split_rule(text)
            rules[dimension] = Rule(inside, between, config.min_bytes if min_bytes is None else min_bytes)
        feedback = config.feedback or FEEDBACK.get(config.preset or "", OFF)
        if config.adapt is not None and feedback == OFF:
            allowed = '"feedback": "int8" beside it, or leaving adapt out'
            why = "needs error feedback, and it is off"
            raise ConfigError.of("ssdtrain.comm.adapt", config.adapt, why, allowed)
        return cls(
            rules=rules,
            exclude=tuple(name for name in config.exclude if name != "none"),
            excluded=config.excluded or EXCLUDED_OF_PRESETS.get(config.preset or "", "raw"),
            feedback=feedback,
            warmup_steps=config.warmup_steps,
            adapt=config.adapt,
            two_hop=config.two_hop,
            probe=config.probe,
            chunk=config.chunk,
            seed=config.seed,
            configured=tuple(name for name in DIMENSIONS if getattr(config, name) not in (None, OFF)),
        )

    def for_device(self, device: torch.device) -> Policy:
        """Return the policy as `device` can follow it: on a GPU pieces are larger, because launching small ones takes longer than
        coding them."""
        return self if device.type != "cuda" else replace(self, chunk=max(self.chunk, DEVICE_CHUNK))

    def digest(self) -> str:
        """Return a hash that is equal on two ranks if they encode and decode messages in the same way."""
        of_messages = {name: value for name, value in asdict(self).items() if name != "configured"}
        text = json.dumps([of_messages, FORMAT_VERSION], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def specs(self, step: int) -> set[str]:
        """Return the codecs that collectives may use from step `step` on."""
        specs = {spec for rule in self.rules.values() for spec in (rule.inside, rule.between)} - {OFF}
        return specs | {WARMUP_CODEC} if specs and step < self.warmup_steps else specs

    def codec(self, spec: str, step: int) -> FixedSizeCodec | None:
        """Return the codec of a collective in step `step`; None: elements are sent uncompressed."""
        if spec == OFF:
            return None
        codec = codec_of(spec)
        return codec_of(WARMUP_CODEC) if step < self.warmup_steps and codec.bits_per_value < 8 else codec

    @property
    def may_overflow(self) -> bool:
        """Whether payloads of some messages may overflow (see `overflow`)."""
        return self.excluded == EXACT_CODEC or any(codec_of(spec).may_overflow for spec in self.specs(0))

    def excluded_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype in which excluded gradients of `dtype` are sent."""
        return torch.bfloat16 if self.excluded == "bf16" and dtype == torch.float32 else dtype

    def is_identity(self, spec: str, dtype: torch.dtype) -> bool:
        """Return whether `spec` has no fewer bits than `dtype`; sums are then left to the framework."""
        return spec in (OFF, "raw") or bits_of(spec, dtype) >= 8 * dtype.itemsize


def bits_of(spec: str, dtype: torch.dtype) -> float:
    """Return the bits per value of a large tensor of `dtype`."""
    codec = codec_of(spec)
    return 8 * codec.payload_bytes(1 << 20, dtype) / (1 << 20) if codec.lossless else codec.bits_per_value


@lru_cache(maxsize=256)
def codec_of(spec: str) -> FixedSizeCodec:
    """Make the codec of `spec` once: codecs are immutable."""
    return make_fixed_size_codec(spec)
