"""What a function reads of the process beside its arguments, and torch's checkpoint does not restore: the global generators of
Python and NumPy, and which kernels may compute attention (a forward may run under `torch.nn.attention.sdpa_kernel`, and its
backward outside of that: another kernel saves other tensors, and rounds otherwise).
"""

from __future__ import annotations

import pickle
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch.backends import cuda

__all__ = ["State", "Surroundings"]


class State(NamedTuple):
    """How to read and write the state of something."""

    read: Callable[[], Any]
    write: Callable[[Any], None]


def _read_numpy() -> bytes | None:
    numpy = sys.modules.get("numpy.random")
    return None if numpy is None else pickle.dumps(numpy.get_state(legacy=False))


def _write_numpy(state: bytes | None) -> None:
    if state is not None:
        sys.modules["numpy.random"].set_state(pickle.loads(state))


_GENERATORS = State(random.getstate, random.setstate), State(_read_numpy, _write_numpy)
_KERNELS = tuple(
    State(*functions)
    for functions in (
        (cuda.flash_sdp_enabled, cuda.enable_flash_sdp),
        (cuda.mem_efficient_sdp_enabled, cuda.enable_mem_efficient_sdp),
        (cuda.math_sdp_enabled, cuda.enable_math_sdp),
        (cuda.cudnn_sdp_enabled, cuda.enable_cudnn_sdp),
    )
)


class Surroundings:
    """As they are before the first run of a function.

    Args:
        generators: restore these too.
    """

    def __init__(self, *, generators: bool) -> None:
        self._first = [(state, state.read()) for state in (_GENERATORS if generators else ())]
        self._kernels = [(state, state.read()) for state in _KERNELS]

    def ran(self) -> None:
        """The first run is over: a generator that it did not draw from is left alone, since other threads may."""
        self._first = [(state, value) for state, value in self._first if state.read() != value]

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Inside they are as they were."""
        changed = [(state, value) for state, value in self._kernels if state.read() != value]
        then = [*self._first, *changed]
        now = [(state, state.read()) for state, _ in then]
        try:
            _write(then)
            yield
        finally:
            _write(now)


def _write(values: list[tuple[State, Any]]) -> None:
    for state, value in values:
        state.write(value)
