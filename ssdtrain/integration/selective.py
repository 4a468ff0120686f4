"""Selective checkpointing whose policy answers CPU_OFFLOAD: the outputs it names go to the tiers.

torch's checkpoint with `create_selective_checkpoint_contexts` runs a function under a dispatch mode, which asks a policy about
the output of each operator. Up to torch 2.14 it recomputes in eager mode what the policy would have in host memory. Inside a
forward that is recorded, an output named by MUST_CPU_OFFLOAD or PREFER_CPU_OFFLOAD is saved as by MUST_SAVE, and what torch keeps
of it is an object that reads it back. What is traced for compilation is left alone.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.utils.checkpoint as torchs

from ssdtrain.integration.patching import Patches, Wrap
from ssdtrain.offload.functorch import tracing
from ssdtrain.offload.hooks import HeldTensor, current_recorder, hold

_MODE = "_CachingTorchDispatchMode"
_WRAPPER = "_VersionWrapper"
_ANSWERS = [
    answer
    for name in ("MUST_CPU_OFFLOAD", "PREFER_CPU_OFFLOAD")
    if (answer := getattr(torchs.CheckpointPolicy, name, None)) is not None
]
"""Answers of a policy; torch 2.6 has none of them."""


class _Answered(threading.local):
    """Whether the policy of this thread has last answered CPU_OFFLOAD."""

    offload = False


_answered = _Answered()


class _HeldOutput:
    """What torch keeps of an output: it calls `get_val` in the recomputation."""

    def __init__(self, held: HeldTensor) -> None:
        self._held = held

    def get_val(self, _: bool) -> torch.Tensor:
        """Return the output. Raises what `OffloadEngine.unpack` raises, also where it was modified in place."""
        return self._held.value()


def hold_offloaded_outputs(patches: Patches, served: Callable[[str], None]) -> None:
    """Offload what policies of selective checkpointing answer CPU_OFFLOAD for, until `patches` are undone.

    Args:
        served: called with the name of the answer, on the thread that asks; the same function for all forwards.

    Raises:
        ImportError: this torch has the answers, and not the functions that serve them.
    """
    if not _ANSWERS:
        return
    missing = [name for name in (_MODE, _WRAPPER) if not hasattr(torchs, name)]
    if missing:
        raise ImportError(f"torch {torch.__version__} has no torch.utils.checkpoint.{', '.join(missing)}")

    patches.replace(getattr(torchs, _MODE), "__init__", _making(served))
    patches.replace(torchs, _WRAPPER, _holding)


@functools.cache
def _making(served: Callable[[str], None]) -> Wrap:
    """Make the wrapper of a mode's `__init__`. Forwards inside of forwards and on other threads have the same one, which is
    applied once: a second question would get the first one's MUST_SAVE."""

    def wrap(plain: Callable[..., None]) -> Callable[..., None]:
        def __init__(self: Any, policy_fn: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
            plain(self, _asking(policy_fn, served), *args, **kwargs)

        return __init__

    return wrap


def _asking(policy: Callable[..., Any], served: Callable[[str], None]) -> Callable[..., Any]:
    """Return a policy that answers MUST_SAVE where `policy` answers CPU_OFFLOAD, and remembers it."""

    def ask(*args: Any, **kwargs: Any) -> Any:
        answer = policy(*args, **kwargs)
        _answered.offload = answer in _ANSWERS and current_recorder() is not None and not tracing()
        if not _answered.offload:
            return answer
        served(f"torch.utils.checkpoint.{answer}")
        return torchs.CheckpointPolicy.MUST_SAVE

    return ask


def _holding(plain: Callable[..., Any]) -> Callable[..., Any]:
    def wrap(value: Any, *args: Any, **kwargs: Any) -> Any:
        recorder = current_recorder()
        if not _answered.offload or recorder is None or not isinstance(value, torch.Tensor):
            return plain(value, *args, **kwargs)  # torch 2.14 also wraps what a pack hook made of an output
        # Below autograd an alias would get a version counter of its own, and a write to the output not be noticed.
        with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
            held = hold(recorder.engine, recorder.tape, value)
        return plain(value, *args, **kwargs) if held is None else _HeldOutput(held)

    return wrap
