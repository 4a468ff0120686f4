"""What a config asks for, built once and attached to a model: the only door that adapters use.

A training loop tells the runtime what happens, and the runtime turns it into calls on the engine:

```python
runtime = Runtime(load_config({"offload": {"directories": "/nvme"}}), device=torch.device("cuda", 0))
runtime.register(model)                     # its parameters and buffers never move
for step in range(steps):
    with runtime.step():
        for microbatch in range(count):
            with runtime.forward(microbatch=microbatch):
                loss = model(batch[microbatch])
            with runtime.backward(microbatch=microbatch):
                loss.backward()
        optimizer.step()
runtime.close()
```

A pipeline calls `forward` and `backward` in its own order with several microbatches alive, names what comes next by
`next_backward`, and passes `keep=True` where the backward follows its forward at once.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import nn

from ssdtrain.comm import Communicator, Policy
from ssdtrain.comm.models import compress_gradients
from ssdtrain.config import Config, OffloadConfig
from ssdtrain.device import warn_of_untested_torch
from ssdtrain.offload.attached import AttachedForward
from ssdtrain.offload.build import build_engine
from ssdtrain.offload.claims import claim
from ssdtrain.offload.engine import OffloadEngine
from ssdtrain.offload.hooks import SavedTensorRecorder
from ssdtrain.offload.metrics import OffloadMetrics
from ssdtrain.offload.policy import OffloadPolicy
from ssdtrain.offload.sharded import watch_sharded
from ssdtrain.offload.tape import Tape
from ssdtrain.preflight import check_start, make_directories
from ssdtrain.storage import (
    Endurance,
    Faults,
    SpillStore,
    defer_signals,
    inside_section,
)
from ssdtrain.telemetry.journal import Journal
from ssdtrain.telemetry.messages import report
from ssdtrain.telemetry.summary import end_of_run, start_of_run
from ssdtrain.telemetry.totals import RuntimeMetrics, StepMetrics

__all__ = ["Runtime", "RuntimeMetrics"]

logger = logging.getLogger("ssdtrain")

# Steps after which an enabled feature must have done something.
FIRST_STEPS = 3


class Runtime:
    """The engine that a config asks for, for one rank and one model; `engine` is its offloading and `comm` its collectives, each
    None where it is not asked for. With `comm`, making one is a collective call of all ranks.

    Args:
        config: a checked config. With `enabled: false` or no `offload` section every method does nothing.
        device: where the model's activations live.
        rank, local_rank: fill the placeholders of directories.
        local_world_size: ranks that share this node's drives and memory.
        faults: for tests.
        staged: move CPU tensors by the way of device memory too (tests); None: by the device.
        timeline: record every change of activation memory, for a plot.
        logs: write log lines every `report.interval` steps; an adapter that writes its framework's own says False.

    Raises:
        ConfigError: see `check_start`; or a directory cannot be made.
        OSError: a directory cannot be used; names the path and the remedy.
    """

    def __init__(
        self,
        config: Config,
        *,
        device: torch.device | str = "cpu",
        rank: int = 0,
        local_rank: int = 0,
        local_world_size: int = 1,
        policy: OffloadPolicy | None = None,
        faults: Faults | None = None,
        staged: bool | None = None,
        timeline: bool = False,
        logs: bool = True,
    ) -> None:
        self.config = config
        self.device = torch.device(device)
        self.rank = rank
        self.engine: OffloadEngine | None = None
        self.comm: Communicator | None = None
        self.steps = 0
        self._store: SpillStore | None = None
        self._tapes: dict[tuple[int, int], weakref.ref[Tape]] = {}
        self._began = 0.0
        self._step_seconds = 0.0
        self._only_keeps: bool | None = None  # every forward so far was asked to keep; None: there was none
        self._attached: list[Callable[[], None]] = []
        self._journal: Journal | None = None
        self._closing: threading.Thread | None = None  # see Note: [Close in a finalizer]
        check_start(
            config,
            device=self.device,
            rank=rank,
            local_rank=local_rank,
            local_world_size=local_world_size,
        )
        self._endurance = Endurance(())
        self._says = rank == 0 and bool(config.report.interval)
        if config.active:
            interval = config.report.interval if logs else 0
            if interval or config.report.path is not None:
                self._journal = Journal(
                    config.report.expand(rank=rank, local_rank=local_rank), interval, rank
                )
        if config.compresses and config.comm is not None:
            self.comm = self._communicator(Policy.from_config(config.comm))
        if config.active and config.offload is not None:
            self._build(config.offload, policy, rank, local_rank, local_world_size, faults, staged, timeline)
        if self._says and self.enabled:
            report(start_of_run(config, self._store, self.comm.policy if self.comm is not None else None))

    def _communicator(self, policy: Policy) -> Communicator | None:
        if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
            logger.warning("comm does nothing: torch.distributed is not initialised when the runtime is made")
            return None
        if torch.distributed.get_world_size() == 1:
            logger.warning(
                "ssdtrain.comm does nothing: there is one rank, and no message to compress; start several ranks, or leave the "
                "comm section out"
            )
            return None
        warn_of_untested_torch()
        return Communicator(policy, self.device)

    def _build(
        self,
        offload: OffloadConfig,
        policy: OffloadPolicy | None,
        rank: int,
        local_rank: int,
        local_world_size: int,
        faults: Faults | None,
        staged: bool | None,
        timeline: bool,
    ) -> None:
        directories = offload.expand(rank=rank, local_rank=local_rank)
        make_directories(directories)
        warn_of_untested_torch()
        self.engine, store = build_engine(
            offload,
            self.device,
            directories,
            policy=policy,
            rank=rank,
            local_world_size=local_world_size,
            faults=faults,
            staged=staged,
            timeline=timeline,
        )
        self._store = store
        first = rank - local_rank
        others = [r for r in range(local_world_size) if r != local_rank]
        self._endurance = Endurance(
            directories, [offload.expand(rank=first + r, local_rank=r) for r in others]
        )
        # A graph may outlive the runtime, and needs the engine (through its hooks) as long as it lives. The store goes with
        # the engine, and at interpreter exit.
        self._finalizer = weakref.finalize(self.engine, store.close)

    @property
    def enabled(self) -> bool:
        """True if there is anything to do."""
        return self.engine is not None or self.comm is not None

    # The model

    def register(self, model: nn.Module) -> None:
        """Never move the parameters and buffers of `model`. Call it after the framework has wrapped the model."""
        if self.engine is not None:
            self.engine.eligible.register(model)
            if self.engine.policy.needs_modules:
                self.engine.modules.watch(model)

    def attach(self, model: nn.Module) -> None:
        """Offload what every call of `model` saves, until `close`. Each call with gradients is one tape.

        `model.forward` is wrapped on the instance, outside of what `torch.compile` compiles; deep copies of the model and what
        is written of it by pickle are not offloaded. With `comm`, the gradients of DistributedDataParallel and FSDP2 are
        compressed from now on.

        Raises:
            ValueError: `comm` is asked for, and nothing about the model reduces gradients; or an adapter offloads the model.
        """
        if self.engine is not None:
            self._attached.append(claim(model, "ssdtrain.attach"))
        if self.comm is not None:
            compress_gradients(model, self.comm)
        if self.engine is None:
            return
        self.register(model)
        gathered = watch_sharded(model)
        if gathered is not None:
            self._attached.append(gathered.remove)
            self.engine.eligible.fixed_when(gathered.__contains__)
        self._attached.append(AttachedForward(model, self.forward).detach)

    # The loop

    @contextmanager
    def step(self) -> Iterator[None]:
        """One optimizer step; an exception inside still ends it."""
        self.step_begin()
        try:
            yield
        finally:
            self.step_end()

    def step_begin(self) -> None:
        """Parameters may have moved since the last step: look where they are."""
        self._began = time.perf_counter()
        if self.engine is not None:
            self.engine.eligible.refresh()

    def step_end(self, skipped: bool = False, number: int | None = None) -> None:
        """Count the step, write its metrics, and warn if something is on and has done nothing.

        Args:
            skipped: its gradients overflowed and were dropped.
            number: of the step, for the log and the file; None: the steps of this runtime are counted.
        """
        seconds = time.perf_counter() - self._began if self._began else 0.0
        self._step_seconds += seconds
        self._began = 0.0
        self.steps += 1
        if self.engine is not None:
            if self.engine.forked:
                return
            self.engine.drain()
        if self.comm is not None:
            self.comm.step_end(skipped)
        if self._journal is not None and (now := self.statistics()) is not None:
            self._journal.step(self.steps if number is None else number, now)
        if self.steps == FIRST_STEPS and self.engine is not None:
            self._complain_of_idleness(self.engine.snapshot())

    def _complain_of_idleness(self, found: OffloadMetrics) -> None:
        if found.offloaded_bytes or found.cancelled_bytes or found.kept_full_bytes or found.kept_late_bytes:
            return
        if self._only_keeps:
            return  # the last stage of a pipeline
        if not found.saved_tensors:
            why = "no saved tensor was seen: is the forward inside the runtime, and do inner saved-tensor hooks take all of it?"
        elif not found.saved_bytes:
            why = (
                f"none of {found.saved_tensors} saved tensors may move: lower offload.min_bytes "
                f"({self.engine.options.min_bytes if self.engine else 0} bytes), and check the device ({self.device})"
            )
        else:
            why = (
                f"the policy kept all {found.saved_bytes} bytes: raise offload.amount, and check that the patterns of "
                "offload.include and offload.exclude leave something"
            )
        logger.warning("offload is enabled and moved nothing in the first %d steps: %s", FIRST_STEPS, why)

    def forward(
        self, chunk: int = 0, microbatch: int | None = None, *, keep: bool = False
    ) -> AbstractContextManager[Tape | None]:
        """A context for the forward of one microbatch on one model chunk.

        Args:
            chunk: the model chunk (virtual pipeline stage) on this rank.
            microbatch: names the tape together with `chunk` until its backward; None: one that nobody names.
            keep: its backward follows at once, so nothing leaves memory.
        """
        if self.engine is None:
            return nullcontext()
        if microbatch is None:
            microbatch = -1
        defer_signals()
        self._only_keeps = keep and self._only_keeps is not False
        tape = Tape(chunk, microbatch, keep=keep)
        self._tapes[chunk, microbatch] = weakref.ref(tape)
        return SavedTensorRecorder(self.engine, tape)

    @contextmanager
    def backward(self, chunk: int = 0, microbatch: int | None = None) -> Iterator[None]:
        """A context for the backward of a tape: its loads start now, its end is noted."""
        tape = self._tape(chunk, -1 if microbatch is None else microbatch)
        if self.engine is None or tape is None:
            yield
            return
        self.engine.prefetch(tape)
        try:
            yield
        finally:
            self.engine.drain()

    def next_backward(self, *tapes: tuple[int, int]) -> None:
        """Name the (chunk, microbatch) whose backwards come next, in order.

        Their loads start as soon as the present backward leaves room; with none running, now.
        """
        if self.engine is None:
            return
        found = [tape for key in tapes if (tape := self._tape(*key)) is not None]
        self.engine.next_backward(found)
        if found:
            self.engine.prefetch(found[0])

    def _tape(self, chunk: int, microbatch: int) -> Tape | None:
        known = self._tapes.get((chunk, microbatch))
        tape = known() if known is not None else None
        if tape is None:
            self._tapes.pop((chunk, microbatch), None)
        return tape

    # Metrics

    def statistics(self) -> RuntimeMetrics | None:
        """The metrics so far, which `print` shows as a table; None where nothing is enabled."""
        if not self.enabled:
            return None
        store = self._store.stats if self._store is not None else None
        written = {drive.path: drive.bytes_written for drive in store.drives} if store is not None else {}
        return RuntimeMetrics(
            self.steps,
            StepMetrics(self._step_seconds, self._endurance.life(written, self._step_seconds)),
            self.engine.snapshot() if self.engine is not None else None,
            store,
            self.comm.figures() if self.comm is not None else {},
        )

    def reset_peak(self) -> None:
        """Begin a new peak of activation memory."""
        if self.engine is not None:
            self.engine.reset_peak()

    def close(self) -> None:
        """Detach from models, wait for what is in flight, close files and buffers. Idempotent.

        Note: [Close in a finalizer]
        Cyclic collection may run a finalizer, and in it this method, at any allocation: also on a thread that holds a lock that
        closing needs, or that serves the transfers it waits for. There a thread of its own closes, as soon as the lock is free.
        """
        while self._attached:
            self._attached.pop()()
        if inside_section():
            if self._closing is None:
                self._closing = threading.Thread(target=self._close, name="ssdtrain-close")
                self._closing.start()
            return
        if self._closing is not None:
            self._closing.join()
        self._close()

    def _close(self) -> None:
        forked = self.engine is not None and self.engine.forked
        found = self.statistics() if self._says and self.steps and not forked else None
        self._says = False
        if self.engine is not None:
            self.engine.modules.close()
            self.engine.close()
            self._finalizer()
        if self._journal is not None:
            self._journal.close()
        if found is not None:
            report(end_of_run(found))

    def __enter__(self) -> Runtime:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
