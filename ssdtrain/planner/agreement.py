"""Ranks whose blocks communicate with each other recompute the same blocks, or they would wait for each other for ever.

Note: [When ranks agree]
At the end of each profiled step all ranks of the group exchange what they know: so they begin and end profiling together.
When each has measured enough, the one whose forwards save most decides which blocks are recomputed, and the others take that
over. It holds as long as the model is attached: what a rank plans later, for itself, is keep and offload. Only a block that
computed other values when it ran again on one of them is recomputed by none any more: they exchange that at the end of each
step that compares. A limit that no plan meets is one error on all of them, also for a program that catches it; later, where
forwards have become larger, it is a warning.

Note: [Objects]
A block that is called with an object (a cache) is not recomputed, and it is seen in profiled steps which ones are. Until they
have decided, ranks compare after every forward which blocks backward will run again. Afterwards such a call of a block that
is recomputed is an error on the rank that makes it.

Note: [Groups]
A block that communicates with ranks that are not in the group is never recomputed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ssdtrain.config import ConfigError
from ssdtrain.device.runtime import made_current
from ssdtrain.planner.measured_blocks import MeasuredBlock
from ssdtrain.planner.plans import NoPlan, warn_outgrown

__all__ = ["Agreement"]

logger = logging.getLogger("ssdtrain")

CPU = torch.device("cpu")


@dataclass(frozen=True)
class _RankState:
    """What a rank knows at the end of a profiled step.

    Attributes:
        blocks: names of its blocks.
        impure: names of those that must not run again, with why.
        again: one of them was recomputed: profiling begins anew.
        saved: bytes of its largest forward; None: it has not measured enough.
    """

    blocks: tuple[str, ...]
    impure: dict[str, str]
    again: bool
    saved: int | None


class Agreement:
    """The side of one rank. Its methods are called by all ranks of the group in the same order.

    Args:
        group: of this rank and those that its blocks communicate with; None: it plans for itself, and nothing is sent.
        blocks: names of its blocks.
        device: of this rank.

    Attributes:
        blocks: names of its blocks.
        recomputed: names of the blocks that all ranks recompute; None: not decided, or without a group.
    """

    def __init__(
        self, group: dist.ProcessGroup | None, blocks: tuple[str, ...], device: torch.device = CPU
    ) -> None:
        self.recomputed: frozenset[str] | None = None
        self.blocks, self._group, self._device = blocks, group, device
        self._ranks = [] if group is None else dist.get_process_group_ranks(group)
        self._decides = 0  # the rank within the group
        self._warned: set[bool] = set()

    @property
    def several(self) -> bool:
        """There are other ranks that have to recompute the same blocks."""
        return self._group is not None

    @property
    def leaves_out(self) -> bool:
        """Whether there are ranks that a block could communicate with and that do not agree here."""
        every = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
        return max(1, len(self._ranks)) < every

    def covers(self, group: Any) -> bool:
        """Whether all ranks of `group` agree here. False where they are not known."""
        if not self._ranks or group is None:
            return False
        try:
            return set(dist.get_process_group_ranks(group)) <= set(self._ranks)
        except (KeyError, RuntimeError, ValueError):  # made past torch.distributed
            return False

    @property
    def decided(self) -> bool:
        """All ranks recompute the same blocks from now on."""
        return self.recomputed is not None

    def check_same(self, again: Iterable[str]) -> None:
        """Called after each forward of a profiled step, before its backward. See Note: [Objects].

        Args:
            again: names of the blocks that its backward runs again.

        Raises:
            RuntimeError: other ranks run others, on all of them.
        """
        if self._group is None or self.decided:
            return
        every: list[Any] = [None] * len(self._ranks)
        with made_current(self._device):
            dist.all_gather_object(every, frozenset(again), group=self._group)
        other = sorted(frozenset.union(*every) - frozenset.intersection(*every))
        if other:
            without = [rank for rank, names in zip(self._ranks, every, strict=True) if other[0] not in names]
            raise RuntimeError(
                f"ssdtrain.plan: the block {other[0]!r}, which ranks of a group recompute, is called on ranks {without} with an "
                "object that is no tensor or plain value, or not at all: the others would wait for ever. Pass tensors (with a "
                'cache: use_cache=False), leave the block out of plan.blocks, or set plan.recompute to "off"'
            )

    def exchange(
        self, impure: dict[str, str], again: bool, found: Sequence[MeasuredBlock]
    ) -> tuple[bool, bool]:
        """Add what other ranks know to `impure`. See Note: [When ranks agree].

        Args:
            again: a block of `impure` was recomputed in the step.
            found: the measured blocks; empty: not enough was measured.

        Returns:
            (profiling has to begin anew, all have measured enough).

        Raises:
            RuntimeError: ranks have blocks of other names, on all of them.
        """
        if self._group is None:
            return again, bool(found)
        if self.recomputed is not None:
            return False, bool(found)
        saved = sum(piece.block.saved for piece in found) if found else None
        states: list[Any] = [None] * len(self._ranks)
        with made_current(self._device):
            dist.all_gather_object(
                states, _RankState(self.blocks, dict(impure), again, saved), group=self._group
            )
        if any(state.blocks != self.blocks for state in states):
            raise RuntimeError(
                f"ssdtrain.plan: the ranks {self._ranks} have other blocks each, and could not recompute the same ones: "
                'give them the same plan.blocks, or set plan.recompute to "off"'
            )
        for state in states:
            for name, why in state.impure.items():
                impure.setdefault(name, why)
        sizes = [-1 if state.saved is None else state.saved for state in states]
        self._decides = sizes.index(max(sizes))
        return any(state.again for state in states), min(sizes) >= 0

    def decide(self, choose: Callable[[], Iterable[str]]) -> None:
        """Set `recomputed` to what `choose` returns on the rank that decides, after an exchange. Without a group: nothing.

        Raises:
            NoPlan, ConfigError: `choose` raised it on that rank; the same on all of them.
            RuntimeError: it raised anything else. On that rank it is the exception itself.
        """
        if self._group is None:
            return
        decides = self._ranks[self._decides]
        answer: list[Any] = [None]
        error: Exception | None = None
        if decides == dist.get_rank():
            try:
                answer = [frozenset(choose())]
            except (NoPlan, ConfigError) as raised:
                answer, error = [raised], raised
            except Exception as raised:  # noqa: BLE001 - raised below, when the others know
                text = f"ssdtrain.plan on rank {decides}, which plans for this one too: {raised!r}"
                answer, error = [RuntimeError(text)], raised
        with made_current(self._device):
            dist.broadcast_object_list(answer, src=decides, group=self._group)
        if error is not None:
            raise error
        if isinstance(answer[0], Exception):
            raise answer[0]
        self.recomputed = answer[0]

    def warn(self, error: NoPlan, *, larger: bool) -> None:
        """Log, once for each cause, that the plan nearest to the limits is followed with the blocks that were agreed on.

        Args:
            larger: forwards have become larger since; else the limits of this rank were not kept to from the start.
        """
        if larger in self._warned:
            return
        self._warned.add(larger)
        device = error.limits.device
        if not larger:
            logger.warning(
                "ssdtrain.plan: the plan nearest to the limits is followed, because with the blocks that all ranks recompute %s",
                error,
            )
        elif device is not None and error.nearest.peak > device:
            logger.warning(
                "ssdtrain.plan: forwards have become larger, and plan.device_limit is not kept to any more: memory may run out, "
                "because the blocks that all ranks recompute stay those that they agreed on in the first steps. Start again with "
                "activation checkpointing by the framework, or with a smaller plan.device_limit. Now %s",
                error,
            )
        else:
            warn_outgrown(error)
