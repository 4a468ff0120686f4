"""The hooks into Megatron-LM's training loop, on a stand-in with the names of `megatron.training`."""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import ssdtrain_megatron
from ssdtrain.config import ConfigError
from ssdtrain_megatron import flags, pretrain, run
from ssdtrain_megatron.attachment import Attachment
from tests.megatron.rows import Row
from tests.megatron.training import Trainer
from tests.offload.test_equality import asked_for


class Writer:
    """A TensorBoard writer that remembers."""

    def __init__(self) -> None:
        self.scalars: dict[tuple[str, int], float] = {}

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.scalars[name, step] = value

    def log(self, values: dict[str, float], step: int) -> None:
        self.scalars.update({(name, step): value for name, value in values.items()})


class Loop:
    """The stand-in: what `pretrain` looks up when it calls it."""

    def __init__(self) -> None:
        self.arguments, self.training = (
            ModuleType(f"megatron.training.{name}") for name in ("arguments", "training")
        )
        self.args = argparse.Namespace()
        self.trainer = Trainer(Row("one process"))
        self.lines: list[str] = []
        self.tensorboard, self.wandb = Writer(), Writer()
        self.arguments.add_megatron_arguments = lambda parser: parser  # type: ignore[attr-defined]
        training: Any = self.training
        training.get_args = lambda: self.args
        training.setup_model_and_optimizer = lambda model_type: (
            self.trainer.chunks,
            self.trainer.optimizer,
            None,
        )
        training.training_log = lambda loss_dict, iteration, report_memory_flag: report_memory_flag
        training.save_checkpoint = lambda iteration, model, non_persistent_ckpt=False: None
        training.print_rank_last = self.lines.append
        training.get_tensorboard_writer = lambda: self.tensorboard
        training.get_wandb_writer = lambda: self.wandb

    def functions(self) -> list[Callable[..., Any]]:
        names = ("setup_model_and_optimizer", "training_log", "save_checkpoint")
        return [self.arguments.add_megatron_arguments, *(getattr(self.training, name) for name in names)]

    def pretrain(self, *flags: str, steps: int = 4) -> list[tuple[str | None, str]]:
        parser = self.arguments.add_megatron_arguments(argparse.ArgumentParser())
        parser.add_argument("--log-interval", type=int, default=2)
        self.args = parser.parse_args(flags)
        self.training.setup_model_and_optimizer("gpt")
        found = []
        for iteration in range(1, steps + 1):
            found.append(self.trainer.step(iteration))
            assert self.training.training_log({}, iteration=iteration, report_memory_flag=False) is False
        return found


@pytest.fixture
def loop(monkeypatch: pytest.MonkeyPatch) -> Iterator[Loop]:
    made = Loop()
    package = ModuleType("megatron.training")
    package.__path__ = []
    package.arguments, package.training = made.arguments, made.training  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "megatron.training", package)
    monkeypatch.setitem(sys.modules, "megatron.training.arguments", made.arguments)
    monkeypatch.setitem(sys.modules, "megatron.training.training", made.training)
    yield made
    ssdtrain_megatron.uninstall_pretrain()


def test_flags_are_enough_to_offload_and_to_be_told(
    loop: Loop, config: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    expected = Loop().pretrain()
    before = loop.functions()
    ssdtrain_megatron.install_pretrain()
    ssdtrain_megatron.install_pretrain()
    flags = [
        "--ssdtrain-offload-directories",
        config["offload"]["directories"],
        "--ssdtrain-offload-min-bytes",
        "1024",
        "--ssdtrain-offload-amount",
        "all",  # what "auto" chooses depends on the machine
    ]
    report = ["--ssdtrain-report-path", str(tmp_path / "report"), "--ssdtrain-report-interval", "1"]
    assert loop.pretrain(*flags, *report) == expected
    lines = (tmp_path / "report" / "rank-0.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3, 4]
    assert "step 1" not in caplog.text  # the loop's own lines say it
    assert [line.split("|")[0].strip() for line in loop.lines] == [
        f"[ssdtrain] iteration {n}" for n in (1, 2, 3, 4)
    ]
    assert "offloaded/step: " in loop.lines[0] and "activation peak without SSDTrain: " in loop.lines[0]
    for writer in (loop.tensorboard, loop.wandb):
        moved = (
            writer.scalars["ssdtrain/offloaded_bytes", 4] + writer.scalars["ssdtrain/avoided_write_bytes", 4]
        )
        assert moved > 2**20
        assert writer.scalars["ssdtrain/activation_peak_bytes", 2] > 0
    ssdtrain_megatron.uninstall_pretrain()
    assert loop.functions() == before


def test_the_interval_of_the_report_wins_over_the_interval_of_the_log(
    loop: Loop, config: dict[str, Any]
) -> None:
    ssdtrain_megatron.install_pretrain()
    flags = ["--ssdtrain-offload-directories", config["offload"]["directories"]]
    for interval, expected in (("3", [3]), ("0", [])):
        loop.lines.clear()
        loop.pretrain(*flags, "--ssdtrain-report-interval", interval)
        found = [line.split("|")[0].strip() for line in loop.lines]
        assert found == [f"[ssdtrain] iteration {n}" for n in expected]


def test_one_rank_with_nothing_to_compress_is_said(loop: Loop, caplog: pytest.LogCaptureFixture) -> None:
    ssdtrain_megatron.install_pretrain()
    with caplog.at_level(logging.WARNING, logger="ssdtrain"):
        loop.pretrain("--ssdtrain-comm-preset", "safe")
    assert [line for line in caplog.messages if "comm does nothing: there is one rank" in line]


def test_a_second_model_is_logged_once_and_all_is_put_back(
    loop: Loop, config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = loop.functions()
    ssdtrain_megatron.install_pretrain()
    flags = ["--ssdtrain-offload-directories", config["offload"]["directories"]]
    closed: list[Attachment] = []
    close = Attachment.close
    monkeypatch.setattr(Attachment, "close", lambda self: closed.append(self) or close(self))
    loop.pretrain(*flags)
    loop.lines.clear()
    loop.trainer = Trainer(Row("the second model"))
    loop.pretrain(*flags)
    assert len(closed) == 1
    assert [line.split("|")[0].strip() for line in loop.lines] == [
        f"[ssdtrain] iteration {n}" for n in (2, 4)
    ]
    loop.pretrain("--no-ssdtrain-enabled", steps=1)
    assert len(closed) == 2
    assert loop.functions() == before


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ([], []),
        (["--ssdtrain-report-interval", "3"], ["ssdtrain.report"]),
        (["--ssdtrain-checkpoint-use-reentrant"], ["ssdtrain.checkpoint"]),
        (["--no-ssdtrain-enabled"], []),
        (["--ssdtrain-comm-preset", "safe"], []),  # and there is one rank
    ],
)
def test_flags_that_ask_for_nothing_leave_the_function_objects(
    loop: Loop, flags: list[str], said: list[str]
) -> None:
    expected = Loop().pretrain()
    before = loop.functions()
    ssdtrain_megatron.install_pretrain()
    assert loop.functions() != before
    assert loop.pretrain(*flags) == expected
    assert loop.functions() == before
    assert len(loop.lines) == len(said)
    assert all(f"{key} is without effect" in line for key, line in zip(said, loop.lines, strict=True))


@pytest.mark.parametrize("flags", [["--ssdtrain-offload-host", "1GiB"], ["--ssdtrain-comm-preset", "safe"]])
def test_a_run_that_trains_nothing_is_left_alone(
    loop: Loop, monkeypatch: pytest.MonkeyPatch, flags: list[str]
) -> None:
    """With --skip-train, which makes no optimizer and wraps no model."""
    before = loop.functions()
    chunks = [chunk.module for chunk in loop.trainer.chunks]
    loop.training.setup_model_and_optimizer = lambda model_type: (chunks, None, None)  # type: ignore[attr-defined]
    before[1] = loop.training.setup_model_and_optimizer
    monkeypatch.setattr("torch.distributed.get_world_size", lambda group=None: 2)
    ssdtrain_megatron.install_pretrain()
    loop.pretrain(*flags, steps=0)
    assert loop.functions() == before
    assert ["--skip-train" in line for line in loop.lines] == [True]


def test_flags_that_a_yaml_file_takes_the_place_of_are_not_dropped_in_silence(
    loop: Loop, config: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ssdtrain_megatron.install_pretrain()
    loop.args = argparse.Namespace(yaml_cfg="gpt.yaml", log_interval=2)
    given = ["--yaml-cfg", "gpt.yaml", "--ssdtrain-offload-host", "1GiB"]
    monkeypatch.setattr(sys, "argv", ["pretrain_gpt.py", *given])
    with pytest.raises(ConfigError, match=r"--yaml-cfg.*--ssdtrain-offload-host.*ssdtrain_config: FILE"):
        loop.training.setup_model_and_optimizer("gpt")
    file = tmp_path / "ssdtrain.json"
    file.write_text(json.dumps(config))
    loop.args.ssdtrain_config = str(file)
    loop.training.setup_model_and_optimizer("gpt")
    assert pretrain._attachment is not None


def test_a_mistake_in_the_flags_is_found_before_the_model_is_built(loop: Loop) -> None:
    built = []
    plain = loop.training.setup_model_and_optimizer
    loop.training.setup_model_and_optimizer = lambda *args: built.append(args) or plain(*args)  # type: ignore[attr-defined]
    ssdtrain_megatron.install_pretrain()
    with pytest.raises(ConfigError, match=r"ssdtrain\.offload\.directories"):
        loop.pretrain("--ssdtrain-offload-threads", "2")
    with pytest.raises(ConfigError, match=r"ssdtrain\.offload\.directories\[0\]: '/proc/ssdtrain'"):
        loop.pretrain("--ssdtrain-offload-directories", "/proc/ssdtrain")
    assert built == []


def test_a_training_loop_that_lacks_a_name_is_rejected_by_it(loop: Loop) -> None:
    del loop.training.training_log  # type: ignore[attr-defined]
    with pytest.raises(ImportError, match=r"megatron\.training\.training\.training_log"):
        ssdtrain_megatron.install_pretrain()


def test_without_a_checkout_it_says_what_is_missing() -> None:
    if "megatron.training" in sys.modules:
        pytest.skip("megatron.training is on the path")
    with pytest.raises(ImportError, match="part of a Megatron-LM checkout"):
        ssdtrain_megatron.install_pretrain()


@pytest.fixture
def command_line(config: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The words of a run of the launcher, whose script is to be written."""
    flags = ["--ssdtrain-offload-directories", config["offload"]["directories"], "--num-layers", "2"]
    monkeypatch.setattr(sys, "argv", ["train.py", *flags])
    monkeypatch.setattr(sys, "path", list(sys.path))
    return flags


@pytest.mark.parametrize("end", ["", "raise SystemExit", "import sys; sys.exit(0)"])
def test_flags_that_a_script_leaves_unused_are_an_error_at_its_end(
    end: str, loop: Loop, command_line: list[str], tmp_path: Path
) -> None:
    script = tmp_path / "own.py"
    script.write_text(f"print('trained')\n{end}\n")
    with pytest.raises(ConfigError, match=r"--ssdtrain-offload-directories.*nothing was attached.*attach\("):
        run.main([str(script), *command_line])


@pytest.mark.parametrize("asked", ["-h", "--help"])
def test_a_script_that_is_asked_for_help_trains_nothing(
    asked: str, loop: Loop, command_line: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "own.py"
    script.write_text("import argparse; argparse.ArgumentParser().parse_args()")
    with pytest.raises(SystemExit) as end:
        run.main([str(script), *command_line, asked])
    assert not end.value.code and "usage" in capsys.readouterr().out


def test_an_error_of_the_script_is_its_own(loop: Loop, command_line: list[str], tmp_path: Path) -> None:
    script = tmp_path / "own.py"
    script.write_text("import sys; sys.exit(3)")
    with pytest.raises(SystemExit, match="3"):
        run.main([str(script), *command_line])


def test_bad_values_are_found_before_a_script_begins(
    loop: Loop, command_line: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "own.py"
    script.write_text("raise AssertionError('it began')")
    for words, said in (
        ("--ssdtrain-offload-amount 999x", "'999x' has the unknown unit"),
        ("--ssdtrain-ofload-amount all", "did you"),
    ):
        with pytest.raises(SystemExit, match="2"):
            run.main([str(script), *command_line, *words.split()])
        assert said in capsys.readouterr().err


def test_flags_that_a_loop_of_its_own_leaves_unused_are_an_error_in_the_schedule(
    loop: Loop, command_line: list[str]
) -> None:
    ssdtrain_megatron.install_pretrain()
    with pytest.raises(ConfigError, match=r"--ssdtrain-offload-directories.*Megatron's schedules"):
        loop.trainer.step(1)


@pytest.mark.parametrize("way", ["the loop's", "its own"])
def test_flags_that_are_used_are_no_error(way: str, loop: Loop, command_line: list[str]) -> None:
    ssdtrain_megatron.install_pretrain()
    if way == "the loop's":
        loop.pretrain(*command_line[:2])
    else:
        command_line += ["--ssdtrain-offload-min-bytes", "1024", "--ssdtrain-offload-amount", "all"]
        parser = loop.arguments.add_megatron_arguments(argparse.ArgumentParser())
        config = ssdtrain_megatron.config_from_args(parser.parse_known_args(command_line)[0])
        with ssdtrain_megatron.attach(loop.trainer.chunks, config) as attachment:
            loop.trainer.step(1)
            assert asked_for(attachment.runtime) > 0
    flags.unused_flags.check("")
