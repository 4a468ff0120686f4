"""Tests on the emulated CUDA device (tests/cuda/emulation), built by `make test-cuda`. Elsewhere nothing is collected."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.state.conftest import attach as attach  # a fixture

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


@pytest.fixture(params=range(int(os.environ.get("EMULATED_TEST_SEEDS", "1"))))
def late(request: pytest.FixtureRequest) -> Iterator[None]:
    """Work of the device begins late at random, and copies take their time."""
    import emulated_cuda

    with emulated_cuda.settings(delay_ms=5, h2d_gbps=1, d2h_gbps=1, seed=request.param):
        yield
        torch.cuda.synchronize()
