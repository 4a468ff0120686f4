import importlib.util
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import ssdtrain
from ssdtrain.tools.cli import bench, main
from ssdtrain.tools.cli.main import COMMANDS, whole_parser
from tests.support.journals import write


@pytest.mark.parametrize("flag", ["-h", "--help"])
def test_help_lists_every_command(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([flag]) == 0
    printed = capsys.readouterr().out
    assert all(name in printed for name in COMMANDS)


@pytest.mark.parametrize(("arguments", "why"), [([], "which command?"), (["fly"], "no command 'fly'")])
def test_a_missing_or_unknown_command_is_refused_with_the_list(
    arguments: list[str], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    printed = capsys.readouterr().err
    assert why in printed and "doctor" in printed


def test_the_version_is_the_packages(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.strip() == ssdtrain.__version__


@pytest.mark.slow
def test_no_command_imports_a_framework() -> None:
    imports = "; ".join(f"import ssdtrain.tools.cli.{name}" for name in COMMANDS)
    code = f"import sys; {imports}; print(sorted({{m.split('.')[0] for m in sys.modules}} & {{'deepspeed', 'megatron'}}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_shell_can_complete_every_option_of_every_command(monkeypatch: pytest.MonkeyPatch) -> None:
    parser = whole_parser()
    assert parser.parse_args(["report", "out", "--trace"]).directory == Path("out")
    assert parser.parse_args(["bench", "io", "--size", "1GiB"]).size == 1 << 30
    assert parser.parse_args(["demo", "--steps", "8"]).steps == 8
    asked = []
    fake = SimpleNamespace(autocomplete=lambda found: asked.append(found))
    monkeypatch.setitem(sys.modules, "argcomplete", fake)  # the package is an extra
    monkeypatch.setenv("_ARGCOMPLETE", "1")
    assert main(["--version"]) == 0
    assert len(asked) == 1


@pytest.mark.parametrize("words", [*COMMANDS, *(f"bench {part}" for part in bench.BENCH_EXAMPLES)])
def test_the_help_of_every_command_has_an_example(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        whole_parser().parse_args([*words.split(), "--help"])
    assert caught.value.code == 0
    assert f"  ssdtrain {words} " in capsys.readouterr().out.partition("usage:")[2].partition("\n")[2]


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        ("doctor {0}", "examining this machine: {0}"),
        ("report {0}/run -o {0}/page.html", "writing {0}/page.html"),
        ("plan --model gpt --hidden 1024 --layers 4 --seq 512 --gpu h100 --microbatch 1", "planning"),
    ],
    ids=["doctor", "report", "plan"],
)
def test_a_terminal_shows_what_a_command_is_busy_with_and_a_pipe_does_not(
    words: str,
    shown: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    write(tmp_path / "run")
    given = words.format(tmp_path).split()
    assert main(given) == 0
    assert capsys.readouterr().err == ""
    notes: list[str] = []

    class Terminal:
        is_terminal = True

        def __init__(self, stderr: bool) -> None:
            assert stderr

        def status(self, text: str) -> Any:
            notes.append(text)
            return nullcontext(SimpleNamespace(update=notes.append))

    monkeypatch.setattr("ssdtrain.tools.cli.progress.Console", Terminal)
    assert main(given) == 0
    assert any(note.startswith(shown.format(tmp_path)) for note in notes), notes


def test_the_demo_without_deepspeed_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "deepspeed" else found(name)
    )
    assert main(["demo"]) == 2
    assert "deepspeed not found: pip install 'ssdtrain[deepspeed,plot]'" in capsys.readouterr().err


def test_the_demo_outside_of_a_checkout_says_where_it_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr("ssdtrain.tools.cli.demo.ROOT", tmp_path)
    assert main(["demo"]) == 2
    assert "make demo" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "status", "printed"),
    [
        ("--help", 0, "usage: ssdtrain demo"),
        ("--modes sleep", 2, "ssdtrain demo: error: argument --modes: invalid choice: 'sleep'"),
    ],
)
def test_the_demo_passes_options_on_from_any_directory(
    words: str,
    status: int,
    printed: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        main(["demo", *words.split()])
    assert ended.value.code == status
    assert printed in "".join(capsys.readouterr())


def test_ctrl_c_in_any_command_is_its_status(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(arguments: list[str]) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("ssdtrain.tools.cli.plan.run", interrupted)
    assert main(["plan"]) == 130


@pytest.mark.parametrize(("output", "errors"), [("| true", ""), ("> /dev/full", "No space left on device")])
def test_an_output_that_ends_early_or_is_full_is_no_traceback(
    output: str, errors: str, tmp_path: Path
) -> None:
    words = f"report {write(tmp_path / 'run')} --prometheus {tmp_path / 'x'}"
    program = f"{sys.executable} -m ssdtrain {words}"
    done = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {program} {output}"], capture_output=True, text=True, check=False
    )
    assert "Traceback" not in done.stderr and errors in done.stderr
    assert done.returncode == 1 or not errors


@pytest.mark.parametrize("module", ["ssdtrain", "ssdtrain.tools.cli"])
def test_the_package_is_the_command(module: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", module, "--version"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout.strip()) == (0, ssdtrain.__version__), done.stderr
