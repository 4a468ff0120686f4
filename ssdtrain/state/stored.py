"""One tensor whose bytes are in device memory or in a slot of a tier."""

from __future__ import annotations

from typing import Any

import torch

from ssdtrain.state.checksum import checksum
from ssdtrain.state.transfers import HostCopy, StateTransfer, StateTransfers, failure_of
from ssdtrain.storage import Slot, signals_deferred

MOVABLE = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
"""Types of tensors that may leave: those with a NaN to show meanwhile."""


def is_movable(tensor: torch.Tensor, min_bytes: int = 1) -> bool:
    """Return True for a plain tensor of `min_bytes` that has a storage of its own, which torch allocated."""
    data = tensor.data
    return (
        type(data) is torch.Tensor
        and data.layout is torch.strided
        and data.dtype in MOVABLE
        and not data.is_conj()
        and not data.is_neg()
        and data.nbytes >= max(min_bytes, 1)
        and data.storage_offset() == 0
        and data.untyped_storage().nbytes() == data.nbytes
        and data.untyped_storage().resizable()
    )


def users(tensor: torch.Tensor) -> int:
    """Count the tensors that have the storage of a plain one, itself included."""
    alone = torch.empty(0, device=tensor.device)
    return 1 + _count(tensor) - _count(alone)


def _count(tensor: torch.Tensor) -> int:
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))


class StoredTensor:
    """A tensor that comes and goes. While it is away, it has its shape, and every element reads as NaN.

    Note: [Interrupts]
        A signal handler may raise (Ctrl-C) at any moment, and the state of a tensor is then what it was or what it is to be: what
        changes together is changed while signals are deferred, and no wait is among it. So a transfer is kept where it is begun,
        and memory is freed after its transfer has ended. Each method may be called again after an interrupt, and goes on.

    Args:
        name: for errors.
        tensor: in memory, see `is_movable`. It stays the same object, and so does its storage.
        slot: of its size; None: it never leaves memory.
        transfers: of its device.
        watched: bytes may be changed past the version counter (through `.data`): they are compared by a checksum before they are
            taken to be those of the slot.

    Attributes:
        away: the tensor shows NaN.
        in_slot: the slot has the bytes of the tensor, or a store of them is in flight.
    """

    __slots__ = (
        "_geometry",
        "_hidden",
        "_load",
        "_nan",
        "_storage",
        "_store",
        "_sum",
        "_transfers",
        "_version",
        "_watched",
        "away",
        "in_slot",
        "name",
        "nbytes",
        "slot",
        "tensor",
    )

    def __init__(
        self,
        name: str,
        tensor: torch.Tensor,
        slot: Slot | None,
        transfers: StateTransfers,
        *,
        watched: bool = False,
    ) -> None:
        self.name = name
        self.tensor = tensor
        self.slot = slot
        self.away = False
        self.in_slot = False
        self._storage = tensor.untyped_storage()
        self.nbytes = self._storage.nbytes()
        self._geometry = tuple(tensor.shape), tuple(tensor.stride())
        self._nan = torch.full((), torch.nan, dtype=tensor.dtype, device=tensor.device)
        self._hidden = self._nan.expand(tensor.shape)
        self._transfers = transfers
        self._store: StateTransfer | None = None
        self._load: StateTransfer | None = None
        self._version = tensor._version
        self._watched = watched
        self._sum: torch.Tensor | None = None  # of the bytes in the slot, if it was computed

    @property
    def in_memory(self) -> bool:
        """Whether the storage is allocated: it has the bytes, or they are on their way."""
        return self._storage.nbytes() > 0

    @property
    def loading(self) -> bool:
        """Whether a load has begun whose end was not waited for."""
        return self._load is not None

    # Out

    def begin_store(self, changed_unseen: bool = False) -> int:
        """Write the bytes to the slot, unless it has them.

        Args:
            changed_unseen: the bytes are others than those of the slot, see `differs`.

        Returns:
            Bytes that are written.

        Raises:
            RuntimeError: the tensor was given other data while it was in memory.
        """
        if not self.away and self.tensor.data_ptr() != self._storage.data_ptr():
            raise self._other_data()
        self._note_changes()
        if self.in_slot and not changed_unseen:
            return 0
        self.wait_for_store()
        self._transfers.make_room(self.nbytes)
        with signals_deferred():
            self._write()
        return self.nbytes

    def _write(self) -> None:
        self.in_slot, self._sum = False, None  # also where nothing can be submitted
        if self._watched:
            with torch.inference_mode(False):
                self._sum = checksum(self._storage)
        assert self.slot is not None
        self._store = self._transfers.store(self.slot, self._storage)
        self.in_slot = True

    def hide(self) -> None:
        """Show NaN. The memory stays until `free`."""
        with signals_deferred():
            with torch.inference_mode(False):  # else the parameter would become an inference tensor
                self.tensor.data = self._hidden
            self._version = self.tensor._version
            self.away = True

    def lost_write(self) -> RuntimeError | None:
        """Return, once, the error of a write to the tensor while it is away, which has changed nothing but what is shown (`zero_`
        of one element that stands for all is no error of torch)."""
        if not self.away:
            return None
        if self.tensor.data_ptr() != self._hidden.data_ptr():
            return self._other_data()
        written = self.tensor._version != self._version
        self._version = self.tensor._version
        text = (
            f"{self.name} was written to while it was not in memory, and the write is lost (config section state): write it in "
            "the forward of its block, by the optimizer or load_state_dict, before ssdtrain.attach, or after close()"
        )
        # Through `.data` no version moves. The host does not wait for a device, whose error it is there: of 254 bytes at most.
        if self._nan.device.type == "cpu":
            written = written or not bool(self._nan.isnan())
        elif not written:
            name = self.name.encode("ascii", "replace")[-150:].decode()
            torch._assert_async(
                self._nan.isnan(), f"{name} was written to while it was not in memory (config section state)"
            )
        if not written:
            return None
        self._nan.fill_(torch.nan)
        return RuntimeError(text)

    def discard_write(self) -> None:
        """Show NaN again, whatever was written to the tensor, or put in its place, if it is away."""
        if self.away:
            with torch.inference_mode(False):
                self._nan.fill_(torch.nan)
            self.hide()

    def may_be_freed(self) -> bool:
        """Return True if `wait_to_free` does not wait."""
        if self._transfers.frees_at_once:
            return self._transfers.may_be_freed(self._storage)
        return self._store is None or self._store.done()

    def wait_to_free(self) -> None:
        """Wait for the store where it needs the memory.

        Raises:
            IOFailure: the store failed; the memory has the only copy.
        """
        if not self._transfers.frees_at_once:
            self.wait_for_store()

    def free(self) -> None:
        """Free the memory of a tensor that is hidden; `wait_to_free` has returned."""
        with signals_deferred():
            self._transfers.before_free(self._storage)
            self._storage.resize_(0)

    def wait_for_store(self) -> None:
        """Wait for the store. Raises IOFailure: it failed."""
        if self._store is not None:
            self._store.wait()
            self._store = None

    # In

    def begin_load(self) -> int:
        """Begin to read the slot into memory, unless the bytes are there or on their way.

        Returns:
            Bytes that are read.

        Raises:
            IOFailure: the store of these bytes failed.
        """
        if self.loading or self.in_memory:
            return 0
        self.wait_for_store()
        self._transfers.make_room(self.nbytes)
        assert self.slot is not None
        with signals_deferred():
            try:
                self._load = self._transfers.load(self.slot, self._storage)
            except Exception:
                self._storage.resize_(0)  # no read has begun
                raise
        return self.nbytes

    def wait_for_load(self) -> None:
        """Wait for the bytes.

        Raises:
            IOFailure: they could not be read, and the memory is free again.
        """
        load = self._load
        if load is None:
            return
        failure = failure_of(load)
        if failure is not None:
            self._drop(load)
            raise failure
        self._load = None

    def abandon(self) -> None:
        """Wait for a load whose bytes nobody needs, however it ends, and free them."""
        load = self._load
        if load is not None:
            failure_of(load)
            self._drop(load)

    def _drop(self, load: StateTransfer) -> None:
        """Free the memory of a load that has ended."""
        with signals_deferred():
            load.discard()
            self._load = None
            self._storage.resize_(0)

    def show(self) -> None:
        """Show the bytes, which are in memory."""
        assert self.in_memory, self.name
        if not self.away:
            return
        with signals_deferred(), torch.inference_mode(False):  # what is evaluated now is trained later
            if self._watched and self._sum is None and self.in_slot:
                self._sum = checksum(self._storage)
            shown = torch.empty(0, dtype=self._hidden.dtype, device=self._hidden.device)
            self.tensor.data = shown.set_(self._storage, 0, *self._geometry)
            self._version = self.tensor._version
            self.away = False

    # The optimizer's thread

    def to_host(self) -> HostCopy:
        """Return the bytes in host memory, where the thread steps them: the memory itself, which `wait_for_load` completes, or
        else a copy of what is in memory or in the slot."""
        self.wait_for_store()
        storage = self._storage
        if self.slot is not None and self._transfers.steps_in(self.slot) and self._slot_is_right():
            storage = torch.UntypedStorage(device=storage.device)  # nothing is copied
        return self._transfers.to_host(self.slot, storage, self._hidden.dtype, *self._geometry)

    def _slot_is_right(self) -> bool:
        """Whether it is known that the slot has the bytes."""
        if self.away:
            return self.in_slot
        return self.differs() is None and self.in_slot and (self._sum is not None or not self._watched)

    def take(self, stepped: HostCopy) -> None:
        """Take the bytes that the thread has stepped, which are those of the tensor from now on."""
        self.in_slot, self._sum, self._version = False, None, self.tensor._version
        if not self._transfers.frees_at_once:
            return
        assert self.slot is not None
        if not self._transfers.steps_in(self.slot):
            self._store = self._transfers.store_host(self.slot, stepped)
        self.in_slot = True

    def differs(self) -> torch.Tensor | None:
        """Return a flag on the device: the bytes are others than those of the slot, though no version counter has moved. None: a
        counter has, they are not watched, or the device has stored them where they are."""
        self._note_changes()
        if not self.in_slot or self._sum is None or self.away:
            return None
        assert self.slot is not None
        with torch.inference_mode(False):
            found = checksum(self._storage)
            changed = found != self._sum
            if not self._transfers.store_where(changed, self.slot, self._storage):
                return changed
        self._sum = found
        return None

    def _note_changes(self) -> None:
        if self.tensor._version != self._version:
            if not self.away:
                self.in_slot = False  # changed in place since it was loaded
            self._version = self.tensor._version

    def _other_data(self) -> RuntimeError:
        return RuntimeError(
            f"{self.name} was given other data (`.data`, or another tensor in its place; config section state): change "
            "parameters in the forward of their block in place, by the optimizer, by load_state_dict, or after close()"
        )


_METADATA = {"__get__", "size", "dim", "numel", "stride", "element_size", "is_floating_point", "is_complex"}
_METADATA |= {"is_contiguous", "untyped_storage"}


class GradientInTier(torch.Tensor):
    """Stands as `grad` of a parameter whose gradient is not in memory: it has a shape, and no operation on it works."""

    @classmethod
    def standing_for(cls, gradient: StoredTensor) -> GradientInTier:
        with torch.inference_mode(False):
            standing: GradientInTier = torch.Tensor._make_subclass(cls, gradient._hidden)
        return standing

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in _METADATA:
            return super().__torch_function__(func, types, args, kwargs)
        raise RuntimeError(
            f"{getattr(func, '__name__', func)} meets a gradient that is not in memory (config section state): clip by "
            "`runtime.state.clip_grad_norm_(max_norm)`, use bfloat16 in place of a GradScaler, and zero by "
            "`zero_grad(set_to_none=True)`"
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"GradientInTier(shape={tuple(self.shape)}, dtype={self.dtype})"
