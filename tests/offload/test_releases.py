"""Handles that die on other threads while the engine ends, at any bytecode: each is released once."""

from __future__ import annotations

from typing import Any

import torch

from ssdtrain.offload.tensors import region as region_module
from ssdtrain.offload.tensors.region import Handle, Releases
from tests.support.bytecodes import Before

GEOMETRY = (torch.float32, torch.Size([1]), (1,), 0)
NAMES = range(4)  # of regions


def close_while(number: int, dies: int) -> tuple[int, list[Any], int]:
    """Of four handles one dies before that bytecode of the end, and the others afterwards.

    Returns:
        How many bytecodes ran, the regions released in order, and how many times a death asked for a drain.
    """
    releases, drains = Releases(), 0

    def drain() -> None:
        nonlocal drains
        drains += 1

    handles: dict[int, Handle] = {name: Handle(name, GEOMETRY, releases) for name in NAMES}
    with Before(number, lambda: handles.pop(dies, None), [region_module]) as at:
        releases.call_at_each(drain)
    handles.clear()
    released = []
    while not releases.empty():
        released.append(releases.next().region)
    return at.count, released, drains


def test_each_handle_is_released_once_whenever_it_dies_during_the_end_of_the_engine() -> None:
    for _ in range(2):  # Python 3.13 reports a function's opcodes from its second traced call on
        bytecodes, released, drains = close_while(0, 0)
    assert bytecodes > 5 and released == [*NAMES] and drains == len(NAMES)
    for dies in NAMES:
        for number in range(1, bytecodes):
            _, released, drains = close_while(number, dies)
            assert sorted(released) == [*NAMES], f"handle {dies} died before bytecode {number}: {released}"
            assert len(NAMES) - 1 <= drains <= len(NAMES)
