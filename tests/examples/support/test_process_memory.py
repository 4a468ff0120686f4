import subprocess
import sys

import pytest

from examples.support.process_memory import PeakMemory, _status_bytes

MiB = 1024 * 1024


# The system may take pages of libraries away at any moment, hundreds of MiB of torch's: each bound here holds more surely then.
@pytest.mark.skipif(sys.platform != "linux", reason="other systems cannot reset the peak of a process")
def test_the_peak_covers_what_came_after_the_reset_even_if_it_is_free_again() -> None:
    memory = PeakMemory()
    before = bytearray(b"x") * (256 * MiB)
    del before
    with_before = memory.resident_bytes
    memory.reset()
    assert memory.covers == "since reset"
    assert memory.resident_bytes < with_before - 128 * MiB
    after = bytearray(b"x") * (128 * MiB)
    del after
    assert memory.resident_bytes > _status_bytes("VmRSS") + 64 * MiB


# Every second of many blocks is freed: a heap could give none of them back.
FRAGMENTED = """
import torch
from examples.support.process_memory import _status_bytes, return_freed_blocks
torch.ones(8 << 20).sum()  # what torch itself needs
assert return_freed_blocks(1 << 20)
base = _status_bytes("VmRSS")
blocks = [torch.ones(1 << 19) for _ in range(64)]
full = _status_bytes("VmRSS") - base
del blocks[::2]
print(full >> 20, (_status_bytes("VmRSS") - base) >> 20)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="glibc's malloc")
def test_freed_blocks_leave_the_process_at_once() -> None:
    done = subprocess.run([sys.executable, "-c", FRAGMENTED], capture_output=True, text=True, check=True)
    full, half = map(int, done.stdout.split())
    assert 120 <= full <= 140
    assert 60 <= half <= 76
