"""Tests on the emulated CUDA device (tests/cuda/emulation), built by `make test-cuda`. Elsewhere nothing is collected."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.gpu.conftest import late as late  # a fixture
from tests.state.conftest import attach as attach

ACTIVE = importlib.util.find_spec("emulated_cuda") is not None and torch.cuda.is_available()
"""Whether this process is on the emulated device: `.venv-cuda` is its environment."""

collect_ignore_glob = [] if ACTIVE else ["test_*.py"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.gpu)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """The CPU that results are compared with computes with one thread, as the device does."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda", 0)
