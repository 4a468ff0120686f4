"""Directories: placeholders are expanded per rank, and what cannot be a directory is rejected with its key."""

import logging
import os
from pathlib import Path

import pytest

from ssdtrain.config import ConfigError, OffloadConfig, ReportConfig, load_config, paths
from tests.support.processes import ran


def offload(*directories: str) -> OffloadConfig:
    config = load_config({"offload": {"directories": list(directories)}})
    assert config.offload is not None
    return config.offload


def test_placeholders_name_the_rank_the_host_and_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "node1")
    monkeypatch.setattr("getpass.getuser", lambda: "ada")
    config = offload("/nvme{local_rank}/{user}/{host}-{rank}", "/other")
    assert config.expand(rank=11, local_rank=3) == (Path("/nvme3/ada/node1-11"), Path("/other"))


@pytest.mark.parametrize("error", [KeyError, OSError])
def test_a_user_without_a_name_is_its_number(monkeypatch: pytest.MonkeyPatch, error: type[Exception]) -> None:
    def nameless() -> str:
        raise error("uid not found")

    monkeypatch.setattr("getpass.getuser", nameless)
    assert offload("/x/{user}").expand(rank=0, local_rank=0) == (Path(f"/x/{os.getuid()}"),)


def test_relative_paths_and_the_home_directory_become_absolute(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/ada")
    assert offload("spill", "~/spill").expand(rank=0, local_rank=0) == (
        tmp_path / "spill",
        Path("/home/ada/spill"),
    )


def test_double_braces_are_braces() -> None:
    assert offload("/x/{{rank}}").expand(rank=4, local_rank=0) == (Path("/x/{rank}"),)


def test_expanding_makes_nothing(tmp_path: Path) -> None:
    offload(str(tmp_path / "a" / "{rank}")).expand(rank=0, local_rank=0)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("directory", "why"),
    [
        ("/x/{gpu}", 'unknown placeholder "{gpu}"'),
        ("/x/{}", 'unknown placeholder "{}"'),
        ("/x/{rank!r}", 'unknown placeholder "{rank}"'),
        ("/x/{rank:03d}", 'unknown placeholder "{rank}"'),
        ("/x/{rank", "unbalanced braces"),
        ("/x/rank}", "unbalanced braces"),
        ("$TMPDIR/x", "environment variables are not expanded"),
        (" /x", "begins or ends with a blank"),
        ("/x\n", "begins or ends with a blank"),
        ("~nosuchuser/x", "leads to no home directory"),
        ("~{host}/x", "leads to no home directory"),
        ("s3://bucket/x", "is a URL"),
        ("", "names no directory"),
        ("  ", "names no directory"),
        ("/x\0y", "names no directory"),
        (3, "is a int"),
    ],
)
def test_a_directory_that_cannot_be_meant_is_rejected(directory: object, why: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_config({"offload": {"directories": [directory]}})
    (problem,) = error.value.problems
    assert problem.path == "ssdtrain.offload.directories"
    assert why in problem.why
    assert "{local_rank}" in problem.allowed


def test_the_same_directory_twice_is_rejected_as_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        ConfigError, match=r"ssdtrain\.offload\.directories: .* twice; allowed: each directory once"
    ):
        offload("spill", f"{tmp_path}/spill/")


def test_the_same_directory_twice_is_rejected_after_expansion_and_links(tmp_path: Path) -> None:
    (tmp_path / "0").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "0")
    config = offload(f"{tmp_path}/{{rank}}", f"{tmp_path}/link")
    with pytest.raises(ConfigError, match=r"ssdtrain\.offload\.directories: .* named twice"):
        config.expand(rank=0, local_rank=0)
    assert len(config.expand(rank=1, local_rank=0)) == 2


def test_a_file_in_the_way_is_rejected_when_the_config_is_read(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    (tmp_path / "broken").symlink_to(tmp_path / "nowhere")
    directories = [str(file), str(file / "below"), str(tmp_path / "broken"), str(tmp_path / "new")]
    with pytest.raises(ConfigError) as error:
        load_config({"offload": {"directories": directories}, "report": {"path": str(file)}})
    found = {problem.path: (problem.value, problem.why) for problem in error.value.problems}
    assert found == {
        "ssdtrain.report.path": (str(file), "is a file"),
        "ssdtrain.offload.directories[0]": (str(file), "is a file"),
        "ssdtrain.offload.directories[1]": (str(file / "below"), f'lies below "{file}", which is a file'),
        "ssdtrain.offload.directories[2]": (str(tmp_path / "broken"), "is a broken link"),
    }
    assert all("must not be a file" in problem.allowed for problem in error.value.problems)


def test_a_file_in_the_way_of_one_rank_is_rejected_on_that_rank(tmp_path: Path) -> None:
    (tmp_path / "0").touch()
    config = offload(f"{tmp_path}/{{rank}}")
    assert config.expand(rank=1, local_rank=0) == (tmp_path / "1",)
    with pytest.raises(ConfigError, match=r"ssdtrain\.offload\.directories\[0\]: .* is a file"):
        config.expand(rank=0, local_rank=0)
    report = load_config({"report": {"path": f"{tmp_path}/{{rank}}"}}).report
    assert report.expand(rank=1, local_rank=0) == tmp_path / "1"
    with pytest.raises(ConfigError, match=r"ssdtrain\.report\.path: .* is a file"):
        report.expand(rank=0, local_rank=0)


def test_no_report_directory_is_none() -> None:
    assert ReportConfig().expand(rank=0, local_rank=0) is None


@pytest.mark.parametrize(
    ("kind", "warns"), [("tmpfs", True), ("ramfs", True), ("ext4", False), (None, False)]
)
def test_a_directory_in_memory_gets_a_warning(
    kind: str | None,
    warns: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(paths, "file_system_of", lambda path: kind)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):  # a start expands the same directories several times
            offload(str(tmp_path)).expand(rank=0, local_rank=0)
    assert len(caplog.records) == warns
    assert not warns or f"ssdtrain.offload.directories[0]: {tmp_path} is on {kind}" in caplog.text


def test_the_file_system_is_that_of_the_deepest_and_latest_mount(tmp_path: Path) -> None:
    mounts = tmp_path / "mounts"
    mounts.write_text(
        "overlay / overlay rw 0 0\n"
        "/dev/nvme0n1 /data xfs rw 0 0\n"
        "tmpfs /data/ram tmpfs rw 0 0\n"
        "/dev/nvme1n1 /with\\040blank/日本 ext4 rw 0 0\n"
        "/dev/sda1 /twice ext3 rw 0 0\n"
        "none /twice tmpfs rw 0 0\n",
        encoding="utf-8",
    )
    expected = {
        "/": "overlay",
        "/datastore": "overlay",
        "/data": "xfs",
        "/data/other/x": "xfs",
        "/data/ram/x": "tmpfs",
        "/with blank/日本/x": "ext4",
        "/twice/x": "tmpfs",
    }
    for path, kind in expected.items():
        assert paths.file_system_of(Path(path), str(mounts)) == kind, path
    assert paths.file_system_of(Path("/"), str(tmp_path / "absent")) is None


@pytest.mark.skipif(not Path("/proc/self/mounts").exists(), reason="needs Linux")
def test_memory_is_recognised_as_stat_recognises_it(tmp_path: Path) -> None:
    for place in [Path("/"), Path("/dev"), Path("/dev/shm"), Path("/proc"), Path("/tmp"), tmp_path]:
        if place.exists():
            told = ran(["stat", "-f", "-c", "%T", place])
            assert (told.stdout.strip() == "tmpfs") == (
                paths.file_system_of(place) in paths.MEMORY_FILE_SYSTEMS
            )


def test_a_directory_that_another_rank_makes_meanwhile_is_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other rank is as fast as can be: it makes the directory right after this one has not found it."""
    shared = tmp_path / "shared"
    plain = Path.is_dir

    def looks(place: Path) -> bool:
        found = plain(place)
        if place == shared and not found:
            os.mkdir(shared)
        return found

    monkeypatch.setattr(Path, "is_dir", looks)
    assert paths.problem_with_directory(shared / "3") is None
    assert plain(shared)
