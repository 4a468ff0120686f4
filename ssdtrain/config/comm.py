"""The `comm` section of the config schema, and its presets.

Sources of the presets: `paper-zhybrid` and `paper-mzhybrid` follow arXiv 2409.02423 (ZFP at a low rate for data-parallel
gradients, at a high rate or lossless for what tensor and pipeline parallelism send; the paper's exact rates are not public), the
others the measurements of docs/collectives.md.
"""

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from ssdtrain.config.kinds import CommRule, Fraction, Names, PositiveSize, Size, Switch
from ssdtrain.config.section import Section, ValueConflict
from ssdtrain.config.units import MiB

DIMENSIONS = ("dp", "dp_gather", "tp", "pp_forward", "pp_backward", "ep", "zero_gather")
"""Keys of `CommConfig` that hold codecs, one per kind of traffic."""

_INT4 = "int4:block=128,hadamard"

PRESETS: dict[str, dict[str, str]] = {
    "exact": dict.fromkeys(DIMENSIONS, "exact"),
    "safe": {"dp": "int8", "dp_gather": "int8"},
    "balanced": {
        "dp": f"int8/{_INT4}",
        "dp_gather": "int8",
        "tp": "off/int8",
        "pp_forward": "int8",
        "pp_backward": "bf16",
        "ep": "off/int8",
        "zero_gather": "int8",
    },
    "aggressive": {
        "dp": _INT4,
        "dp_gather": _INT4,
        "tp": "off/fp8:hadamard",
        "pp_forward": _INT4,
        "pp_backward": "int8",
        "ep": "int8",
        "zero_gather": _INT4,
    },
    "paper-zhybrid": {
        "dp": "zfp:rate=8",
        "dp_gather": "zfp:rate=8",
        "tp": "zfp:rate=16",
        "pp_forward": "zfp:rate=16",
        "pp_backward": "zfp:rate=16",
        "ep": "zfp:rate=16",
        "zero_gather": "zfp:rate=16",
    },
    "paper-mzhybrid": {**dict.fromkeys(DIMENSIONS, "exact"), "dp": "zfp:rate=8", "dp_gather": "zfp:rate=8"},
}
EXCLUDED_OF_PRESETS = {"balanced": "exact", "aggressive": "exact"}
"""`excluded` of presets; of the others it is "raw"."""
FEEDBACK = {"balanced": "int8", "aggressive": "int8"}
"""Error feedback of presets; the others have none."""


class CommConfig(Section):
    """Compression of collectives, configured per parallel dimension because each tolerates a different compression level
    (docs/collectives.md).

    The value of a dimension is a codec, "inside/between" for different codecs within a node and between nodes, or "off". An
    appended "@64KiB" is the dimension's own `min_bytes`. The default of a dimension is the preset's, or "off" without a preset.
    """

    preset: Literal["exact", "safe", "balanced", "aggressive", "paper-zhybrid", "paper-mzhybrid"] | None = (
        None
    )
    """Codecs for all dimensions. With "exact" no bit changes. Default: none is compressed."""

    dp: CommRule | None = None
    """Gradients of data parallelism before summation: the reduce-scatter, or the first half of an all-reduce."""

    dp_gather: CommRule | None = None
    """Gradients of data parallelism after summation: the second half of an all-reduce."""

    tp: CommRule | None = None
    """Activations and their gradients between tensor-parallel ranks, including sequence parallelism."""

    pp_forward: CommRule | None = None
    """Activations from one pipeline stage to the next. Integers, masks and scalars are never compressed."""

    pp_backward: CommRule | None = None
    """Gradients of activations from one pipeline stage to the previous one."""

    ep: CommRule | None = None
    """Tokens of expert parallelism, in both directions."""

    zero_gather: CommRule | None = None
    """All-gathers of weights: in ZeRO-3 before their use; in other optimizers that shard their state after a step, as
    the difference from the values that other ranks already have."""

    min_bytes: Size = MiB
    """Messages smaller than this, before compression, are not compressed."""

    exclude: Names = ("norm", "bias", "embedding")
    """Parameters whose gradients and weights are not compressed: "norm", "bias" and "embedding" stand for these kinds of
    parameters, anything else is a pattern of parameter names such as "*.router.*"; "none" excludes nothing."""

    excluded: Literal["raw", "exact", "bf16"] | None = None
    """How excluded gradients and weights are sent beside compressed ones: "raw" in their own dtype, "exact": with the codec of
    that name where it saves enough, which changes no bit, or "bf16": gradients in float32 are rounded to bfloat16 before they are
    summed, and their sums before they are gathered. Each rounding has a relative error of at most 2^-8, and zeros stay zeros;
    weights, and gradients that the framework itself sends in 16 bits, are not changed by it. Default: the preset's, or "raw"."""

    feedback: Literal["int8", "fp32", "off"] | None = None
    """Error feedback for gradients: the compression error is added to the next step's gradients, and stored in 8 or 32 bits per
    parameter. Default: the preset's, or "off" without a preset."""

    warmup_steps: Annotated[int, Field(ge=0)] = 100
    """Number of initial steps in which codecs below 8 bits are replaced by int8, except for messages between stages."""

    adapt: Fraction | None = None
    """Choose the bits of each gradient bucket such that its relative error stays below this value, for example 0.1. Default:
    fixed bits."""

    two_hop: Switch = "auto"
    """Reduce within each node first and then between nodes, so that fewer bytes cross the network. Default: for groups with the
    same number of ranks, at least two, on each of several nodes. With "on" it is an error at start if the job has no such
    layout, and later if a group over several nodes cannot be split. Groups within a node, or with one rank per node, always use
    one hop."""

    probe: bool = True
    """Time each collective at its first use with and without its codec, and disable the codec with one warning if the plain
    collective is at least 10% faster in most rounds."""

    chunk: PositiveSize = 4 * MiB
    """Bytes per pipelined piece of a tensor on the CPU: a piece is encoded while the previous one is sent."""

    seed: Annotated[int, Field(ge=0)] = 0
    """Seed of stochastic rounding, which does not use torch's generators."""

    def conflicts(self) -> Iterator[ValueConflict]:
        if self.adapt is not None and self.feedback == "off":
            why = "needs error feedback, but feedback is off"
            yield "adapt", self.adapt, why, 'leaving one of them out, or "feedback": "int8"'

    @property
    def active(self) -> bool:
        """Whether any message may be compressed."""
        return self.preset is not None or any(getattr(self, name) not in (None, "off") for name in DIMENSIONS)
