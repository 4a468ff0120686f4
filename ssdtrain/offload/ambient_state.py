"""What a function reads of the process beside its arguments, and torch's checkpoint does not restore: the global generators of
Python and NumPy, which kernels may compute attention and how they round (a forward may run under
`torch.nn.attention.sdpa_kernel`, and its backward outside of that: another kernel saves other tensors), and context variables,
which a thread of autograd's own does not have at all.
"""

from __future__ import annotations

import pickle
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import Context, copy_context
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.backends import cuda, cudnn, mkldnn

__all__ = ["AmbientState", "State"]


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


def _read_deterministic() -> tuple[bool, bool]:
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )


def _write_deterministic(state: tuple[bool, bool]) -> None:
    enabled, warns = state
    torch.use_deterministic_algorithms(enabled, warn_only=warns)


def _read_precision() -> Any:
    try:
        return torch.get_float32_matmul_precision(), cudnn.allow_tf32
    except RuntimeError:  # it was set by the newer attributes, and torch refuses to read the older ones then
        return tuple(backend.fp32_precision for backend in _precisions())


def _write_precision(state: Any) -> None:
    if isinstance(state[-1], bool):
        torch.set_float32_matmul_precision(state[0])
        cudnn.allow_tf32 = state[1]
        return
    for backend, precision in zip(_precisions(), state, strict=True):
        backend.fp32_precision = precision


def _precisions() -> tuple[Any, ...]:
    return cuda.matmul, cudnn.conv, cudnn.rnn, mkldnn.matmul, mkldnn.conv, mkldnn.rnn  # type: ignore[attr-defined]


def _flag(module: Any, name: str) -> State:
    return State(partial(getattr, module, name), partial(setattr, module, name))


_KERNELS = (
    State(cuda.flash_sdp_enabled, cuda.enable_flash_sdp),
    State(cuda.mem_efficient_sdp_enabled, cuda.enable_mem_efficient_sdp),
    State(cuda.math_sdp_enabled, cuda.enable_math_sdp),
    State(cuda.cudnn_sdp_enabled, cuda.enable_cudnn_sdp),
    State(_read_deterministic, _write_deterministic),
    State(_read_precision, _write_precision),
    _flag(cuda.matmul, "allow_fp16_reduced_precision_reduction"),
    _flag(cuda.matmul, "allow_bf16_reduced_precision_reduction"),
    *(_flag(cudnn, name) for name in ("enabled", "benchmark", "deterministic")),
    State(torch.get_default_dtype, torch.set_default_dtype),
    State(torch.get_num_threads, torch.set_num_threads),
)
"""Which kernels compute, and in which order and precision they add."""


class AmbientState:
    """What is read before the first run of a function.

    Args:
        generators: restore these too.
    """

    def __init__(self, *, generators: bool) -> None:
        self._first = [(state, state.read()) for state in (_GENERATORS if generators else ())]
        self._kernels = [(state, state.read()) for state in _KERNELS]
        self._context = copy_context()

    def ran(self) -> None:
        """The first run is over: a generator that it did not draw from is left alone, since other threads may."""
        self._first = [(state, value) for state, value in self._first if state.read() != value]

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Inside they are as they were."""
        changed = [(state, value) for state, value in self._kernels if state.read() != value]
        then = [*self._first, *changed]
        now = [(state, state.read()) for state, _ in then]
        variables = _set(self._context)
        try:
            _write(then)
            yield
        finally:
            _write(now)
            for variable, token in reversed(variables):
                variable.reset(token)


def _set(context: Context) -> list[tuple[Any, Any]]:
    """Give the variables their values in `context`. Returns those that had others, each with what resets it."""
    missing = object()
    return [
        (variable, variable.set(value))
        for variable, value in context.items()
        if variable.get(missing) is not value
    ]


def _write(values: list[tuple[State, Any]]) -> None:
    for state, value in values:
        state.write(value)
