"""Offloading of activations as a feature of a runtime."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager

from torch import nn

from ssdtrain.config import EnduranceConfig, OffloadConfig
from ssdtrain.device import warn_of_untested_torch
from ssdtrain.features import Feature, Forward, Microbatch, Placement, Step
from ssdtrain.metrics import MetricSet
from ssdtrain.offload.build import build_engine
from ssdtrain.offload.checks.proof import Prover
from ssdtrain.offload.checks.step_checks import StepChecks
from ssdtrain.offload.free_codec import CodecTrial
from ssdtrain.offload.hooks import SavedTensorRecorder
from ssdtrain.offload.policy import OffloadPolicy
from ssdtrain.offload.tensors.tape import Tape
from ssdtrain.storage import Endurance, EnduranceMetrics, Faults, Rating, defer_signals
from ssdtrain.text import LEAST_WAIT, duration_text, rate_text, size_text

MOST_TAPES = 1024
"""Names of tapes, after which those are forgotten that nothing needs any more."""


def _rating(config: EnduranceConfig | None) -> Rating | None:
    if config is None:
        return None
    return Rating(config.dwpd or 1.0, config.tbw, config.years)


class ActivationOffload(Feature):
    """Records what forwards save, moves it to the tiers, and brings it back for backward.

    Args:
        offload: the section of the config; its directories exist.
        place: of this rank.
        policy, faults, staged: see `Runtime`.
        planned: a plan says what leaves, which may be nothing.

    Attributes:
        engine: what the saved-tensor hooks call.
        store: the tiers.

    Raises:
        HostBudgetExceeded: the ranks of the node would take more memory than it has.
        OSError: a directory cannot be used; names the path and the remedy.
    """

    def __init__(
        self,
        offload: OffloadConfig,
        place: Placement,
        *,
        policy: OffloadPolicy | None = None,
        faults: Faults | None = None,
        staged: bool | None = None,
        planned: bool = False,
    ) -> None:
        directories = offload.expand(rank=place.rank, local_rank=place.local_rank)
        warn_of_untested_torch()
        self.engine, self.store = build_engine(
            offload,
            place.device,
            directories,
            policy=policy,
            rank=place.rank,
            local_world_size=place.local_world_size,
            faults=faults,
            staged=staged,
            planned=planned,
        )
        # A graph may outlive the runtime, and needs the engine (through its hooks) as long as it lives. The store goes with
        # the engine, and at interpreter exit.
        self._close_store = weakref.finalize(self.engine, self.store.close)
        if offload.prove_steps:
            self.engine.prover = Prover(self.engine.device)
        tried = self.engine.options.codec
        self._trial = CodecTrial(self.engine, tried) if tried is not None and tried.automatic else None
        self._closing = threading.RLock()
        """A second close waits for the first one, which waits for copies to and from the memory that the store unmaps."""
        self._config = offload
        self._planned = planned
        first = place.rank - place.local_rank
        others = [r for r in range(place.local_world_size) if r != place.local_rank]
        shared = [offload.expand(rank=first + r, local_rank=r) for r in others]
        self.endurance = Endurance(directories, shared, _rating(offload.endurance))
        """Budget of the drives; limits what "auto" offloads where the config has `offload.endurance`."""
        self.checks = StepChecks(self.engine, self.store, self.endurance, offload, place, planned=planned)
        self._tapes: dict[tuple[int, int], weakref.ref[Tape]] = {}
        self._models: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._steps_end = False  # or begin: the next end will be known

    # The model

    def attach(self, model: nn.Module) -> None:
        """The parameters and buffers of `model` never move."""
        self.engine.eligible.register(model)
        self._models.add(model)
        self.name_modules(self.engine.policy.needs_modules)

    def name_modules(self, needed: bool) -> None:
        """Have hooks on all modules, which name those that save tensors, from the next forward on; or none, where what is done
        with these does not depend on it. Called between steps."""
        if not needed and self.engine.prover is None:
            self.engine.modules.close(self)
            return
        for model in self._models:
            self.engine.modules.watch(model, owner=self)

    def detach(self) -> None:
        self.engine.modules.close(self)

    # The loop

    def on_step_begin(self) -> None:
        self._steps_end = True
        self.engine.eligible.refresh()

    def on_forward(self, forward: Forward) -> AbstractContextManager[Tape] | None:
        defer_signals()
        self.checks.saw_forward(forward)
        if self.engine.resting:
            self._tapes.pop((forward.chunk, forward.microbatch), None)
            return None
        if not self._steps_end:
            self.engine.grow(between_steps=False)
        tape = Tape(forward.chunk, forward.microbatch, keep=forward.keep)
        if len(self._tapes) >= MOST_TAPES:  # a loop may number its microbatches on and on
            self._tapes = {key: known for key, known in [*self._tapes.items()] if known() is not None}
        self._tapes[forward.chunk, forward.microbatch] = weakref.ref(tape)
        return SavedTensorRecorder(self.engine, tape)

    def on_backward(self, backward: Microbatch) -> AbstractContextManager[None] | None:
        tape = self.tape(*backward)
        return None if tape is None else self._loading(tape)

    @contextmanager
    def _loading(self, tape: Tape) -> Iterator[None]:
        self.engine.prefetch(tape)
        try:
            yield
        finally:
            self.engine.drain()

    def on_next_backward(self, upcoming: Sequence[Microbatch]) -> None:
        found = [tape for key in upcoming if (tape := self.tape(*key)) is not None]
        self.engine.next_backward(found)
        if found:
            self.engine.prefetch(found[0])

    def tape(self, chunk: int, microbatch: int) -> Tape | None:
        """Return the latest tape of a microbatch on a model chunk; None where nothing needs it any more."""
        known = self._tapes.get((chunk, microbatch))
        tape = known() if known is not None else None
        if tape is None:
            self._tapes.pop((chunk, microbatch), None)
        return tape

    def on_backward_over(self) -> None:
        self.engine.drain()

    def on_step_end(self, step: Step) -> None:
        self._steps_end = True
        self.engine.drain()
        self.engine.grow(between_steps=True)
        if self._trial is not None and not step.closing:
            self._trial.step_ended(failed=step.failed)
        self.checks.step_ended(step)

    def on_unended_step(self) -> str:
        if self._trial is None or self._trial.over:
            return ""
        self._trial.end(None, "no step ends")
        if "codec" not in self._config.model_fields_set:
            return ""  # nobody has asked for it
        return 'offload.codec is "auto", and nothing is encoded; "exact" needs no steps'

    # Metrics

    def metrics(self) -> list[tuple[str, MetricSet]]:
        store = self.store.metrics
        written = {drive.path: drive.bytes_written for drive in store.drives}
        life = EnduranceMetrics(self.endurance.life(written, self.checks.seconds))
        return [("", self.engine.snapshot()), ("", store), ("", life)]

    def reset_peak(self) -> None:
        self.engine.reset_peak()

    def description(self) -> str:
        if not self._config.moves and not self._planned:
            return "offload: steps are measured, and nothing is moved"
        metrics = self.store.metrics
        tiers = [f"host memory ({size_text(metrics.host.capacity)})"] if metrics.host is not None else []
        tiers += [f"{drive.path} ({size_text(drive.capacity)})" for drive in metrics.drives]
        amount = self._config.amount
        much = "as much as can be hidden" if amount.kind == "auto" else f"{amount} of what is saved"
        if self._planned:
            much = "what the plan says"
        way = f"offload: {much}, to {', then '.join(tiers)}"
        codec = self.engine.options.codec
        tried = " is tried" if self._trial is not None else ""
        return f"{way} | codec: {codec.spec if codec is not None else 'none'}{tried}"

    def decisions(self) -> str:
        return "" if self._trial is None else self._trial.decision

    def limited_by(self, seconds: float) -> str:
        found, store = self.engine.snapshot(), self.store.metrics
        if found.stall_seconds < LEAST_WAIT * seconds:
            return ""
        if found.store_wait_seconds > found.load_wait_seconds and store.write_seconds:
            rate = (store.ssd_bytes_written + store.host_bytes_written) / store.write_seconds
            return f"stores, written at {rate_text(rate)}, which forward waited {duration_text(found.store_wait_seconds)} for"
        if found.load_wait_seconds and store.read_seconds:
            rate = (store.ssd_bytes_read + store.host_bytes_read) / store.read_seconds
            return f"loads, read at {rate_text(rate)}, which backward waited {duration_text(found.load_wait_seconds)} for"
        return ""

    def close(self) -> None:
        with ExitStack() as closing:  # all are called, the last first, whatever one of them raises
            if not self.engine.forked:  # where a thread of the parent may have held it
                closing.enter_context(self._closing)
            closing.callback(self.engine.drain)  # what the store has waited for gives its buffers back
            closing.callback(self._close_store)
            closing.callback(self.engine.close)
            if self._trial is not None:
                closing.callback(self._trial.close)
            closing.callback(self.detach)
