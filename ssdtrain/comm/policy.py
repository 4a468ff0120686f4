"""The compression policy of each parallel dimension: the `comm` section with its preset filled in, validated."""

from __future__ import annotations

import hashlib
import json
import logging
from dataclasses import asdict, dataclass, replace
from functools import lru_cache

import torch

from ssdtrain.codecs import FORMAT_VERSION, Codec, FixedSizeCodec, make_codec
from ssdtrain.config import DIMENSIONS, CommConfig, ConfigError, ConfigIssue
from ssdtrain.config.codecs import OFF, split_rule
from ssdtrain.config.comm import FEEDBACK, FRAMED, PRESETS
from ssdtrain.ranks import global_rank

logger = logging.getLogger("ssdtrain")

WARMUP_CODEC = "int8"

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


@dataclass(frozen=True)
class Policy:
    """A validated `CommConfig`. It must be equal on all ranks."""

    rules: dict[str, Rule]
    exclude: tuple[str, ...]
    excluded: str
    """How gradients of excluded parameters are sent: "raw" or "bf16"."""
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
    def from_config(cls, config: CommConfig, path: str = "ssdtrain.comm") -> Policy:
        """Fill in presets and split rules.

        Raises:
            ConfigError: `adapt` without error feedback, which depends on the preset.
        """
        preset = PRESETS.get(config.preset or "", {})
        rules = {}
        for dimension in DIMENSIONS:
            text = getattr(config, dimension) or preset.get(dimension, OFF)
            inside, between, min_bytes = split_rule(text, framed=dimension in FRAMED)
            rules[dimension] = Rule(inside, between, config.min_bytes if min_bytes is None else min_bytes)
        feedback = config.feedback or FEEDBACK.get(config.preset or "", OFF)
        if config.adapt is not None and feedback == OFF:
            allowed = '"feedback": "int8" beside it, or leaving adapt out'
            why = "needs error feedback, and it is off"
            raise ConfigError([ConfigIssue(f"{path}.adapt", config.adapt, why, allowed)])
        return cls(
            rules=rules,
            exclude=tuple(name for name in config.exclude if name != "none"),
            excluded=config.excluded,
            feedback=feedback,
            warmup_steps=config.warmup_steps,
            adapt=config.adapt,
            two_hop=config.two_hop,
            probe=config.probe,
            chunk=config.chunk,
            seed=config.seed,
            configured=tuple(name for name in DIMENSIONS if getattr(config, name) not in (None, OFF)),
        )

    def for_device(self, device: torch.device, path: str = "ssdtrain.comm") -> Policy:
        """Return the policy as `device` can follow it: on a GPU pieces are larger, because launching small ones takes longer than
        coding them, and codecs whose payload has no fixed size are off: they work in host memory.

        Raises:
            ConfigError: the config gives a dimension such a codec by name, and `device` is a GPU.
        """
        if device.type != "cuda":
            return self
        on_host = [
            name
            for name, rule in self.rules.items()
            if not all(map(_has_fixed_size, (rule.inside, rule.between)))
        ]
        allowed = 'a codec that runs on a GPU, as "zfp:rate=16" or "int8", or "off"'
        why = "works in host memory only, and the tensors of this job are on a GPU"
        if named := [name for name in on_host if name in self.configured]:
            rules = {name: self.rules[name] for name in named}
            codecs = {name: f"{rule.inside}/{rule.between}" for name, rule in rules.items()}
            raise ConfigError(
                [ConfigIssue(f"{path}.{name}", each, why, allowed) for name, each in codecs.items()]
            )
        if on_host and global_rank() == 0:
            logger.warning(
                "comm.preset: %s stay uncompressed: the preset's codec for them %s", ", ".join(on_host), why
            )
        rules = {
            name: replace(rule, inside=OFF, between=OFF) if name in on_host else rule
            for name, rule in self.rules.items()
        }
        return replace(self, rules=rules, chunk=max(self.chunk, DEVICE_CHUNK))

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
        if step < self.warmup_steps and codec.bits_per_value < 8:
            codec = codec_of(WARMUP_CODEC)
        assert isinstance(codec, FixedSizeCodec), spec
        return codec

    def excluded_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype in which excluded gradients of `dtype` are sent."""
        return torch.bfloat16 if self.excluded == "bf16" and dtype == torch.float32 else dtype

    def is_identity(self, spec: str, dtype: torch.dtype) -> bool:
        """Return whether `spec` has no fewer bits than `dtype`; sums are then left to the framework."""
        return spec in (OFF, "raw") or codec_of(spec).bits_per_value >= 8 * dtype.itemsize


def _has_fixed_size(spec: str) -> bool:
    return spec == OFF or isinstance(codec_of(spec), FixedSizeCodec)


@lru_cache(maxsize=256)
def codec_of(spec: str) -> Codec:
    """Make the codec of `spec` once: codecs are immutable."""
    return make_codec(spec)
