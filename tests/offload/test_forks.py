"""Processes that are forked while tensors are on their way: by a data loader, and in the middle of backward."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from ssdtrain.offload import functorch
from ssdtrain.runtime import Runtime
from tests.offload import zoo
from tests.offload.conftest import VARIANTS, MakeRuntime, Variant, settled
from tests.offload.test_equality import same
from tests.support.tiers import tiered

STEPS = 3


class Examples(Dataset[tuple[torch.Tensor, int]]):
    """Noise, and how many spill files the process that made it holds."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def __len__(self) -> int:
        return 4 * STEPS

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        generator = torch.Generator().manual_seed(index)
        return torch.randn(64, generator=generator), spill_files(self.directory)


def spill_files(directory: Path) -> int:
    """Descriptors of this process that lead to files of `directory`, whether they still have a name or not."""
    held = 0
    for entry in os.listdir("/proc/self/fd"):
        try:
            held += os.readlink(f"/proc/self/fd/{entry}").startswith(f"{directory}/")
        except FileNotFoundError:
            continue  # the listing's own
    return held


def fork_here(gradient: torch.Tensor) -> None:
    """A child that looks at what it inherited and ends, in the middle of backward."""
    child = os.fork()
    if child == 0:
        os._exit(0 if bool(torch.isfinite(gradient).all()) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def train(runtime: Runtime | None, directory: Path) -> list[torch.Tensor]:
    """Losses and gradients. Each epoch's workers are forked between a forward and its backward, with its stores in flight."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64), nn.GELU(), nn.Linear(64, 1))
    found = []
    for _ in range(2):
        loss = None
        for _ in range(STEPS):
            with runtime.forward() if runtime is not None else nullcontext():
                ahead = model(zoo.noise(32, 64)).square().mean()
            loader = DataLoader(
                Examples(directory), batch_size=4, num_workers=2, multiprocessing_context="fork"
            )
            batches = iter(loader)
            with runtime.backward() if runtime is not None else nullcontext():
                ahead.register_hook(fork_here)
                ahead.backward()
            for examples, held in batches:
                assert not held.any(), "a data loader's worker holds a spill file, and with it the space"
                with runtime.forward() if runtime is not None else nullcontext():
                    loss = model(examples).square().mean()
                loss.backward()
        found += [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
    return found


@pytest.mark.parametrize("way", tiered(VARIANTS[:3], quick=VARIANTS[:1]), ids=lambda v: v.name)
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_forks_with_stores_in_flight_change_no_bit_and_hold_no_space(
    way: Variant, make_runtime: MakeRuntime, tmp_path: Path
) -> None:
    runtime = make_runtime(way)
    assert same(train(None, tmp_path), train(runtime, tmp_path))
    assert spill_files(tmp_path) > 0, "the check sees no spill file even where there is one"
    found = runtime.statistics()
    assert found.offload.offloaded_bytes + found.offload.avoided_write_bytes > 0


def exit_code_of_a_child(lock: AbstractContextManager[Any], act: Callable[[], object]) -> int:
    """Fork while another thread holds `lock`; the child acts and ends."""
    held, over = threading.Event(), threading.Event()

    def hold() -> None:
        with lock:
            held.set()
            over.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)  # ends it wherever it waits
        signal.alarm(60)
        try:
            act()
            os._exit(0)
        finally:
            os._exit(1)
    ended = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    over.set()
    thread.join()
    return ended


@pytest.mark.parametrize("holds", ["engine", "store"])
@pytest.mark.parametrize("way", VARIANTS[:2], ids=lambda v: v.name)
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_child_has_the_figures_of_the_fork_and_nothing_to_wait_for(
    holds: str, way: Variant, make_runtime: MakeRuntime
) -> None:
    """Whatever lock another thread holds at the fork is never released in the child."""
    runtime = make_runtime(way, host="1MiB")
    engine, store = runtime.engine, runtime.offload.store
    x = zoo.noise(64, 64).requires_grad_()
    with runtime.forward():
        loss = x.sin().cos().sum()
    settled(runtime)
    known = runtime.statistics()
    assert known.store.bytes_written > 0

    def figures_are_known() -> None:
        found = runtime.statistics()
        for name in ("bytes_written", "live_slots", "live_bytes", "capacity_bytes"):
            assert getattr(found.store, name) == getattr(known.store, name)
        assert found.offload.offloaded_bytes == known.offload.offloaded_bytes > 0
        runtime.step_end()
        runtime.close()

    ended = exit_code_of_a_child(engine._lock if holds == "engine" else store._lock, figures_are_known)
    loss.backward()
    assert ended == 0


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_child_forked_while_another_thread_begins_a_forward_can_record_its_own() -> None:
    """All recorders of a process share a lock, which the other thread never releases in the child."""

    def record() -> None:
        with functorch.StepAside():
            pass

    assert exit_code_of_a_child(functorch._lock, record) == 0
