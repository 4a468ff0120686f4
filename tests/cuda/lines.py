"""Which lines for CUDA run in the tests of one process on the emulated device, and which do not: `make coverage-cuda`.

    .venv-cuda/bin/python -m tests.cuda.lines [arguments of pytest]

Ranks are processes of their own, whose lines are not counted.
"""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import Any

import coverage
import pytest

ROOT = Path(__file__).parents[2]

FILES = [
    "ssdtrain/device/bandwidth.py",
    "ssdtrain/device/cuda.py",
    "ssdtrain/device/runtime.py",
    "ssdtrain/device/timestamps.py",
    "ssdtrain/offload/departures.py",
    "ssdtrain/offload/device_copy.py",
    "ssdtrain/offload/gpudirect.py",
    "ssdtrain/offload/limits.py",
    "ssdtrain/offload/loads.py",
    "ssdtrain/offload/rests.py",
    "ssdtrain/offload/staged.py",
    "ssdtrain/offload/starter.py",
    "ssdtrain/offload/targets.py",
    "ssdtrain/state/transfers.py",
]

TESTS = [
    "tests/gpu",
    "tests/test_device.py",
    "tests/cuda/test_codecs.py",
    "tests/cuda/test_devices.py",
    "tests/cuda/test_gpudirect.py",
    "tests/cuda/test_programs.py",
    "tests/cuda/test_sides.py",
    "tests/cuda/test_state.py",
    "tests/cuda/test_training.py",
]


class Backward:
    """Lets the threads of autograd be traced, which threading did not start: from the first hook that they call."""

    def pytest_collection_finish(self) -> None:
        from ssdtrain.offload.engine import OffloadEngine

        unpack = OffloadEngine.unpack

        def traced(engine: Any, held: Any) -> Any:
            if sys.gettrace() is None:
                sys.settrace(threading.gettrace())
            return unpack(engine, held)

        OffloadEngine.unpack = traced  # type: ignore[method-assign]


def main(*arguments: str) -> int:
    measured = coverage.Coverage(include=[str(ROOT / file) for file in FILES], data_file=None, branch=False)
    measured.start()
    status = pytest.main(["-q", "-m", "gpu", *(arguments or TESTS)], plugins=[Backward()])
    measured.stop()
    measured.report(show_missing=True)
    return int(status)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
