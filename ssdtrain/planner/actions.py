"""The actions of a plan on the blocks of a model: recomputation, compressed inputs, offload."""

from __future__ import annotations

import functools
from collections.abc import Callable, Container, Iterable, Mapping, Sequence

from torch import nn

from ssdtrain.compact.feature import CompactLinear
from ssdtrain.offload.checkpoint import Checkpoint
from ssdtrain.planner.block_times import MeasuredBlock, kind_of
from ssdtrain.planner.execute import BlockPolicy, recompute_modules
from ssdtrain.planner.recomputations import Recomputations

__all__ = ["BlockActions", "recomputed_meanwhile"]


def recomputed_meanwhile(blocks: Mapping[str, nn.Module], impure: Container[str]) -> frozenset[str]:
    """The blocks that are recomputed while steps are profiled without tiers: all but the last one of each kind, and those that
    must not run again or have buffers.

    Args:
        blocks: by qualified name.
        impure: names of those that must not run again.
    """
    last = {kind_of(block): name for name, block in blocks.items()}
    kept = {
        *last.values(),
        *(name for name, block in blocks.items() if next(block.buffers(), None) is not None),
    }
    return frozenset(name for name in blocks if name not in kept and name not in impure)


class BlockActions:
    """Carries out one plan after the other, between steps.

    Args:
        blocks: by qualified name.
        policy: of the engine that offloads.
        checkpoint: by which blocks are recomputed.
        compact: compresses inputs of linear layers; None: no plan does.
        strict, recomputations: see `recompute_modules`.

    Attributes:
        recomputed: names of the blocks that are recomputed.
    """

    def __init__(
        self,
        blocks: Mapping[str, nn.Module],
        policy: BlockPolicy,
        checkpoint: Checkpoint,
        compact: CompactLinear | None,
        strict: Callable[[], bool],
        recomputations: Recomputations,
    ) -> None:
        self._blocks, self._policy, self._strict = blocks, policy, strict
        self._recomputations, self.recomputed = recomputations, frozenset[str]()
        self._checkpoint, self._compact = checkpoint, compact
        self._undo: Callable[[], object] = lambda: None

    def follow(
        self,
        measured: Sequence[MeasuredBlock],
        chosen: Sequence[str],
        at_most: int,
        recomputed: frozenset[str] | None = None,
    ) -> None:
        """Do with each block what the plan says.

        Args:
            chosen: an action for each of `measured`.
            at_most: bytes that a forward saves without the plan having to be made again, if more than planned.
            recomputed: names of the blocks that all ranks recompute, also those that are not in `measured`, since another
                forward may run them; None: those that the plan says.
        """
        pairs = list(zip(measured, chosen, strict=True))
        actions = {piece.name: action for piece, action in pairs if piece.name}
        planned = frozenset(name for name, action in actions.items() if action == "recompute")
        self._recompute(planned if recomputed is None else recomputed)
        self.compress(name for name, action in actions.items() if action == "compress")
        offloaded = [name for name, action in actions.items() if action == "ssd"]
        expected = sum(piece.saved_by(action) for piece, action in pairs)
        self._policy.follow(dict.fromkeys(offloaded, "offload"), expected=max(expected, at_most))

    def profile(self, recomputed: Iterable[str], *, offload: bool, tried: Iterable[str] = ()) -> None:
        """While steps are profiled: recompute these blocks, and offload or keep all that is saved.

        Args:
            tried: names of other blocks, whose recomputation is only tried.
        """
        self.compress(())
        self._recompute(recomputed, tried)
        self._policy.follow({}, rest="offload" if offload else "keep")

    def compress(self, names: Iterable[str]) -> None:
        """Only in these blocks."""
        if self._compact is not None:
            self._compact.compress_in(self._blocks[name] for name in names)

    def _recompute(self, names: Iterable[str], tried: Iterable[str] = ()) -> None:
        self.release()
        recomputed = frozenset(names)
        if not recomputed <= self.recomputed:
            self._recomputations.begin_again()
        self.recomputed = recomputed
        run = functools.partial(
            recompute_modules,
            checkpoint=self._checkpoint,
            owner=self,
            strict=self._strict,
            recomputations=self._recomputations,
        )
        undo = run({name: self._blocks[name] for name in recomputed})
        undo_tried = run({name: self._blocks[name] for name in tried}, tried=True)
        self._undo = lambda: (undo(), undo_tried())

    def release(self) -> None:
        """Recompute no block. Idempotent."""
        self._undo()
        self._undo = lambda: None
