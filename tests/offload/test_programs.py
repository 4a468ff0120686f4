"""Programs that nobody would write, on drives that nobody would buy, against autograd without hooks."""

from __future__ import annotations

import gc
import tempfile
import threading
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ssdtrain.config import load_config
from ssdtrain.runtime import Runtime, Seams
from ssdtrain.storage import Faults
from tests.offload.conftest import (
    IN_PARTS,
    LAGGING,
    VARIANTS,
    Variant,
    holds_nothing,
    offload_parts,
    only_slots,
    settled,
)
from tests.offload.programs import NAMES, UNARY, Instruction, Machine, same
from tests.offload.reference import SynchronousOffload
from tests.support.lagging import LaggingDevice

INSTRUCTIONS = st.lists(
    st.tuples(st.sampled_from(NAMES), st.integers(0, 50), st.integers(0, 50)), min_size=25, max_size=50
)
FAULTS = st.builds(
    Faults,
    seed=st.integers(0, 1000),
    delay=st.sampled_from([0.0, 0.3, 1.0]),
    max_delay=st.just(0.002),
    short=st.sampled_from([0.0, 0.5]),
    interrupt=st.sampled_from([0.0, 0.3]),
    write_failure=st.sampled_from([0.0, 0.0, 0.3]),
    torn=st.booleans(),
)
OPTIONS = st.fixed_dictionaries(
    {
        "in_flight": st.sampled_from([1, "32KiB", "1MiB"]),
        "prefetch": st.sampled_from([0, "16KiB", "1MiB"]),
        "amount": st.sampled_from(["all", "0.5", "24KiB"]),
        "engine": st.sampled_from(["c", "python"]),
        "host": st.sampled_from([0, "2MiB"]),
        "capacity": st.sampled_from(["64KiB", "1GiB"]),
        "collecting": st.booleans(),
    }
)


WAYS = ("offloaded_bytes", "loaded_bytes", "avoided_write_bytes", "kept_full_bytes", "failed_stores")
"""Figures of the engine that must not stay 0 over all programs: each is a way that a region can go."""


class CollectingLock:
    """A lock inside of which the garbage collector runs, so that whatever it frees dies in a locked section."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        self._lock.acquire()
        gc.collect(0)

    def __exit__(self, *exception: object) -> None:
        gc.collect(0)
        self.release()

    def acquire(self, blocking: bool = True) -> bool:
        return self._lock.acquire(blocking)

    def release(self) -> None:
        self._lock.release()


@contextmanager
def make(directory: str, variant: Variant, options: dict[str, Any], faults: Faults) -> Iterator[Runtime]:
    options = dict(options)
    collecting = options.pop("collecting")
    section = {"directories": directory, "min_bytes": 1024, "buffer": "4MiB", **options}
    with ExitStack() as stack:
        if variant.lagging:
            device = LaggingDevice(faults.seed)
            stack.callback(device.close)
            stack.enter_context(patch("ssdtrain.offload.build.device_for", lambda _: device))
        injected = None if options.get("engine") == "python" else faults
        runtime = Runtime(load_config({"offload": section}), seams=Seams(injected, variant.staged or None))
        stack.enter_context(runtime)
        if variant.slots is not None:
            only_slots(runtime, variant.slots)
        if variant.part is not None:
            offload_parts(runtime, variant.part)
        if collecting:
            runtime.engine._lock = CollectingLock()  # type: ignore[assignment]
        yield runtime


def machine(runtime: Runtime, seed: int, *, keeps: bool = False) -> Machine:
    """Runs programs with the engine."""
    device = runtime.engine.device
    copied = device.wait_for_stores if isinstance(device, LaggingDevice) else lambda: None
    return Machine(runtime.forward, seed, lambda: settled(runtime), runtime.close, copied, keeps)


def agree(program: list[Instruction], seed: int, runtime: Runtime, *, keeps: bool = False) -> None:
    plain = Machine(nullcontext, seed, keeps=keeps).run(program)
    ours = machine(runtime, seed, keeps=keeps).run(program)
    names = {name for name, *_ in program}
    difference = same(plain, ours, freed="free" in names, closed=keeps or "close" in names)
    assert difference is None, difference


def any_program(variant: Variant, ways: Sequence[str] = WAYS, **how: Any) -> None:
    """Programs drawn by hypothesis, with `settings(**how)`; between them they must have taken all of `ways` a region can go."""
    went = Counter[str]()

    @settings(deadline=None, suppress_health_check=list(HealthCheck), **how)
    @given(program=INSTRUCTIONS, seed=st.integers(0, 5), options=OPTIONS, faults=FAULTS)
    def run(program: list[Instruction], seed: int, options: dict[str, Any], faults: Faults) -> None:
        with tempfile.TemporaryDirectory() as directory, make(directory, variant, options, faults) as runtime:
            agree(program, seed, runtime)
            gc.collect()
            holds_nothing(runtime)
            found = runtime.statistics()
            assert found is not None
            for name in WAYS:
                went[name] += getattr(found.offload, name)

    run()
    assert all(went[name] for name in ways), went


@pytest.mark.parametrize(
    "variant",
    [
        VARIANTS[0],
        *(pytest.param(one, marks=pytest.mark.slow) for one in (*VARIANTS[2:5], LAGGING, *IN_PARTS)),
    ],
    ids=lambda v: v.name,
)
def test_any_program_on_any_drive(variant: Variant) -> None:
    """What is drawn depends on the version of Python: so few programs need not meet a write that fails."""
    any_program(variant, ("offloaded_bytes", "loaded_bytes"), max_examples=16, derandomize=True)


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("variant", [*VARIANTS[:6], LAGGING, *IN_PARTS], ids=lambda v: v.name)
def test_a_thousand_programs_each_on_any_drive(variant: Variant) -> None:
    any_program(variant, max_examples=1000)


def test_no_program_frees_memory_that_a_copy_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What such a copy brings is wrong, and goes unseen where the memory comes back at the same address (docs/storage.md): on a
    loaded machine a program that did so had another gradient."""
    storing: list[bool] = []
    full = torch.full
    options = {"amount": "all", "collecting": False}
    with make(str(tmp_path), LAGGING, options, Faults()) as runtime:
        device = runtime.engine.device  # type: ignore[union-attr]
        assert isinstance(device, LaggingDevice)
        device._store._delay = lambda: 0.02

        def allocated(*arguments: Any, **named: Any) -> torch.Tensor:
            storing.append(device.storing())
            return full(*arguments, **named)

        monkeypatch.setattr(torch, "full", allocated)  # who gets the memory
        machine(runtime, 0).run([("free", 2, unary) for unary in range(len(UNARY))])
    assert len(storing) >= len(UNARY) and not any(storing)


def test_a_backward_that_raises_elsewhere_holds_nothing_when_its_thread_has_been_joined() -> None:
    """What is alive at the end of a program is counted at once, also on a loaded machine, where a thread takes its time to go."""
    saved = weakref.WeakSet[_Saved]()

    def pack(tensor: torch.Tensor) -> _Saved:
        saved.add(held := _Saved(tensor))
        return held

    def unpack(held: _Saved) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls > 2:  # not those of the loss: two branches have been queued
            raise RuntimeError("a branch fails")
        return held.tensor

    for _ in range(20):
        calls = 0
        program = Machine(nullcontext, 0)
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            program.do_unary(0, 0)
            program.do_unary(1, 0)
            program.do_loss(2, 3)
        program.do_elsewhere(0, 0)
        assert program.shown == [("error", "a branch fails")]
        program.values.clear()
        program.losses.clear()
        assert not saved


class _Saved:
    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor.detach()


@pytest.mark.slow
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(programs=st.lists(INSTRUCTIONS, min_size=3, max_size=3), options=OPTIONS, faults=FAULTS)
def test_three_programs_at_once_in_threads(
    programs: list[list[Instruction]], options: dict[str, Any], faults: Faults
) -> None:
    three_at_once(programs, options, faults)


@pytest.mark.long
@pytest.mark.timeout(3600)
@settings(max_examples=500, deadline=None, suppress_health_check=list(HealthCheck))
@given(programs=st.lists(INSTRUCTIONS, min_size=3, max_size=3), options=OPTIONS, faults=FAULTS)
def test_three_programs_at_once_in_threads_five_hundred_times(
    programs: list[list[Instruction]], options: dict[str, Any], faults: Faults
) -> None:
    three_at_once(programs, options, faults)


def three_at_once(programs: list[list[Instruction]], options: dict[str, Any], faults: Faults) -> None:
    errors: list[BaseException] = []
    # Closed by one, it is closed for all.
    closes = any(name == "close" for program in programs for name, *_ in program)
    with tempfile.TemporaryDirectory() as directory, make(directory, VARIANTS[0], options, faults) as runtime:

        def run(seed: int) -> None:
            try:
                agree(programs[seed], seed, runtime, keeps=closes)
            except BaseException as error:  # noqa: BLE001 - shown below, on the thread of the test
                errors.append(error)

        threads = [threading.Thread(target=run, args=(seed,)) for seed in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive(), "a thread hangs"
        assert not errors, errors
        gc.collect()
        holds_nothing(runtime)


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(program=INSTRUCTIONS, seed=st.integers(0, 5))
def test_the_synchronous_reference_agrees_where_nothing_is_written(
    program: list[Instruction], seed: int
) -> None:
    """The reference knows no versions, so programs without in-place writes are what it can vouch for."""
    program = [instruction for instruction in program if instruction[0] not in ("write", "numpy")]
    with tempfile.TemporaryDirectory() as directory:
        reference = SynchronousOffload(Path(directory), 1024)
        plain = Machine(nullcontext, seed).run(program)
        difference = same(plain, Machine(reference.hooks, seed).run(program))
        assert difference is None, difference
