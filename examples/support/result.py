"""One measured training run: what a script leaves behind and what tables and plots are made from."""

import dataclasses
import statistics
from dataclasses import dataclass, field
from typing import Any

from examples.support.activation_meter import Timeline


@dataclass
class RunResult:
    """Figures over the timed steps, except where a field says otherwise."""

    name: str
    losses: list[str]
    """The loss of every step as `float.hex()`, so that equality is equality of bits."""
    weights_sha256: str
    """Of every parameter's bytes after the last step, in the order of their names."""
    step_seconds: list[float]
    activation_peak_bytes: int
    activation_timeline: Timeline
    """Of the timed step whose time is the median."""
    backward_began: float | None
    """Seconds into the step of the timeline."""
    resident_peak_bytes: int
    resident_peak_covers: str
    device_peak_bytes: int | None = None
    bytes_written: int = 0
    bytes_read: int = 0
    bytes_cancelled: int = 0
    stall_seconds: float = 0.0
    about: dict[str, Any] = field(default_factory=dict)
    """Model, versions, threads: whatever says what was run."""

    @property
    def step_median(self) -> float:
        return statistics.median(self.step_seconds)

    @property
    def steps(self) -> int:
        return len(self.step_seconds)

    @property
    def final_loss(self) -> float:
        return float.fromhex(self.losses[-1])

    def differs_from(self, other: "RunResult") -> str | None:
        """Where the two runs' numbers part, as a sentence; None if every loss and all weights are equal to the bit."""
        for step, (mine, theirs) in enumerate(zip(self.losses, other.losses, strict=False), start=1):
            if mine != theirs:
                return (
                    f"the loss of step {step} is {float.fromhex(mine):.9g} ({mine}) with {self.name} "
                    f"and {float.fromhex(theirs):.9g} ({theirs}) with {other.name}"
                )
        if len(self.losses) != len(other.losses):
            return f"{self.name} has {len(self.losses)} steps, {other.name} has {len(other.losses)}"
        if self.weights_sha256 != other.weights_sha256:
            return f"all losses are equal, but the weights of {self.name} and {other.name} differ after the last step"
        return None

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> "RunResult":
        """The inverse of `to_json`.

        Raises:
            ValueError: Keys are missing or unknown; all are named.
        """
        known = {entry.name for entry in dataclasses.fields(cls)}
        needed = {
            entry.name
            for entry in dataclasses.fields(cls)
            if entry.default is dataclasses.MISSING and entry.default_factory is dataclasses.MISSING
        }
        missing, unknown = needed - record.keys(), record.keys() - known
        if missing or unknown:
            raise ValueError(
                f"not a run's result: missing keys {sorted(missing)}, unknown keys {sorted(unknown)}"
            )
        timeline = [(float(at), int(alive)) for at, alive in record["activation_timeline"]]
        return cls(**{**record, "activation_timeline": timeline})
