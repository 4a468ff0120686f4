"""A region: bytes of one storage that are kept once; a handle: what autograd holds for each saved tensor in it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

import torch

from ssdtrain.offload.tensors.geometry import Geometry, densest, lead_of, restride, tensor_over, view_of
from ssdtrain.offload.transfer.state import TransferState
from ssdtrain.storage import record

if TYPE_CHECKING:
    from ssdtrain.offload.checks.proof import Proof
    from ssdtrain.offload.tensors.meter import Seen
    from ssdtrain.offload.tensors.tape import Tape
    from ssdtrain.storage import SourceChanged


class _Nothing(dict[torch.device, torch.Tensor]):
    """Empty tensors by device."""

    def __missing__(self, device: torch.device) -> torch.Tensor:
        return self.setdefault(device, torch.empty(0, device=device))


_NOTHING = _Nothing()


def place_of(chunk: int, index: int) -> str:
    """Return the name of a region whose module is not known."""
    return f"chunk {chunk}, region {index}"


@record(collected=True)
class Region:
    """Bytes [start, start + nbytes) of one storage, kept once however many saved tensors view them.

    Here is what they are, which version of them was saved, and who refers to them; where they are is in `transfer`.

    Note: [The probe]
    `tensor` is a detached alias of the first tensor saved. When the bytes have left memory its storage is taken away
    (`empty_`), but the object remains: it still shares the version counter of the original, so an in-place write to the
    original is noticed whenever it happens. Regions that hold a packed copy (`copy_together`) watch the original through `probe`.

    Note: [Buffers belong to the tensor]
    `transfer.loaded` is the buffer that a load filled. What `unpack` hands out shares its storage and its version counter; where
    a region has one handle only, its tensor has the buffer for itself, and a counter of its own. The storage owns the
    buffer: it goes back to the arena when the last view dies, not when the handle does. A backward may return
    its saved tensor, modified, as the gradient (vocabulary-parallel cross entropy does); a buffer that went back with the
    handle would be overwritten under it. A write is seen on the counter, and the buffer is not handed out again.

    Note: [Freed under the engine]
    `storage.resize_` frees memory that a store may still read, and leaves no trace on the version counter. A region whose
    storage has another address or too few bytes when its store is over (`freed`) is not read back from the tier: which bytes
    went there is unknown. It stays as its owner leaves it: backward raises while the storage is too small for it (`changed`),
    and gets what its owner filled in again otherwise, as autograd would give it. Storage of the same address and size at the
    end may have been freed and used by others in between: then the store took other bytes, as the sample of the write shows
    when they are read (`overwritten`). Storages that are known to be freed do not come this far: see `eligible`.
    """

    tensor: torch.Tensor
    probe: torch.Tensor
    start: int
    nbytes: int
    tape: Tape
    version: int
    seen: Seen
    """Its storage, as the meter counts it."""
    index: int
    """Place on the tape."""
    operator: int
    """Sequence number of the one that saved it."""
    owner: weakref.ref[torch.Tensor]
    """See Note: [Owners of version counters] in `sharing`."""
    dtype: torch.dtype
    pointer: int
    """Address of the storage of `tensor`, as it was when it was saved, or when its store began; 0: that was emptied."""
    transfer: TransferState
    """The mover's."""
    stream: Any | None = None
    """Stream on which it was saved; None without streams."""
    form: Geometry | None = None
    """Geometry of the first tensor saved, where the region is all of its bytes and nothing else."""
    origin: Geometry | None = None
    """Where a thin view lies in its storage, whose bytes are copied together."""
    packed: tuple[int, ...] | None = None  # shape of that copy, when it was made
    lead: int = 0  # of a packed view, its address modulo 64
    stays: bool = False  # whatever a plan says: it is filtered out, or all of its tape stays
    handles: int = 1  # handles alive, with that of the tensor that makes it
    shared: bool = False  # there was ever more than one
    pending_unpacks: int = 1  # handles alive that were not unpacked in `last_pass`
    last_pass: int = -1  # the tape's pass in which backward last used it
    module: str = ""  # qualified name of the module that saved it; "": unknown

    @property
    def name(self) -> str:
        """Name of the module that saved it, or else its place."""
        return self.module or self.place

    @property
    def place(self) -> str:
        """The model chunk, and the number on its tape."""
        return place_of(self.tape.chunk, self.index)

    @property
    def in_tensor(self) -> bool:
        """True while the bytes are (also) in `tensor`."""
        return bool(self.tensor.untyped_storage().nbytes())

    @property
    def on_device(self) -> bool:
        """True while the bytes, or their payload, are (also) where the engine has not released them."""
        return self.pointer != 0 or self.transfer.payload is not None

    def tensor_from(self, base: torch.Tensor, start: int, geometry: Geometry, *, alone: bool) -> torch.Tensor:
        """Return the saved tensor of this geometry from the region's bytes, which begin `start` bytes into the storage of `base`.

        Args:
            alone: no other tensor is in these bytes, so that it needs no version counter in common.
        """
        if self.packed is not None:
            dense = base if base.dtype != torch.uint8 else base.view(geometry[0]).view(self.packed)
            return restride(dense, geometry, self.lead)
        if self.origin is not None:  # a thin view that was not copied
            return view_of(base, 0, self.origin)
        return tensor_over(base, geometry, start) if alone else view_of(base, start, geometry)

    @property
    def emptied(self) -> bool:
        """True if the engine has released the bytes in `tensor`."""
        return self.pointer == 0

    def changed(self) -> bool:
        """Return True if the original was modified in place since it was saved, or is lost."""
        return self.probe._version != self.version or (
            self.pointer != 0 and self.tensor.untyped_storage().nbytes() < self.start + self.nbytes
        )

    def freed(self) -> bool:
        """Return True if the bytes should be in the tensor, and its owner has freed that memory, filled again or not."""
        if self.pointer == 0:
            return False
        storage = self.tensor.untyped_storage()
        return storage.data_ptr() != self.pointer or storage.nbytes() < self.start + self.nbytes

    def let_go(self) -> bool:
        """Do as `empty_`, where the bytes are in `tensor`. False: their owner has freed that memory, filled again or not, and
        nothing is done."""
        tensor = self.tensor
        storage = tensor.untyped_storage()
        if storage.data_ptr() != self.pointer or storage.nbytes() < self.start + self.nbytes:
            return False
        self.pointer = 0
        tensor.data = _NOTHING[tensor.device]
        return True

    def copy_together(self) -> None:
        """Have the bytes of a thin view, whose store begins, in one piece."""
        offset = int(self.probe.storage_offset()) * self.probe.itemsize
        self.lead = lead_of(self.pointer, offset, self.probe.device)
        self.tensor = densest(self.probe)
        self.pointer = self.tensor.untyped_storage().data_ptr()
        self.packed = tuple(self.tensor.shape)
        self.probe.data = _NOTHING[self.probe.device]  # it only watches the version

    def empty_(self) -> None:
        """Let go of the bytes and keep the version counter. See Note: [The probe]."""
        self.pointer = 0
        tensor = self.tensor
        tensor.data = _NOTHING[tensor.device]


@record()
class Release:
    """What remains of a handle."""

    region: Region
    last_pass: int | None


@record(told=("releases", "region", "last_pass"), tells=Release)
class Handle:
    """What the pack hook returns for a tensor that may move. Its life is autograd's own reference; see `Releases`."""

    region: Region
    geometry: Geometry
    releases: Releases
    proof: Proof | None = None
    """What backward gets is compared with it."""
    last_pass: int | None = None
    """The tape's pass in which backward last had it; None: never."""


class Releases:
    """Handles that died, in the order of their deaths.

    Note: [Release through a queue]
    A handle dies anywhere: on an autograd thread, in cyclic collection, inside a section that holds the engine's lock. C code
    then puts what remains of it into a queue, which pack, unpack and step drain. Nothing of Python runs: a signal
    that arrives during backward is handled in the first Python that runs after it, and an exception that the handler raises
    in a finalizer (Ctrl-C) is lost. After the end of the engine nobody drains the queue: from then on Python runs
    (`call_at_each`). It waits for no lock, so who held the engine's lock meanwhile looks again (`look_again`).
    """

    def __init__(self) -> None:
        dead: SimpleQueue[Release] = SimpleQueue()
        self.put: Callable[[Release], object] = dead.put
        """What a handle calls at its death."""
        self.empty = dead.empty
        """`empty()`: no handle has died since."""
        self.next = dead.get_nowait
        """`next()`: what remains of the next handle that died, once. There must be one: handles are taken here only, with the
        engine's lock held."""
        self.look_again: Callable[[], object] = int
        """Call it after the engine's lock was released: what died meanwhile, if the engine has ended. Before, it does nothing."""

    def call_at_each(self, drain: Callable[[], None]) -> None:
        """Call `drain` also, each time when a handle has died that is alive now. Called with the engine's lock held."""
        put = self.put

        def died(release: Release) -> None:
            put(release)
            drain()

        self.look_again, self.put = drain, died


class Kept:
    """What the pack hook returns for a tensor that stays: the tensor, and the version at which it was saved.

    With hooks autograd no longer compares versions, so the comparison is ours for these too.
    """

    __slots__ = ("tensor", "version")

    def __init__(self, tensor: torch.Tensor) -> None:
        # A leaf is returned as the same object; a detached alias of anything else, because a saved output that is held as
        # itself holds its own graph.
        self.tensor = tensor if tensor.is_leaf else tensor.detach()
        self.version = tensor._version

    def unchanged(self) -> torch.Tensor:
        """The tensor.

        Raises:
            RuntimeError: it was modified in place since it was saved.
        """
        if self.tensor._version != self.version:
            size = () if self.tensor.is_nested else self.tensor.shape  # a nested tensor has no sizes
            raise modified(self.tensor.dtype, size, self.tensor._version, self.version)
        return self.tensor


def modified(dtype: torch.dtype, size: Sequence[int], version: int, expected: int) -> RuntimeError:
    """Return the error that autograd raises by itself where no hooks are installed; with equal versions that of a lost tensor."""
    if version == expected:
        return lost(dtype, size)
    return RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace operation: "
        f"[{dtype} {list(size)}] is at version {version}; expected version {expected} instead. Hint: enable anomaly "
        "detection to find the operation that failed to compute its gradient, with "
        "torch.autograd.set_detect_anomaly(True)."
    )


def lost(dtype: torch.dtype, size: Sequence[int]) -> RuntimeError:
    """Return the error for a saved tensor that is lost. See Note: [Freed under the engine]."""
    return RuntimeError(
        f"the memory of a saved tensor [{dtype} {list(size)}] was freed (storage.resize_) before or while it was offloaded, "
        "and its bytes are not known any more. Offloading needs to know which tensors a framework frees and fills again: "
        "attach by the framework's own adapter, or leave the part of the model that does it outside"
    )


def overwritten(dtype: torch.dtype, nbytes: int, unverified: SourceChanged | None) -> RuntimeError:
    """Return the error for a saved tensor of which the tier got other bytes. See Note: [Freed under the engine].

    Args:
        unverified: the error of the read, if the tier may have changed the bytes too; None: it returned what it was given.
    """
    if unverified is not None:
        return RuntimeError(
            f"a saved tensor [{dtype}, {nbytes} bytes] came back changed: {unverified}. "
            'With offload.verify: "all" what a drive changes is found by itself'
        )
    return RuntimeError(
        f"a saved tensor [{dtype}, {nbytes} bytes] was overwritten before it was offloaded, in a way that PyTorch does not see: "
        "its storage was freed and filled again (storage.resize_), or NumPy, a loader or another library wrote to its memory. "
        "Copy such a buffer before the forward uses it, or leave the part of the model that does it outside"
    )


def after_close() -> RuntimeError:
    """Return the error for a saved tensor that is in a tier when the engine has been closed."""
    return RuntimeError(
        "a saved tensor is needed after the offload engine was closed: close it after backward"
    )


def captured() -> RuntimeError:
    """Return the error for a saved tensor that is needed while a CUDA graph is captured, and may be offloaded."""
    return RuntimeError(
        "a CUDA graph is being captured of the backward of a forward that was not captured: what that forward saved may be "
        "offloaded, and a graph would read its memory at each replay. Capture the forward too, or leave it outside of offloading"
    )
