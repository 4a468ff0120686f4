"""Commands inside of sentences name modules, targets, scripts and options that are there; so do those of fenced blocks."""

from __future__ import annotations

import argparse
import importlib.util
import re
import shlex
from pathlib import Path

import pytest

from ssdtrain.config.flags import add_flags
from ssdtrain.tools.cli.main import COMMANDS, whole_parser
from tests.docs.blocks import PAGES, TOP, blocks
from tests.docs.messages import ROOT

# Pages of results say what was run on a date.
NOW = [page for page in [*TOP, *PAGES] if page.parent.name != "results" and page.name != "CHANGELOG.md"]
START = re.compile(r"^(?:torchrun|ssdtrain|python|make|pytest|scripts/\S+)(?: |$)")
OURS = ("ssdtrain", "ssdtrain_ds", "ssdtrain_megatron", "benchmarks", "examples", "tests")


def inline() -> list[tuple[str, str]]:
    """(page, command) of all commands between backticks."""
    found = []
    for page in NOW:
        text = re.sub(r"```.*?```", "", page.read_text(), flags=re.S)
        for code in re.findall(r"`([^`]+)`", text):
            command = " ".join(code.split())
            if START.match(command) and "ssdtrain." not in command.split()[0]:
                found.append((str(page.relative_to(ROOT)), command))
    return found


def fenced() -> list[tuple[str, str]]:
    found = []
    for one in blocks():
        if one.language in ("", "bash") and ROOT / one.page in NOW:
            for line in one.text.replace("\\\n", " ").splitlines():
                if START.match(line):
                    found.append((one.page, line.partition(" #")[0]))
    return found


def targets() -> set[str]:
    return set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))


def options_of(command: str) -> set[str]:
    """All options of `ssdtrain COMMAND` and of its parts."""
    (commands,) = [a for a in whole_parser()._actions if isinstance(a, argparse._SubParsersAction)]
    waiting, found = [commands.choices[command]], set()
    while waiting:
        for action in waiting.pop()._actions:
            found |= set(action.option_strings)
            if isinstance(action, argparse._SubParsersAction):
                waiting += action.choices.values()
    return found


def options(words: list[str]) -> list[str]:
    return [word.partition("=")[0] for word in words if word.startswith("--")]


def check_module(module: str, words: list[str]) -> None:
    if module.partition(".")[0] not in OURS:
        return
    spec = importlib.util.find_spec(module)
    assert spec.origin is not None, module
    if module == "ssdtrain":
        check_ssdtrain(words)
    elif module.startswith(("benchmarks.", "examples.")):
        # The options are where the module is, or in what its folder shares.
        text = "".join(file.read_text() for file in Path(spec.origin).parent.glob("*.py"))
        for option in options(words):
            assert f'"{option}"' in text, option


def check_ssdtrain(words: list[str]) -> None:
    if not words or words[0].startswith(("-", "...")):
        return
    assert words[0] in COMMANDS, words
    script = next((at for at, word in enumerate(words) if word == "torchrun" or word.endswith(".py")), None)
    if words[0] == "estimate" and script is not None:
        words = words[:script]  # the flags behind it are the script's
    assert set(options(words)) <= options_of(words[0]), words


@pytest.mark.parametrize(("page", "command"), sorted({*inline(), *fenced()}))
def test_what_a_command_names_is_there(page: str, command: str) -> None:
    program, *words = shlex.split(command)
    if program == "make":
        assert words[0] in targets()
    elif program.startswith("scripts/"):
        assert (ROOT / program).exists()
    elif program == "ssdtrain":
        check_ssdtrain(words)
    elif "-m" in words:
        at = words.index("-m") + 1
        check_module(words[at], words[at + 1 :])
    for word in words:
        if word.endswith(".py") and "/" in word:
            assert (ROOT / word).exists(), word


def test_flags_of_megatron_are_those_of_the_schema() -> None:
    parser = argparse.ArgumentParser()
    add_flags(parser)
    known = {option for action in parser._actions for option in action.option_strings}
    for page in NOW:
        named = set(re.findall(r"--(?:no-)?ssdtrain-[a-z-]*[a-z]", page.read_text()))
        assert named <= known, (page.name, named - known)
