"""A worker of the Python engine that cannot be made ready."""

from __future__ import annotations

import ctypes
import tempfile

import pytest

from ssdtrain.storage import python_engine
from ssdtrain.storage.errors import IOFailure
from ssdtrain.storage.pool import ErrorMaker


def test_an_operation_fails_where_its_worker_gets_no_memory() -> None:
    def no_memory() -> python_engine.TransferPiece:
        raise OSError(12, "Cannot allocate memory")

    memory = ctypes.create_string_buffer(4096)
    with tempfile.TemporaryFile() as file:
        pool = python_engine.PythonPool(
            [(file.fileno(), False)],
            threads=1,
            host_threads=0,
            piece=4096,
            make_error=ErrorMaker(["drive"]),
            make_transfer=no_memory,
        )
        operation = pool.submit(0, ctypes.addressof(memory), 4096, 0, (0, 0, 4096), 0, 0, 0, 0)
        with pytest.raises(IOFailure):
            operation.wait(10)
        pool.close()
