"""Builds and owns the features that a config enables; entry point for integrations.

A training loop announces its events, and the runtime passes them to its features (`ssdtrain.features`):

```python
runtime = Runtime(load_config({"offload": {"directories": "/nvme"}}), torch.device("cuda", 0))
runtime.register(model)                     # after the framework has wrapped it
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

import copy
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from types import TracebackType
from typing import Any, NamedTuple

import torch
from torch import nn

from ssdtrain.comm import Communicator
from ssdtrain.comm.feature import CompressedCollectives
from ssdtrain.compact.feature import CompactLinear
from ssdtrain.config import Config
from ssdtrain.features import UNNAMED, Feature, Forward, Microbatch, Placement
from ssdtrain.messages import report
from ssdtrain.offload.engine import OffloadEngine
from ssdtrain.offload.feature import ActivationOffload
from ssdtrain.offload.policy import OffloadPolicy
from ssdtrain.offload.tensors.tape import Tape
from ssdtrain.planner.build import offload_features
from ssdtrain.planner.plan_blocks import PlanBlocks
from ssdtrain.preflight import check_start, check_state, make_directories, warn_about_drives
from ssdtrain.state.feature import ModelState
from ssdtrain.steps import Step, StepClock
from ssdtrain.storage import Faults, forks, holds_signal_safe_lock
from ssdtrain.telemetry.journal import Journal
from ssdtrain.telemetry.summary import summary
from ssdtrain.telemetry.totals import RuntimeMetrics, StepMetrics

__all__ = ["Runtime", "RuntimeMetrics", "Seams"]

logger = logging.getLogger("ssdtrain")


class Seams(NamedTuple):
    """What tests change about a runtime."""

    faults: Faults | None = None
    """Faults of storage."""
    staged: bool | None = None
    """Whether CPU tensors pass through device memory and staging buffers; None: as the device needs it."""


class Runtime:
    """The features that a config enables, for one rank and one model. With `comm`, making one is a collective call of all ranks.

    Args:
        config: a checked config. With `enabled: false`, or without a section that enables anything and without `features`,
            every method does nothing.
        place: the device where the model's activations live; or with it the position of this process in the job, which is
            torch.distributed's rank and the launcher's (`ranks`) otherwise.
        policy: decides for each saved tensor in place of `offload.amount`, also where that is "auto". Not with a plan.
        plan_blocks: what `plan` may recompute; None: it keeps and offloads only.
        features: more features, see `ssdtrain.features`. They are closed with the runtime.
        logs: write log lines every `report.interval` steps; False for an adapter that writes its framework's own.
        chunked_state: the integration serves `state`: its framework leaves parameters and optimizer to torch.
        seams: for tests.

    Attributes:
        features: in the order in which events reach them, see Note: [Order of features] in `ssdtrain.features`.
        clock: says when a step is over.
        offload: the feature that offloads activations; None: not enabled.
        collectives: the feature of compressed collectives; None: not enabled.
        compact: the feature that compresses inputs of linear layers; None: not enabled.
        state: the feature that keeps the model's state in chunks, whose `optimizer` is set before `register`; None: not enabled.

    Raises:
        ConfigError: see `check_start` and `check_state`; or a directory cannot be made.
        OSError: a directory cannot be used; names the path and the remedy.
        ValueError: two features have metrics of one name.
    """

    def __init__(
        self,
        config: Config,
        place: Placement | torch.device | str = "cpu",
        *,
        policy: OffloadPolicy | None = None,
        plan_blocks: PlanBlocks | None = None,
        features: Sequence[Feature] = (),
        logs: bool = True,
        chunked_state: bool = False,
        seams: Seams = Seams(),  # noqa: B008 - a tuple
    ) -> None:
        place = place if isinstance(place, Placement) else Placement.of(place)
        self.config, self.device, self.rank = config, place.device, place.rank
        self.features: list[Feature] = []
        self.offload: ActivationOffload | None = None
        self.collectives: CompressedCollectives | None = None
        self.compact: CompactLinear | None = None
        self.state: ModelState | None = None
        self.clock = StepClock(self._step_over, self._backward_over, self._unended)
        self._step_seconds = 0.0
        self._before_reset: RuntimeMetrics | None = None
        self._undo = ExitStack()
        self._journal: Journal | None = None
        self._closing: threading.Thread | None = None  # see Note: [Close in a finalizer]
        self._forked = self._warned_unended = False
        self._reports = place.rank == 0 and bool(config.report.interval)
        check_start(config, place)
        if config.enabled and config.state is not None:
            check_state(config, chunked_state)
        if not config.enabled or not (config.active or features):
            return
        forks.track(self)
        try:
            self._build(place, policy, plan_blocks, features, logs, seams)
        except BaseException:
            self._reports = False
            self.close()
            raise
        if self._reports and self.features:
            report(" | ".join(text for feature in self.features if (text := feature.description())))

    def _build(
        self,
        place: Placement,
        policy: OffloadPolicy | None,
        plan_blocks: PlanBlocks | None,
        given: Sequence[Feature],
        logs: bool,
        seams: Seams,
    ) -> None:
        config, clock = self.config, self.clock
        # 1. Parts that others are made with.
        self._journal = Journal.open(config.report, place, logs=logs)
        self.collectives = CompressedCollectives.from_config(config, place, clock)
        if config.compact is not None:
            self.compact = CompactLinear(config.compact, place, lambda: clock.steps)
        # 2. Offloading, what records it, what plans it: see Note: [Order of features].
        planning: list[Feature] = []
        if config.state is not None:
            directories = config.state.expand(rank=place.rank, local_rank=place.local_rank)
            make_directories(directories, "ssdtrain.state.directories")
            self.state = ModelState(
                config.state, directories, place, **seams._asdict(), planned=bool(config.plans)
            )
            self.features = [self.state]  # closed if what follows raises
        if config.offload is not None:
            directories = config.offload.expand(rank=place.rank, local_rank=place.local_rank)
            make_directories(directories)
            if place.local_rank == 0:
                warn_about_drives(config.offload, directories)
        if config.offload is not None or config.plans or config.measures:
            self.offload, planning = offload_features(
                config,
                place,
                policy=policy,
                plan_blocks=plan_blocks,
                compact=self.compact,
                state=self.state,
                faults=seams.faults,
                staged=seams.staged,
                reports=self._reports,
            )
            self.features += [self.offload, *planning]
        # 3. The rest.
        others = [part for part in (self.collectives, self.compact, self.state) if part is not None]
        if self.offload is not None or others or given:
            journal = self._journal
            recording = (
                [] if journal is None else journal.recorders(config.report, place, self.engine, self.comm)
            )
            offloading = [] if self.offload is None else [self.offload]
            self.features = [*offloading, *recording, *planning, *others, *given]
            clock.watch_optimizers()
        self._check_metrics()

    @property
    def engine(self) -> OffloadEngine | None:
        """The engine that offloads activations; None: not enabled."""
        return None if self.offload is None else self.offload.engine

    @property
    def comm(self) -> Communicator | None:
        """The communicator of compressed collectives; None: not enabled."""
        return None if self.collectives is None else self.collectives.comm

    def _check_metrics(self) -> None:
        owner: dict[str, str] = {}
        for feature in self.features:
            name = type(feature).__name__
            for prefix, found in feature.metrics():
                for metric in found.declared(prefix):
                    if metric.name in owner:
                        raise ValueError(
                            f"the features {owner[metric.name]} and {name} both have a metric {metric.name!r}: give the "
                            "metrics of one of them another prefix"
                        )
                    owner[metric.name] = name
        if self._journal is not None:
            self._journal.reserved |= {*owner, *(metric.name for metric in StepMetrics.declared())}

    def after_fork(self) -> None:
        """Count and report nothing any more in a forked child. Features do so by themselves."""
        self._forked = True

    @property
    def reports(self) -> bool:
        """Whether this rank writes log lines: rank 0 does, unless `report.interval` is 0."""
        return self._reports

    @property
    def moves(self) -> bool:
        """Whether saved tensors may leave memory; False: there is no offload section, or one with an amount of 0."""
        return self.config.offload is not None and self.config.offload.moves

    @property
    def enabled(self) -> bool:
        """True if there is a feature."""
        return bool(self.features)

    @property
    def steps(self) -> int:
        """Steps that are over."""
        return self.clock.ended

    # The model

    def register(self, model: nn.Module) -> None:
        """Attach the features to `model`. Call it once for each model, after the framework has wrapped it."""
        self.clock.attach(model)
        for feature in self.features:
            feature.attach(model)

    def call_at_close(self, undo: Callable[[], object]) -> None:
        """Call `undo` when this runtime closes, before its features detach; the latest first."""
        self._undo.callback(undo)

    # The loop

    @contextmanager
    def step(self) -> Iterator[None]:
        """One optimizer step; an exception inside still ends it, without communication between ranks."""
        self.step_begin()
        try:
            yield
        except BaseException:
            self._end_step(failed=True)
            raise
        self.step_end()

    def step_begin(self) -> None:
        """Announce that a step begins; the optimizer may have moved parameters since the last one."""
        self.clock.begin()
        self._step_begins()

    def step_end(self, skipped: bool = False, number: int | None = None) -> None:
        """Announce that a step is over. A loop with an optimizer of torch need not: see `ssdtrain.steps.StepClock`.

        Args:
            skipped: its gradients overflowed and were dropped.
            number: of the step, for the log and the file; None: the steps of this runtime are counted.
        """
        self._end_step(number, skipped=skipped)

    def _end_step(self, number: int | None = None, *, skipped: bool = False, failed: bool = False) -> None:
        if not self._forked:
            self.clock.end(number, skipped=skipped, failed=failed)

    def _step_begins(self) -> None:
        for feature in self.features:
            feature.on_step_begin()

    def _step_over(self, step: Step) -> None:
        if self._forked:
            return
        self._step_seconds += step.seconds
        for feature in self.features:
            feature.on_step_end(step)
        if self._journal is not None and (now := self.statistics()) is not None:
            decided = [text for feature in self.features if (text := feature.decisions())]
            self._journal.step(step.number, now, decided)
        if not step.announced and not step.closing:
            self._step_begins()

    def _backward_over(self) -> None:
        for feature in self.features:
            feature.on_backward_over()

    def _unended(self) -> None:
        missed = [text for feature in self.features if (text := feature.on_unended_step())]
        if self._journal is not None and self._journal.records:
            missed.append("report: nothing is recorded until a step ends")
        self._warn_unended(missed)

    def _warn_unended(self, missed: Sequence[str]) -> None:
        if missed and not self.steps and not self._warned_unended:
            self._warned_unended = True
            logger.warning(
                "ssdtrain: %d forwards ran without the end of a step: %s. Call runtime.step_end() after each optimizer step, or "
                "run each step inside of runtime.step()",
                self.clock.forwards,
                "; ".join(missed),
            )

    def log_values(self, **values: float) -> None:
        """Add values of the training script, as in `log_values(loss=loss.item())`, to this step's line of the journal
        (`report.path`). Call it before the end of the step; without a journal it does nothing.

        Raises:
            ValueError: a name is one of SSDTrain's own metrics, or a value is not a number.
        """
        if self._journal is not None:
            self._journal.add(values)

    def log_late_values(self, **values: float) -> None:
        """Add values to the step that ended last, as `log_values` to the step that goes on. Before the first end of a step it
        is that step.

        Raises:
            ValueError: see `log_values`.
        """
        if self._journal is not None:
            self._journal.add(values, late=True)

    def forward(
        self, chunk: int = 0, microbatch: int | None = None, *, keep: bool = False
    ) -> AbstractContextManager[Tape | None]:
        """A context for the forward of one microbatch on one model chunk; it gives the tape, or None where nothing is offloaded.

        Args:
            chunk: the model chunk (virtual pipeline stage) on this rank.
            microbatch: names the tape together with `chunk` until its backward; None: an unnamed one.
            keep: its backward follows at once, so nothing leaves memory.
        """
        forward = Forward(chunk, UNNAMED if microbatch is None else microbatch, keep)
        if self.features:
            self.clock.forward_begins()
        return _Contexts(self.features, lambda feature: feature.on_forward(forward))

    def call(self, module: nn.Module, arguments: Any) -> AbstractContextManager[Tape | None]:
        """Return a context as `forward` does, for a call of a module that the loop makes with `arguments`."""
        self.clock.before_forward()
        for feature in self.features:
            feature.before_call(module, arguments)
        return self.forward()

    def backward(self, chunk: int = 0, microbatch: int | None = None) -> AbstractContextManager[Tape | None]:
        """A context for the backward of a tape: its loads start now, its end is noted."""
        backward = Microbatch(chunk, UNNAMED if microbatch is None else microbatch)
        return _Contexts(self.features, lambda feature: feature.on_backward(backward))

    def next_backward(self, *tapes: tuple[int, int]) -> None:
        """Name the (chunk, microbatch) whose backwards come next, in order.

        Their loads start as soon as the current backward leaves room; with none running, now.
        """
        upcoming = [Microbatch(*tape) for tape in tapes]
        for feature in self.features:
            feature.on_next_backward(upcoming)

    def accumulate(
        self, model: nn.Module, microbatches: Sequence[Any], loss: Callable[[nn.Module, Any], torch.Tensor]
    ) -> list[torch.Tensor]:
        """Accumulate the gradients of microbatches block by block, with a `state` section: each block runs all of them before the
        next one does, so that a further microbatch moves no weights. The gradients are those of a backward for each, to the bit.

        Example:
            >>> losses = runtime.accumulate(model, microbatches, lambda model, batch: model(batch).mean() / 8)
            >>> optimizer.step()

        Args:
            model: the attached one.
            loss: called with the model and a microbatch, each on a thread of its own, one running at a time. What is entered
                around forward belongs inside; autocast and the CUDA stream are taken over.

        Returns:
            The losses, without a graph.

        Raises:
            RuntimeError: there is no `state` section; or the model draws random numbers, ties parameters of several blocks, or
                is another one for each microbatch: see `ssdtrain.state.vertical`.
        """
        if self.state is None:
            raise RuntimeError(
                "runtime.accumulate needs the config section state, whose weights it saves from moving"
            )
        return self.state.accumulate(model, microbatches, loss)

    # Metrics

    def statistics(self) -> RuntimeMetrics | None:
        """The metrics so far, which `print` shows as a table; None where nothing is enabled."""
        if not self.enabled:
            return None
        sets = [
            (prefix, copy.copy(found)) for feature in self.features for prefix, found in feature.metrics()
        ]
        return RuntimeMetrics(self.steps, StepMetrics(self._step_seconds), sets)

    def reset_peak(self) -> None:
        """Begin a new peak of activation memory."""
        self._before_reset = self.statistics()
        for feature in self.features:
            feature.reset_peak()

    def close(self) -> None:
        """Detach from models, wait for what is in flight, close files and buffers. Idempotent.

        Note: [Close in a finalizer]
        Cyclic collection may run a finalizer, and in it this method, at any allocation: also on a thread that holds a lock that
        closing needs, or that serves the transfers it waits for. There a thread of its own closes, as soon as the lock is free.
        """
        with ExitStack() as closing:  # all are called, the last first, whatever one of them raises
            closing.callback(self._close_features)
            closing.callback(self._undo.close)
            closing.callback(self._end_last_step)

    def _end_last_step(self) -> None:
        if self._forked or holds_signal_safe_lock():
            self.clock.remove()
            return
        self.clock.close()
        if self.clock.forwards and self._journal is not None and self._journal.records:
            self._warn_unended(["report: nothing is recorded until a step ends"])

    def _close_features(self) -> None:
        if holds_signal_safe_lock():
            if self._closing is None:
                self._closing = threading.Thread(target=self._close, name="ssdtrain-close")
                self._closing.start()
            return
        if self._closing is not None:
            self._closing.join()
        self._close()

    def _close(self) -> None:
        found = self.statistics() if self._reports and self.steps and not self._forked else None
        before, seconds = self._before_reset, found.step_seconds if found is not None else 0.0
        if found is not None and before is not None and before.steps == found.steps:
            found = before  # peaks began anew after the last step: there was none since
        limits = [text for feature in self.features if (text := feature.limited_by(seconds))]
        self._reports = False
        with ExitStack() as closing:  # all are closed, whatever one of them raises
            if self._journal is not None:
                closing.callback(self._journal.close)
            for feature in self.features:
                closing.callback(feature.close)
            for feature in self.features:
                closing.callback(feature.detach)
        if found is not None:
            report(summary(found, limits[-1] if limits else ""))
            if self.config.report.verbose:
                report(f"all metrics\n{found}")

    def __enter__(self) -> Runtime:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Contexts:
    """Enters what features return for an event, in their order, and gives the tape that one of them records."""

    def __init__(
        self, features: list[Feature], enter: Callable[[Feature], AbstractContextManager[Any] | None]
    ) -> None:
        self._features = features
        self._enter = enter
        self._entered = ExitStack()

    def __enter__(self) -> Tape | None:
        tape: Tape | None = None
        with ExitStack() as entered:
            for feature in self._features:
                context = self._enter(feature)
                value = entered.enter_context(context) if context is not None else None
                if isinstance(value, Tape):
                    tape = value
            self._entered = entered.pop_all()
        return tape

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        return self._entered.__exit__(kind, error, trace)
