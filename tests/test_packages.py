"""What pip builds: one version, type information, data files, and an editable install that no folder hides."""

from __future__ import annotations

import importlib.metadata
import os
import shlex
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import ssdtrain
from tests.docs.blocks import block
from tests.support.processes import ran

ROOT = Path(__file__).parent.parent
DATA = ("ssdtrain/tools/report/report.css", "ssdtrain/tools/report/report.js")
TYPED = tuple(f"{package}/py.typed" for package in ("ssdtrain", "ssdtrain_ds", "ssdtrain_megatron"))
SOURCES = (
    "ssdtrain",
    "ssdtrain_ds",
    "ssdtrain_megatron",
    "scripts",
    "setup.py",
    "pyproject.toml",
    "MANIFEST.in",
)


def copy_of_the_sources(to: Path) -> Path:
    """Builds leave files beside the sources."""
    listed = ran(
        ["git", "ls-files", "-co", "--exclude-standard", *SOURCES, "README.md", "LICENSE", "CHANGELOG.md"],
        cwd=ROOT,
    )
    for name in listed.stdout.splitlines():
        (to / name).parent.mkdir(parents=True, exist_ok=True)
        (to / name).write_bytes((ROOT / name).read_bytes())
        (to / name).chmod((ROOT / name).stat().st_mode)
    return to


def run(*command: str, cwd: Path, **environment: str) -> str:
    done = ran(command, cwd=cwd, env={**os.environ, **environment}, timeout=800)
    return done.stdout


def test_the_changelog_knows_the_version() -> None:
    assert f"## {ssdtrain.__version__}" in (ROOT / "CHANGELOG.md").read_text()


def named(text: str) -> set[str]:
    """The packages whose lines in a file of requirements give a version."""
    lines = (line.partition("#")[0].strip() for line in text.splitlines())
    found = [Requirement(line) for line in lines if line and not line.startswith("-")]
    assert all(one.specifier for one in found)
    return {canonicalize_name(one.name) for one in found}


def test_all_that_tests_run_with_has_its_version_in_a_file() -> None:
    """Or a release of somebody else's changes what tests find in a tree that is the same."""
    direct = named((ROOT / "requirements-dev.txt").read_text())
    fixed = direct | named((ROOT / "constraints.txt").read_text())
    left, seen, free = [(name, "") for name in direct], set(), set()
    while left:
        name, extra = left.pop()
        if (name, extra) in seen:
            continue
        seen.add((name, extra))
        try:
            needs = importlib.metadata.requires(name)
        except importlib.metadata.PackageNotFoundError:
            continue  # of another platform
        for need in map(Requirement, needs or []):
            if need.marker is None or need.marker.evaluate({"extra": extra}):
                other = canonicalize_name(need.name)
                left += [(other, one) for one in ("", *need.extras)]
                if other not in fixed and not any(one.operator == "==" for one in need.specifier):
                    free.add(other)
    assert not free
    docs = named((ROOT / "requirements-docs.txt").read_text())
    assert docs and "mkdocs" in fixed


@pytest.mark.slow
def test_a_folder_called_ssdtrain_does_not_hide_an_editable_install(tmp_path: Path) -> None:
    sources = copy_of_the_sources(tmp_path / "sources")
    build = "import setuptools.build_meta as build; build.build_editable('../editable')"
    (tmp_path / "editable").mkdir()
    run(sys.executable, "-c", build, cwd=sources, CC="false")
    (wheel,) = (tmp_path / "editable").glob("*.whl")
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    (tmp_path / "work" / "ssdtrain").mkdir(parents=True)  # a spill directory
    program = (
        f"import site; site.addsitedir({str(tmp_path / 'site')!r}); import ssdtrain; print(ssdtrain.__file__)"
    )
    found = run(sys.executable, "-c", program, cwd=tmp_path / "work", PYTHONPATH="")
    assert found.strip() in (
        str(sources / "ssdtrain" / "__init__.py"),
        str(ROOT / "ssdtrain" / "__init__.py"),
    )


QUIET = ("--quiet", "--no-deps", "--no-build-isolation")


@pytest.mark.slow
def test_without_a_compiler_the_packages_build_and_the_python_engine_serves(tmp_path: Path) -> None:
    sources = copy_of_the_sources(tmp_path / "sources")
    script = str(sources / "scripts" / "build_wheels.sh")
    stale = sources / "build" / "lib" / "ssdtrain" / "stale.py"
    stale.parent.mkdir(parents=True)
    stale.write_text("")
    run(
        sys.executable,
        "-m",
        "pip",
        "wheel",
        *QUIET,
        "--wheel-dir",
        str(tmp_path / "direct"),
        ".",
        cwd=sources,
        CC="false",
    )
    (direct,) = (tmp_path / "direct").glob("*.whl")
    assert "ssdtrain/stale.py" not in zipfile.ZipFile(direct).namelist()
    printed = run(script, str(tmp_path / "dist"), cwd=sources, CC="false", PYTHON=sys.executable, PYTHONS="")
    assert "no extension was built" in printed
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    assert wheel.name.endswith("-py3-none-any.whl")  # it is for any machine
    names = zipfile.ZipFile(wheel).namelist()
    (metadata,) = (name for name in names if name.endswith(".dist-info/METADATA"))
    # torch exchanges Python objects between ranks through it, and does not depend on it.
    assert "Requires-Dist: numpy\n" in zipfile.ZipFile(wheel).read(metadata).decode()
    assert {*TYPED, *DATA} <= set(names)
    assert not [
        name for name in names if name.endswith((".so", ".c", ".h")) or name.startswith(("tests", "examples"))
    ]
    (archive,) = (tmp_path / "dist").glob("*.tar.gz")
    with tarfile.open(archive) as packed:
        inside = {name.partition("/")[2] for name in packed.getnames()}
    for folder in ("storage", "codecs"):
        for file in (ROOT / "ssdtrain" / folder).glob("*.[ch]"):
            assert str(file.relative_to(ROOT)) in inside
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    program = "import ssdtrain, torch\n" + (
        "offloading = ssdtrain.offload('spill', min_bytes='1KiB')\n"
        "x = torch.randn(64, 64, requires_grad=True)\n"
        "with offloading: loss = x.sin().sum()\n"
        "loss.backward(); print(ssdtrain.__file__, offloading.runtime.statistics().store.engine)"
    )
    file, engine = run(sys.executable, "-c", program, cwd=tmp_path, PYTHONPATH=str(tmp_path / "site")).split()
    assert file.startswith(str(tmp_path / "site")) and engine == "python"


@pytest.mark.slow
def test_the_install_commands(tmp_path: Path) -> None:
    """`pip install .` and `ssdtrain doctor ./spill` of README and docs/index.md, the first without a compiler."""
    pages = [block("README.md", "pip install ."), block("docs/index.md", "pip install .")]
    (lines,) = {
        tuple(line.partition("#")[0].strip() for line in page.text.strip().splitlines()) for page in pages
    }
    install, doctor = map(shlex.split, lines)
    assert install == ["pip", "install", "."] and doctor[0] == "ssdtrain"
    # What it depends on is here; the environment itself is left as it is.
    sources, target = copy_of_the_sources(tmp_path / "sources"), tmp_path / "site"
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--target", str(target)]
    run(sys.executable, "-m", *install, *options, cwd=sources, CC="false")
    (tmp_path / "work").mkdir()
    command = [sys.executable, str(target / "bin" / doctor[0]), *doctor[1:]]
    printed = run(*command, cwd=tmp_path / "work", PYTHONPATH=str(target), COLUMNS="80")
    assert "spill: does not exist" in printed and "nothing broken" in printed
    assert "C I/O engine: not built" in printed
