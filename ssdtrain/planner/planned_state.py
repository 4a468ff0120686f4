"""The part of `ssdtrain plan`'s answer that says where model state is, as a file that frameworks are configured from at start."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

from ssdtrain.config import ConfigError, ConfigIssue
from ssdtrain.config.errors import InvalidValue
from ssdtrain.config.units import format_size

__all__ = ["PlannedState", "StatePlace"]

StatePlace = Literal["device", "host", "ssd"]


@dataclass(frozen=True)
class PlannedState:
    """Where a plan has the parameters, gradients and optimizer state of one rank.

    Attributes:
        place: of the blocks' state that does not stay on the device.
        zero: stage of ZeRO.
        ranks: data-parallel ranks.
        blocks: number of transformer blocks of the rank.
        persistent: number of these, from the first one on, whose state stays on the device.
        buffers: number of the others whose parameters are on the device at a time.
        block_parameters: elements of the largest block, over all data-parallel ranks.
        outer_parameters: elements of embeddings, the last norm and the output layer.
        largest_parameter: elements of the largest weight.
        cpu_optimizer: the optimizer of the blocks runs on CPUs.
    """

    place: StatePlace
    zero: int
    ranks: int
    blocks: int
    persistent: int
    buffers: int
    block_parameters: int
    outer_parameters: int
    largest_parameter: int
    cpu_optimizer: bool

    @classmethod
    def read(cls, file: str, key: str) -> PlannedState:
        """Read what `ssdtrain plan --json` has written.

        Args:
            key: full key of the config that names the file, for errors.

        Raises:
            ConfigError: the file cannot be read, or is of something else.
        """
        allowed = "the file of an answer: ssdtrain plan ... --json > plan.json"
        try:
            written = json.loads(Path(file).expanduser().read_text())
        except OSError as error:
            why = f"cannot be read ({error.strerror})"
            raise ConfigError([ConfigIssue(key, file, why, allowed)]) from error
        except ValueError as error:
            raise ConfigError([ConfigIssue(key, file, f"is no JSON ({error})", allowed)]) from error
        section = written.get("state") if isinstance(written, dict) else None
        names = {field.name for field in fields(cls)}
        if not isinstance(section, dict) or section.keys() != names:
            why = "has no section `state` of this version of SSDTrain"
            raise ConfigError([ConfigIssue(key, file, why, allowed)])
        return cls(**section)

    def within(self, limit: int, itemsize: int, others: int) -> PlannedState:
        """Return the placement under ZeRO-3 that leaves most where it is fastest: all on the device; else the optimizer on CPUs;
        else also the weights of as few blocks as possible in host memory.

        Args:
            limit: bytes of a rank's device.
            itemsize: bytes of a weight.
            others: bytes of gradients and optimizer state of all ranks together.

        Raises:
            InvalidValue: what is outside of blocks, and the blocks that are gathered, do not fit.
        """
        gathered = itemsize * max(self.buffers * self.block_parameters, self.largest_parameter)
        room = (limit - gathered) * self.ranks
        weights = itemsize * (self.outer_parameters + self.blocks * self.block_parameters)
        if weights + others <= room:
            return replace(self, place="device", persistent=self.blocks, cpu_optimizer=False)
        if weights <= room:
            return replace(self, place="device", persistent=self.blocks, cpu_optimizer=True)
        persistent = (room // itemsize - self.outer_parameters) // self.block_parameters
        if persistent < 0:
            least = gathered + -(-itemsize * self.outer_parameters // self.ranks)
            raise InvalidValue(
                f"is less than what is outside of blocks and {self.buffers} gathered blocks take",
                f"{format_size(least)} and more, or smaller blocks",
            )
        return replace(self, place="host", persistent=persistent, cpu_optimizer=True)

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, as `read` takes it."""
        return asdict(self)

    @property
    def away(self) -> float:
        """Share of the blocks whose state does not stay on the device."""
        return 0.0 if self.place == "device" else 1 - self.persistent / self.blocks

    @property
    def optimizer_away(self) -> float:
        """Share of the blocks whose optimizer state is not on the device: all where CPUs run the optimizer."""
        return 1.0 if self.cpu_optimizer else self.away

    @property
    def persistent_parameters(self) -> int:
        """Elements that can stay on the device as a whole, in the order of the model. Under ZeRO-3 a rank has its share of what
        the plan leaves there, and as many bytes are so many times fewer elements."""
        whole = self.outer_parameters + self.persistent * self.block_parameters
        return whole // self.ranks if self.zero >= 3 else whole
