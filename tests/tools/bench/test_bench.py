"""`ssdtrain bench`: each part measures something, shows it as a table or as JSON, and says what is missing."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ssdtrain.tools.bench.codec import device_seconds
from ssdtrain.tools.bench.io import fio_command
from ssdtrain.tools.cli import main
from tests.support.processes import ran

MODEL = """
import torch

def build(batch):
    model = torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(4)])
    x = torch.randn(batch, 256)
    return model, lambda: model(x).relu().square().mean()

_calls = []

def other(batch):
    _calls.append(1)
    model = torch.nn.Linear(8, 8)
    return model, lambda scale=len(_calls): scale * model(torch.ones(4, 8)).sum()
"""


DEEP = """
import torch

def build(batch):
    block = lambda: torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.GELU(), torch.nn.Linear(256, 256))
    model = torch.nn.Sequential(*[block() for _ in range(6)])
    x = torch.randn(batch, 256)
    return model, lambda: model(x).square().mean()
"""


def figures(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, object]:
    assert main(["bench", *arguments, "--json"]) == 0
    found: dict[str, object] = json.loads(capsys.readouterr().out)
    return found


@pytest.mark.parametrize("engine", ["c", "python"])
def test_io_without_fio_measures_and_says_so(
    engine: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")
    options = ["io", str(tmp_path), "--size", "32MiB", "--repeats", "1", "--engine", engine]
    found = figures(capsys, *options)
    assert found["engine"] == engine and "not installed" in str(found["fio"])
    assert found["pool_write_bytes_per_second"] > 1e6 and found["pool_read_bytes_per_second"] > 1e6  # type: ignore[operator]
    assert found["write_ratio_fio"] is None
    assert not list(tmp_path.iterdir())
    assert main(["bench", *options]) == 0
    shown = capsys.readouterr().out
    assert "write" in shown and "apt install fio" in " ".join(shown.split())


def test_io_compares_with_fio(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if subprocess.run(["which", "fio"], capture_output=True, check=False).returncode:
        pytest.skip("fio is not installed: apt install fio")
    found = figures(capsys, "io", str(tmp_path), "--size", "32MiB", "--repeats", "1")
    assert 0.05 < found["write_ratio_fio"] < 50 and 0.05 < found["read_ratio_fio"] < 50  # type: ignore[operator]


def test_without_o_direct_fio_reads_from_the_page_cache_as_the_pool_does() -> None:
    assert "--invalidate=0" in fio_command("file", 1, "read", direct=False)
    assert "--invalidate=1" in fio_command("file", 1, "read")


def test_a_directory_that_is_not_there_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "io", str(tmp_path / "missing")]) == 1
    error = capsys.readouterr().err
    assert "missing" in error and error.count("\n") == 1


def test_codecs_have_a_size_and_a_speed_each_way(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["codec", "--codec", "int8", "--codec", "bf16", "--size", "1MiB", "--repeats", "2"]
    found = figures(capsys, *options, "--device", "cpu")
    codecs = found["codecs"]
    assert isinstance(codecs, dict) and list(codecs) == ["int8", "bf16"]
    assert codecs["bf16"]["ratio"] == pytest.approx(0.5, abs=0.01)
    assert all(codecs["int8"][f"{way}_bytes_per_second"] > 0 for way in ("encode", "decode", "accumulate"))
    assert main(["bench", *options]) == 0
    assert "int8" in capsys.readouterr().out


@pytest.mark.parametrize("part", ["io", "codec", "collective"])
def test_nothing_is_not_measured(part: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["bench", part, "--size", "0"])
    assert '--size: "0" is too little to measure; allowed: ' in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ("codec --codec int9", '--codec: "int9" is not a codec (did you mean "int8"?)'),
        ("codec --device mars", '--device: "mars" is not a device; allowed: cpu'),
        ("codec --device meta", '--device: "meta" cannot be measured; allowed: cpu'),
        ("codec --device cuda:99", '--device: "cuda:99" cannot be measured; allowed: cpu'),
        ("collective --preset fast", "--preset: invalid choice: 'fast'"),
    ],
)
def test_a_value_that_an_option_does_not_take_is_a_usage_error(
    words: str, why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["bench", *words.split()])
    assert caught.value.code == 2
    assert why in capsys.readouterr().err


def test_a_codec_is_timed_by_events_of_the_device_that_it_runs_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """An event that is recorded on another device measures that device's stream."""
    current = [0]
    recorded = []

    class Device:
        def __init__(self, device: torch.device) -> None:
            self.index = device.index

        def __enter__(self) -> None:
            current.append(self.index)

        def __exit__(self, *_: object) -> None:
            current.pop()

    class Event:
        def __init__(self, *, enable_timing: bool) -> None: ...

        def record(self) -> None:
            recorded.append(current[-1])

        def synchronize(self) -> None: ...

        def elapsed_time(self, _: object) -> float:
            return 1.0

    monkeypatch.setattr(torch.cuda, "device", Device)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    assert device_seconds(lambda: None, torch.device("cuda:1")) == 1e-3
    assert recorded == [1, 1]


def everything(tmp_path: Path) -> str:
    """The file of a config that offloads all."""
    file = tmp_path / "all.json"
    file.write_text(json.dumps({"offload": {"directories": str(tmp_path / "spill"), "amount": "all"}}))
    return str(file)


def test_a_step_of_the_users_own_script(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "train_mine.py").write_text(MODEL)
    options = ["script", f"{tmp_path / 'train_mine.py'}:build", "--batch", "512", "--steps", "4"]
    assert figures(capsys, *options, "--directory", str(tmp_path / "spill"))["gradients_equal"] is True
    options += ["--config", everything(tmp_path)]
    found = figures(capsys, *options)
    assert found["gradients_equal"] is True
    assert found["offloaded_bytes_per_step"] > 0 and found["plain_activation_peak_bytes"] > 0  # type: ignore[operator]
    assert main(["bench", *options, "--batch", "1024"]) == 0
    assert "equal, bit for bit" in capsys.readouterr().out
    assert "no room" not in caplog.text  # of the engine that measures the peak without offloading


def test_a_lossy_config_shows_that_gradients_differ(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "train_lossy.py").write_text(MODEL)
    (tmp_path / "c.yaml").write_text(
        f"offload: {{directories: {tmp_path}/spill, codec: int4, min_bytes: 1KiB}}\n"
    )
    options = ["script", f"{tmp_path / 'train_lossy.py'}:build", "--batch", "512", "--steps", "4"]
    assert figures(capsys, *options, "--config", str(tmp_path / "c.yaml"))["gradients_equal"] is False


@pytest.mark.slow
def test_what_recomputation_drops_counts_in_the_peak_without_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "train_plan.py").write_text(DEEP)
    (tmp_path / "c.json").write_text('{"plan": {"blocks": "*", "device_limit": "6MiB"}}')
    options = ["script", f"{tmp_path / 'train_plan.py'}:build", "--batch", "512", "--steps", "2"]
    planned = figures(capsys, *options, "--config", str(tmp_path / "c.json"))
    offloaded = figures(capsys, *options, "--config", everything(tmp_path))
    assert planned["plain_activation_peak_bytes"] == offloaded["plain_activation_peak_bytes"]
    assert planned["activation_peak_bytes"] < planned["plain_activation_peak_bytes"]  # type: ignore[operator]
    # The steps that a plan is made from do not count.
    assert (planned["warmup_steps"], offloaded["warmup_steps"]) == (8, 3)


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (
            "script none.py:build",
            'bench script: the model is named "none.py:build", and there is no file none.py',
        ),
        ("script train_more.py:nothing", "has no nothing"),
        ("script train_more.py:build --directory /proc", "bench script: invalid SSDTrain config"),
        ("script train_more", "module:function"),
        ("script train_more.py:other", "same model and data"),
        ("script train_more.py:build --config off.yaml", "off.yaml switches nothing on"),
        ("script train_more.py:build --config large.yaml", "host memory"),
        ("codec --codec mask --size 4KiB", "does not encode torch.float32"),
    ],
)
def test_what_cannot_be_measured_is_one_line(
    words: str, why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A config without any effect used to have steps run for ever."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train_more.py").write_text(MODEL)
    (tmp_path / "off.yaml").write_text("enabled: false\noffload: {directories: ./tier}\n")
    (tmp_path / "large.yaml").write_text("offload: {directories: ./tier, host: 900TB}\n")
    assert main(["bench", *words.split()]) == 1
    error = capsys.readouterr().err
    assert why in error and "Traceback" not in error and error.count("\n") == 1 + error.count("\n  ssdtrain.")


@pytest.mark.long
@pytest.mark.distributed
def test_collectives_between_processes_of_this_machine() -> None:
    command = [sys.executable, "-m", "ssdtrain", "bench", "collective", "--ranks", "2", "--repeats", "2"]
    done = ran([*command, "--size", "256KiB", "--preset", "safe", "--json"], timeout=200)
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["ranks"] == 2
    assert found["wire_ratio"]["safe"] < 0.3
    assert found["sizes"][str(256 << 10)]["safe"]["seconds"] > 0
