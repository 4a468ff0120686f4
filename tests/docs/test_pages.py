"""Pages are generated from the code, link to what is there, and show what works."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import yaml

from ssdtrain.config import load_config
from ssdtrain.tools.cli import main
from ssdtrain.tools.report.document import document
from tests.docs.blocks import PAGES, TOP, blocks
from tests.docs.messages import ROOT
from tests.support.journals import write
from tests.support.processes import ran


def code(page: Path, language: str) -> list[str]:
    return [one.text for one in blocks() if ROOT / one.page == page and one.language == language]


def anchors(page: Path) -> set[str]:
    heads = re.findall(r"^#+ (.*)$", re.sub(r"```.*?```", "", page.read_text(), flags=re.S), re.M)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


def test_the_page_of_metrics_is_what_the_code_declares() -> None:
    assert (ROOT / "docs" / "metrics.md").read_text() == document(), "run `make docs`"


@pytest.mark.parametrize("page", [*TOP, *PAGES], ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"```.*?```", "", page.read_text(), flags=re.S)):
        if target.startswith(("http://", "https://")):
            continue
        name, _, anchor = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        assert file.exists(), f"{page.name}: {target}"
        if anchor:
            assert anchor in anchors(file), f"{page.name}: {target}"


def test_every_extra_is_on_the_first_page() -> None:
    table = (
        (ROOT / "pyproject.toml").read_text().split("[project.optional-dependencies]\n")[1].split("\n\n")[0]
    )
    first = (ROOT / "docs" / "index.md").read_text()
    rows = [row for row in first.splitlines() if row.startswith("| `")]
    named = [name for row in rows for name in re.findall(r"`(.*?)`", row.split("|")[1])]
    assert {line.split(" = ")[0] for line in table.splitlines()} <= set(named)


def test_every_page_is_in_the_navigation() -> None:
    text = re.sub(r"!!python\S+", "", (ROOT / "mkdocs.yml").read_text())
    named = set(re.findall(r"[\w/.-]+\.md", yaml.dump(yaml.safe_load(text)["nav"])))
    assert named == {str(page.relative_to(ROOT / "docs")) for page in PAGES}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_config_blocks_are_configs(page: Path) -> None:
    for block in code(page, "json"):
        found = json.loads(block if block.lstrip().startswith("{") else "{" + block + "}")
        if "ssdtrain" in found:
            assert load_config(found["ssdtrain"]).active, block
        elif "offload" in found:
            assert load_config(found).active, block


@pytest.mark.slow
def test_the_first_example_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    source = code(ROOT / "docs" / "index.md", "python")[0]
    exec(compile(source, "index.md", "exec"), {})
    assert re.search(r"offloaded bytes +[1-9]", capsys.readouterr().out)


def test_the_commands_that_watch_a_run_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "out" / "report")
    write(tmp_path / "out" / "baseline")
    commands = [line for block in code(ROOT / "docs" / "watch.md", "") for line in block.splitlines()]
    assert len(commands) == 3
    for command in commands:
        words = command.split()
        assert words[:2] == ["ssdtrain", "report"]
        assert main(words[1:]) == 0
    assert (tmp_path / "out" / "report" / "report.html").exists()
    assert (tmp_path / "out" / "ssdtrain.prom").exists()


@pytest.mark.slow
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    program = ROOT / "out" / "docs-venv" / "bin" / "mkdocs"
    mkdocs = str(program) if program.exists() else shutil.which("mkdocs")
    if mkdocs is None:
        pytest.skip("mkdocs is not installed: `make site` installs it and builds the pages")
    ran([mkdocs, "build", "--strict", "--site-dir", str(tmp_path)], cwd=ROOT)
    assert "What always holds" in (tmp_path / "architecture.html").read_text()
