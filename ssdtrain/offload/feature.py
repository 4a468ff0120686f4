"""Offloading of activations as a feature of a runtime."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager

from torch import nn

from ssdtrain.config import EnduranceConfig, OffloadConfig
from ssdtrain.device import warn_of_untested_torch
from ssdtrain.features import FIRST_STEPS, Feature, Forward, Microbatch, Placement, Step
from ssdtrain.offload.build import build_engine
from ssdtrain.offload.hooks import SavedTensorRecorder
from ssdtrain.offload.policy import OffloadPolicy
from ssdtrain.offload.proof import Prover
from ssdtrain.offload.tape import Tape
from ssdtrain.storage import Endurance, EnduranceMetrics, Faults, Rating, defer_signals
from ssdtrain.telemetry.registry import MetricSet
from ssdtrain.telemetry.text import size_text

__all__ = ["ActivationOffload"]

logger = logging.getLogger("ssdtrain")

WEAR_PERIOD = 1000
"""Steps between two looks at how fast the drives wear, after that at the first steps."""

WEAR_SLACK = 1.05
"""Of the rate that they bear."""

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
        policy, faults, staged, timeline: see `Runtime`.
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
        timeline: bool = False,
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
            timeline=timeline,
        )
        # A graph may outlive the runtime, and needs the engine (through its hooks) as long as it lives. The store goes with
        # the engine, and at interpreter exit.
        self._close_store = weakref.finalize(self.engine, self.store.close)
        if offload.prove_steps:
            self.engine.prover = Prover(self.engine.device)
        self._config = offload
        self._planned = planned
        self._place = place
        first = place.rank - place.local_rank
        others = [r for r in range(place.local_world_size) if r != place.local_rank]
        shared = [offload.expand(rank=first + r, local_rank=r) for r in others]
        self.endurance = Endurance(directories, shared, _rating(offload.endurance))
        """Of the drives; limits what "auto" offloads where the config has `offload.endurance`."""
        self._seconds = 0.0
        self._worn: tuple[dict[str, int], float] = {}, 0.0  # at the last look at it: bytes written, seconds
        self._steps = 0
        self._tapes: dict[tuple[int, int], weakref.ref[Tape]] = {}
        self._announces_steps = False  # the loop does, so that the end of each is known
        self._only_keeps: bool | None = None  # every forward so far was asked to keep; None: there was none

    # The model

    def attach(self, model: nn.Module) -> None:
        """The parameters and buffers of `model` never move."""
        self.engine.eligible.register(model)
        if self.engine.policy.needs_modules or self.engine.prover is not None:
            self.engine.modules.watch(model, owner=self)

    def detach(self) -> None:
        self.engine.modules.close(self)

    # The loop

    def on_step_begin(self) -> None:
        self._announces_steps = True
        self.engine.eligible.refresh()

    def on_forward(self, forward: Forward) -> AbstractContextManager[Tape]:
        defer_signals()
        self._only_keeps = forward.keep and self._only_keeps is not False
        if not self._announces_steps:
            self.engine.grow(between_steps=False)
        tape = Tape(forward.chunk, forward.microbatch, keep=forward.keep)
        if len(self._tapes) >= MOST_TAPES:  # a loop may number its microbatches on and on
            self._tapes = {key: known for key, known in self._tapes.items() if known() is not None}
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
        """The latest tape of a microbatch on a model chunk; None where nothing needs it any more."""
        known = self._tapes.get((chunk, microbatch))
        tape = known() if known is not None else None
        if tape is None:
            self._tapes.pop((chunk, microbatch), None)
        return tape

    def on_step_end(self, step: Step) -> None:
        self._seconds += step.seconds
        self._steps += 1
        self._announces_steps = True
        self.engine.drain()
        self.engine.grow(between_steps=True)
        if self._steps == FIRST_STEPS and not self._planned:
            self._warn_if_inactive()
        if self._config.endurance is not None and (
            self._steps == FIRST_STEPS or self._steps % WEAR_PERIOD == 0
        ):
            self._warn_of_wear()
        if self._steps == self._config.prove_steps:
            self._report_proof()

    def _warn_of_wear(self) -> None:
        """Since the last time: with "auto" from its second plan on, which is when the amount has settled."""
        written = {drive.path: drive.bytes_written for drive in self.store.metrics.drives}
        before, seconds_before = self._worn
        self._worn = written, self._seconds
        if self._config.amount.kind == "auto" and self._steps == FIRST_STEPS:
            return  # everything is offloaded until there is a plan
        seconds = self._seconds - seconds_before
        recent = {path: nbytes - before.get(path, 0) for path, nbytes in written.items()}
        allowed = self.endurance.allowed_rate(recent)
        if (
            allowed is None
            or seconds <= 0
            or (rate := sum(recent.values()) / seconds) <= WEAR_SLACK * allowed
        ):
            return
        remedy = f'lower offload.amount to {allowed / rate:.1%} of what it is, or use "auto"'
        logger.warning(
            "offload.endurance: %s/s are written to %s, which wears out in %.2g years at this rate; it should live %g years, "
            "with at most %s/s: %s",
            size_text(rate),
            ", ".join(self.endurance.devices),
            self.endurance.years * allowed / rate,
            self.endurance.years,
            size_text(allowed),
            remedy,
        )

    def _report_proof(self) -> None:
        prover, self.engine.prover = self.engine.prover, None
        if prover is not None:
            totals = prover.totals
            logger.info(
                "offload.prove_steps: in the first %d steps %d saved tensors (%s) came back from a tier or a buffer, each as it "
                "was saved, to the bit",
                self._steps,
                totals.tensors,
                size_text(totals.nbytes),
            )

    def _warn_if_inactive(self) -> None:
        found = self.engine.snapshot()
        if (
            found.offloaded_bytes
            or found.avoided_write_bytes
            or found.kept_full_bytes
            or found.kept_late_bytes
        ):
            return
        if self._only_keeps:
            return  # the last stage of a pipeline
        if not found.saved_tensors:
            why = "no saved tensor was seen: is the forward inside the runtime, and do inner saved-tensor hooks take all of it?"
        elif not found.saved_bytes:
            why = (
                f"none of {found.saved_tensors} saved tensors may move: lower offload.min_bytes "
                f"({self.engine.options.min_bytes} bytes), and check the device ({self._place.device})"
            )
        else:
            why = (
                f"the policy kept all {found.saved_bytes} bytes: raise offload.amount, and check that the patterns of "
                "offload.include and offload.exclude leave something"
            )
        logger.warning("offload is enabled and moved nothing in the first %d steps: %s", FIRST_STEPS, why)

    # Metrics

    def metrics(self) -> list[tuple[str, MetricSet]]:
        store = self.store.metrics
        written = {drive.path: drive.bytes_written for drive in store.drives}
        life = EnduranceMetrics(self.endurance.life(written, self._seconds))
        return [("", self.engine.snapshot()), ("", store), ("", life)]

    def reset_peak(self) -> None:
        self.engine.reset_peak()

    def description(self) -> str:
        metrics = self.store.metrics
        tiers = [f"host memory ({size_text(metrics.host.capacity)})"] if metrics.host is not None else []
        tiers += [f"{drive.path} ({size_text(drive.capacity)})" for drive in metrics.drives]
        amount = self._config.amount
        much = "as much as can be hidden" if amount.kind == "auto" else f"{amount} of what is saved"
        if self._planned:
            much = "what the plan says"
        way = f"offload: {much}, to {', then '.join(tiers)}"
        return f"{way} | codec: {self._config.codec or 'none'}"

    def close(self) -> None:
        with ExitStack() as closing:  # all are called, the last first, whatever one of them raises
            closing.callback(self.engine.drain)  # what the store has waited for gives its buffers back
            closing.callback(self._close_store)
            closing.callback(self.engine.close)
            closing.callback(self.detach)
