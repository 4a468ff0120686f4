"""Which regions of a tape each block saved, and what it did that a second run must not do."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ssdtrain.offload.engine import OffloadEngine
from ssdtrain.offload.tensors.tape import Tape
from ssdtrain.planner.recompute.attributes import Attributes
from ssdtrain.planner.recompute.purity import (
    OBJECT,
    OTHER_PARAMETERS,
    has_other_parameters,
    may_run_again,
    transformed,
    versions,
)
from ssdtrain.profile.containers import leaves
from ssdtrain.profile.modules import ModuleHook
from ssdtrain.profile.passes import PassRecorder, RecordedTimestamp

__all__ = ["BlockSpan", "BlockSpans"]


@dataclass
class BlockSpan:
    """One block in one forward. Regions [begin, end) of the tape are those that it saved first.

    Attributes:
        inputs: bytes that it is called with, and that its recomputation saves.
        small: bytes of the storages that it saved and that are not in these regions.
        plain: it is called with plain arguments and its own parameters: see `may_run_again`, `has_other_parameters`.
        why: it must not run again; "": it may.
        held: by the index of a region, at the end of how many blocks after this one (0: of this one) the program still had the
            tensor: its memory is there until then, though it leaves.
        timestamps: of its begin, of the end of the hook that saved its last tensor, of its end; None where passes are not
            recorded.
    """

    name: str
    begin: int
    end: int = 0
    inputs: int = 0
    small: int = 0
    plain: bool = True
    why: str = ""
    timestamps: tuple[RecordedTimestamp, RecordedTimestamp, RecordedTimestamp] | None = None
    held: dict[int, int] = field(default_factory=dict)

    @property
    def pure(self) -> bool:
        """It may run again."""
        return not self.why


class _RunningBlock(NamedTuple):
    """A block whose forward runs."""

    span: BlockSpan
    storages: dict[int, int]
    """Bytes that a second run would save, by the id of each storage that it is called with."""
    tensors: list[Tensor]
    """Tensors that it is called with, and its buffers."""
    versions: list[int]
    """Versions of these, before."""
    buffers: list[int]
    """Which objects its buffers were, by id: `tensors` keeps these alive."""
    attributes: Attributes
    """Attributes of its modules, before."""
    unoffloaded: int
    """What the meter counted before, bytes."""
    began: RecordedTimestamp | None


class BlockSpans:
    """Hooks on the blocks of a model, until `remove`. A block inside of another, or run in backward, is not seen.

    Args:
        blocks: by name.
        engine: the offload engine of their forwards.
    """

    def __init__(self, blocks: Mapping[str, nn.Module], engine: OffloadEngine) -> None:
        self.tape: Tape | None = None
        """Tape of the forward that runs; None: none does, or it is not recorded."""
        self._found: list[BlockSpan] = []
        self._engine, self._thread = engine, 0
        self._running: _RunningBlock | None = None
        self._watched: list[
            tuple[BlockSpan, int, int]
        ] = []  # regions that the program may have: span, its number, index
        self._hooks = []
        for name, block in blocks.items():
            self._hooks.append(
                block.register_forward_pre_hook(ModuleHook(self._enter, name), with_kwargs=True)
            )
            self._hooks.append(block.register_forward_hook(ModuleHook(self._leave, name)))

    @contextmanager
    def forward(self, tape: Tape | None) -> Iterator[list[BlockSpan]]:
        """Around a forward of the model on this thread, which `tape` records; gives the list that its spans come into. Without a
        tape there are none."""
        found = self._found = []
        self._running, self._watched = None, []
        self.tape, self._thread = tape, threading.get_ident()
        try:
            yield found
        finally:
            self.tape = self._running = None

    def remove(self) -> None:
        """Remove the hooks. Idempotent."""
        while self._hooks:
            self._hooks.pop().remove()

    def _recorder(self) -> PassRecorder | None:
        recorder = self._engine.recorder
        return recorder if recorder.active else None

    def _enter(self, name: str, block: nn.Module, *arguments: Any) -> None:
        tape = self.tape
        if (
            tape is None
            or self._running is not None
            or torch._C._current_graph_task_id() != -1
            or self._thread != threading.get_ident()
            or transformed()
        ):
            return
        tensors = [t for t in leaves(arguments) if isinstance(t, Tensor) and t.layout is torch.strided]
        eligible, storages = self._engine.eligible, dict[int, int]()
        for tensor in tensors:
            movable = tensor.nbytes >= eligible.min_bytes and eligible.may_move(tensor)
            key = id(tensor.untyped_storage())  # by which the meter knows it
            storages[key] = max(storages.get(key, 0), tensor.nbytes if movable else 0)
        why = "" if may_run_again(arguments) else OBJECT
        why = why or (OTHER_PARAMETERS if has_other_parameters(block) else "")
        span = BlockSpan(name, len(tape.regions), plain=not why, why=why)
        recorder = self._recorder()
        began = None if recorder is None else recorder.clock(self._engine.device.timestamp())
        counted = self._engine.meter.unoffloaded_bytes
        watched = [*tensors, *block.buffers()]
        self._running = _RunningBlock(
            span,
            storages,
            watched,
            versions(watched),
            _identities(block.buffers()),
            Attributes(block),
            counted,
            began,
        )

    def communicates(self, _: object = None) -> None:
        """A collective is called: the block that runs, if one does, must not run again."""
        if self._running is not None:
            self._running.span.why = (
                self._running.span.why or "it communicates with other ranks in its forward"
            )

    def _leave(self, name: str, block: nn.Module, *_: Any) -> None:
        running, tape, recorder = self._running, self.tape, self._recorder()
        if (
            running is None
            or tape is None
            or running.span.name != name
            or self._thread != threading.get_ident()
        ):
            return
        self._running = None
        span = running.span
        span.end = len(tape.regions)
        saved = [region for region in tape.regions[span.begin :] if region is not None]
        span.inputs = sum(region.nbytes for region in saved if region.seen.key in running.storages)
        # What no forward saved (the block has frozen weights, or computes from a copy of another type) its recomputation saves.
        known = {region.seen.key for region in tape.regions if region is not None}
        span.inputs += sum(nbytes for key, nbytes in running.storages.items() if key not in known)
        grown = self._engine.meter.unoffloaded_bytes - running.unoffloaded
        span.small = max(0, grown - sum(region.nbytes for region in saved))
        replaced = running.buffers != _identities(block.buffers())  # self.average = 0.9 * self.average + ...
        if not span.why and (replaced or running.versions != versions(running.tensors)):
            span.why = "it changes a buffer, or its input in place"
        elif not span.why and (changed := running.attributes.changed_in_place()):
            span.why = f"it changes {changed} in place"
        if recorder is not None and running.began is not None:
            last = recorder.last_packed(tape)
            ended = recorder.clock(self._engine.device.timestamp())
            span.timestamps = (running.began, running.began if last is None else last, ended)
        for region in saved:
            if region.seen.key in running.storages:
                span.held[region.index] = 0  # by whoever called the block
            self._watched.append((span, len(self._found), region.index))
        self._note_held(tape)
        self._found.append(span)

    def _note_held(self, tape: Tape) -> None:
        """A block has ended: see `BlockSpan.held`."""
        still = []
        for span, number, index in self._watched:
            region = tape.regions[index]
            if region is None or (region.emptied and region.seen() is None):
                continue
            if region.emptied:
                span.held[index] = len(self._found) - number
            still.append((span, number, index))
        self._watched = still


def _identities(tensors: Iterable[Tensor]) -> list[int]:
    return [id(tensor) for tensor in tensors]
