"""PyTorch's own tests of autograd with the engine around each, where somebody has PyTorch's test files."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest

from tests.offload.upstream import compare

DIRECTORY = os.environ.get("SSDTRAIN_PYTORCH_TESTS", "")


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.skipif(
    not DIRECTORY, reason="SSDTRAIN_PYTORCH_TESTS names no directory with PyTorch's test files"
)
@pytest.mark.skipif(importlib.util.find_spec("expecttest") is None, reason="PyTorch's tests need expecttest")
def test_pytorchs_own_tests_end_as_they_do_without_the_engine() -> None:
    assert compare(Path(DIRECTORY).absolute(), []), "see the output: a difference without a reason"
