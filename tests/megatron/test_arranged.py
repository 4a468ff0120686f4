"""Runs the tests under `arranged`, file by file, each in a process where megatron-core works on the CPU."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from tests.support.processes import ROOT, start

FILES = sorted((Path(__file__).parent / "arranged").glob("test_*.py"))

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("megatron.core") is None, reason="megatron-core is not installed"
)


QUICK = ("test_attach_errors",)
"""One file of `make test`; the others are slow."""


@pytest.mark.parametrize(
    "file",
    [pytest.param(file, marks=[] if file.stem in QUICK else [pytest.mark.slow]) for file in FILES],
    ids=lambda file: file.stem,
)
def test_arranged(file: Path) -> None:
    command = [
        "-m",
        "tests.megatron.cpu",
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        str(file.relative_to(ROOT)),
    ]
    output = start(1, command, SSDTRAIN_TESTS_ARRANGED="1")
    assert " passed" in output
