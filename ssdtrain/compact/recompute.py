"""Saved tensors that backward can make again, bit for bit, from others that are saved anyway.

Note: [Copies of norms and activation functions]
    `silu(gate) * up` saves silu(gate) beside gate, and a norm written in Python saves `x * rstd` beside x and rstd. Each is the
    result of an elementwise operation whose inputs are saved by the node that made it. A linear layer that reads such a product
    finds both nodes behind its input: there the saved copy is let go, and made again by the same operation on the same inputs.

Note: [Written in place]
    A copy that was written to after its operation (under no_grad, through a detached alias) is not the operation's result: its
    version shows that, and it is kept. One that is written to after it was saved is autograd's own error, which saved-tensor
    hooks lose, so that it is raised here. Writes through `.data` or NumPy move no version: neither sees them.

Note: [Who keeps an input anyway]
    Some nodes save their own result (relu, tanh, attention). To compress it for the layer behind them would save nothing and
    add the compressed input.

Note: [Functions that only pass on]
    Wrappers put autograd functions around modules that return what they got, to be called in backward. They are looked through.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

__all__ = ["kept_by_producer", "register_passing", "release_copies"]

_PRODUCT = "MulBackward0"
_SILU = "SiluBackward0"
_CAST = "ToCopyBackward0"
_VIEWS = frozenset({"ViewBackward0", "TransposeBackward0", "PermuteBackward0", "ReshapeAliasBackward0"})
_RESULTS = ("_raw_saved_result", "_raw_saved_output", "_raw_saved_out")
_LONGEST = 8
_passing: set[str] = set()


def register_passing(*functions: str) -> None:
    """Look through autograd functions of these classes. See Note: [Functions that only pass on]."""
    _passing.update(f"{function}Backward" for function in functions)


def _producer(x: Tensor) -> Any:
    node = x.grad_fn
    while node is not None and node.name() in _passing:
        node = node.next_functions[0][0]
    return node


def kept_by_producer(x: Tensor) -> bool:
    """True if the node that made `x` saves it too. See Note: [Who keeps an input anyway]."""
    node = _producer(x)
    for _ in range(_LONGEST):
        if node is None:
            return False
        if any(hasattr(type(node), name) for name in _RESULTS):
            return True
        if node.name() not in _VIEWS and node.name() not in _passing:
            return False
        node = node.next_functions[0][0]
    return False


def release_copies(x: Tensor) -> int:
    """Let go of copies behind `x` that backward makes again; returns their bytes.

    Where other saved-tensor hooks are in force they have the copies already, and nothing happens.
    """
    node = _producer(x)
    if node is None or node.name() != _PRODUCT:
        return 0
    freed = 0
    for place, (producer, _) in zip(
        ("_raw_saved_self", "_raw_saved_other"), node.next_functions, strict=True
    ):
        again = _again(producer)
        if again is None:
            continue
        copy = _Copy(again)
        try:
            getattr(node, place).register_hooks(copy.pack, copy.unpack)
        except RuntimeError:
            continue  # nothing is saved there, or hooks are in force
        freed += copy.nbytes
    return freed


class _Copy:
    """The pair of hooks of one saved copy. See Note: [Written in place]."""

    def __init__(self, again: Callable[[], Tensor]) -> None:
        self.again = again
        self.nbytes = 0
        """Of what was let go."""
        self.dtype = torch.float32
        self.version = 0
        self._probe: Tensor | None = None

    def pack(self, saved: Tensor) -> Tensor | None:
        self.dtype, self.version = saved.dtype, saved._version
        self._probe = saved.detach()  # shares the version counter
        self._probe.data = torch.empty(0, device=saved.device)
        if self.version:
            return saved
        self.nbytes = saved.nbytes
        return None

    def unpack(self, kept: Tensor | None) -> Tensor:
        assert self._probe is not None
        if self._probe._version != self.version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: it is at "
                f"version {self._probe._version}; expected version {self.version} instead"
            )
        if kept is not None:
            return kept
        with torch.no_grad():
            return self.again().to(self.dtype)


def _again(node: Any) -> Callable[[], Tensor] | None:
    """What makes the result of `node` again from what it has saved; None where it cannot be."""
    if node is None:
        return None
    name = node.name()
    if name == _CAST:
        below = node.next_functions[0][0]
        return _again(below) if below is not None and below.name() == _PRODUCT else None
    if name == _SILU:
        return lambda: F.silu(node._saved_self)
    if name == _PRODUCT and all(function is not None for function, _ in node.next_functions):
        return lambda: node._saved_self * node._saved_other
    return None
