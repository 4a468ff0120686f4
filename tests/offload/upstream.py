"""PyTorch's own tests of autograd with the engine around every one of them, beside the same tests without it.

```
python -m tests.offload.upstream DIRECTORY [pytest arguments]
```

DIRECTORY holds test files of PyTorch (test_autograd.py, test_utils.py, ...), which are not part of this project, and need the
package expecttest. The files run as they are and in each of the ways below, every way in a process of its own. Exit status 1 if
a test ends otherwise with the engine than without and no reason below explains it, or if a way moved nothing or left something.

As a pytest plugin this module puts saved-tensor hooks around each test of its process, and writes what became of them:

- copying: no engine, but hooks that copy. A test that ends otherwise here too cannot be run under any hooks that move data.
- racing: the engine as users have it: most backwards come before the drive is done, so stores are cancelled and forwarded.
- stored: each saved tensor is on the drive before forward goes on, so backward reads every byte back.
- staged: the same by the way of device memory.
- unshared: as stored, but every saved tensor gets a region of its own.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import ssdtrain.offload.engine
from ssdtrain.config import load_config
from ssdtrain.offload.engine import OffloadEngine
from ssdtrain.offload.tensors.region import Handle, Kept
from ssdtrain.offload.tensors.tape import Tape
from ssdtrain.runtime import Runtime, Seams

PLAIN, COPYING, RACING, STORED, STAGED, UNSHARED = [
    "plain",
    "copying",
    "racing",
    "stored",
    "staged",
    "unshared",
]
OURS = (RACING, STORED, STAGED, UNSHARED)

WAY, RESULT = "SSDTRAIN_UPSTREAM_WAY", "SSDTRAIN_UPSTREAM_RESULT"

LEFT_OUT = "not profiler"  # these look for exact lists of operations

HOOKS = "it ends so under any hooks that copy"
DATA = (
    "gradcheck moves its inputs by writes through `.data`, which no version counter sees: a tensor that is saved again joins "
    "the region that holds the bytes of the first save (it passes where nothing is shared)"
)


class Around:
    """The plugin of one process: hooks around each test, and the outcome of each.

    Args:
        way: one of those above.
        result: the JSON file to write at the end.
    """

    def __init__(self, way: str, result: Path) -> None:
        self.way = way
        self.result = result
        self.outcomes: dict[str, str] = {}
        self.first_lines: dict[str, str] = {}
        self.moved: dict[str, int] = {}
        self._directory = tempfile.TemporaryDirectory(prefix="ssdtrain-")
        self._runtime: Runtime | None = None
        if way in OURS:
            section = {
                "directories": self._directory.name,
                "min_bytes": 1,
                "buffer": "64MiB",
                "capacity": "1GiB",
            }
            self._runtime = Runtime(
                load_config({"offload": section}), seams=Seams(staged=way == STAGED or None), logs=False
            )
            assert self._runtime.engine is not None
            if way == UNSHARED:
                ssdtrain.offload.engine.find_region = lambda *_: None

    def _hooks(self) -> AbstractContextManager[Any]:
        if self.way == COPYING:
            return torch.autograd.graph.saved_tensors_hooks(_copy, lambda copy: copy)
        if self._runtime is None or self._runtime.engine is None:
            return contextlib.nullcontext()
        if self.way == RACING:
            return self._runtime.forward()
        engine = self._runtime.engine
        return torch.autograd.graph.saved_tensors_hooks(
            partial(_pack_and_wait, engine, Tape()), engine.unpack
        )

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Iterator[None]:
        before = self._left()
        try:
            with self._hooks():
                return (yield)
        finally:
            self.moved[item.nodeid] = self._left() - before

    def _left(self) -> int:
        """Bytes that have left, or would have if backward had not come first."""
        found = self._runtime.statistics() if self._runtime is not None else None
        return 0 if found is None else found.offload.offloaded_bytes + found.offload.avoided_write_bytes

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if (report.when != "call" and report.passed) or self.outcomes.get(report.nodeid) == "failed":
            return
        self.outcomes[report.nodeid] = report.outcome
        if report.failed:
            crash = getattr(report.longrepr, "reprcrash", None)
            text = crash.message if crash is not None else str(report.longrepr)
            self.first_lines[report.nodeid] = text.partition("\n")[0][:200]

    def pytest_sessionfinish(self) -> None:
        _let_go()
        figures = self._close(self._runtime) if self._runtime is not None else {"left": _live_copies()}
        self._directory.cleanup()
        self.result.write_text(json.dumps([self.outcomes, self.first_lines, self.moved, figures]))

    @staticmethod
    def _close(runtime: Runtime) -> dict[str, Any]:
        statistics = runtime.statistics()
        runtime.close()
        names = ("saved_tensors", "shared_tensors", "packed_bytes", "offloaded_bytes", "avoided_write_bytes")
        names += ("forwarded_bytes", "loaded_bytes", "kept_bytes")
        figures = {name: getattr(statistics.offload, name) for name in names}
        return {**figures, "left": statistics.offload.live_regions}


def _let_go() -> None:
    """The interpreter holds the frames of the last failure, and torch's engine the graph of a backward that raised."""
    for name in ("last_exc", "last_value", "last_traceback"):
        if hasattr(sys, name):
            delattr(sys, name)
    torch.ones(1, requires_grad=True).sum().backward()
    gc.collect()


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided or tensor.is_nested:
        return tensor.detach()
    copy = tensor.detach().clone()
    _copies.append(weakref.ref(copy))
    return copy


_copies: list[weakref.ref[torch.Tensor]] = []


def _live_copies() -> int:
    return sum(copy() is not None for copy in _copies)


def _pack_and_wait(engine: OffloadEngine, tape: Tape, tensor: torch.Tensor) -> Handle | Kept:
    held = engine.pack(tape, tensor)
    while engine.snapshot().in_flight_bytes:
        time.sleep(0)
    return held


def pytest_configure(config: pytest.Config) -> None:
    if RESULT in os.environ:
        config.pluginmanager.register(Around(os.environ[WAY], Path(os.environ[RESULT])), "ssdtrain-around")


@dataclass
class Run:
    """What one process found: by the name of the test its outcome, its error, the bytes it moved; and the engine's figures."""

    outcomes: dict[str, str]
    first_lines: dict[str, str]
    moved: dict[str, int]
    figures: dict[str, int]

    def count(self, outcome: str) -> int:
        return sum(found == outcome for found in self.outcomes.values())


def run(way: str, directory: Path, arguments: list[str]) -> Run:
    """Run the files of `directory` in a process of its own.

    Raises:
        RuntimeError: the process ended without a result; with the end of its output.
    """
    with tempfile.TemporaryDirectory() as temporary:
        result = Path(temporary) / "result.json"
        command = [
            sys.executable,
            *["-m", "pytest", "-q", "--tb=short", "-p", "no:cacheprovider", "-c"],
            os.devnull,
        ]
        command += [
            "--rootdir",
            str(directory),
            *["-p", "tests.offload.upstream", "--timeout=120", "-k"],
            LEFT_OUT,
        ]
        command += arguments or [str(path) for path in sorted(directory.rglob("test_*.py"))]
        root = str(Path(__file__).parents[2])
        search = os.pathsep.join(filter(None, [root, str(directory), os.environ.get("PYTHONPATH", "")]))
        environment = {**os.environ, WAY: way, RESULT: str(result), "PYTHONPATH": search}
        done = subprocess.run(
            command, cwd=directory, env=environment, capture_output=True, text=True, check=False
        )
        if done.returncode not in (0, 1) or not result.exists():
            raise RuntimeError(
                f"{way}: pytest ended with {done.returncode}\n{done.stdout[-4000:]}{done.stderr[-4000:]}"
            )
        return Run(*json.loads(result.read_text()))


def compare(directory: Path, arguments: list[str]) -> bool:
    """Run all ways, print what was found; True if every difference has a reason, and every way moved data and left none."""
    plain = run(PLAIN, directory, arguments)
    print(
        f"plain: {plain.count('passed')} passed, {plain.count('failed')} failed, {plain.count('skipped')} skipped"
    )
    copying = run(COPYING, directory, arguments)
    left = copying.figures["left"]
    print(f"copying: {copying.count('passed')} passed, {copying.count('failed')} failed; {left} copies left")
    well = plain.count("passed") > 0
    for way in OURS:
        ours = run(way, directory, arguments)
        moving = sum(moved > 0 for moved in ours.moved.values())
        print(
            f"{way}: {ours.count('passed')} passed, {ours.count('failed')} failed; {moving} tests moved data; {ours.figures}"
        )
        for name, outcome in plain.outcomes.items():
            found = ours.outcomes.get(name, "missing")
            if found != outcome:
                why = reason(name, way, ours, copying)
                print(
                    f"  {name}: {outcome}, then {found}: {ours.first_lines.get(name, '')}\n    {why or 'NO REASON'}"
                )
                well = well and why is not None
        # Tests whose backward raises leave their graph in torch, with the copying hooks their copies.
        gone = ours.figures["left"] <= copying.figures["left"]
        well = well and moving > 0 and gone and (way == RACING or ours.figures["loaded_bytes"] > 0)
    return well


def reason(name: str, way: str, ours: Run, copying: Run) -> str | None:
    """Why a test may end otherwise with the engine than without hooks; None: it may not."""
    if copying.outcomes.get(name) == ours.outcomes.get(name):
        return HOOKS
    if "Jacobian mismatch" in ours.first_lines.get(name, "") and way != UNSHARED:
        return DATA
    return None


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    sys.exit(0 if compare(Path(sys.argv[1]).absolute(), sys.argv[2:]) else 1)
