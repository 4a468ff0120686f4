"""Carries out a plan of blocks: what they save is offloaded, or they run again in backward, or keep compressed inputs."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import nn

from ssdtrain.codecs import make_fixed_size_codec
from ssdtrain.codecs.base import FLOATS
from ssdtrain.compact.feature import CompactLinear
from ssdtrain.offload.checkpoint import Checkpoint
from ssdtrain.offload.policy import KEEP, OFFLOAD, Action, ForwardProfile, ForwardSizes, SavedTensorInfo
from ssdtrain.planner.measured_blocks import MeasuredBlock, kind_of
from ssdtrain.planner.plans import shares_of
from ssdtrain.planner.recompute.modules import recompute_modules
from ssdtrain.planner.recompute.trials import Recomputations
from ssdtrain.profile.modules import Running

__all__ = ["BlockActions", "BlockPolicy", "recomputed_meanwhile"]

ACTIONS = {
    "keep": KEEP,
    "recompute": KEEP,  # of what is saved, only its inputs
    "offload": OFFLOAD,
    "host": Action(True, tier="host"),
    "ssd": Action(True, tier="ssd"),
}


class PlannedRegion(NamedTuple):
    """What happens to one of the regions that a block saves."""

    module: str
    """Name of the one that saves it."""
    nbytes: int
    """Size in the forward that the plan was made for."""
    action: Action


NO_PARTS: Mapping[str, Sequence[PlannedRegion]] = MappingProxyType({})

ALIKE_BYTES = 1.25
"""Ratio of two sizes up to which what a module saves may be the region that was planned."""


class _Turns(threading.local):
    """How far the forward of a thread is: one tape may be recorded on each.

    Attributes:
        position: of the latest region on its tape.
        counts: by block and module, of regions that were those of the plan.
    """

    def __init__(self) -> None:
        self.position = -1
        self.counts: dict[tuple[str, str], int] = {}


class BlockPolicy:
    """An `OffloadPolicy` that does with a saved tensor what the plan says of the block that saved it.

    Args:
        actions: qualified name of a block to "keep", "recompute", "offload" (to the first tier with room), "host" or "ssd".
        rest: of what is saved outside of these blocks.
        least: bytes; what is smaller stays.
        codec: by which blocks with the action "encode" stay; None: there is no such action.

    Raises:
        ValueError: an action is none of these.
    """

    needs_modules = True

    def __init__(
        self, actions: Mapping[str, str], rest: str = "keep", *, least: int = 0, codec: str | None = None
    ) -> None:
        self._least = least
        self._allowed = dict(ACTIONS)
        self._codec = None if codec is None else make_fixed_size_codec(codec)
        if codec is not None:
            self._allowed["encode"] = Action(True, codec=codec, tier="device")
        self._payloads: dict[tuple[Running, ...], list[int]] = {}
        self.follow(actions, rest)

    def follow(
        self,
        actions: Mapping[str, str],
        rest: str = "keep",
        *,
        expected: int | None = None,
        parts: Mapping[str, Sequence[PlannedRegion]] = NO_PARTS,
    ) -> None:
        """Do this from the next forward on. Called between steps.

        Args:
            expected: bytes that the largest forward saves then; None: what the first ones save.
            parts: of blocks that leave in part, what they save, in order. What a module saves beside that, in number or size, is
                offloaded: memory must not run out first.
        """
        unknown = sorted({*actions.values(), rest} - set(self._allowed))
        if unknown:
            raise ValueError(f"the plan has the actions {unknown}; allowed: {', '.join(self._allowed)}")
        self._actions = {name: self._allowed[action] for name, action in actions.items()}
        self._rest = self._allowed[rest]
        self._known: dict[tuple[Running, ...], Action | tuple[str, str]] = {}
        self._in_turn: dict[tuple[str, str], list[PlannedRegion]] = {}
        for block, regions in parts.items():
            for region in regions:
                self._in_turn.setdefault((block, region.module), []).append(region)
        self._parts, self._turns = frozenset(parts), _Turns()
        self._expected, self._sizes = expected, ForwardSizes()

    def encoded_ratio(self, block: str) -> float:
        """Bytes of payloads over those of what the block of this name has saved so far; 1.0: nothing."""
        found = [sizes for modules, sizes in self._payloads.items() if any(m.name == block for m in modules)]
        whole = sum(nbytes for nbytes, _ in found)
        return sum(payload for _, payload in found) / whole if whole else 1.0

    def _count_payload(self, saved: SavedTensorInfo) -> None:
        """See `encoded_ratio`. Only while no plan is followed."""
        codec, payload = self._codec, saved.nbytes
        assert codec is not None
        if saved.dtype is torch.bool:
            payload = saved.nbytes // 8
        elif saved.dtype in FLOATS:
            payload = min(payload, codec.payload_bytes(saved.nbytes // saved.dtype.itemsize, saved.dtype))
        sizes = self._payloads.setdefault(saved.modules, [0, 0])
        sizes[0] += saved.nbytes
        sizes[1] += payload

    def decide(self, saved: SavedTensorInfo) -> Action:
        found = self._known.get(saved.modules)
        if found is None:
            found = self._known[saved.modules] = self._action_of(saved.modules)
        if self._parts:
            turns = self._turns
            if saved.position <= turns.position:
                turns.counts = {}  # another forward
            turns.position = saved.position
        if not isinstance(found, Action):
            found = self._next(found, saved.nbytes)
        if saved.nbytes < self._least:
            return KEEP
        if self._codec is not None and self._expected is None:
            self._count_payload(saved)
        return found

    def _next(self, place: tuple[str, str], nbytes: int) -> Action:
        """What happens to the next region of a module of a block that leaves in part."""
        count, planned = self._turns.counts.get(place, 0), self._in_turn.get(place, ())
        if (
            count >= len(planned)
            or not nbytes <= ALIKE_BYTES * planned[count].nbytes <= ALIKE_BYTES**2 * nbytes
        ):
            return OFFLOAD  # it is another one
        self._turns.counts[place] = count + 1
        return planned[count].action

    def _action_of(self, modules: tuple[Running, ...]) -> Action | tuple[str, str]:
        """What happens to what is saved in these modules; or of which block and module that depends."""
        for module in modules:
            if module.name in self._parts:
                return module.name, modules[-1].name
            if action := self._actions.get(module.name):
                return action
        return self._rest

    def observe(self, forward: ForwardProfile) -> None:
        self._sizes.add(forward.saved_bytes)
        if self._sizes.forwards == ForwardSizes.REMEMBERED:  # the first ones under these actions
            self._sizes.settle()

    @property
    def largest(self) -> int:
        """Bytes of the largest of the latest forwards."""
        return self._sizes.largest()

    def shape_changed(self) -> bool:
        """The largest of the latest forwards differs from the largest of the first under these actions by a fifth and more, or is
        larger than expected by as much."""
        larger = self._expected is not None and self.largest > 1.2 * self._expected
        return larger or self._sizes.changed()


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


def _regions(piece: MeasuredBlock, action: str) -> list[PlannedRegion]:
    """What happens to a block's regions under an action of `in_part`."""
    found, shares = [], shares_of(action)
    for number, regions in enumerate(piece.regions):
        share = shares[number] if number < len(shares) else 0.0
        what = KEEP if not share else OFFLOAD if share == 1 else Action(True, part=share)
        found += [PlannedRegion(module, nbytes, what) for module, nbytes in regions]
    return found


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
        leaving = {"ssd": "offload", "host": "offload", "encode": "encode"}
        followed = {name: leaving[action] for name, action in actions.items() if action in leaving}
        parts = {piece.name: _regions(piece, action) for piece, action in pairs if shares_of(action)}
        expected = sum(piece.saved_by(action) for piece, action in pairs)
        self._policy.follow(followed, expected=max(expected, at_most), parts=parts)

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
