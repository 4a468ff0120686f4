"""Keys of DeepSpeed's config that conflict with the block. The table in docs/deepspeed.md is generated from this one."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ssdtrain import ranks
from ssdtrain.config import Config
from ssdtrain.integration.compatibility import FrameworkConflict


def _takes_the_space(section: str) -> Any:
    def applies(value: Any, config: Config, written: Mapping[str, Any]) -> bool:
        """ZeRO-Infinity swaps to the file system of one of our directories, whose free space we would take up."""
        offload = config.offload
        swaps = bool(value) and written["zero_optimization"][section].get("device") == "nvme"
        if not swaps or offload is None or offload.capacity is not None:
            return False
        ours = offload.expand(rank=ranks.global_rank(), local_rank=ranks.local_rank())
        theirs = _file_system(str(value))
        return any(_file_system(directory) == theirs for directory in ours)

    return applies


def _file_system(path: str | Path) -> int:
    """The device number of what is there of `path`."""
    there = Path(path).absolute()
    while not there.exists():
        there = there.parent
    return there.stat().st_dev


_NEVER_RUN = "was never run with offload: compare losses with and without the block first"

DEEPSPEED_CONFLICTS: tuple[FrameworkConflict, ...] = (
    FrameworkConflict(
        "compile.offload_activation",
        "offload",
        "error",
        "lets DeepCompile move the activations of compiled graphs to host memory: they would be offloaded twice, or not at all",
        "false, or the block without offload",
        lambda value, config, written: bool(value) and bool(written["compile"].get("deepcompile")),
    ),
    *(
        FrameworkConflict(
            f"zero_optimization.{section}.nvme_path",
            "offload",
            "error",
            "is on the file system of ssdtrain.offload.directories, whose free space offload takes: swapping would run out of it",
            "another drive, or a value for ssdtrain.offload.capacity (what each rank may take)",
            _takes_the_space(section),
        )
        for section in ("offload_param", "offload_optimizer")
    ),
    FrameworkConflict(
        "zero_optimization.zenflow",
        "comm",
        "error",
        "reduces selected columns of gradients by functions of its own, whose buckets compression does not see",
        "leaving it out, or the block without comm",
    ),
    FrameworkConflict(
        "zero_optimization.zenflow",
        "offload",
        "warning",
        _NEVER_RUN,
        "leaving it out, or the block without offload",
    ),
    FrameworkConflict(
        "zero_optimization.offload_optimizer.super_offload",
        "comm",
        "error",
        "takes steps back when gradients turn out to overflow, and error feedback has gone on by then",
        "false, or the block without comm",
    ),
    FrameworkConflict(
        "zero_optimization.offload_optimizer.super_offload",
        "offload",
        "warning",
        f"{_NEVER_RUN}, and give offload.host what its pinned buffers leave",
        "false, or the block without offload",
    ),
)
