"""The schema: every key that this version knows, its default and its meaning.

Strict (no value is converted into another type behind the reader's back), frozen, and closed to unknown keys.
A default is what leaving the key out means, and so does the value "auto", which `load_config` leaves out.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator
from typing_extensions import Self

from ssdtrain.config import paths
from ssdtrain.config.amount import Amount
from ssdtrain.config.errors import ConfigError, Contradiction, Problem
from ssdtrain.config.kinds import (
    AmountField,
    Capacity,
    CodecName,
    CommRule,
    Directories,
    Directory,
    Fraction,
    FramedRule,
    Names,
    Patterns,
    PositiveSize,
    RatioRules,
    Seconds,
    Size,
    Switch,
    kind_of,
)
from ssdtrain.config.units import KiB, MiB, exact_size

LATER = frozenset({"planner", "offload.verify", "report.trace"})
"""Keys of later versions: they are refused by name, so that nobody takes silence for consent."""

Found = tuple[str, Any, str, str]
"""A contradiction: key within the section, value, why, what is allowed."""


class Section(BaseModel):
    """What all sections have in common."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid", use_attribute_docstrings=True)

    @model_validator(mode="after")
    def _refuse_contradictions(self) -> Self:
        found = list(self.contradictions())
        if found:
            raise Contradiction(found)
        return self

    def contradictions(self) -> Iterator[Found]:
        """Values that are fine one by one and impossible together."""
        yield from ()

    def to_dict(self) -> dict[str, Any]:
        """What JSON can hold and `load_config` reads back as an equal config; keys at their defaults are left
        out."""
        written: dict[str, Any] = {}
        for name, field in type(self).model_fields.items():
            value = getattr(self, name)
            if isinstance(value, Section):
                inner = value.to_dict()
                if inner or field.default is None:
                    written[name] = inner
            elif value != field.get_default(call_default_factory=True):
                written[name] = kind_of(field).plain(value)
        return written


class OffloadConfig(Section):
    """Activations go to SSD or host memory during forward and come back before backward needs them."""

    directories: Directories = ()
    """Directories on the drives, one slab in each; several are striped. {rank}, {local_rank}, {host}, {user}
    and ~ are expanded on each rank. May be left out only with `host`, which then is the only tier."""

    capacity: Capacity | None = None
    """Bytes that one rank may use on each drive. By default 90% of the free space, shared by the ranks of the
    node."""

    host: Size = 0
    """Bytes of host memory per rank, a tier in front of the drives. By default there is none."""

    amount: AmountField = Amount("all")
    """How much of what a microbatch saves is offloaded: "all", a fraction such as 0.6 or "60%", the bytes that
    stay such as "512MiB" (those saved last, because backward needs them first), or "auto": as much as transfers
    can be hidden for, measured in the first steps and again when something changes (docs/policy.md)."""

    device_budget: PositiveSize | None = None
    """With `amount: "auto"`: bytes of activations that should be on the device at most, at the least waiting. By
    default as few as transfers can be hidden for."""

    include: Patterns = ()
    """Offload only what these modules save, and what is inside of them: patterns of qualified names or classes, such as
    "*.mlp" or "LayerNorm". By default all."""

    exclude: Patterns = ()
    """Leave what these modules save in memory: patterns as in `include`, over which they win. By default none."""

    codec: CodecName | None = None
    """What floating-point tensors are encoded by on their way to a tier: "lossless" keeps gradients to the bit,
    "int8" and others do not (docs/codecs.md). By default they are stored as they are. Boolean masks are always
    packed to bits."""

    min_bytes: Size = 256 * KiB
    """Saved tensors smaller than this stay where they are."""

    buffer: PositiveSize | None = None
    """Bytes of the arena of reusable buffers (pinned where there is a GPU) that all transfers of the rank
    pass through. By default sized by what the engine sees."""

    in_flight: PositiveSize = 256 * MiB
    """Bytes of stores under way before saving one more tensor waits. What is stored also has to fit in
    `buffer`."""

    prefetch: Size | None = None
    """Bytes of loads issued ahead of backward; 0 loads when backward asks. By default three of the largest
    saved tensors or 24MiB, whichever is more, but at most a quarter of what one forward offloads, and at most
    half of `buffer` where that is given."""

    deadline: Seconds = 10.0
    """How long saving a tensor waits for stores under way before it takes the next tier, or keeps the
    tensor."""

    threads: Annotated[int, Field(ge=1, le=64)] = 4
    """I/O threads per drive that may write at a time; one more reads."""

    engine: Literal["auto", "c", "python"] = "auto"
    """The I/O engine. By default the C one, or the Python one with one log line where no compiler was
    there."""

    direct: Switch = "auto"
    """Unbuffered I/O (O_DIRECT). By default used where the file system allows it, else buffered with one
    warning; "on" makes that an error."""

    on_full: Literal["keep", "raise"] = "keep"
    """What happens when every tier is full: keep the tensor on its device with one warning, or raise."""

    def contradictions(self) -> Iterator[Found]:
        if not self.directories and not self.host:
            why = "leaves no place to offload to, because host is 0"
            yield "directories", list(self.directories), why, "at least one directory, or host above 0"
        if not self.directories and self.capacity is not None:
            why = "limits drives, but directories is empty"
            yield "capacity", exact_size(self.capacity), why, "leaving it out, or at least one directory"
        if not self.directories and self.direct == "on":
            why = "concerns drives, but directories is empty"
            yield "direct", self.direct, why, "leaving it out, or at least one directory"
        if self.device_budget is not None and self.amount.kind != "auto":
            why = f'needs amount: "auto", but amount is {self.amount}'
            yield "device_budget", exact_size(self.device_budget), why, 'leaving it out, or "amount": "auto"'
        yield from self._too_large("min_bytes", "capacity", "so nothing would be offloaded")
        yield from self._too_large("min_bytes", "buffer", "so nothing would fit through it")
        if self.host:
            yield from self._too_large("min_bytes", "host", "so nothing would fit in it")
        yield from self._too_large("prefetch", "buffer", "which loads pass through")
        if "in_flight" in self.model_fields_set:
            yield from self._too_large("in_flight", "buffer", "which stores pass through")

    def _too_large(self, key: str, bound: str, consequence: str) -> Iterator[Found]:
        value, limit = getattr(self, key), getattr(self, bound)
        if value is not None and limit is not None and value > limit:
            why = f"is more than {bound} ({exact_size(limit)}), {consequence}"
            yield key, exact_size(value), why, f"at most {bound}"

    def expand(
        self,
        *,
        rank: int,
        local_rank: int,
        host: str | None = None,
        user: str | None = None,
        path: str = "ssdtrain.offload",
    ) -> tuple[Path, ...]:
        """The absolute directories of one rank, checked against what lies there; none of them is made.

        Args:
            rank: global rank.
            local_rank: rank within the node.
            host: None is this machine's name.
            user: None is the user of this process.
            path: full key of this section, for errors.

        Raises:
            ConfigError: a file is in the way of a directory, or two are the same.
        """
        found = tuple(
            paths.expand_path(text, rank=rank, local_rank=local_rank, host=host, user=user)
            for text in self.directories
        )
        paths.check_directories(found, f"{path}.directories")
        return found


class CheckpointConfig(Section):
    """The checkpoint function, which recomputes a block in backward and offloads its inputs.

    The keys are the arguments of torch.utils.checkpoint.checkpoint, for calls that do not give them.
    """

    use_reentrant: bool = False
    """The variant of torch.utils.checkpoint: reentrant runs a second autograd pass inside backward."""

    preserve_rng_state: bool = True
    """Recompute with the random generators as they were, so that dropout repeats."""

    determinism_check: Literal["default", "none"] = "default"
    """Compare shapes, dtypes and devices of what was recomputed with what was saved, or not."""

    early_stop: bool = True
    """Stop recomputing a block as soon as all that backward needs is there."""

    def contradictions(self) -> Iterator[Found]:
        if self.use_reentrant and self.determinism_check != "default":
            why = "concerns the variant that is not reentrant, but use_reentrant is true"
            yield (
                "determinism_check",
                self.determinism_check,
                why,
                'leaving it out, or "use_reentrant": false',
            )


class ReportConfig(Section):
    """What is said about a run while it goes on."""

    interval: Annotated[int, Field(ge=0)] = 100
    """Steps between log lines; 0 logs none, and neither the line at start nor the table at the end."""

    path: Directory | None = None
    """A directory that gets one JSON-lines file per rank, a line for each step. {rank}, {local_rank}, {host},
    {user} and ~ are expanded on each rank. By default none is written."""

    def expand(
        self,
        *,
        rank: int,
        local_rank: int,
        host: str | None = None,
        user: str | None = None,
        path: str = "ssdtrain.report",
    ) -> Path | None:
        """The absolute directory of one rank, or None where no file is asked for. It is not made.

        Arguments and errors as those of `OffloadConfig.expand`.
        """
        if self.path is None:
            return None
        found = paths.expand_path(self.path, rank=rank, local_rank=local_rank, host=host, user=user)
        why = paths.problem_with_directory(found)
        if why is not None:
            raise ConfigError([Problem(f"{path}.path", str(found), why, paths.DIRECTORY_ALLOWED)])
        return found


class CommConfig(Section):
    """Collectives carry fewer bytes, as much in each parallel dimension as it bears (docs/collectives.md).

    A dimension's value is a codec, "inside/between" where ranks of one node and of several get different
    ones, or "off"; "@64KiB" behind it is the dimension's own `min_bytes`. What is left out is as the preset
    says, and without a preset off.
    """

    preset: Literal["safe", "balanced", "aggressive", "paper-zhybrid", "paper-mzhybrid"] | None = None
    """A codec for every dimension. By default none is compressed."""

    dp: CommRule | None = None
    """Gradients on their way to the rank that sums them: the reduce-scatter, and the first half of an
    all-reduce."""

    dp_gather: CommRule | None = None
    """Summed gradients on their way back: the second half of an all-reduce."""

    tp: CommRule | None = None
    """Activations and their gradients between tensor-parallel ranks, sequence parallelism included."""

    pp_forward: FramedRule | None = None
    """Activations from one pipeline stage to the next. Integers, masks and scalars always go as they are."""

    pp_backward: FramedRule | None = None
    """Gradients of activations from one pipeline stage to the one before."""

    ep: CommRule | None = None
    """Tokens to their experts and back."""

    zero_gather: CommRule | None = None
    """Weights that ranks gather: of ZeRO-3 before they are used, of other optimizers that shard their
    state after a step, as the difference from what the others already have."""

    min_bytes: Size = MiB
    """Messages smaller than this, before compression, go as they are."""

    exclude: Names = ("norm", "bias", "embedding")
    """Parameters whose gradients and weights go as they are: "norm", "bias" and "embedding" by what they are,
    anything else as a pattern of their name such as "*.router.*"; "none" leaves out nothing."""

    feedback: Literal["int8", "fp32", "off"] | None = None
    """Error feedback for gradients: what compression lost is added to the next step's, and kept meanwhile in
    8 or 32 bits per parameter. By default as the preset says, and without one off."""

    warmup_steps: Annotated[int, Field(ge=0)] = 100
    """Steps in which codecs below 8 bits are replaced by int8."""

    adapt: Fraction | None = None
    """Choose the bits of each gradient bucket so that its relative error stays under this, such as 0.1. By
    default the bits are fixed."""

    two_hop: Switch = "auto"
    """Reduce inside each node first and between nodes then, so that less crosses the network. By default where
    a group has the same number of ranks, at least two, on each of several nodes. "on" is an error at start
    unless the job has that, and later for a group over such nodes that cannot be split; a group inside a node,
    or with one rank on each, has one hop anyway."""

    probe: bool = True
    """Measure each collective at its first use with and without its codec, and step back, with one warning,
    where the plain one is clearly faster: by a tenth in most of several rounds."""

    chunk: PositiveSize = 4 * MiB
    """Bytes of a tensor that are encoded while those before are on their way."""

    seed: Annotated[int, Field(ge=0)] = 0
    """Of the random numbers that stochastic rounding takes; not torch's."""

    def contradictions(self) -> Iterator[Found]:
        if self.adapt is not None and self.feedback == "off":
            why = "needs error feedback, but feedback is off"
            yield "adapt", self.adapt, why, 'leaving one of them out, or "feedback": "int8"'

    @property
    def active(self) -> bool:
        """Whether any message may be compressed."""
        return self.preset is not None or any(getattr(self, name) not in (None, "off") for name in DIMENSIONS)


DIMENSIONS = ("dp", "dp_gather", "tp", "pp_forward", "pp_backward", "ep", "zero_gather")
"""The keys of `CommConfig` that hold codecs: one for each kind of traffic."""

FRAMED = ("pp_forward", "pp_backward")
"""Those of `DIMENSIONS` whose messages carry their size, so that a payload of unknown size fits."""


class CompactConfig(Section):
    """Linear layers keep a compressed input for the gradient of their weight (docs/compact.md).

    The gradient of the layer's input is exact in every mode; that of its weight has the right mean and added noise.
    """

    mode: Literal["reconstruct", "quant"] = "reconstruct"
    """What is kept of an input x: "reconstruct" keeps z = x P for a random P and reconstructs the gradient
    of the weight from it; "quant" keeps x in few bits, with stochastic rounding."""

    ratio: RatioRules = (("*", 0.25),)
    """The part of an input's features that z has, above 0 and at most 1: one number, or numbers by patterns of layers' names,
    of which the first that fits counts; a layer that none fits is not compressed. Not with "quant"."""

    codec: Literal["int8", "int4", "int2"] = "int4"
    """The bits of a value with "quant"."""

    projection: Literal["orthonormal", "gaussian", "hadamard"] = "orthonormal"
    """How P is drawn: orthonormal columns, the paper's Gaussian numbers (more noise), or columns of a Hadamard matrix with
    random signs. Not with "quant"."""

    update_every: Annotated[int, Field(ge=1)] | None = None
    """Optimizer steps that use one P. By default 1. Not with "quant"."""

    seed: Annotated[int, Field(ge=0)] = 0
    """Of P and of stochastic rounding; not torch's."""

    include: Patterns = ()
    """Compress only linear layers of these names or classes, or inside of such modules, such as "*.mlp" or "*.q_proj". By
    default all that are known."""

    exclude: Patterns = (
        "head",
        "*.head",
        "*lm_head",
        "*output_layer",
        "*embed_out",
        "*router",
        "*.gate",
    )
    """Leave these out: patterns as in `include`, over which they win. By default heads and routers."""

    recompute: bool = True
    """Let go of what norms and activation functions save beside their own inputs, such as silu(gate) in a gated layer, and make
    it again in backward, to the bit."""

    def contradictions(self) -> Iterator[Found]:
        fields = type(self).model_fields
        if self.mode == "quant":
            for key in ("ratio", "projection", "update_every"):
                value = getattr(self, key)
                if value != fields[key].default:
                    shown = kind_of(fields[key]).plain(value)
                    yield (
                        key,
                        shown,
                        'concerns projections, and mode is "quant"',
                        "leaving it out, or another mode",
                    )
        elif self.codec != fields["codec"].default:
            yield "codec", self.codec, f'concerns "quant", and mode is "{self.mode}"', "leaving it out"

    @property
    def steps_per_projection(self) -> int:
        """`update_every`, or its default."""
        return self.update_every or 1


class Config(Section):
    """What is asked of SSDTrain. A feature whose section is absent is off."""

    enabled: bool = True
    """False switches everything off, as if there were no config, and still checks what is written."""

    offload: OffloadConfig | None = None
    """Activations to SSD and host memory. Without this section nothing is offloaded."""

    checkpoint: CheckpointConfig = CheckpointConfig()
    """Defaults of the checkpoint function."""

    comm: CommConfig | None = None
    """Compressed collectives. Without this section every message goes as the framework sends it."""

    compact: CompactConfig | None = None
    """Linear layers that keep a compressed input. Without this section they keep it whole."""

    report: ReportConfig = ReportConfig()
    """Log lines and files about the run."""

    @property
    def active(self) -> bool:
        """Whether any feature is asked for."""
        return self.enabled and (self.offload is not None or self.compresses or self.compact is not None)

    @property
    def compresses(self) -> bool:
        """Whether any message between ranks may be compressed."""
        return self.enabled and self.comm is not None and self.comm.active
