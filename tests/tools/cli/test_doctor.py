import errno
import importlib
import json
import os
import re
from pathlib import Path

import pytest
import torch

import ssdtrain_ds._compat
from ssdtrain.device import TESTED_TORCH
from ssdtrain.storage import drive_of
from ssdtrain.storage.drive import Drive
from ssdtrain.tools.cli import doctor, main
from ssdtrain.tools.cli.versions import TESTED, installed, too_old


def findings(capsys: pytest.CaptureFixture[str], *words: str | Path) -> tuple[int, dict[str, dict[str, str]]]:
    status = main(["doctor", "--json", *map(str, words)])
    report = json.loads(capsys.readouterr().out)
    assert report["broken"] is (status == 1)
    return status, {finding["subject"]: finding for finding in report["findings"]}


def test_this_machine_is_sound(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    descriptors = len(os.listdir("/proc/self/fd"))
    status, found = findings(capsys, tmp_path)
    assert status == 0
    assert list(tmp_path.iterdir()) == [] and len(os.listdir("/proc/self/fd")) == descriptors
    assert [f for f in found.values() if f["verdict"] in ("warning", "broken") and not f["remedy"]] == []
    assert found["torch"]["found"] == torch.__version__.partition("+")[0]
    assert found["deepspeed"]["found"] == installed("deepspeed")
    assert found[f"{tmp_path}: file system"]["found"].startswith(drive_of(tmp_path).filesystem)
    assert found[f"{tmp_path}: O_DIRECT"]["found"] in ("works", "refused")


def test_the_table_has_the_same_findings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    for subject in ("python", "torch", "deepspeed", "megatron-core", "C I/O engine", "CUDA", "broken,"):
        assert subject in printed


def test_a_drive_that_is_almost_full_is_a_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Drive, "free_bytes", lambda _: 4096)
    _, found = findings(capsys, tmp_path)
    assert found[f"{tmp_path}: free space"]["verdict"] == "warning"


def test_segments_that_cannot_grow_are_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "a GPU")
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    found = {}
    for setting in ("", "max_split_size_mb:512,expandable_segments:True"):
        monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", setting)
        found[setting] = next(one for one in doctor.devices() if one.subject == "device memory")
    fixed, expandable = found.values()
    assert fixed.verdict == "-" and "expandable_segments:True" in fixed.remedy
    assert expandable.verdict == "ok" and not expandable.remedy


def test_without_numpy_ranks_cannot_exchange_objects(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "installed", lambda name: None if name == "numpy" else installed(name))
    status, found = findings(capsys, tmp_path)
    assert status == 1 and "pip install numpy" in found["numpy"]["remedy"]


def test_a_directory_that_training_would_make_is_sound(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for below in ("missing", "missing/deeper/{rank}"):
        path = tmp_path / below
        status, found = findings(capsys, path)
        assert status == 0
        assert found[str(path)]["verdict"] == "-"
        assert str(tmp_path) in found[str(path)]["found"]
        assert found[f"{path}: file system"]["verdict"] in ("ok", "warning")
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_cannot_be_is_broken(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "file"
    file.touch()
    for path in (file, file / "below", Path("/proc/ssdtrain"), Path("~nosuchuser/x"), tmp_path / "{gpu}"):
        status, found = findings(capsys, path)
        assert status == 1
        assert found[str(path)]["verdict"] == "broken"
        assert found[str(path)]["remedy"]


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="no tmpfs here")
def test_memory_that_poses_as_a_drive_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    status, found = findings(capsys, Path("/dev/shm"))
    assert status == 0
    assert found["/dev/shm: file system"]["verdict"] == "warning"
    assert "memory, not a drive" in found["/dev/shm: file system"]["remedy"]


def test_without_the_c_engine_it_says_what_runs_instead(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = importlib.import_module

    def refuse(name: str) -> object:
        if name == "ssdtrain.storage._iopool":
            raise ImportError(name)
        return plain(name)

    monkeypatch.setattr(importlib, "import_module", refuse)
    found = {finding.subject: finding for finding in doctor.extensions()}
    assert found["C I/O engine"].verdict == "warning"
    assert "Python threads" in found["C I/O engine"].remedy


@pytest.mark.parametrize(
    ("package", "version", "verdict"),
    [
        ("torch", TESTED["torch"][0], "ok"),
        ("torch", "2.9.1", "warning"),
        ("torch", "2.5.1", "broken"),
        ("torch", None, "broken"),
        ("deepspeed", None, "-"),
        ("deepspeed", "0.17.0", "warning"),
    ],
)
def test_versions_are_judged_by_what_was_run(package: str, version: str | None, verdict: str) -> None:
    finding = doctor.version_finding(package, version, TESTED[package])
    assert finding.verdict == verdict
    assert finding.remedy or verdict == "ok"


def test_only_the_leading_numbers_of_a_version_are_compared() -> None:
    assert not too_old("torch", "2.6.0rc1")
    assert not too_old("torch", "3.0")
    assert too_old("torch", "1.13.1")
    assert not too_old("deepspeed", "0.0.1")


def test_the_doctor_and_the_adapter_agree_on_what_was_tested() -> None:
    assert TESTED["deepspeed"] == ssdtrain_ds._compat.TESTED_DEEPSPEED
    assert TESTED["torch"] == TESTED_TORCH


def test_what_is_installed_is_what_python_imports() -> None:
    assert installed("torch") == torch.__version__.partition("+")[0]
    assert installed("no-such-package-here") is None


def test_a_measured_drive_has_a_bandwidth(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, found = findings(capsys, "--measure", "32MiB", tmp_path)
    assert status == 0
    assert re.fullmatch(r"writes .+ .*B/s, reads .+ .*B/s", found[f"{tmp_path}: bandwidth"]["found"])
    assert list(tmp_path.iterdir()) == []


def test_a_size_that_is_none_is_an_error_of_usage(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["doctor", "--measure", "much"])
    assert '--measure: "much" is not a number' in capsys.readouterr().err


def test_a_config_is_checked_on_this_machine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "ds.json"
    for block, status, verdict in (
        ({"offload": {"directories": str(tmp_path / "spill")}}, 0, "ok"),
        ({"offload": {"directories": "/proc/spill"}}, 1, "broken"),
        ({"offload": {"directories": str(tmp_path / "spill"), "gpudirect": "on"}}, 1, "broken"),
        ({"offload": {"directory": str(tmp_path)}}, 1, "broken"),
        ({}, 0, "warning"),
    ):
        file.write_text(json.dumps({"train_batch_size": 1, "ssdtrain": block}))
        given, found = findings(capsys, "--config", file, tmp_path)
        assert given == status and found[f"config {file}"]["verdict"] == verdict, block
        assert found[f"config {file}"]["remedy"] or verdict == "ok"
    assert findings(capsys, "--config", tmp_path / "missing.json", tmp_path)[0] == 1


def test_the_sections_of_a_config_are_named_and_their_directories_examined(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"state": {"directories": str(tmp_path / "chunks")}}))
    status, found = findings(capsys, "--config", file, tmp_path)
    assert status == 0 and found[f"config {file}"]["found"] == "can be used: state"
    assert f"{tmp_path / 'chunks'}" in found


def test_all_that_is_broken_in_a_config_is_told_in_one_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One directory is no place for files, another a file, a third fails when it is used; GPUDirect Storage needs a device."""
    refusing, file = tmp_path / "refusing", tmp_path / "config0.json"
    gpudirect = {"gpudirect": "on", "verify": "off"}

    def open_nameless(directory: Path) -> int:
        raise OSError(errno.EIO, "Input/output error", str(directory))

    def broken(block: dict[str, object]) -> tuple[set[str], str]:
        file.write_text(json.dumps(block))
        status, found = findings(capsys, "--config", file)
        assert status == 1 and not any(f["found"].startswith("can be used") for f in found.values())
        bad = [f for f in found.values() if f["verdict"] == "broken"]
        return {f["subject"] for f in bad}, " ".join(f["found"] for f in bad)

    for written, directory in (("/proc/spill",) * 2, (str(tmp_path / "config{rank}.json"), str(file))):
        subjects, text = broken({"offload": {"directories": written, **gpudirect}})
        assert {f"config {file}", directory} <= subjects and "offload.gpudirect" in text
    monkeypatch.setattr(doctor, "open_nameless", open_nameless)
    subjects, text = broken({"offload": {"directories": str(refusing), **gpudirect}})
    assert {f"config {file}", str(refusing)} <= subjects and "offload.gpudirect" in text
    subjects, _ = broken({"offload": {"directories": str(refusing)}})
    assert str(refusing) in subjects and f"config {file}" not in subjects


def test_limits_are_judged_and_have_remedies() -> None:
    assert doctor.memlock(64 * 1024).verdict == "-" and "memlock=-1" in doctor.memlock(65536).remedy
    assert doctor.memlock(None).found == "unlimited"
    assert doctor.open_files(1024).verdict == "warning" and "ulimit -n" in doctor.open_files(1024).remedy
    assert doctor.open_files(1 << 20).verdict == "ok"
    assert {"free memory", "memlock", "open files", "NUMA nodes"} <= {f.subject for f in doctor.limits()}


def test_more_than_is_free_is_not_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--measure", "100PB", str(tmp_path)]) == 1
    printed = " ".join(capsys.readouterr().out.split())
    assert "are to be written, and" in printed and "give --measure a smaller size" in printed
    assert main(["bench", "io", str(tmp_path), "--size", "100PB"]) == 1
    assert "are to be written: give a smaller --size" in capsys.readouterr().err


def test_a_config_that_is_disabled_is_not_asked_for_a_section(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "off.yaml"
    file.write_text(f"enabled: false\noffload: {{directories: {tmp_path}}}\n")
    status, found = findings(capsys, "--config", file, tmp_path)
    config = found[f"config {file}"]
    assert status == 0 and "enabled is false" in config["found"] and config["remedy"] == "set enabled to true"
