"""The config schema: keys, types, defaults and their documentation.

The models are strict (no implicit conversion), frozen, and reject unknown keys. The value "auto" stands for the default:
`load_config` removes such keys.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from ssdtrain.config import paths
from ssdtrain.config.amount import Amount
from ssdtrain.config.comm import CommConfig
from ssdtrain.config.endurance import EnduranceConfig
from ssdtrain.config.errors import ConfigError, Problem
from ssdtrain.config.kinds import (
    AmountField,
    Capacity,
    CodecName,
    Directories,
    Directory,
    Patterns,
    PositiveSize,
    RatioRules,
    Seconds,
    Size,
    Steps,
    Switch,
    kind_of,
)
from ssdtrain.config.plan import PlanConfig
from ssdtrain.config.section import Conflict, Section
from ssdtrain.config.state import StateConfig
from ssdtrain.config.units import KiB, exact_size


class OffloadConfig(Section):
    """Offloading of activations to SSD or host memory in forward, and prefetching before backward needs them."""

    directories: Directories = ()
    """Directories on the drives, each with one spill file per rank; several share the bytes by measured speed. {rank},
    {local_rank}, {host}, {user} and ~ are expanded on each rank. Optional only with `host`, which then is the only tier."""

    capacity: Capacity | None = None
    """Maximum bytes per rank on each drive. Default: 90% of the free space, divided among the ranks of the node."""

    host: Size = 0
    """Bytes of host memory per rank, used as a tier before the drives; pinned with a GPU. Default: none."""

    amount: AmountField = Amount("auto")
    """How much of what a microbatch saves is offloaded: "auto", as much as transfers can be hidden for, measured in the first
    steps and again when something changes (docs/policy.md); "all"; a fraction such as 0.6 or "60%"; or the bytes that stay such
    as "512MiB" (those saved last, because backward needs them first)."""

    device_budget: PositiveSize | None = None
    """With `amount: "auto"` (default): bytes of activations that should be on the device at most, at the least waiting. By
    default as few as transfers can be hidden for."""

    include: Patterns = ()
    """Offload only tensors saved by these modules and their submodules: patterns of qualified names or class names, such as
    "*.mlp" or "LayerNorm". Default: all modules."""

    exclude: Patterns = ()
    """Do not offload tensors saved by these modules: patterns as in `include`, over which they take precedence. Default: none."""

    codec: CodecName | None = None
    """Codec of offloaded floating-point tensors. With "lossless" gradients are bit-identical, with "int8" and others they are
    not (docs/codecs.md). Default: tensors are stored unchanged. Boolean masks are always packed to bits."""

    min_bytes: Size = 256 * KiB
    """Saved tensors smaller than this are not offloaded."""

    buffer: PositiveSize | None = None
    """Bytes of the rank's arena of reusable transfer buffers (pinned host memory with a GPU). Default: sized by the tensors that
    the engine sees; on a GPU 1GiB at least, and at most this rank's share of half of the node's free memory. A larger arena
    allows more transfers in flight; a smaller one saves host memory."""

    in_flight: PositiveSize | None = None
    """Maximum bytes of stores in flight: saving another tensor waits (at most `deadline`). They also have to fit in `buffer`.
    Default: on a GPU half of the arena; on the CPU 256MiB, which is a part of the peak there; with GPUDirect Storage that or what
    two operators save, whichever is more."""

    prefetch: Size | None = None
    """Bytes of loads issued ahead of backward; 0: load on demand. Default: a fixed rule that does not depend on the measured
    bandwidth. On a GPU: half of the arena. On the CPU: the larger of 24MiB and three of the largest saved tensors, but at most a
    quarter of what one forward offloads, and at most half of `buffer` if that is given, else 1GiB. More hides a slower drive and
    takes memory that offloading saves."""

    deadline: Seconds = 10.0
    """Maximum time that saving a tensor waits for stores in flight before it uses the next tier or keeps the tensor."""

    threads: Annotated[int, Field(ge=1, le=64)] = 4
    """Concurrent writes per drive, and concurrent reads; the pool has one thread more, so that reads never wait for writes."""

    engine: Literal["auto", "c", "python"] = "auto"
    """The I/O engine. Default: "c", or "python" with a warning if the C extension was not built."""

    direct: Switch = "auto"
    """Unbuffered I/O (O_DIRECT). Default: used if the file system supports it, else buffered I/O with one warning; "on" makes
    that an error."""

    gpudirect: Switch = "auto"
    """GPUDirect Storage (kvikio), between GPU and drives without host memory. Default: used if it works here and is faster than
    host memory in a probe at start, else the log says why not; "on" makes it an error if it does not work. It takes more device
    memory (docs/gpu.md)."""

    on_full: Literal["keep", "raise"] = "keep"
    """When every tier is full: keep the tensor on its device with one warning, or raise."""

    verify: Literal["off", "sample", "all"] = "sample"
    """Compare a checksum of all bytes of a stored tensor when it comes back, so that a drive that returns wrong data is an error
    that names tensor and directory: of no tensor, of one in 32, or of all (which costs the I/O threads 0.2 s of CPU time
    per GB when they write and 0.1 s when they read)."""

    prove_steps: Annotated[int, Field(ge=0)] = 0
    """In so many first steps keep a copy of every saved tensor in host memory, and compare what backward gets with it, to the
    bit: an error names the first tensor that differs, and its module (docs/equality.md). Takes host memory for all that is saved
    between forward and backward."""

    endurance: EnduranceConfig | None = None
    """The wear of the drives. Without this section it is only reported."""

    def conflicts(self) -> Iterator[Conflict]:
        if self.prove_steps and self.codec not in (None, "lossless"):
            why = f'compares bits, but codec "{self.codec}" changes them'
            yield "prove_steps", self.prove_steps, why, 'leaving it out, or "codec": "lossless"'
        if not self.directories and not self.host:
            why = "leaves no place to offload to, because host is 0"
            yield "directories", list(self.directories), why, "at least one directory, or host above 0"
        if not self.directories and self.capacity is not None:
            why = "limits drives, but directories is empty"
            yield "capacity", exact_size(self.capacity), why, "leaving it out, or at least one directory"
        for key in ("direct", "gpudirect"):
            if not self.directories and getattr(self, key) == "on":
                why = "concerns drives, but directories is empty"
                yield key, "on", why, "leaving it out, or at least one directory"
        if self.gpudirect == "on" and self.verify == "all":
            why = 'keeps tensors out of host memory, where verify "all" compares them'
            yield "gpudirect", "on", why, '"auto" or "off", or "verify": "sample"'
        if self.device_budget is not None and self.amount.kind != "auto":
            why = f'needs amount: "auto", but amount is {self.amount}'
            yield "device_budget", exact_size(self.device_budget), why, 'leaving it out, or "amount": "auto"'
        yield from self._too_large("min_bytes", "capacity", "so nothing would be offloaded")
        yield from self._too_large("min_bytes", "buffer", "so nothing would fit through it")
        if self.host:
            yield from self._too_large("min_bytes", "host", "so nothing would fit in it")
        yield from self._too_large("prefetch", "buffer", "which loads pass through")
        yield from self._too_large("in_flight", "buffer", "which stores pass through")

    def _too_large(self, key: str, bound: str, consequence: str) -> Iterator[Conflict]:
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
    """Defaults of `ssdtrain.checkpoint`, which recomputes a block in backward and offloads its inputs.

    The keys are the arguments of torch.utils.checkpoint.checkpoint.
    """

    use_reentrant: bool = False
    """The variant of torch.utils.checkpoint: the reentrant one runs a nested autograd pass inside backward."""

    preserve_rng_state: bool = True
    """Restore the state of random generators for the recomputation, so that dropout is identical."""

    determinism_check: Literal["default", "none"] = "default"
    """Whether shapes, dtypes and devices of recomputed tensors are compared with the saved ones."""

    early_stop: bool = True
    """Stop the recomputation as soon as all tensors that backward needs are available."""

    def conflicts(self) -> Iterator[Conflict]:
        if self.use_reentrant and self.determinism_check != "default":
            why = "concerns the variant that is not reentrant, but use_reentrant is true"
            remedy = 'leaving it out, or "use_reentrant": false'
            yield "determinism_check", self.determinism_check, why, remedy


class ReportConfig(Section):
    """Logging and files about the run."""

    interval: Annotated[int, Field(ge=0)] = 100
    """Steps between log lines; 0 disables them, the line at start and the table at the end."""

    path: Directory | None = None
    """Directory for one JSON-lines file per rank with a line per step. {rank}, {local_rank}, {host}, {user} and ~ are expanded on
    each rank. Default: none."""

    trace: Steps = ()
    """Steps to trace, such as [10, 11] or "10-12": what ran, moved and waited when, in one file per rank in `path`, for
    `ssdtrain report --trace` (docs/trace.md). At most 100. Default: none."""

    def conflicts(self) -> Iterator[Conflict]:
        if self.trace and self.path is None:
            why = "has no directory to write to: path is not set"
            yield "trace", list(self.trace), why, "leaving it out, or a path"

    def expand(
        self,
        *,
        rank: int,
        local_rank: int,
        host: str | None = None,
        user: str | None = None,
        path: str = "ssdtrain.report",
    ) -> Path | None:
        """The absolute directory of one rank, or None if no file is written. It is not created.

        Arguments and errors as in `OffloadConfig.expand`.
        """
        if self.path is None:
            return None
        found = paths.expand_path(self.path, rank=rank, local_rank=local_rank, host=host, user=user)
        why = paths.problem_with_directory(found)
        if why is not None:
            raise ConfigError([Problem(f"{path}.path", str(found), why, paths.DIRECTORY_ALLOWED)])
        return found


class CompactConfig(Section):
    """Linear layers keep a compressed input for the gradient of their weight (docs/compact.md).

    The gradient of the layer's input is exact in every mode; that of its weight has the right mean and added noise.
    """

    mode: Literal["reconstruct", "lowrank", "quant"] = "reconstruct"
    """What is kept of an input x: "reconstruct" keeps z = x P for a random P and reconstructs the gradient
    of the weight from it; "lowrank" keeps z and trains a matrix of its size in place of the weight, so that gradients and the
    optimizer's state are as small (plain PyTorch and DistributedDataParallel); "quant" keeps x in few bits, with stochastic
    rounding."""

    ratio: RatioRules = (("*", 0.25),)
    """The part of an input's features that z has, above 0 and at most 1: one number, or numbers by patterns of layers' names,
    of which the first that fits counts; a layer that none fits is not compressed. Not with "quant"."""

    codec: Literal["int8", "int4", "int2", "int4_rotated", "int2_rotated"] = "int4"
    """The bits of a value with "quant". "int4_rotated" and "int2_rotated" multiply by a Hadamard matrix first: less noise for
    gated MLPs such as Llama's, more for others (docs/compact.md)."""

    projection: Literal["orthonormal", "gaussian", "hadamard"] = "orthonormal"
    """How P is drawn: orthonormal columns, the paper's Gaussian numbers (more noise), or columns of a Hadamard matrix with
    random signs. Not with "quant"."""

    update_every: Annotated[int, Field(ge=1)] | None = None
    """Optimizer steps that use one P. By default 1, and 50 with "lowrank". Not with "quant"."""

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
        "*.lora_B",
    )
    """Leave these out: patterns as in `include`, over which they win. By default heads, routers, and the second layers of LoRA
    adapters, whose inputs have as few features as the rank."""

    recompute: bool = True
    """Let go of what norms and activation functions save beside their own inputs, such as silu(gate) in a gated layer or the
    float32 copy of the input of a norm in half precision, and make it again in backward, to the bit."""

    def conflicts(self) -> Iterator[Conflict]:
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
        return self.update_every or (50 if self.mode == "lowrank" else 1)


class Config(Section):
    """The configuration of SSDTrain. A feature is disabled if its section is absent."""

    enabled: bool = True
    """False disables all features; the config is still validated."""

    offload: OffloadConfig | None = None
    """Offloading of activations. Without this section nothing is offloaded."""

    checkpoint: CheckpointConfig = CheckpointConfig()
    """Defaults of the checkpoint function."""

    comm: CommConfig | None = None
    """Compression of collectives. Without this section no message is changed."""

    compact: CompactConfig | None = None
    """Linear layers that keep a compressed input. Without this section they keep it whole."""

    state: StateConfig | None = None
    """Parameters, gradients and optimizer state in chunks. Without this section they stay where the framework has them."""

    plan: PlanConfig | None = None
    """Choice of keep, recompute and offload for each block. Without this section nothing is recomputed."""

    report: ReportConfig = ReportConfig()
    """Logging and files about the run."""

    def conflicts(self) -> Iterator[Conflict]:
        if self.plan is None or self.plan.mode == "off":
            return
        if self.plan.compress and self.compact is None:
            why = "is lossy, and no section says how inputs of linear layers may be compressed"
            yield "plan.compress", True, why, "a compact section, or leaving it out"
        elif self.plan.compress and self.compact is not None and self.compact.mode == "lowrank":
            why = 'decides block by block, and compact.mode "lowrank" trains other weights in all of them'
            yield "plan.compress", True, why, 'compact.mode "reconstruct" or "quant", or leaving it out'
        if self.offload is None:
            return
        offload = self.offload
        if offload.amount.kind in ("fraction", "keep"):
            why = "fixes what is offloaded, which the plan decides"
            yield "offload.amount", offload.amount.plain(), why, 'leaving it out, or "plan": "off"'
        for key in ("include", "exclude"):
            if getattr(offload, key):
                why = "keeps tensors that the plan counts as offloaded"
                yield f"offload.{key}", list(getattr(offload, key)), why, 'leaving it out, or "plan": "off"'
        if offload.endurance is not None:
            why = "bounds what is written with amount auto, and not by a plan in this version"
            yield "offload.endurance", offload.endurance.to_dict(), why, 'leaving it out, or "plan": "off"'
        if offload.device_budget is not None:
            why = "is of amount auto without a plan"
            yield (
                "offload.device_budget",
                exact_size(offload.device_budget),
                why,
                "plan.device_limit in its place",
            )

    @property
    def active(self) -> bool:
        """Whether any feature is enabled."""
        sections = (self.offload, self.compact, self.state)
        found = any(section is not None for section in sections) or self.compresses or self.plans
        return self.enabled and found

    @property
    def plans(self) -> bool:
        """Whether blocks are planned."""
        return self.enabled and self.plan is not None and self.plan.mode == "auto"

    @property
    def compresses(self) -> bool:
        """Whether any message between ranks may be compressed."""
        return self.enabled and self.comm is not None and self.comm.active
