"""The schema: every key that this version knows, its default and its meaning.

Strict (no value is converted into another type behind the reader's back), frozen, and closed to unknown keys.
A default is what leaving the key out means; no key needs a value such as "auto" to be written.
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
    CodecName,
    Directories,
    Directory,
    PositiveSize,
    Seconds,
    Size,
    Switch,
    kind_of,
)
from ssdtrain.config.units import KiB, MiB, exact_size

LATER = frozenset({"comm", "compact", "planner", "offload.verify", "report.trace"})
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

    capacity: PositiveSize | None = None
    """Bytes that one rank may use on each drive. By default 90% of the free space, shared by the ranks of the
    node."""

    host: Size = 0
    """Bytes of host memory per rank, a tier in front of the drives. By default there is none."""

    amount: AmountField = Amount("all")
    """How much of what a microbatch saves is offloaded: "all", a fraction such as 0.6 or "60%", or the bytes
    that stay such as "512MiB". What stays is what was saved last, because backward needs it first."""

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
    """Bytes of loads issued ahead of backward; 0 loads when backward asks. By default chosen from measured
    bandwidth and the free part of `buffer`."""

    deadline: Seconds = 10.0
    """How long saving a tensor waits for stores under way before it takes the next tier, or keeps the
    tensor."""

    threads: Annotated[int, Field(ge=1, le=64)] = 4
    """I/O threads per drive."""

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
    """Steps between log lines; 0 logs none."""

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


class Config(Section):
    """What is asked of SSDTrain. A feature whose section is absent is off."""

    enabled: bool = True
    """False switches everything off, as if there were no config, and still checks what is written."""

    offload: OffloadConfig | None = None
    """Activations to SSD and host memory. Without this section nothing is offloaded."""

    checkpoint: CheckpointConfig = CheckpointConfig()
    """Defaults of the checkpoint function."""

    report: ReportConfig = ReportConfig()
    """Log lines and files about the run."""

    @property
    def active(self) -> bool:
        """Whether any feature is asked for."""
        return self.enabled and self.offload is not None
