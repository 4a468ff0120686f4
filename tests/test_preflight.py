"""What a config asks of the machine is checked before anything is made, with the key, the value and a remedy."""

import importlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import ssdtrain
from ssdtrain.codecs import lossless
from ssdtrain.config import ConfigError, load_config
from ssdtrain.features import Placement
from ssdtrain.preflight import check_start, make_directories
from ssdtrain.runtime import Runtime
from ssdtrain.storage import HostBudgetExceeded, check_host_budget

NOBODY = 65534


@contextmanager
def as_nobody() -> Iterator[None]:
    """Without the privileges of root, who may write everywhere."""
    before = os.geteuid()
    if before == 0:
        os.seteuid(NOBODY)
    try:
        yield
    finally:
        if before == 0:
            os.seteuid(before)


def rejected(config: dict[str, Any], place: Placement | None = None) -> ConfigError:
    with pytest.raises(ConfigError) as error:
        check_start(load_config(config), place)
    return error.value


@pytest.fixture
def locked(tmp_path: Path) -> Iterator[Path]:
    """A directory that nobody may write in, below parents that everybody may search."""
    for place in (tmp_path, *tmp_path.parents):
        if place.stat().st_uid == os.geteuid() and place.parent != Path("/"):
            place.chmod(place.stat().st_mode | 0o711)
    directory = tmp_path / "locked"
    directory.mkdir()
    directory.chmod(0o555)
    yield directory
    directory.chmod(0o755)


def test_a_directory_that_cannot_be_written_or_made_is_rejected(locked: Path) -> None:
    config = {
        "offload": {"directories": [str(locked), str(locked / "a" / "{rank}")]},
        "report": {"path": str(locked / "report")},
    }
    with as_nobody():
        error = rejected(config, Placement.of("cpu", 3))
    report, existing, new = error.problems
    assert (report.path, report.value) == ("ssdtrain.report.path", str(locked / "report"))
    assert (existing.path, existing.value) == ("ssdtrain.offload.directories[0]", str(locked))
    assert "is not writable" in existing.why
    assert (new.path, new.value) == ("ssdtrain.offload.directories[1]", str(locked / "a" / "3"))
    assert f'because "{locked}" is not writable' in new.why
    assert "can write to" in new.allowed
    assert os.listdir(locked) == []


@pytest.mark.parametrize("directory", ["/proc/ssdtrain", "/sys/x/y"])
def test_a_directory_of_the_kernel_is_rejected(directory: str) -> None:
    if not Path(directory).parents[-2].is_dir():
        pytest.skip(f"needs {Path(directory).parents[-2]}, which is not mounted here")
    (problem,) = rejected({"offload": {"directories": directory}}).problems
    assert problem.path == "ssdtrain.offload.directories[0]"
    assert "only the kernel makes files" in problem.why


@pytest.mark.parametrize("make", [Runtime, lambda config: ssdtrain.attach(torch.nn.Linear(1, 1), config)])
@pytest.mark.parametrize(
    "wrong",
    [{"directories": "/proc/ssdtrain"}, {"codec": "lossless"}, {"host": "1PB"}],
    ids=lambda wrong: next(iter(wrong)),
)
def test_nothing_is_made_where_something_is_rejected(
    make: Any, wrong: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lossless, "_zstandard", missing)
    good = str(tmp_path / "new" / "deep")
    offload = {"directories": [good], **wrong}
    if "directories" in wrong:
        offload["directories"] = [good, wrong["directories"]]
    with pytest.raises((ConfigError, HostBudgetExceeded)):
        make(load_config({"offload": offload, "report": {"path": str(tmp_path / "report")}}))
    assert list(tmp_path.iterdir()) == []


def test_host_memory_of_all_sections_counts_together(tmp_path: Path) -> None:
    budget = check_host_budget(0, 1)
    most = int(0.6 * min(limit for limit in (budget.available, budget.cgroup) if limit is not None))
    offload = {"directories": str(tmp_path), "host": most}
    state = {"directories": str(tmp_path), "host": most}
    check_start(load_config({"offload": offload}), Placement.of("cpu"))
    check_start(load_config({"state": state}), Placement.of("cpu"))
    with pytest.raises(
        HostBudgetExceeded, match=r"^ssdtrain\.offload\.host and ssdtrain\.state\.host would take"
    ):
        check_start(load_config({"offload": offload, "state": state}), Placement.of("cpu"))


def missing() -> None:
    raise RuntimeError("the lossless codec needs zstandard: pip install ssdtrain[lossless]")


def test_a_codec_whose_package_is_missing_is_rejected(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(lossless, "_zstandard", missing)
    (problem,) = rejected({"offload": {"directories": str(tmp_path), "codec": "lossless"}}).problems
    assert problem.path == "ssdtrain.offload.codec" and "pip install" in problem.why


def test_what_depends_on_device_rank_or_preset_is_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "1").touch()
    config = {"offload": {"directories": f"{tmp_path}/{{rank}}", "codec": "lossless"}}
    check_start(load_config(config), Placement.of("cpu", 0))
    assert "is a file" in str(rejected(config, Placement.of("cpu", 1)))
    assert "host memory" in str(rejected(config, Placement.of("cuda:0")))
    assert "ssdtrain.comm.adapt" in str(rejected({"comm": {"preset": "safe", "adapt": 0.1}}))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    (problem,) = rejected({"offload": {"directories": str(tmp_path), "engine": "c"}}).problems
    assert problem.path == "ssdtrain.offload.engine"


def test_a_config_that_is_off_asks_nothing_of_the_machine() -> None:
    check_start(load_config({"enabled": False, "offload": {"directories": "/proc/ssdtrain"}}))


def test_directories_are_made_all_or_none(tmp_path: Path) -> None:
    make_directories([tmp_path / "a" / "b", tmp_path / "a" / "c"])
    assert {place.name for place in (tmp_path / "a").iterdir()} == {"b", "c"}
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"directories\[1\]: .* cannot be made"):
        make_directories([tmp_path / "x" / "y", tmp_path / "file" / "z"])
    assert not (tmp_path / "x").exists()


def warnings_at_start(caplog: pytest.LogCaptureFixture, **offload: Any) -> list[str]:
    caplog.clear()
    Runtime(load_config({"offload": offload})).close()
    return [record.getMessage() for record in caplog.records if "ssdtrain.offload" in record.getMessage()]


def test_two_directories_on_one_drive_are_said_at_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    one, two = str(tmp_path / "one"), str(tmp_path / "two")
    (said,) = warnings_at_start(caplog, directories=[one, two], capacity="64MiB")
    assert said.startswith(f"ssdtrain.offload.directories[1]: {two} is on the same drive as {one}")
    assert "name one directory for each drive" in said
    assert not warnings_at_start(caplog, directories=[one], capacity="64MiB")


def test_a_capacity_above_the_free_space_is_said_at_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    figures = os.statvfs(tmp_path)
    size = 2 * figures.f_bavail * figures.f_frsize
    (said,) = warnings_at_start(caplog, directories=str(tmp_path), capacity=size)
    assert said.startswith("ssdtrain.offload.capacity: ") and "that are free in" in said
    assert str(tmp_path) in said and "set a smaller capacity" in said
    assert not warnings_at_start(caplog, directories=str(tmp_path), capacity=size // 4)
