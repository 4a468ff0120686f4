"""What a user gains, in one sentence: the largest microbatch at about the speed of keeping everything, against the largest one
that fits so. Where that is nothing, what other means would bring."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ssdtrain.config.errors import InvalidValue
from ssdtrain.planner.plans import Limits, NoPlan, Objective
from ssdtrain.tools.whatif.cluster import BRIEF, FailedPlacements, plan_job, uniform_plan
from ssdtrain.tools.whatif.cluster_job import ClusterJob
from ssdtrain.tools.whatif.cluster_plan import ClusterPlan
from ssdtrain.tools.whatif.hardware import Ssds, parse_ssds

__all__ = ["RECOMPUTATION", "SAME_SPEED", "Gain", "Largest", "Trial", "gain_of", "largest", "more_drives"]

SAME_SPEED = 0.02
"""Slowdown over keeping everything up to which a larger microbatch counts as gained."""

USUAL_DRIVES = "4 x 7GB/s, write 5GB/s"
"""Drives that a job without any is told about."""

LEAST_GAIN = 1.01
"""Ratio of microbatches up to which nothing is gained."""

MOST_SEQUENCES = 1 << 16

RECOMPUTATION = "recomputation"

Trial = Callable[[int], float | None]
"""Seconds of one sequence, forward and backward, in microbatches of so many; None: they do not fit."""


@dataclass(frozen=True)
class Largest:
    """The largest microbatch that fits with some means.

    Attributes:
        size: sequences; 0: not one fits.
        seconds: of one of them, forward and backward.
    """

    size: int
    seconds: float


NONE = Largest(0, 0.0)


def largest(trial: Trial, begin: Largest = NONE) -> Largest:
    """The largest microbatch that fits, to within a sixteenth of it.

    Args:
        begin: is known to fit.
    """
    size, seconds, gap = begin.size, begin.seconds, 1
    while size <= MOST_SEQUENCES and (took := trial(size + gap)) is not None:
        size, seconds, gap = size + gap, took, 2 * gap
    while gap > max(1, size // 16):
        took = trial(size + gap // 2)
        if took is None:
            gap //= 2
        else:
            size, seconds, gap = size + gap // 2, took, gap - gap // 2
    return Largest(size, seconds)


@dataclass(frozen=True)
class Gain:
    """What one job gains.

    Attributes:
        kept: with everything kept in device memory.
        ours: with the means that the job has; its sequences take at most `SAME_SPEED` longer.
        alone: seconds of one sequence with everything kept in unlimited memory, where not one fits.
        carried: share of the bytes of a step that its drives can write while it runs; None: it has no drives.
        others: by other means, named as a subject.
    """

    kept: Largest
    ours: Largest
    alone: float
    carried: float | None
    others: Mapping[str, Largest]

    @classmethod
    def of(
        cls,
        kept: Trial,
        ours: Callable[[float], Trial],
        alone: float,
        carried: float | None,
        others: Mapping[str, Callable[[float], Trial]],
    ) -> Gain:
        """Try all of them; where something is gained, of the others only recomputation.

        Args:
            ours, others: take the seconds that a sequence may take.
        """
        most_kept = largest(kept)
        seconds = (1 + SAME_SPEED) * (most_kept.seconds or alone)
        gain = cls(most_kept, largest(ours(seconds), most_kept), alone, carried, {})
        tried = {
            name: largest(trial(seconds), most_kept)
            for name, trial in others.items()
            if name == RECOMPUTATION or not gain.pays
        }
        return replace(gain, others=tried)

    @property
    def pays(self) -> bool:
        return self.ours.size > LEAST_GAIN * self.kept.size

    def sentence(self) -> str:
        """Such as "1.16 x the batch at 1.00 x the time of keeping everything"."""
        if self.pays and not self.kept.size:
            gained = f"{self._ratios(self.ours)}, where not one sequence fits with everything kept"
        elif self.pays:
            gained = f"{self._ratios(self.ours)} of keeping everything"
        elif self.carried is None:
            gained = "nothing: there are no drives and there is no host memory to offload to"
        else:
            share = "less than 1%" if self.carried < 0.01 else f"{self.carried:.0%}"
            gained = f"nothing: your drives carry {share} of what a step saves"
        vain = [name for name, one in self.others.items() if one.size <= LEAST_GAIN * self.kept.size]
        others = [
            f"{name} would give {self._ratios(one)}" for name, one in self.others.items() if name not in vain
        ]
        if vain:
            others.insert(0, f"{' and '.join(vain)} would not give more")
        return f"{gained}; {', '.join(others)}"

    def _ratios(self, one: Largest) -> str:
        time = f"at {self._slower(one):.2f} x the time"
        if not self.kept.size:
            return f"a batch of {one.size} {time}"
        return f"{one.size / self.kept.size:.2f} x the batch {time}"

    def _slower(self, one: Largest) -> float:
        return one.seconds / (self.kept.seconds if self.kept.size else self.alone)

    def figures(self) -> dict[str, Any]:
        """Return plain data."""
        return {
            "sentence": self.sentence(),
            "kept_batch": self.kept.size,
            "batch": self.ours.size,
            "batch_ratio": self.ours.size / self.kept.size if self.kept.size else None,
            "time_ratio": self._slower(self.ours) if self.ours.size else None,
            "drives_carry": self.carried,
            "others": {
                name: {"batch": one.size, "time_ratio": self._slower(one) if one.size else None}
                for name, one in self.others.items()
            },
        }


def more_drives(ssds: Ssds | None) -> tuple[str, Ssds]:
    """Four times the drives, or usual ones where there are none, and what they are called."""
    more = parse_ssds(USUAL_DRIVES) if ssds is None else replace(ssds, count=4 * ssds.count)
    return f"{more.count} drives of {more.write / 1e9:g} GB/s", more


def gain_of(job: ClusterJob) -> Gain:
    """The gain of a job, whatever its batch is, with its model state where it is."""
    job = replace(job, batch=0)
    named, ssds = more_drives(job.ssds)
    plenty = replace(job, ssds=job.ssds if job.state == "ssd" else None, host=job.host + (1 << 50))
    others = {
        named: _same_speed(replace(job, ssds=ssds)),
        "host memory": _same_speed(plenty),
        RECOMPUTATION: lambda _: _uniform(replace(job, recompute=True), "recompute"),
    }
    carried = None
    if job.ssds is not None:
        rate = min(job.ssds.write_rate / job.local_node, job.link_rate)
        carried = min(1.0, rate / job.bandwidth_for_all(1))
    roomy = replace(job, gpu=replace(job.gpu, memory=1 << 60), state="device", cpu_rate=0.0)
    alone = uniform_plan(roomy, 1, "keep").microbatch_seconds
    return Gain.of(_uniform(job, "keep"), _same_speed(job), alone, carried, others)


def _same_speed(job: ClusterJob) -> Callable[[float], Trial]:
    """Return what tries microbatches with a sequence in at most so many seconds, in the first place of model state that does."""

    def within(seconds: float) -> Trial:
        failed: FailedPlacements = {}

        def planned(size: int) -> ClusterPlan:
            limits, any_of_them = Limits(seconds=seconds * size), Objective(0.0, hidden=seconds * size)
            return plan_job(job, size, limits, any_of_them, effort=BRIEF, failed=failed)

        return _trial(planned)

    return within


def _uniform(job: ClusterJob, action: str) -> Trial:
    return _trial(lambda size: uniform_plan(job, size, action))


def _trial(planned: Callable[[int], ClusterPlan]) -> Trial:
    def seconds(size: int) -> float | None:
        try:
            return planned(size).microbatch_seconds / size
        except (NoPlan, InvalidValue):
            return None

    return seconds
