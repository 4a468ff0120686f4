"""Device memory that loads are copied into, reused in the order of the streams, without the host or the compute stream waiting.

Note: [Load targets]
A restored tensor is written by the load stream and read by the stream that runs backward. If its memory came from the compute
stream's allocations, the copy would have to wait for all work that is queued there, and never overlap with it. So targets have
memory of the load stream, and that of one which has died is used again for the next, although work that reads it may still be
queued elsewhere: when a target dies, an event is recorded on each stream that used it, and the copy into the next one waits, on
the load stream, for these events.

Targets are reserved a few regions before they are filled. So several are alive at a time, and the next one takes the memory of
the one that died first: its copy waits for work that is long over.

Note: [Form of a target]
Where a region holds the bytes of one tensor and nothing else, the alias has the dtype, sizes and strides of that tensor: it is
what backward gets, without another tensor made of it. The tensor over the block that it is an alias of is kept for the next one.

Note: [Memory of the allocator]
The allocator knows only the load stream. What it is given back while another stream reads it, it may unmap at any time (with
expandable segments, where memory is short or after `torch.cuda.empty_cache`) or hand to others (cudaMallocAsync, or a component
that was given the same stream of torch's pool). So what is handed out is an alias with a storage of its own; the block behind it
stays here until the death of the alias has been noticed, and the events of its users have passed.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch.utils.dlpack import from_dlpack, to_dlpack

from ssdtrain.device import Device, Event
from ssdtrain.offload.tensors.geometry import ALIGNED, Geometry, tensor_over
from ssdtrain.offload.tensors.meter import ActivationMeter, SeenBuffer

_from_dlpack: Callable[[object], torch.Tensor] = getattr(torch._C, "_from_dlpack", from_dlpack)
"""The same of a capsule, without asking what it is given."""

SLACK = 2
"""Memory is used again for a target that needs at least this part of it."""

FORMS = 16
"""Number of forms that memory keeps a tensor of, at most."""


@functools.cache
def keeps_form(dtype: torch.dtype) -> bool:
    """Return whether an alias by DLPack has the dtype and the strides of its tensor: older versions of torch do not know every
    dtype, and set the strides of dimensions of size 1."""
    probe = torch.empty_strided((1, 2), (7, 1), dtype=dtype, device="cpu")
    try:
        alias = _from_dlpack(to_dlpack(probe))
    except (RuntimeError, BufferError):
        return False
    return alias.dtype is dtype and alias.stride() == probe.stride()


class NoTargetYet(torch.OutOfMemoryError):
    """There is no memory for a load before `LoadTargets.allocate` was called. What was to be loaded is as before."""


class TargetMemory:
    """What the allocator gave for targets, one after another.

    Args:
        tensor: the memory (uint8).
    """

    __slots__ = ("address", "awaited", "forms", "nbytes", "tensor")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.nbytes = tensor.numel()
        self.address = tensor.data_ptr()
        self.awaited: list[Event] = []
        """What the next copy into it waits for."""
        self.forms: dict[Geometry, torch.Tensor] = {}
        """Tensors at its begin. See Note: [Form of a target]."""

    def in_form(self, form: Geometry) -> torch.Tensor | None:
        """Return a tensor of this form at the begin of the memory; None: aliases of it have another form."""
        tensor = self.forms.get(form)
        if tensor is None and keeps_form(form[0]):
            if len(self.forms) == FORMS:
                self.forms.clear()
            tensor = self.forms[form] = tensor_over(self.tensor, form)
        return tensor


class Target(SeenBuffer):
    """A part of such memory that a load fills; a reference to the storage of the alias that is handed out."""

    __slots__ = ("address", "form", "memory", "streams", "tensor", "used")

    memory: TargetMemory
    address: int
    tensor: torch.Tensor | None
    """The alias, of uint8 or in its form, until `take`."""
    form: Geometry | None
    """Form of the alias; None: uint8. See Note: [Form of a target]."""
    streams: list[Any]
    """Streams that were handed it."""
    used: deque[Target]
    """Gets it at its death."""

    def died(self) -> None:
        self.used.append(self)


class LoadTargets:
    """Allocates targets, each with what a copy into it has to wait for. Called with the engine's lock held.

    Args:
        device: allocates on its load stream, and records events.
        meter: counts them, and notices their deaths.
        waits: the allocator may be asked with the engine's lock held, which others then wait for.
    """

    def __init__(self, device: Device, meter: ActivationMeter, *, waits: bool = True) -> None:
        self._device = device
        self._meter = meter
        self._dead: deque[Target] = deque()
        # Of those that died, in the order of their deaths: not out of use yet, or kept for the next loads. See `_trim`.
        self._pending: deque[TargetMemory] = deque()
        self._alive_bytes = self._pending_bytes = 0  # of their memory
        self._peak_bytes = 0  # the most of `_alive_bytes` since none was alive
        self._latest = 0  # bytes of the latest target
        self.missing = 0
        """Bytes of the memory that `allocate` is to make; 0: none."""
        self._waits = waits
        self._allocated: TargetMemory | None = None  # for the target that was missing

    def reserve(self, nbytes: int, lead: int = 0, form: Geometry | None = None) -> Target:
        """Return a target of `nbytes` uninitialised bytes, whose address is `lead` modulo `ALIGNED`.

        Args:
            form: form of all these bytes as a tensor; None: uint8.

        Raises:
            NoTargetYet: `allocate` has to make it.
            torch.OutOfMemoryError: there is no memory for it.
        """
        self._latest = nbytes + ALIGNED if lead else nbytes
        memory = self._dead_memory(self._latest) or self._memory(self._latest)
        self._alive_bytes += memory.nbytes
        if self._alive_bytes > self._peak_bytes:
            self._peak_bytes = self._alive_bytes
        start = (lead - memory.address) % ALIGNED if lead else 0
        part = memory.in_form(form) if form is not None and not lead else None
        if part is None:
            form = None
            part = memory.tensor if memory.nbytes == nbytes else memory.tensor[start : start + nbytes]
        tensor = _from_dlpack(to_dlpack(part))
        target = self._meter.see(tensor.untyped_storage(), Target)
        target.memory, target.address, target.tensor = memory, memory.address + start, tensor
        target.form, target.streams, target.used = form, [], self._dead
        return target

    def _dead_memory(self, nbytes: int) -> TargetMemory | None:
        memory = self._allocated
        if memory is not None and nbytes <= memory.nbytes <= SLACK * nbytes:
            self._allocated = None
            return memory
        for memory in self._pending:
            if nbytes <= memory.nbytes <= SLACK * nbytes:
                self._pending.remove(memory)
                self._pending_bytes -= memory.nbytes
                return memory
        return None

    def _memory(self, nbytes: int) -> TargetMemory:
        self.note_deaths()
        if (memory := self._dead_memory(nbytes)) is not None:
            return memory
        self._trim(self._peak_bytes - self._alive_bytes - nbytes)
        if not self._waits:
            self.missing = nbytes
            raise NoTargetYet
        return self._made(nbytes, nullcontext())

    def _made(self, nbytes: int, lock: AbstractContextManager[object]) -> TargetMemory:
        """Ask the allocator; where it has none, once more after all that is out of use was given back to it, under `lock`."""
        try:
            return TargetMemory(self._device.load_target(nbytes))
        except torch.OutOfMemoryError:
            with lock:
                self._give_back()
            return TargetMemory(self._device.load_target(nbytes))

    def allocate(self, lock: AbstractContextManager[object]) -> None:
        """Make the memory that is missing. Called without the engine's lock, `lock`: to allocate may wait for the device.

        Raises:
            torch.OutOfMemoryError: there is none.
        """
        with lock:
            nbytes, self.missing = self.missing, 0
        if not nbytes:
            return
        memory = self._made(nbytes, lock)
        with lock:
            self._allocated = memory

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Ask the allocator with the engine's lock held, inside."""
        before, self._waits = self._waits, True
        try:
            yield
        finally:
            self._waits = before

    def take(self, target: Target) -> torch.Tensor:
        """Return the tensor, which from now on is alive only while others hold it."""
        tensor, target.tensor = target.tensor, None
        assert tensor is not None
        return tensor

    def note_deaths(self) -> None:
        """Record where the streams are that used what has died since, and give back what is out of use. Cheap when nothing is."""
        if not self._meter.settled():
            self._meter.drain()
        dead, pending = self._dead, self._pending
        while dead:
            self._retire(dead.popleft())
        if pending:
            limit = self._peak_bytes - self._alive_bytes if self._alive_bytes else 0
            if self._pending_bytes > limit or pending[0].nbytes > SLACK * self._latest:
                self._trim(limit)

    def _give_back(self) -> None:
        """Give back all that is out of use, also what was allocated for a load that does not need it any more."""
        self._allocated = None
        self._trim(-1)

    def _trim(self, limit: int) -> None:
        """Give back what is out of use, but for `limit` bytes of the size that is needed now: as much as was alive at once stays
        while loads go on, since to allocate takes longer than the rest of a load."""
        pending = self._pending
        while pending:
            memory = pending[0]
            if self._pending_bytes <= limit and memory.nbytes <= SLACK * self._latest:
                break
            if not _passed(memory.awaited):
                break
            pending.popleft()
            self._pending_bytes -= memory.nbytes
        if not self._alive_bytes:
            self._peak_bytes = 0

    def _retire(self, target: Target) -> None:
        memory = target.memory
        # What it had to wait for itself, if nothing was ever copied into it, the next copy into its memory waits for.
        awaited = memory.awaited
        if awaited:
            _passed(awaited)
        for stream in target.streams:
            event = self._device.record(stream)
            if event is not None:
                awaited.append(event)
        self._alive_bytes -= memory.nbytes
        self._pending_bytes += memory.nbytes
        self._pending.append(memory)


def _passed(events: list[Event]) -> bool:
    """Forgets those that have passed."""
    while events:
        if not events[0].query():
            return False
        del events[0]
    return True
