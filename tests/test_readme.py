"""What the README shows works as it is pasted."""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from ssdtrain.config import load_config
from tests.support.processes import ran

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text()


def blocks(language: str) -> list[str]:
    """What stands in the fences of this language."""
    found: list[str] = []
    inside: list[str] | None = None
    for line in README.splitlines():
        if not line.startswith("```"):
            if inside is not None:
                inside.append(line)
        elif inside is None:
            inside, opened = [], line[3:]
        else:
            if opened == language:
                found.append("\n".join(inside))
            inside = None
    return found


def commands() -> list[str]:
    return [line.split("#")[0].strip() for block in blocks("") for line in block.splitlines() if line.strip()]


def test_the_pytorch_example_runs(tmp_path: Path) -> None:
    (source,) = blocks("python")
    source = source.replace("./spill", str(tmp_path / "spill"))
    done = ran([sys.executable, "-c", source], timeout=120)
    assert re.search(r"offloaded bytes +[1-9]", done.stdout)


def test_the_argument_for_the_trainer_is_a_callback_of_a_config_that_loads() -> None:
    from ssdtrain.hf import SSDTrainCallback

    (argument,) = re.findall(r"`callbacks=\[(SSDTrainCallback\(.*?\))\]`", README)
    callback = eval(argument, {"SSDTrainCallback": SSDTrainCallback})
    assert load_config(callback.config).offload is not None


def test_the_deepspeed_block_is_a_config() -> None:
    (block,) = re.findall(r'`("ssdtrain": [^`]*)`', README)
    config = load_config(json.loads("{" + block + "}")["ssdtrain"])
    assert config.active and config.offload is not None


def recipe(target: str) -> str:
    """The commands that make would run for a target in an installed checkout."""
    done = ran(["make", "--dry-run", "--old-file=.venv/.installed", "TESTS=", target], cwd=ROOT)
    return done.stdout


@pytest.mark.parametrize(
    ("target", "runs"),
    [
        ("demo", "ssdtrain demo"),
        ("demo-megatron", "python -m tests.megatron.demo"),
        ("test", "python -m pytest"),
        ("test-all", "python -m pytest"),
        ("docs", "python -m ssdtrain.config.document docs/config.md"),
        ("site", "mkdocs build"),
    ],
)
def test_make_runs_what_is_there(target: str, runs: str) -> None:
    assert f"make {target}" in README + CONTRIBUTING
    commands = recipe(target)
    assert runs in commands
    for module in re.findall(r"python -m ([\w.]+)", commands):
        assert importlib.util.find_spec(module) is not None, module


def test_every_test_is_in_a_tier() -> None:
    """`make test-all` has the tests of `make test` and the slow ones; the long ones have a target of their own."""

    def expression(target: str) -> str:
        (found,) = re.findall(r'-m "?([a-z ]*(?:slow|long)[a-z ]*?)"?(?: |$)', recipe(target), re.M)
        return found

    assert [expression(target) for target in ("test", "test-all", "test-long")] == [
        "not slow and not long",
        "not long",
        "long",
    ]
    assert "make test-all" in (ROOT / ".ci" / "run").read_text().splitlines()


@pytest.mark.slow
def test_the_deepspeed_commands_run_a_script(tmp_path: Path) -> None:
    """The line of code, and the launcher as it stands there but with one process."""
    (code,) = re.findall(r"`(import ssdtrain_ds;[^`]*)`", README)
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
    (line,) = [line for line in commands() if "ssdtrain_ds" in line]
    words = shlex.split(line)
    assert words[0] == "torchrun" and words[-3:] == ["train.py", "--deepspeed_config", "ds.json"]
    (tmp_path / "train.py").write_text(
        "import sys, deepspeed\n"
        "from deepspeed.runtime.engine import DeepSpeedEngine\n"
        "assert hasattr(DeepSpeedEngine.__init__, '__wrapped__'), 'not installed'\n"
        "print('arguments', sys.argv[1:])\n"
    )
    words[words.index("--nproc_per_node") + 1] = "1"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", *words[1:]]
    done = ran(command, cwd=tmp_path, timeout=240)
    assert "arguments ['--deepspeed_config', 'ds.json']" in done.stdout


def test_every_page_that_it_names_and_every_benchmark_of_the_pages_is_there() -> None:
    pages = re.findall(r"\]\((docs/[^)#]*)[^)]*\)", README)
    texts = [path.read_text() for path in [ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]]
    modules = {name for text in texts for name in re.findall(r"python -m (benchmarks\.\w+)", text)}
    assert len(pages) >= 5 and len(modules) >= 5
    for path in pages:
        assert (ROOT / path).exists(), path
    for module in modules:
        assert importlib.util.find_spec(module) is not None, module
