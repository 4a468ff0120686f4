"""What offloading does by the number of steps: it counts their time, and looks at what they moved."""

from __future__ import annotations

import logging

from ssdtrain.config import OffloadConfig
from ssdtrain.config.units import exact_size
from ssdtrain.features import FIRST_STEPS, Forward, Placement, Step
from ssdtrain.offload.engine import OffloadEngine
from ssdtrain.storage import Endurance, SpillStore
from ssdtrain.text import size_text

logger = logging.getLogger("ssdtrain")

WEAR_PERIOD = 1000
"""Steps between two looks at how fast the drives wear, after that at the first steps."""

WEAR_SLACK = 1.05
"""Factor of the rate that they bear, from which on a warning comes."""


class StepChecks:
    """Warns after the first steps if nothing moved, or if the drives wear too fast, and ends `prove_steps`.

    Args:
        planned: a plan says what leaves, which may be nothing.

    Attributes:
        seconds: time of the steps so far.
        steps: steps so far.
    """

    def __init__(
        self,
        engine: OffloadEngine,
        store: SpillStore,
        endurance: Endurance,
        config: OffloadConfig,
        place: Placement,
        *,
        planned: bool,
    ) -> None:
        self.engine, self.store, self.endurance = engine, store, endurance
        self.seconds = 0.0
        self._config = config
        self._place = place
        self._planned = planned
        self.steps = 0
        self._worn: tuple[dict[str, int], float] = {}, 0.0  # at the last look at it: bytes written, seconds
        self._only_keeps: bool | None = None  # every forward so far was asked to keep; None: there was none

    def saw_forward(self, forward: Forward) -> None:
        """A forward begins."""
        self._only_keeps = forward.keep and self._only_keeps is not False

    def step_ended(self, step: Step) -> None:
        """A step is over."""
        self.seconds += step.seconds
        self.steps += 1
        if self.steps == FIRST_STEPS and not self._planned:
            self._warn_if_inactive()
        if self._config.endurance is not None and (
            self.steps == FIRST_STEPS or self.steps % WEAR_PERIOD == 0
        ):
            self._warn_of_wear()
        if self.steps == self._config.prove_steps:
            self._report_proof()

    def _warn_of_wear(self) -> None:
        """Since the last time: with "auto" from its second plan on, which is when the amount has settled."""
        written = {drive.path: drive.bytes_written for drive in self.store.metrics.drives}
        before, seconds_before = self._worn
        self._worn = written, self.seconds
        if self._config.amount.kind == "auto" and self.steps == FIRST_STEPS:
            return  # everything is offloaded until there is a plan
        seconds = self.seconds - seconds_before
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
                self.steps,
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
        if self._only_keeps or not self._config.moves:
            return  # the last stage of a pipeline; or it measures
        if not found.saved_tensors:
            why = "no saved tensor was seen: is the forward inside the runtime, and do inner saved-tensor hooks take all of it?"
        elif not found.saved_bytes:
            why = (
                f"none of {found.saved_tensors} saved tensors may move: lower offload.min_bytes "
                f"({exact_size(self.engine.options.min_bytes)}), and check the device ({self._place.device})"
            )
        else:
            why = (
                f"the policy kept all {found.saved_bytes} bytes: raise offload.amount, and check that the patterns of "
                "offload.include, exclude and modules leave something"
            )
        logger.warning(
            "offload is enabled and moved nothing in the first %d steps: %s (docs/troubleshooting.md)",
            FIRST_STEPS,
            why,
        )
