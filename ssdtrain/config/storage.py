"""Keys of the sections `offload` and `state` about where their bytes go: drives, host memory and the I/O engine."""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from ssdtrain.config import paths
from ssdtrain.config.kinds import Capacity, Directories, HostMemorySize, Switch
from ssdtrain.config.section import Section, ValueConflict
from ssdtrain.config.units import exact_size


class StorageSection(Section):
    """Base of the sections with tiers of their own."""

    key: ClassVar[str]
    """Name of the section."""
    purpose: ClassVar[str]
    """What a place is needed for, in errors."""

    directories: Directories = ()
    """Directories on the drives, each with one spill file per rank; several share the bytes by measured speed. {rank},
    {local_rank}, {host}, {user} and ~ are expanded on each rank. Optional only with `host`, which then is the only tier."""

    capacity: Capacity | None = None
    """Maximum bytes per rank on each drive. Default: 90% of the free space, divided among the ranks of the node."""

    host: HostMemorySize = 0
    """Bytes of host memory per rank, used as a tier before the drives; pinned with a GPU. Default: none."""

    threads: Annotated[int, Field(ge=1, le=64)] = 4
    """Concurrent writes per drive, and concurrent reads; a read never waits for a write to end."""

    engine: Literal["auto", "c", "python"] = "auto"
    """The I/O engine. Default: "c", or "python", which is slower, with a warning if the C extension was not built."""

    direct: Switch = "auto"
    """Unbuffered I/O (O_DIRECT). Default: used if the file system supports it, else buffered I/O with one warning; "on" makes
    that an error."""

    verify: Literal["off", "all"] = "all"
    """Compare a checksum of all bytes of a stored tensor when it comes back, so that a drive that returns wrong data is an error
    that names tensor, directory and offset. It costs the I/O threads about one pass over the bytes, 0.04 s of CPU time per GB
    in each direction, and 0.1 s when they write CPU tensors (docs/storage.md)."""

    @property
    def moves(self) -> bool:
        """Whether anything goes there."""
        return True

    def conflicts(self) -> Iterator[ValueConflict]:
        if self.directories:
            return
        if not self.host and self.moves:
            why = f"leaves no place {self.purpose}, because host is 0"
            yield "directories", [], why, "at least one directory, or host above 0"
        if self.capacity is not None:
            why = "limits drives, but directories is empty"
            yield "capacity", exact_size(self.capacity), why, "leaving it out, or at least one directory"
        for key in ("direct", "gpudirect"):
            if getattr(self, key, None) == "on":
                why = "concerns drives, but directories is empty"
                yield key, "on", why, "leaving it out, or at least one directory"

    def expand(self, *, rank: int, local_rank: int) -> tuple[Path, ...]:
        """Return the absolute directories of one rank, checked against what lies there. None of them is created.

        Args:
            rank: global rank.
            local_rank: rank within the node.

        Raises:
            ConfigError: a file is in the way of a directory, or two are the same.
        """
        found = tuple(paths.expand_path(text, rank=rank, local_rank=local_rank) for text in self.directories)
        paths.check_directories(found, f"ssdtrain.{self.key}.directories")
        return found
