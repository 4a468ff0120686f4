"""What the demo runs, passed to the process of each mode as JSON."""

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from examples.support.model import GPTConfig

MODES = ("keep", "recompute", "ssdtrain")
TITLES = {"keep": "keep", "recompute": "recompute", "ssdtrain": "SSDTrain"}


@dataclass(frozen=True)
class Settings:
    layers: int = 12
    hidden: int = 384
    heads: int = 6
    sequence: int = 256
    microbatch: int = 4
    steps: int = 6
    memory_steps: int = 2
    """First steps, in which the process's peak is read (from the second on, when the optimizer has its state) and freed
    memory returns to the system at once, which is slower."""
    warmup: int = 1
    """Steps after those that are not timed either."""
    dropout: float = 0.0
    learning_rate: float = 3e-4
    seed: int = 1234
    zero_stage: int = 1
    data: Path | None = None
    """A text file; None is the standard library's sources."""
    directory: Path | None = None
    """Where SSDTrain's slab goes; only that mode needs it."""

    def __post_init__(self) -> None:
        for name in ("layers", "hidden", "heads", "sequence", "microbatch", "steps"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}: give 1 or more")
        if self.timed_steps < 1 or self.warmup < 0 or self.memory_steps < 2:
            raise ValueError(
                f"{self.steps} steps leave none to time after {self.memory_steps} (at least 2) in which memory is read and "
                f"{self.warmup} of warm-up: give at least {max(self.memory_steps, 2) + max(self.warmup, 0) + 1}"
            )
        self.model  # noqa: B018 - the shape has conditions of its own

    @property
    def timed_steps(self) -> int:
        return self.steps - self.memory_steps - self.warmup

    @property
    def model(self) -> GPTConfig:
        return GPTConfig(
            layers=self.layers,
            hidden=self.hidden,
            heads=self.heads,
            sequence=self.sequence,
            dropout=self.dropout,
        )

    def deepspeed_config(self, mode: str, *, bf16: bool) -> dict[str, Any]:
        """The DeepSpeed JSON of a mode. The one thing that SSDTrain needs from a user is the last key."""
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": self.microbatch,
            "gradient_accumulation_steps": 1,
            "gradient_clipping": 1.0,
            "zero_optimization": {"stage": self.zero_stage},
            # A client optimizer: DeepSpeed's own would be compiled on first use.
            "zero_allow_untested_optimizer": True,
            "bf16": {"enabled": bf16},
            "steps_per_print": 10**9,
        }
        if mode == "ssdtrain":
            config["ssdtrain"] = {"offload": {"directories": [str(self.directory)], "amount": "all"}}
        return config

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), default=str)

    @classmethod
    def from_json(cls, text: str) -> "Settings":
        fields = json.loads(text)
        paths = {name: Path(fields[name]) for name in ("data", "directory") if fields.get(name)}
        return cls(**{**fields, **paths})
