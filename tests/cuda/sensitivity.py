"""Takes away, one at a time, each wait, each record and each use that keeps memory on the way of device memory, and says
whether tests on the emulated device, whose work comes late, fail without it:

    .venv-cuda/bin/python -m tests.cuda.sensitivity [NAME...]

A line that no test misses either needs a test that forces its race, or is not needed and goes. Not among the tests of
`make test-cuda`: it runs them once for each line.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

TESTS = [
    "tests/gpu/test_streams.py",
    "tests/cuda/test_sides.py",
    "tests/cuda/test_late_copies.py",
    "tests/cuda/test_training.py::test_whatever_comes_late_the_bits_are_those_of_a_run_without",
    "tests/cuda/test_programs.py",
    "tests/cuda/test_gpudirect.py",
]
STATE = "state: "
"""What the names of model state's lines begin with."""
TESTS_OF_STATE = ["tests/cuda/test_state_copies.py", "tests/cuda/test_state.py"]
VARIABLE = "SENSITIVITY_REMOVED"
CLOCK_GHZ = "0.1"
"""Of the device: what tests let it sleep takes so long that a host with much else to do comes first."""


def without(call: str, caller: str, otherwise: Any = None) -> Callable[[Any], None]:
    """Let `CudaDevice.<call>` do nothing where the function `caller` of the engine calls it."""

    def remove(device: Any) -> None:
        original = getattr(device, call)

        def unless_called_there(*arguments: Any, **named: Any) -> Any:
            if sys._getframe(1).f_code.co_name == caller:
                return otherwise
            return original(*arguments, **named)

        setattr(device, call, unless_called_there)

    return remove


def store_without_wait(device: Any) -> None:
    from ssdtrain.device.streams import NO_STREAM, TO_HOST

    device.copy_to_host = lambda self, source, target, nbytes: self._streams.copy(
        source, target, nbytes, TO_HOST, self._store, NO_STREAM
    )


def load_without_wait(device: Any) -> None:
    copy = device.copy_to_device
    device.copy_to_device = lambda self, source, target, nbytes, after=(), within=False: copy(
        self, source, target, nbytes, within=within
    )


def event_before_the_copy(device: Any) -> None:
    def recorded_first(call: str, stream: str) -> None:
        original = getattr(device, call)

        def copy(self: Any, *arguments: Any, **named: Any) -> Any:
            event = self.record(getattr(self, stream))
            original(self, *arguments, **named)
            return event

        setattr(device, call, copy)

    recorded_first("copy_to_host", "_store")
    recorded_first("copy_to_device", "_load")


def let_go(method: str) -> Callable[[Any], None]:
    """Let nothing be kept until its copy has passed where `StagedTransfer.<method>` keeps it."""

    def remove(device: Any) -> None:
        from ssdtrain.offload.transfer.staged import StagedTransfer

        original = getattr(StagedTransfer, method)

        def keeping_nothing(self: Any, *arguments: Any, **named: Any) -> Any:
            before = [len(copies) for copies in self._passing]
            result = original(self, *arguments, **named)
            for copies, count in zip(self._passing, before, strict=True):
                added = [copies.pop() for _ in range(len(copies) - count)][::-1]
                copies.extend((event, lease, None) for event, lease, _ in added)
            return result

        setattr(StagedTransfer, method, keeping_nothing)

    return remove


REMOVALS: dict[str, Callable[[Any], None]] = {
    "nothing": lambda device: None,  # what must not be noticed
    "a store waits for what made the data": store_without_wait,
    "a load waits for the last users of its memory": load_without_wait,
    "an event stands behind its copy": event_before_the_copy,
    "a target's death is recorded on its streams": without("record", "_retire"),
    "unpack waits for the load": without("wait", "end_load"),
    "a departure waits for the store": without("wait", "depart"),
    "an encoding is waited for": without("wait", "_leave_to_payload"),
    "what comes back encoded is decoded behind its copy": without("wait", "_decode_arrived"),
    "the pool writes behind the copy": without("event_handle", "_write", 0),
    "stores wait for the stream that saved": without("wait_stream", "begin"),
    "memory of another stream is kept": without("record_use", "_save"),
    "memory that is packed is kept": without("record_use", "_copy_together"),
    "a decoded tensor is kept": without("record_use", "end_load"),
    "a payload is kept": without("record_use", "_decode"),
    "what a cancelled store copies is kept": let_go("_return"),
    "a part that stayed is kept while it is put back": let_go("_put_back"),
    "a buffer beside the arena is kept while it is copied": let_go("advance_load"),
    "GPUDirect writes behind what made the data": without("event_handle", "begin_store", 0),
    "GPUDirect reads behind the last users of its memory": without("event_handle", "begin_load", 0),
    STATE + "freed memory waits for the copy that reads it": without("wait", "before_free"),
    STATE + "freed memory of another stream is kept": without("record_use", "before_free"),
    STATE + "what reuses the memory waits for a store through the buffer": without("wait", "store"),
    STATE + "a copy in comes behind the last users of its memory": without("record", "_queue_copy_in"),
    STATE + "a block waits for its load": without("wait", "wait"),
    STATE + "a block waits for its load through the buffer": without("wait", "copy_in"),
    STATE + "the CPU's step waits for the copies that it reads": without("block", "_run", True),
    STATE + "what was stepped is waited for": without("wait", "arrive"),
}


def pytest_configure() -> None:
    """As a plugin of pytest: remove what the environment names."""
    from ssdtrain.device import CudaDevice

    REMOVALS[os.environ[VARIABLE]](CudaDevice)


def noticed(name: str) -> dict[str, Any]:
    """Whether tests fail with that removed, and which one was the first."""
    done = subprocess.run(
        [
            sys.executable,
            *["-m", "pytest", "-q", "-x", "-m", "gpu", "-p", "tests.cuda.sensitivity", "--timeout=200"],
            *(TESTS_OF_STATE if name.startswith(STATE) else TESTS),
        ],
        capture_output=True,
        text=True,
        env={**os.environ, VARIABLE: name, "OMP_NUM_THREADS": "1", "EMULATED_CLOCK_GHZ": CLOCK_GHZ},
    )
    failed = [
        line.split(" - ")[0].removeprefix("FAILED ")
        for line in done.stdout.splitlines()
        if line.startswith("FAILED t")
    ]
    ended = failed or ([f"ended with {done.returncode}"] if done.returncode else [])
    return {"removed": name, "noticed": bool(done.returncode), "by": ended[:1]}


if __name__ == "__main__":
    results = []
    for name in sys.argv[1:] or REMOVALS:
        results.append(noticed(name))
        print(json.dumps(results[-1]), flush=True)
    print(
        json.dumps(
            {
                "removed": len(results),
                "unnoticed": [each["removed"] for each in results if not each["noticed"]],
            }
        )
    )
