"""One tensor whose bytes are in device memory or in a slot of a tier."""

from __future__ import annotations

from typing import Any

import torch

from ssdtrain.state.checksum import checksum
from ssdtrain.state.transfers import Transfer, Transfers
from ssdtrain.storage import Slot

__all__ = ["MOVABLE", "GradientInTier", "StoredTensor", "is_movable", "users"]

MOVABLE = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
"""Types of tensors that may leave: those with a NaN to show meanwhile."""


def is_movable(tensor: torch.Tensor, min_bytes: int = 1) -> bool:
    """True for a plain tensor of `min_bytes` that has a storage of its own, which torch allocated."""
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
    """How many tensors have the storage of a plain one, which is among them."""
    alone = torch.empty(0, device=tensor.device)
    return 1 + _count(tensor) - _count(alone)


def _count(tensor: torch.Tensor) -> int:
    found: int = torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)
    return found


class StoredTensor:
    """A tensor that comes and goes. While it is away, it has its shape, and every element reads as NaN.

    Args:
        name: for errors.
        tensor: in memory, see `is_movable`. It stays the same object, and so does its storage.
        slot: of its size.
        transfers: of its device.
        watched: bytes may be changed past the version counter (through `.data`): they are compared by a checksum before they are
            taken to be those of the slot.

    Attributes:
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
        "in_slot",
        "name",
        "nbytes",
        "slot",
        "tensor",
    )

    def __init__(
        self, name: str, tensor: torch.Tensor, slot: Slot, transfers: Transfers, *, watched: bool = False
    ) -> None:
        self.name = name
        self.tensor = tensor
        self.slot = slot
        self.in_slot = False
        self._storage = tensor.untyped_storage()
        self.nbytes = self._storage.nbytes()
        self._geometry = tuple(tensor.shape), tuple(tensor.stride())
        self._nan = torch.full((), torch.nan, dtype=tensor.dtype, device=tensor.device)
        self._hidden = self._nan.expand(tensor.shape)
        self._transfers = transfers
        self._store: Transfer | None = None
        self._load: Transfer | None = None
        self._version = tensor._version
        self._watched = watched
        self._sum: torch.Tensor | None = None  # of the bytes in the slot, while they are in memory

    @property
    def in_memory(self) -> bool:
        """True if the storage is allocated: it has the bytes, or they are on their way."""
        return self._storage.nbytes() > 0

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
        if not self._is_hidden() and self.tensor.data_ptr() != self._storage.data_ptr():
            raise self._other_data()
        self._note_changes()
        if self.in_slot and not changed_unseen:
            return 0
        self.wait_for_store()
        if self._watched:
            with torch.inference_mode(False):
                self._sum = checksum(self._storage)
        self._store = self._transfers.store(self.slot, self._storage)
        self.in_slot = True
        return self.nbytes

    def hide(self) -> None:
        """Show NaN. The memory stays until `free`."""
        with torch.inference_mode(False):  # else the parameter would become an inference tensor
            self.tensor.data = self._hidden
        self._version = self.tensor._version

    def lost_write(self) -> RuntimeError | None:
        """The error of a write to the tensor while it is away, which has changed nothing but what is shown (`zero_` of one
        element that stands for all is no error of torch). It is found once."""
        if not self._is_hidden():
            return self._other_data()
        written = self.tensor._version != self._version
        self._version = self.tensor._version
        text = (
            f"{self.name} was written to while it was not in memory, and the write is lost (config section state): write it in "
            "the forward of its block, by the optimizer or load_state_dict, before ssdtrain.attach, or after close()"
        )
        # Through `.data` no version moves. The host does not wait for a device, whose error it is there.
        if self._nan.device.type == "cpu":
            written = written or not bool(self._nan.isnan())
        elif not written:
            torch._assert_async(self._nan.isnan(), text)
        if not written:
            return None
        self._nan.fill_(torch.nan)
        return RuntimeError(text)

    def discard_write(self) -> None:
        """Show NaN again, whatever was written to the tensor, or put in its place, while it is away."""
        with torch.inference_mode(False):
            self._nan.fill_(torch.nan)
        self.hide()

    def may_be_freed(self) -> bool:
        """True if `wait_to_free` does not wait."""
        return self._store is None or self._transfers.frees_at_once or self._store.done()

    def wait_to_free(self) -> None:
        """Wait for the store where it needs the memory.

        Raises:
            IOFailure: the store failed; the memory has the only copy.
        """
        if not self._transfers.frees_at_once:
            self.wait_for_store()

    def free(self) -> None:
        """Free the memory; `wait_to_free` has returned."""
        self._storage.resize_(0)
        self._sum = None

    def wait_for_store(self) -> None:
        """Raises IOFailure: the store failed."""
        if self._store is not None:
            self._store.wait()
            self._store = None

    # In

    def begin_load(self) -> int:
        """Begin to read the slot into memory.

        Returns:
            Bytes that are read.

        Raises:
            IOFailure: the store of these bytes failed.
        """
        self.wait_for_store()
        try:
            self._load = self._transfers.load(self.slot, self._storage)
        except BaseException:
            self._storage.resize_(0)
            raise
        return self.nbytes

    def finish_load(self) -> None:
        """Wait for the bytes and show them.

        Raises:
            IOFailure: they could not be read; the tensor goes on to show NaN.
        """
        if self._load is not None:
            try:
                self._load.wait()
            except Exception:
                self._load = None
                self._storage.resize_(0)
                raise
            self._load = None
        self.show()

    def abandon(self) -> None:
        """Wait for a load whose bytes nobody needs, and free them.

        Raises:
            IOFailure: they could not be read.
        """
        if self._load is not None:
            self._load.wait()
            self._load = None
            self._storage.resize_(0)

    def show(self) -> None:
        """Show the bytes, which are in memory."""
        assert self.in_memory, self.name
        with torch.inference_mode(False):  # what is evaluated now is trained later
            shown = torch.empty(0, dtype=self._hidden.dtype, device=self._hidden.device)
            self.tensor.data = shown.set_(self._storage, 0, *self._geometry)
            self._version = self.tensor._version
            if self._watched and self._sum is None:
                self._sum = checksum(self._storage)

    def differs(self) -> torch.Tensor | None:
        """A flag on the device: the bytes are others than those of the slot, though no version counter has moved. None: a counter
        has, or they are not watched."""
        self._note_changes()
        if not self.in_slot or self._sum is None or self._is_hidden():
            return None
        with torch.inference_mode(False):
            return checksum(self._storage) != self._sum

    def _note_changes(self) -> None:
        if self.tensor._version != self._version:
            self._version = self.tensor._version
            if not self._is_hidden():
                self.in_slot = False  # changed in place since it was loaded

    def _other_data(self) -> RuntimeError:
        return RuntimeError(
            f"{self.name} was given other data (`.data`, or another tensor in its place; config section state): change "
            "parameters in the forward of their block in place, by the optimizer, by load_state_dict, or after close()"
        )

    def _is_hidden(self) -> bool:
        return self.tensor.data_ptr() == self._hidden.data_ptr()


_METADATA = frozenset(
    {
        *("__get__", "size", "dim", "numel", "stride", "element_size", "is_floating_point", "is_complex"),
        *("is_contiguous", "untyped_storage"),
    }
)


class GradientInTier(torch.Tensor):
    """Stands as `grad` of a parameter whose gradient is not in memory: it has a shape, and no operation on it works."""

    @classmethod
    def standing_for(cls, gradient: StoredTensor) -> GradientInTier:
        with torch.inference_mode(False):
            found: GradientInTier = torch.Tensor._make_subclass(cls, gradient._hidden)
        return found

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
