"""docs/config.md is what the schema says, its examples work, and so does every file in configs/."""

import argparse
import json
import re
import shlex
from pathlib import Path

import pytest
import yaml

from ssdtrain.config import load_config
from ssdtrain.config.document import document, main
from ssdtrain.config.flags import add_flags, config_from_namespace, flags

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "config.md"


def code(language: str) -> list[str]:
    """The code blocks of the page in one language."""
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", PAGE.read_text(), flags=re.DOTALL | re.MULTILINE)
    return [text for name, text in blocks if name == language]


def test_the_page_is_what_the_schema_says() -> None:
    assert PAGE.read_text() == document(), "run `make docs`"


def test_the_page_has_a_row_for_every_key_with_a_meaning() -> None:
    for flag in flags():
        assert flag.help, flag.path
        assert re.search(rf"^\| `{flag.keys[-1]}` \|.*`{flag.name}`", document(), flags=re.MULTILINE), (
            flag.path
        )


def test_the_three_examples_ask_for_the_same() -> None:
    (in_json,), (in_yaml,) = code("json"), code("yaml")
    on_command_line = next(block for block in code("") if "--ssdtrain" in block)
    parser = argparse.ArgumentParser()
    add_flags(parser)
    parsed = config_from_namespace(parser.parse_args(shlex.split(on_command_line.replace("\\\n", " "))))
    config = load_config(json.loads(in_json)["ssdtrain"])
    assert config == load_config(yaml.safe_load(in_yaml)) == parsed
    assert config.active


def test_the_generator_writes_a_file_or_to_standard_output(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(tmp_path / "page.md")]) == 0
    assert (tmp_path / "page.md").read_text() == document()
    assert main([]) == 0
    assert capsys.readouterr().out == document()
    assert main(["a", "b"]) == 2


CONFIGS = sorted(file for file in (ROOT / "configs").rglob("*") if file.suffix in {".json", ".yaml", ".yml"})


def test_there_are_example_configs() -> None:
    assert CONFIGS


@pytest.mark.parametrize("file", CONFIGS, ids=lambda file: str(file.relative_to(ROOT)))
def test_every_example_config_loads_and_switches_something_on(file: Path) -> None:
    config = load_config(file)
    assert config.active
    assert config.offload.expand(rank=3, local_rank=1) or config.offload.host
