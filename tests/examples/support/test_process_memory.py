import subprocess
import sys

import pytest

from examples.support.process_memory import PeakMemory

MiB = 1024 * 1024


@pytest.mark.skipif(sys.platform != "linux", reason="other systems cannot reset the peak of a process")
def test_the_peak_covers_what_came_after_the_reset_even_if_it_is_free_again() -> None:
    before = bytearray(256 * MiB)  # Zeroed pages; touched below.
    before[::4096] = b"x" * len(range(0, len(before), 4096))
    memory = PeakMemory()
    del before
    memory.reset()
    assert memory.covers == "since reset"
    base = memory.resident_bytes
    after = bytearray(b"x") * (128 * MiB)
    del after
    # Half of it as a margin: under pressure the system takes pages of libraries away meanwhile, of which torch has many.
    assert base + 64 * MiB < memory.resident_bytes < base + 192 * MiB


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
