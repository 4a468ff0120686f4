"""Checks of a config against this machine before a model is built: directories, packages, memory.

`load_config` validates the config itself; checks that depend on the machine and the rank are here. Adapters call it when they
read the config, and `Runtime` again with the device. `check_start` creates nothing.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from ssdtrain.comm import Policy
from ssdtrain.config import Config, ConfigError, ConfigIssue, OffloadConfig, ReportConfig
from ssdtrain.config.paths import WRITABLE_ALLOWED, problem_with_writing
from ssdtrain.config.units import exact_size, format_size
from ssdtrain.features import Placement
from ssdtrain.offload.transfer.coding import check_codec
from ssdtrain.storage import check_host_budget, drive_of

logger = logging.getLogger("ssdtrain")

_DIRECTORIES = "ssdtrain.offload.directories"


def check_start(config: Config, place: Placement | None = None) -> None:
    """Check that this rank can start with `config`. Does nothing if no feature is enabled.

    Args:
        place: of this process; None: on an unknown device, which skips checks that depend on it, and where torch.distributed and
            the launcher say.

    Raises:
        ConfigError: a directory is not writable or cannot be created; a package that a codec requires is missing; a codec does
            not support the device; the C engine was requested and was not built. Names each key.
        HostBudgetExceeded: the ranks of this node need more host memory than is available.
    """
    if not config.active:
        return
    problems: list[ConfigIssue] = []
    place = Placement.of("cpu") if place is None else place
    problems += _of_report(config.report, place)
    if config.offload is not None:
        problems += _of_offload(
            config.offload, config.offload.expand(rank=place.rank, local_rank=place.local_rank)
        )
    if config.state is not None:
        problems += _unwritable(
            config.state.expand(rank=place.rank, local_rank=place.local_rank), "ssdtrain.state.directories"
        )
    if config.comm is not None and config.compresses:
        Policy.from_config(config.comm)  # what depends on its preset
    if config.plans and config.plan is not None and config.plan.plot and not _installed("matplotlib"):
        allowed = "pip install 'ssdtrain[plot]', or leaving it out"
        problems.append(
            ConfigIssue("ssdtrain.plan.plot", True, "needs matplotlib, which is not installed", allowed)
        )
    if problems:
        raise ConfigError(problems)
    if config.offload is not None:
        check_codec(config.offload, place.device.type)
    _check_host_memory(config, place)


def _check_host_memory(config: Config, place: Placement) -> None:
    """Compare what each section asks of the host, and what all do together: each alone may fit where all do not."""
    offload, state = config.offload, config.state
    asked = {
        "ssdtrain.offload.host": 0 if offload is None else offload.host,
        "ssdtrain.offload.buffer": 0 if offload is None else offload.buffer or 0,
        "ssdtrain.state.host": 0 if state is None else state.host,
    }
    asked = {key: nbytes for key, nbytes in asked.items() if nbytes}
    for key, nbytes in asked.items():
        check_host_budget(nbytes, place.local_world_size, subject=key)
    if len(asked) > 1:
        check_host_budget(sum(asked.values()), place.local_world_size, subject=" and ".join(asked))


def check_state(config: Config, served: bool) -> None:
    """Check that the `state` section of `config` can be served where it is used.

    Args:
        served: the integration leaves parameters and optimizer to torch.

    Raises:
        ConfigError: it is not served, or the config has a section that it cannot run beside.
    """
    assert config.state is not None
    if not served:
        why = "is for models of plain PyTorch, given to ssdtrain.attach"
        allowed = "leaving it out, and the framework's own means for parameters and optimizer state"
    elif config.compact is not None and config.compact.mode == "lowrank":
        why = 'meets compact.mode "lowrank", which trains other matrices than the optimizer was made with'
        allowed = 'compact.mode "reconstruct" or "quant", or leaving out one of the two'
    elif config.plans and config.plan is not None and config.plan.device_limit is not None:
        key, value = "ssdtrain.plan.device_limit", config.plan.device_limit
        why, allowed = "meets the section state", "state.device_limit, which is for activations as well then"
        raise ConfigError.of(key, exact_size(value), why, allowed)
    else:
        return
    raise ConfigError.of("ssdtrain.state", config.state.to_dict(), why, allowed)


def _of_report(report: ReportConfig, place: Placement) -> Iterator[ConfigIssue]:
    directories = {
        "path": report.expand(rank=place.rank, local_rank=place.local_rank),
        "tensorboard": report.expand_tensorboard(rank=place.rank, local_rank=place.local_rank),
    }
    for key, directory in directories.items():
        if directory is not None and (why := problem_with_writing(directory)) is not None:
            yield ConfigIssue(f"ssdtrain.report.{key}", str(directory), why, WRITABLE_ALLOWED)
    if report.tensorboard is not None and not _installed("tensorboard"):
        why = "needs tensorboard, which is not installed"
        allowed = 'leaving it out, or installing it: pip install "ssdtrain[tensorboard]"'
        yield ConfigIssue("ssdtrain.report.tensorboard", report.tensorboard, why, allowed)


def _installed(package: str) -> bool:
    found = importlib.util.find_spec(package)
    # A folder of that name in the working directory, such as one of event files, has no origin.
    return found is not None and found.origin is not None


def _of_offload(offload: OffloadConfig, directories: Sequence[Path]) -> Iterator[ConfigIssue]:
    yield from _unwritable(directories, _DIRECTORIES)
    if offload.engine == "c" and importlib.util.find_spec("ssdtrain.storage._iopool") is None:
        why = "requests the C engine, which was not built"
        allowed = '"auto" or "python", or reinstalling ssdtrain where a C compiler is'
        yield ConfigIssue("ssdtrain.offload.engine", "c", why, allowed)


def _unwritable(directories: Sequence[Path], key: str) -> Iterator[ConfigIssue]:
    for index, directory in enumerate(directories):
        why = problem_with_writing(directory)
        if why is not None:
            yield ConfigIssue(f"{key}[{index}]", str(directory), why, WRITABLE_ALLOWED)


def make_directories(directories: Sequence[Path], key: str = _DIRECTORIES) -> None:
    """Create missing directories with their parents: all or none.

    Raises:
        ConfigError: a directory could not be created (a quota, a network file system).
    """
    made: list[Path] = []
    for index, directory in enumerate(directories):
        missing = [place for place in (directory, *directory.parents) if not place.exists()]
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            for place in (*missing, *made):
                _remove_if_empty(place)
            why = f"cannot be made ({error.strerror})"
            raise ConfigError.of(f"{key}[{index}]", str(directory), why, WRITABLE_ALLOWED) from error
        made = missing + made  # the deepest first


def warn_about_drives(offload: OffloadConfig, directories: Sequence[Path]) -> None:
    """Warn where several of `directories`, which exist, are on one drive, and where `capacity` is more than what is free."""
    first: dict[str | int, int] = {}
    for index, directory in enumerate(directories):
        status = os.statvfs(directory)
        free = status.f_bavail * status.f_frsize
        if offload.capacity is not None and offload.capacity > free:
            logger.warning(
                "ssdtrain.offload.capacity: %s is more than the %s that are free in %s: it will be full before, and what finds "
                "no room stays in memory; set a smaller capacity, or leave it out for nine tenths of the free space "
                "(docs/storage.md)",
                exact_size(offload.capacity),
                format_size(free),
                directory,
            )
        earlier = first.setdefault(drive_of(directory).device or os.stat(directory).st_dev, index)
        if earlier != index:
            logger.warning(
                "%s[%d]: %s is on the same drive as %s: two files on it are no faster than one, and each takes its own "
                "capacity; name one directory for each drive (docs/storage.md)",
                _DIRECTORIES,
                index,
                directory,
                directories[earlier],
            )


def _remove_if_empty(directory: Path) -> None:
    with contextlib.suppress(OSError):  # it was not created, or another rank uses it
        os.rmdir(directory)
