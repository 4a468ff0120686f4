"""Transfer of one piece in the Python engine: vectored calls, bounce buffers, injected faults. `_iopool_transfer.h` is the C
version.
"""

import errno
import os
import time
from typing import TYPE_CHECKING

from ssdtrain.storage import faults as fault
from ssdtrain.storage import memory
from ssdtrain.storage.faults import Faults, chance, mix
from ssdtrain.storage.memory import ALIGNMENT
from ssdtrain.storage.pieces import COPY_IN, READ, WRITE, Piece

if TYPE_CHECKING:
    from ssdtrain.storage.python_operation import PythonOperation

SECTOR = 512
"""Bytes: granularity of a short O_DIRECT transfer."""

BOUNCE = 1 << 20
"""Bytes of a worker's bounce buffer, for reads into an address with another page offset."""

ERRNO, END_OF_FILE, NOTHING_WRITTEN, EVENT, CHANGED, CORRUPTED = range(6)
"""Meaning of an error code: an errno, a read beyond the end, a write of 0 bytes, the CUDA error of an event, a wrong sample, a
wrong digest."""


class TransferError(Exception):
    def __init__(self, code: int, detail: int, offset: int) -> None:
        super().__init__(code, detail, offset)
        self.code, self.detail, self.offset = code, detail, offset


class Transfer:
    """State of one worker thread: its bounce buffer."""

    def __init__(self, faults: Faults | None) -> None:
        self._faults = faults
        self._map = memory.Map(BOUNCE, huge_pages=False)
        self._bounce = memory.view(self._map.address, BOUNCE)

    def close(self) -> None:
        self._map.close()

    def delay(self, operation: "PythonOperation", index: int) -> None:
        f = self._faults
        if (
            f is not None
            and f.delay
            and chance(f.seed, fault.DELAY, operation.kind, operation.serial, index) < f.delay
        ):
            length = chance(f.seed, fault.DELAY_LENGTH, operation.kind, operation.serial, index)
            time.sleep(length * f.max_delay)

    def injected(self, operation: "PythonOperation", index: int) -> bool:
        """Whether an injected failure of the operation applies to this piece."""
        f = self._faults
        if f is None or operation.kind > READ:
            return False
        chosen, probability = (
            (f.fail_writes, f.write_failure) if operation.kind == WRITE else (f.fail_reads, f.read_failure)
        )
        fails = operation.serial in chosen or (
            probability > 0 and chance(f.seed, fault.FAIL, operation.kind, operation.serial) < probability
        )
        return (
            fails
            and index
            == fault.hashed(f.seed, fault.FAIL_PIECE, operation.kind, operation.serial, 0, 0)
            % operation.pieces
        )

    def run(self, operation: "PythonOperation", index: int, piece: Piece, fd: int, direct: bool) -> None:
        """Transfer one piece.

        Raises:
            TransferError: an errno, or the end of the file.
        """
        self.delay(operation, index)
        if self.injected(operation, index):
            assert self._faults is not None
            raise TransferError(self._faults.error, ERRNO, piece.offset)
        if operation.digesting and not operation.kind & 1:
            self._digest(operation, piece)
        self._transfer(operation, index, piece, fd, direct)
        if operation.digesting and operation.kind & 1:
            self._digest(operation, piece)

    def _digest(self, operation: "PythonOperation", piece: Piece) -> None:
        """Add the bytes of a piece to the digest of its operation: what is about to be written, or what was read."""
        start = max(piece.start, operation.page_offset)
        at, end = operation.address + start - operation.page_offset, piece.end - start
        digest = mix(start + 1)
        for done in range(0, end, BOUNCE):
            source, count = at + done, min(BOUNCE, end - done)
            if not operation.kind & 1:
                code = memory.copy_checked(self._map.address, source, count)
                if code:
                    raise TransferError(code, ERRNO, piece.offset)
                source = self._map.address
            digest = memory.digest(source, count, digest)
        operation.add_digest(digest)

    def _transfer(
        self, operation: "PythonOperation", index: int, piece: Piece, fd: int, direct: bool
    ) -> None:
        if operation.kind > READ:
            self._copy(operation, piece)
            return
        start = max(piece.start, operation.page_offset)
        source = operation.address + start - operation.page_offset
        offset = piece.offset + start - piece.start
        if not direct:
            self._call(operation, index, fd, [memory.view(source, piece.end - start)], offset, 1)
        elif (source - start) % ALIGNMENT:
            self._read_elsewhere(operation, index, piece, fd)
        else:
            self._aligned(operation, index, piece, fd, start)

    def _copy(self, operation: "PythonOperation", piece: Piece) -> None:
        mine, stored, nbytes = operation.address + piece.start, piece.offset, piece.end - piece.start
        if operation.kind == COPY_IN:
            code = memory.copy_checked(stored, mine, nbytes)
            if code:
                raise TransferError(code, ERRNO, piece.offset)
        else:
            memory.copy(mine, stored, nbytes)

    def _aligned(self, operation: "PythonOperation", index: int, piece: Piece, fd: int, start: int) -> None:
        """Image and memory agree mod 4096: whole blocks in place, the first and last one bounced. Note: [Image] in pieces.py."""
        origin = operation.address - operation.page_offset
        first, last = start // ALIGNMENT * ALIGNMENT, -(-piece.end // ALIGNMENT) * ALIGNMENT
        edges: list[tuple[int, int, int]] = []  # image range and its place in the bounce buffer
        low, high = first, last
        if start > first:
            edges.append((start, min(piece.end, first + ALIGNMENT), start - first))
            low = first + ALIGNMENT
        if piece.end < last and low < last:
            edges.append((last - ALIGNMENT, piece.end, ALIGNMENT))
            high = last - ALIGNMENT
        writing = operation.kind == WRITE
        if writing and edges:
            self._bounce[: 2 * ALIGNMENT] = bytes(2 * ALIGNMENT)
            for a, b, at in edges:
                code = memory.copy_checked(self._map.address + at, origin + a, b - a)
                if code:
                    raise TransferError(code, ERRNO, piece.offset)
        vector = []
        if start > first:
            vector.append(self._bounce[:ALIGNMENT])
        if low < high:
            vector.append(memory.view(origin + low, high - low))
        if high < last:
            vector.append(self._bounce[ALIGNMENT : 2 * ALIGNMENT])
        self._call(operation, index, fd, vector, piece.offset + first - piece.start, ALIGNMENT)
        if not writing:
            for a, b, at in edges:
                memory.view(origin + a, b - a)[:] = self._bounce[at : at + b - a]

    def _read_elsewhere(self, operation: "PythonOperation", index: int, piece: Piece, fd: int) -> None:
        """Read into an address with another page offset than the write's: every chunk is copied."""
        origin = operation.address - operation.page_offset
        for at in range(piece.start, piece.end, BOUNCE):
            end = min(at + BOUNCE, piece.end)
            a = max(at, operation.page_offset)
            if a >= end:
                continue
            length = -(-(end - at) // ALIGNMENT) * ALIGNMENT
            self._call(
                operation, index, fd, [self._bounce[:length]], piece.offset + at - piece.start, ALIGNMENT
            )
            memory.view(origin + a, end - a)[:] = self._bounce[a - at : end - at]

    def _call(
        self,
        operation: "PythonOperation",
        index: int,
        fd: int,
        vector: list[memoryview],
        offset: int,
        unit: int,
    ) -> None:
        """preadv or pwritev until every byte is transferred, across EINTR and short transfers.

        Args:
            unit: alignment of a resumed call; bytes of a short call beyond it are transferred again.
        """
        left = sum(len(part) for part in vector)
        attempt = 0
        writing = operation.kind == WRITE
        while left:
            parts, odd = self._shortened(operation, index, attempt, vector, left, unit)
            attempt += 1
            if not parts:
                continue
            try:
                done = os.pwritev(fd, parts, offset) if writing else os.preadv(fd, parts, offset)
            except OSError as error:
                raise TransferError(error.errno or errno.EIO, ERRNO, offset) from error
            if done > odd:
                done -= odd
            if done < left and unit > 1:
                done -= done % SECTOR
            if done == 0:
                raise TransferError(errno.EIO, NOTHING_WRITTEN if writing else END_OF_FILE, offset)
            offset, left = offset + done, left - done
            vector = _after(vector, done)

    def _shortened(
        self,
        operation: "PythonOperation",
        index: int,
        attempt: int,
        vector: list[memoryview],
        left: int,
        unit: int,
    ) -> tuple[list[memoryview], int]:
        """Apply injected faults to a call.

        Returns:
            The vector to transfer (empty: an injected EINTR), and bytes of it to report as not transferred.
        """
        f = self._faults
        if f is None:
            return vector, 0
        where = (operation.kind, operation.serial, index, attempt)
        if f.interrupt and chance(f.seed, fault.INTERRUPT, *where) < f.interrupt:
            return [], 0
        if f.short and left > unit and chance(f.seed, fault.SHORT, *where) < f.short:
            random = fault.hashed(f.seed, fault.SHORT_LENGTH, *where)
            want = (1 + random % ((left - 1) // unit)) * unit
            return _before(vector, want), random % min(unit, SECTOR)
        return vector, 0


def _after(vector: list[memoryview], done: int) -> list[memoryview]:
    rest = []
    for part in vector:
        if done < len(part):
            rest.append(part[done:])
        done = max(0, done - len(part))
    return rest


def _before(vector: list[memoryview], count: int) -> list[memoryview]:
    head = []
    for part in vector:
        if count:
            head.append(part[:count])
            count -= min(count, len(part))
    return head
