"""The device of these tests: a GPU, or the CPU in a dry run."""

import importlib.util
import os
from collections.abc import Iterator

import pytest
import torch

from benchmarks.gpu.measure import CUBLAS, be_deterministic

DRY_RUN = os.environ.get("SSDTRAIN_GPU_DRY_RUN") == "1"


@pytest.fixture
def device() -> torch.device:
    """A GPU; in a dry run, where there is none, the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda", 0)
    if DRY_RUN:
        return torch.device("cpu")
    pytest.skip("no CUDA device; SSDTRAIN_GPU_DRY_RUN=1 tries the test on the CPU")


@pytest.fixture
def gpu() -> torch.device:
    """A GPU, for what only a GPU has: streams, events, a caching allocator."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device, and the CPU has no streams")
    return torch.device("cuda", 0)


@pytest.fixture
def deterministic(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The same run twice has the same bits: see `benchmarks.gpu.measure.be_deterministic`."""
    monkeypatch.setenv(CUBLAS, os.environ.get(CUBLAS, ":4096:8"))  # it is taken back
    before = torch.get_deterministic_debug_mode()
    be_deterministic()
    yield
    torch.set_deterministic_debug_mode(before)


@pytest.fixture(params=range(int(os.environ.get("EMULATED_TEST_SEEDS", "1"))))
def late(request: pytest.FixtureRequest) -> Iterator[None]:
    """Work of an emulated device begins late at random, and copies take their time. Hardware takes its own."""
    if importlib.util.find_spec("emulated_cuda") is None:
        yield
        return
    import emulated_cuda

    with emulated_cuda.settings(delay_ms=5, h2d_gbps=1, d2h_gbps=1, seed=request.param):
        yield
        torch.cuda.synchronize()
