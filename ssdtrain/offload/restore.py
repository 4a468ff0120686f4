"""The way back of a saved tensor: from wherever its region is to what the unpack hook returns."""

from __future__ import annotations

import torch

from ssdtrain.offload.mover import Mover
from ssdtrain.offload.prefetch import Prefetcher
from ssdtrain.offload.region import Handle, after_close, modified
from ssdtrain.offload.transfer_state import State

__all__ = ["Restorer"]


class Restorer:
    """Called with the engine's lock held, and never waits.

    Args:
        mover: moves the regions.
        prefetcher: knows how large the arena has to be.
    """

    def __init__(self, mover: Mover, prefetcher: Prefetcher) -> None:
        self.closed = False
        """What is in a tier does not come back any more."""
        self._mover = mover
        self._prefetcher = prefetcher

    def restore(self, handle: Handle) -> torch.Tensor | None:
        """The saved tensor if its bytes are in memory; else None, with their load under way, or waiting for a buffer.

        Raises:
            RuntimeError: it was modified in place since, or is in a tier after `closed`.
            IOFailure: it could not be read back.
        """
        region = handle.region
        transfer, mover = region.transfer, self._mover
        if transfer.state is State.STORED:
            if self.closed:
                raise after_close()
            self._prefetcher.fit()
            if not mover.loads.begin(region, on_demand=True):
                return None
        if transfer.state is State.LOADING:
            assert transfer.operation is not None
            if not transfer.operation.done():
                return None
            mover.loads.end(region)
        loaded = transfer.loaded
        if loaded is not None and loaded._version != transfer.loaded_version:
            # Backward wrote into the buffer: those are not the bytes that were saved. See Note: [Buffers belong to the tensor].
            if transfer.state is State.RESIDENT:
                dtype, size, *_ = handle.geometry
                raise modified(dtype, size, loaded._version, transfer.loaded_version)
            if transfer.state is State.LOADED:
                mover.loads.let_go(region)
                return self.restore(handle)
            if transfer.state is State.STORING:
                mover.loads.let_go(
                    region
                )  # the staging buffer or the payload still has the bytes that were saved
        if transfer.state is State.STORING and not mover.stop_store(region):
            mover.forward(region)
        if transfer.state is State.STAGED:
            mover.unstage(region)
        return self._hand_out(handle)

    def _hand_out(self, handle: Handle) -> torch.Tensor:
        region = handle.region
        self._mover.loads.hand_out(region)
        if not handle.unpacked:
            handle.unpacked = True
            region.pending_unpacks -= 1
        region.last_pass = region.tape.pass_number
        base, start = region.transfer.loaded, 0
        # It can come from its tier again: then whoever was handed it owns the buffer.
        last = region.pending_unpacks <= 0 and base is not None and region.transfer.slot is not None
        if last:
            self._mover.loads.let_go(region)
        elif base is None:
            base, start = region.tensor, region.start
        assert base is not None
        return region.tensor_from(base, start, handle.geometry, alone=last and not region.shared)
