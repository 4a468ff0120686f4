"""The config schema: keys, types, defaults and their documentation.

The models are strict (no implicit conversion), frozen, and reject unknown keys. The value "auto" stands for the default:
`load_config` removes such keys.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from ssdtrain.config import paths
from ssdtrain.config.comm import CommConfig
from ssdtrain.config.errors import ConfigError
from ssdtrain.config.kinds import Directory, Patterns, RatioRules, StepNumbers, kind_of
from ssdtrain.config.offload import OffloadConfig
from ssdtrain.config.plan import PlanConfig
from ssdtrain.config.section import Section, ValueConflict
from ssdtrain.config.state import StateConfig
from ssdtrain.config.units import exact_size


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

    def conflicts(self) -> Iterator[ValueConflict]:
        if self.use_reentrant and self.determinism_check != "default":
            why = "concerns the variant that is not reentrant, but use_reentrant is true"
            remedy = 'leaving it out, or "use_reentrant": false'
            yield "determinism_check", self.determinism_check, why, remedy


class ReportConfig(Section):
    """Logging and files about the run."""

    interval: Annotated[int, Field(ge=0)] = 100
    """Steps between log lines; 0 disables them, the line at start and the table at the end."""

    verbose: bool = False
    """Write a table of all metrics at the end, behind the short one (docs/metrics.md)."""

    path: Directory | None = None
    """Directory for one JSON-lines file per rank with a line per step. {rank}, {local_rank}, {host}, {user} and ~ are expanded on
    each rank. Default: none."""

    trace: StepNumbers = ()
    """Steps to trace, such as [10, 11] or "10-12": what ran, moved and waited when, in one file per rank in `path`, for
    `ssdtrain report --trace` (docs/trace.md). At most 100. Default: none."""

    tensorboard: Directory | None = None
    """Directory for metrics of TensorBoard, every `interval` steps (every step where that is 0): one folder `rank-N` per rank.
    Needs tensorboard. Expanded as `path`. Default: none."""

    def conflicts(self) -> Iterator[ValueConflict]:
        if self.trace and self.path is None:
            why = "has no directory to write to: path is not set"
            yield "trace", list(self.trace), why, "leaving it out, or a path"

    def expand(self, *, rank: int, local_rank: int) -> Path | None:
        """The absolute directory of one rank, or None if no file is written. It is not created.

        Arguments and errors as in `OffloadConfig.expand`.
        """
        return _expand("path", self.path, rank, local_rank)

    def expand_tensorboard(self, *, rank: int, local_rank: int) -> Path | None:
        """Expand, as `expand` does, the directory for the TensorBoard files of one rank."""
        found = _expand("tensorboard", self.tensorboard, rank, local_rank)
        return None if found is None else found / f"rank-{rank}"


def _expand(key: str, given: str | None, rank: int, local_rank: int) -> Path | None:
    if given is None:
        return None
    found = paths.expand_path(given, rank=rank, local_rank=local_rank)
    why = paths.problem_with_directory(found)
    if why is not None:
        raise ConfigError.of(f"ssdtrain.report.{key}", str(found), why, paths.DIRECTORY_ALLOWED)
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
    """Seed of P and of stochastic rounding; torch's own is not used."""

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

    def conflicts(self) -> Iterator[ValueConflict]:
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
    """Offloading of activations. Without this section nothing is offloaded. "auto" in place of the section is a first try without
    a drive: `host`, a quarter of the memory that is free when the config is read, divided among the ranks of the node; at most
    half of what `state.host`, or all of the model state for `plan.state_limit` in plain PyTorch, leaves."""

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
    """Logging and files about the run. With `path` or `tensorboard` and none of the other sections, steps are measured and
    nothing is changed: a baseline."""

    def conflicts(self) -> Iterator[ValueConflict]:
        if self.plan is None or self.plan.mode == "off":
            return
        if self.plan.compress and self.compact is None:
            why = "is lossy, and no section says how inputs of linear layers may be compressed"
            yield "plan.compress", True, why, "a compact section, or leaving it out"
        elif self.plan.compress and self.compact is not None and self.compact.mode == "lowrank":
            why = 'decides block by block, and compact.mode "lowrank" trains other weights in all of them'
            yield "plan.compress", True, why, 'compact.mode "reconstruct" or "quant", or leaving it out'
        if self.plan.plot and self.report.path is None:
            yield "plan.plot", True, "has no directory to write to", "a report.path, or leaving it out"
        if self.offload is None:
            return
        offload = self.offload
        if offload.prove_steps and self.plan.encode in ("int8", "int4"):
            why = f'compares bits, but plan.encode "{self.plan.encode}" changes them'
            yield "offload.prove_steps", offload.prove_steps, why, 'leaving it out, or plan.encode "exact"'
        if offload.amount.kind in ("fraction", "keep"):
            why = "fixes what is offloaded, which the plan decides"
            yield "offload.amount", offload.amount.plain(), why, 'leaving it out, or "plan": "off"'
        for key in ("include", "exclude", "modules"):
            if given := getattr(offload, key):
                why = "keeps tensors that the plan counts as offloaded"
                shown = kind_of(type(offload).model_fields[key]).plain(given)
                yield f"offload.{key}", shown, why, 'leaving it out, or "plan": "off"'
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
        return (self.enabled and found) or self.measures

    @property
    def measures(self) -> bool:
        """Whether steps are only measured: there is a report to write, and no section for what it would be about."""
        sections = (self.offload, self.comm, self.compact, self.state)
        writes = self.report.path is not None or self.report.tensorboard is not None
        return self.enabled and writes and not self.plans and all(section is None for section in sections)

    @property
    def plans(self) -> bool:
        """Whether blocks are planned."""
        return self.enabled and self.plan is not None and self.plan.mode == "auto"

    @property
    def compresses(self) -> bool:
        """Whether any message between ranks may be compressed."""
        return self.enabled and self.comm is not None and self.comm.active
