"""`offload.amount: "auto"`: the policy that follows a plan by the place of a region on its tape."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

from ssdtrain.offload.policy import KEEP, OFFLOAD, Action, ForwardProfile, SavedTensorInfo
from ssdtrain.planner import step
from ssdtrain.planner.step import Choice, Machine

__all__ = ["AdaptivePolicy", "actions_of", "measure_by_one"]

REMEMBERED = 8
"""Forwards of a chunk whose largest says how large its tapes are."""


class AdaptivePolicy:
    """Offloads what its plan says, and everything before there is one and past its end: memory must not run
    out first.

    The plan changes between steps only (`ssdtrain.planner.controller`), and holds no state that a checkpoint
    would need: three steps suffice to learn it again.
    """

    needs_modules = False

    def __init__(self) -> None:
        self.plans: dict[int, tuple[Action, ...]] = {}
        """By model chunk: what happens to the region at each position of a tape."""
        self.largest: dict[int, int] = {}
        """By model chunk: bytes saved by its largest forward so far."""
        self.forwards = 0
        """That saved something."""
        self._bytes: dict[int, deque[int]] = {}
        self._planned: dict[int, int] = {}

    def decide(self, saved: SavedTensorInfo) -> Action:
        plan = self.plans.get(saved.chunk)
        if plan is None or saved.position >= len(plan):
            return OFFLOAD
        return plan[saved.position]

    def observe(self, forward: ForwardProfile) -> None:
        if forward.saved_bytes:
            self.forwards += 1
            chunk = forward.chunk
            self.largest[chunk] = max(self.largest.get(chunk, 0), forward.saved_bytes)
            self._bytes.setdefault(forward.chunk, deque(maxlen=REMEMBERED)).append(forward.saved_bytes)

    def follow(self, plans: Mapping[int, Sequence[Action]]) -> None:
        """Follow these plans from the next tape on. Called between steps."""
        self.plans = {chunk: tuple(plan) for chunk, plan in plans.items()}
        self._planned = {chunk: max(sizes) for chunk, sizes in self._bytes.items()}

    def shape_changed(self) -> bool:
        """The largest of the latest tapes of a chunk has another size than when the plan was made, by a fifth
        and more."""
        for chunk, sizes in self._bytes.items():
            before = self._planned.get(chunk)
            if before is not None and not 0.8 * before <= max(sizes) <= 1.2 * before:
                return True
        return False


def actions_of(spans: Sequence[tuple[int, int]], choices: Sequence[Choice], machine: Machine) -> list[Action]:
    """What the engine does with each region of a tape: without a tier it takes host memory first.

    Args:
        spans: [begin, end) of the positions that each choice is about.
    """
    plan = [KEEP] * spans[-1][1]
    for (begin, end), choice in zip(spans, choices, strict=True):
        if choice == step.KEEP:
            continue
        first = len(machine.tiers) > 1 and choice.tier == machine.tiers[0].name
        action = Action(True, tier="ssd") if first else OFFLOAD
        plan[begin:end] = [action if choice.share == 1 else action._replace(part=choice.share)] * (
            end - begin
        )
    return plan


def measure_by_one(plan: list[Action], movable: Sequence[int], *, both: bool) -> None:
    """Have one region written in each step whatever becomes of the others: by it a change of the bandwidth is seen. It is the
    first one that `plan` offloads, or else that may be.

    Args:
        movable: the positions of regions that may be offloaded; the first are taken first.
        both: there are host memory and drives, and it is the drives that may change.
    """
    away = Action(True, tier="ssd") if both else OFFLOAD
    leaving = [
        position for position in movable if plan[position].offload and plan[position].tier == away.tier
    ]
    for position in (leaving or movable)[:1]:
        action = plan[position] if leaving else away
        plan[position] = action._replace(must_write=True)
