"""A copy between a device and host memory, in the place of an operation of the I/O pool."""

from __future__ import annotations

from ssdtrain.device import Device, Event

__all__ = ["DeviceCopy"]


class DeviceCopy:
    """Over when its event has passed; an `ssdtrain.storage.Operation`. It was queued on a stream: it cannot be cancelled, and the
    device reports what fails.

    Args:
        device: whose stream copies.
        event: the end of the copy; None: it is over.
        nbytes: size.
    """

    began = seconds = 0.0  # not measured
    checksum = digest = 0

    def __init__(self, device: Device, event: Event | None, nbytes: int) -> None:
        self.nbytes = nbytes
        self._device = device
        self._event = event

    def done(self) -> bool:
        event = self._event
        if event is None:
            return True
        if event.query():
            self._event = None
            return True
        return False

    def begun(self) -> bool:
        return True

    def wait(self, timeout: float | None = None) -> bool:
        event = self._event
        return event is None or self._device.block(event, timeout)

    def cancel(self) -> bool:
        return False

    def failed(self) -> None:
        return None
