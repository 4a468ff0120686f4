import subprocess
import sys

import pytest


def _output(script: str) -> str:
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout


# In a process of its own: threads that other tests leave behind may take or give back memory meanwhile. The system may take pages
# of libraries away at any moment: each bound here holds more surely then.
RESET = """
from examples.support.process_memory import PeakMemory, _status_bytes
memory = PeakMemory()
before = bytearray(b"x") * (256 << 20)
del before
with_before = memory.resident_bytes
memory.reset()
at_reset = memory.resident_bytes
after = bytearray(b"x") * (128 << 20)
del after
print(memory.covers, with_before >> 20, at_reset >> 20, memory.resident_bytes >> 20, _status_bytes("VmRSS") >> 20, sep=",")
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="other systems cannot reset the peak of a process")
def test_the_peak_covers_what_came_after_the_reset_even_if_it_is_free_again() -> None:
    covers, *figures = _output(RESET).split(",")
    with_before, at_reset, peak, now = map(int, figures)
    assert covers == "since reset"
    assert at_reset < with_before - 128
    assert peak > now + 64


# Every second of many blocks is freed: a heap could give none of them back. Pages of files, such as libraries, do not count: the
# system may take them away at any moment.
FRAGMENTED = """
import torch
from examples.support.process_memory import _status_bytes, return_freed_blocks
torch.ones(8 << 20).sum()  # what torch itself needs
assert return_freed_blocks(1 << 20)
own = lambda: _status_bytes("RssAnon") + _status_bytes("VmSwap")
base = own()
blocks = [torch.ones(1 << 19) for _ in range(64)]
full = own() - base
del blocks[::2]
print(full >> 20, (own() - base) >> 20)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="glibc's malloc")
def test_freed_blocks_leave_the_process_at_once() -> None:
    full, half = map(int, _output(FRAGMENTED).split())
    assert 120 <= full <= 140
    assert 60 <= half <= 76
