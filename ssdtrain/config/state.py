"""The section `state` of the schema."""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from ssdtrain.config import paths
from ssdtrain.config.kinds import Capacity, Directories, Patterns, PositiveSize, Size, Switch
from ssdtrain.config.section import Conflict, Section
from ssdtrain.config.units import KiB, exact_size

__all__ = ["StateConfig"]


class StateConfig(Section):
    """Parameters, gradients and optimizer state of a model of plain PyTorch in chunks, on SSD or in host memory while they are
    not needed (docs/state.md)."""

    device_limit: PositiveSize | None = None
    """Bytes of parameters, gradients and optimizer state on the device at most. As many of the first chunks as fit stay on the
    device. A limit that is too small is an error at start. Default: what two chunks take, beside all that is in no chunk."""

    directories: Directories = ()
    """Directories on the drives, as in `offload.directories`. Optional only with `host`, which then is the only tier."""

    capacity: Capacity | None = None
    """Maximum bytes per rank on each drive. Default: 90% of the free space, divided among the ranks of the node."""

    host: Size = 0
    """Bytes of host memory used as a tier before the drives; pinned with a GPU. Default: none."""

    blocks: Patterns = ()
    """The modules whose parameters are a chunk each: patterns of qualified names, such as "layers.*". Default: the children of
    the longest ModuleList and of all others of the same class."""

    min_bytes: Size = 64 * KiB
    """Smaller parameters, with their gradients and optimizer state, stay on the device."""

    threads: Annotated[int, Field(ge=1, le=64)] = 4
    """Concurrent writes per drive, and concurrent reads, as `offload.threads`."""

    engine: Literal["auto", "c", "python"] = "auto"
    """The I/O engine, as `offload.engine`."""

    direct: Switch = "auto"
    """Unbuffered I/O (O_DIRECT), as `offload.direct`."""

    verify: Literal["off", "all"] = "all"
    """Compare a checksum of all bytes of a tensor when it comes back, so that a drive that returns wrong data is an error. It
    costs what `offload.verify` does."""

    def conflicts(self) -> Iterator[Conflict]:
        if not self.directories and not self.host:
            why = "leaves no place for the model's state, because host is 0"
            yield "directories", list(self.directories), why, "at least one directory, or host above 0"
        if not self.directories and self.capacity is not None:
            why = "limits drives, but directories is empty"
            yield "capacity", exact_size(self.capacity), why, "leaving it out, or at least one directory"
        if not self.directories and self.direct == "on":
            why = "concerns drives, but directories is empty"
            yield "direct", self.direct, why, "leaving it out, or at least one directory"

    def expand(self, *, rank: int, local_rank: int) -> tuple[Path, ...]:
        """The absolute directories of one rank, as `OffloadConfig.expand`.

        Raises:
            ConfigError: a file is in the way of a directory, or two are the same.
        """
        found = tuple(
            paths.expand_path(text, rank=rank, local_rank=local_rank, host=None, user=None)
            for text in self.directories
        )
        paths.check_directories(found, "ssdtrain.state.directories")
        return found
