"""A meter of activation memory that owes nothing to the engine: what autograd saved, for as long as it is alive.

Note: [What is counted]
    Every storage that reached autograd's saved-tensor hooks, once, with its whole size, from the moment it was saved to
    the moment it is freed, wherever the last reference to it was. Storages of parameters and buffers are left out. The
    memory of a tensor that merely passes through forward without being saved is not activation memory in this sense; the
    process's resident set, reported beside it, contains both. A tensor that is not strided (sparse, jagged) has no storage of
    its own and is left out.

Note: [Recomputed activations]
    They are alive during backward and count like any other, if the meter is in force there too: keep the whole of
    forward and backward inside `step()`. With `torch.utils.checkpoint(use_reentrant=True)` (and DeepSpeed's function of
    the same kind) the second run saves through the meter's hooks. With `use_reentrant=False` torch puts its own hooks
    inside, and the meter sees the blocks' inputs alone: such a run is not measured by this meter.
"""

import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

Timeline = list[tuple[float, int]]
"""(seconds since the step began, bytes alive from then on), in order of time."""


@dataclass
class StepRecord:
    """One step as the meter saw it; filled when the `with` block ends."""

    timeline: Timeline = field(default_factory=list)
    marks: dict[str, float] = field(default_factory=dict)
    """Seconds since the step began at which `mark` was called, by name."""
    began: float = field(default_factory=time.perf_counter)
    """When the step began, on the clock of time.perf_counter."""

    @property
    def peak_bytes(self) -> int:
        return max((alive for _, alive in self.timeline), default=0)

    def mark(self, name: str) -> None:
        self.marks[name] = time.perf_counter() - self.began


class SavedTensorMeter:
    """Counts the storages that are alive for backward.

    Storages are known by weak reference: torch keeps one Python object per storage while the storage lives, so the
    reference's callback comes exactly when the memory is freed. The callback may run on any thread and at any point of
    another call (cyclic collection), so it and `pack` touch shared state only by single dict and list operations, which
    the interpreter makes atomic; the sums are made when the step is over.

    Args:
        module: Its parameters and buffers are not counted. Call `exclude` again if a framework replaces their storages.
    """

    def __init__(self, module: nn.Module | None = None) -> None:
        self._excluded: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._alive: dict[int, tuple[weakref.ref[torch.UntypedStorage], int]] = {}
        self._events: list[tuple[float, int]] = []
        if module is not None:
            self.exclude(module)

    def exclude(self, module: nn.Module) -> None:
        """Leave out the present storages of the module's parameters and buffers."""
        for tensor in (*module.parameters(), *module.buffers()):
            if tensor.layout is torch.strided:
                storage = tensor.untyped_storage()
                self._excluded[storage._cdata] = weakref.ref(storage)

    @property
    def alive_bytes(self) -> int:
        return sum(size for _, size in list(self._alive.values()))

    @contextmanager
    def step(self) -> Iterator[StepRecord]:
        """Measures one step: forward and backward both belong inside."""
        events: list[tuple[float, int]] = []
        self._events = events
        alive = self.alive_bytes
        record = StepRecord()
        with torch.autograd.graph.saved_tensors_hooks(self._pack, lambda packed: packed):
            yield record
        record.timeline.append((0.0, alive))
        for at, change in sorted(list(events), key=lambda event: event[0]):
            alive += change
            record.timeline.append((at - record.began, alive))

    def _pack(self, tensor: Tensor) -> Tensor:
        if tensor.layout is torch.strided:
            self._saved(tensor.untyped_storage())
        # A non-leaf kept as it is would hold its own graph: the node's output would refer to the node.
        return tensor if tensor.is_leaf else tensor.detach()

    def _saved(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        excluded = self._excluded.get(key)
        if excluded is None or excluded() is not storage:
            entry = (weakref.ref(storage, lambda ref: self._freed(key, ref)), size)
            if self._alive.setdefault(key, entry) is entry:
                self._events.append((time.perf_counter(), size))

    def _freed(self, key: int, ref: "weakref.ref[torch.UntypedStorage]") -> None:
        known = self._alive.get(key)
        if known is not None and known[0] is ref:
            del self._alive[key]
            self._events.append((time.perf_counter(), -known[1]))
