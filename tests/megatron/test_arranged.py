"""Runs the tests under `arranged` in processes where megatron-core works on the CPU."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from tests.support.processes import ROOT, start

FILES = sorted((Path(__file__).parent / "arranged").glob("test_*.py"))

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("megatron.core") is None, reason="megatron-core is not installed"
    ),
]


def test_arranged() -> None:
    names = [str(file.relative_to(ROOT)) for file in FILES]
    command = ["-m", "tests.megatron.cpu", "-m", "pytest", "-q", "-p", "no:cacheprovider", *names]
    output = start(1, command, SSDTRAIN_TESTS_ARRANGED="1")
    assert " passed" in output
