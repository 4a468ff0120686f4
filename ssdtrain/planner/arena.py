"""The arena of buffers where it is a part of activation memory (a CPU) and sized by what forwards save.

Note: [An arena that costs more than it gives]
What comes back from a tier lies in an arena, which stays between steps. Of a small model it takes more than offloading saves. So
the cost model has it only where something leaves, and a plan that keeps everything needs none: the one tensor that such a plan
offloads all the same, to see whether the tiers are faster now, comes back into memory of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ssdtrain.offload.engine import OffloadEngine
from ssdtrain.planner.model.types import Block, Machine

__all__ = ["ArenaCost"]


class ArenaCost:
    """See Note: [An arena that costs more than it gives]."""

    def __init__(self, engine: OffloadEngine) -> None:
        self._engine, self._optional = engine, engine.arena_is_optional
        # Of what a forward saves, at most so far: without an arena it is not known, and plans must not take turns.
        self._share = 0.0

    def counted(self, machine: Machine, chunks: Sequence[Sequence[Block]]) -> Machine:
        """Return the machine with the bytes that the arena takes where something of these blocks leaves."""
        saved = sum(block.saved + block.fixed for blocks in chunks for block in blocks)
        if not self._optional or not saved:
            return machine
        self._share = max(self._share, self._engine.limits().buffers / saved)
        return replace(machine, buffers=round(self._share * saved), buffers_stay=False)

    def planned(self, *, used: bool) -> None:
        """A plan begins, between two steps. `used`: something leaves."""
        if self._optional:
            self._engine.set_arena_in_use(used)
