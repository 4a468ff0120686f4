"""The launcher and the patches, as far as they go without a checkout of Megatron-LM."""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.processes import ROOT

LINE = "import ssdtrain_megatron; ssdtrain_megatron.install_pretrain()"
SCRIPTS = ("pretrain_bert.py", "pretrain_gpt.py", "pretrain_t5.py")


def python(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "usage:"),
        (["--help"], "usage:"),
        (["/nowhere/pretrain_gpt.py"], "/nowhere/pretrain_gpt.py is not a file"),
    ],
)
def test_the_launcher_says_what_it_needs(arguments: list[str], said: str) -> None:
    done = python("-m", "ssdtrain_megatron.run", *arguments)
    assert done.returncode != 0
    assert said in done.stderr


@pytest.mark.slow
def test_a_script_without_a_checkout_around_it_is_told_what_is_missing(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("print('never')")
    done = python("-m", "ssdtrain_megatron.run", str(tmp_path / "train.py"))
    assert done.returncode != 0 and "never" not in done.stdout
    assert "megatron.training cannot be imported" in done.stderr


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    for name in SCRIPTS:
        (tmp_path / name).write_text('x = 1\n\nif __name__ == "__main__":\n\n    x = 2\n')
    return tmp_path


def apply(*arguments: str | Path) -> tuple[int, str]:
    done = python("patches/apply.py", *map(str, arguments))
    return done.returncode, done.stdout


def test_a_patch_is_found_applied_and_taken_out_again(checkout: Path) -> None:
    before = {name: (checkout / name).read_text() for name in SCRIPTS}
    assert apply(checkout, "--check")[0] == 0
    assert {name: (checkout / name).read_text() for name in SCRIPTS} == before
    assert apply(checkout)[0] == 0
    for name in SCRIPTS:
        assert (checkout / name).read_text().splitlines()[3].strip() == LINE
    status, said = apply(checkout)
    assert status == 0 and "is applied" in said
    assert apply(checkout, "--reverse")[0] == 0
    assert {name: (checkout / name).read_text() for name in SCRIPTS} == before
    assert apply(checkout, "--reverse") == (1, f"no patch is applied in {checkout}\n")


def test_a_checkout_that_has_a_gpt_script_only_has_a_patch_of_its_own(tmp_path: Path) -> None:
    """As from 0.18 on. That patch fits a checkout of 0.16 too, which must get the one of all three scripts."""
    script = tmp_path / "pretrain_gpt.py"
    head = "    # Timestamp right after entering __main__ block (after all imports/library setup)\n"
    text = f'x = 1\n\n\nif __name__ == "__main__":\n{head}    x = 2\n'
    script.write_text(text)
    assert "0.18" in apply(tmp_path, "--check")[1]
    assert apply(tmp_path)[0] == 0
    assert script.read_text().splitlines()[4].strip() == LINE
    assert apply(tmp_path, "--reverse")[0] == 0
    assert script.read_text() == text

    for name in ("pretrain_bert.py", "pretrain_t5.py"):
        (tmp_path / name).write_text('x = 1\n\nif __name__ == "__main__":\n\n    x = 2\n')
    assert "0.16" in apply(tmp_path)[1]
    assert all(LINE in (tmp_path / name).read_text() for name in SCRIPTS)
    assert "0.16" in apply(tmp_path)[1]
    assert "0.16" in apply(tmp_path, "--reverse")[1]
    assert not any(LINE in (tmp_path / name).read_text() for name in SCRIPTS)


def test_where_no_patch_fits_it_says_what_git_says(checkout: Path) -> None:
    (checkout / "pretrain_t5.py").write_text("something else\n")
    status, said = apply(checkout)
    assert status == 1
    assert "no patch fits" in said and "pretrain_t5.py" in said
    assert LINE not in (checkout / "pretrain_gpt.py").read_text()
    assert apply(checkout / "nothing")[0] == 1


def test_what_git_could_not_do_is_not_called_done(
    checkout: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A checkout that may be read and not written: the patch fits, and git fails. Root may write everywhere, so git pretends."""
    patches = runpy.run_path(str(ROOT / "patches" / "apply.py"))
    run = subprocess.run

    def failing(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        if "--check" in command:
            return run(command, **options)
        return subprocess.CompletedProcess(command, 128, "", "error: unable to write file: Permission denied")

    def told(*arguments: str) -> tuple[int, str]:
        return patches["main"]([str(checkout), *arguments]), capsys.readouterr().out

    with monkeypatch.context() as patch:
        patch.setattr(subprocess, "run", failing)
        status, said = told()
    assert status == 1 and "not megatron-lm-" in said and "Permission denied" in said
    assert LINE not in (checkout / "pretrain_gpt.py").read_text()
    assert told()[0] == 0
    with monkeypatch.context() as patch:
        patch.setattr(subprocess, "run", failing)
        status, said = told("--reverse")
    assert status == 1 and "not megatron-lm-" in said and "Permission denied" in said
    assert LINE in (checkout / "pretrain_gpt.py").read_text()
