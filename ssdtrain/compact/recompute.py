"""Saved tensors that backward recomputes, bit for bit, from others that are saved anyway.

Note: [Copies of norms and activation functions]
    `silu(gate) * up` saves silu(gate) beside gate, and a norm written in Python saves `x * rstd` beside x and rstd. Each is the
    result of an elementwise operation whose inputs are saved by the node that made it. A linear layer that reads such a product
    finds both nodes behind its input: the saved copy is released, and recomputed by the same operation on the same inputs.

Note: [Float32 inputs of norms]
    In a model of half precision such a norm casts x to float32 first, and two nodes save the cast: `x * rstd` and the square in
    rstd. The values of the cast are those of x, so they are saved in the dtype of x, once for both nodes, and cast again in
    backward. This also applies where all weights are frozen.

Note: [Written in place]
    A copy that was written to after its operation (under no_grad, through a detached alias) is not the operation's result: its
    version shows that, and it is kept. A write after the save is an error in autograd, which tensors with hooks do not check;
    the hooks here raise it. Between the save and the linear layer, where hooks are set, torch does not tell the version of the
    save: a copy that has been written to is one that was written before, as by an activation in place, if the product of what is
    saved is still the layer's input; else its gradient is the same error, with CUDA one of the device, which comes before any
    work that is queued later, such as the optimizer's. Of a norm's input the square is then left to autograd.
    Writes through `.data` or NumPy increment no version: neither autograd nor these hooks detect them. Before the save they are
    legal, and a float32 input with values that its narrow dtype does not have is kept whole; with CUDA, where the host
    would have to wait for the device, it is an error of the device.

Note: [Inputs saved by their producer]
    Some nodes save their own result (relu, tanh, attention). Compressing it for the next layer would release nothing and add
    the compressed input.

Note: [Identity functions of wrappers]
    Wrappers put autograd functions around modules that return their input and only act in backward. They are skipped.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ssdtrain.compact.autograd_nodes import (
    CAST,
    FACTORS,
    MEAN_SQUARE,
    PRODUCT,
    SILU,
    SQUARED,
    VIEWS,
    output_dtype,
    saved_factors,
    saved_input,
    saves_its_result,
    set_hooks,
)
from ssdtrain.versions import VersionProbe

_MOST_VIEWS = 8
_MODIFIED = "modified by an inplace operation"
"""Part of autograd's error."""
_HALVES = (torch.bfloat16, torch.float16)
_passing: set[str] = set()


def register_passing(*functions: str) -> None:
    """Skip autograd functions of these classes. See Note: [Identity functions of wrappers]."""
    _passing.update(f"{function}Backward" for function in functions)


def _producer(x: Tensor) -> Any:
    node = x.grad_fn
    while node is not None and node.name() in _passing:
        node = node.next_functions[0][0]
    return node


def kept_by_producer(x: Tensor) -> bool:
    """Return True if the node that made `x` saves it too. See Note: [Inputs saved by their producer]."""
    node = _producer(x)
    for _ in range(_MOST_VIEWS):
        if node is None:
            return False
        if saves_its_result(node):
            return True
        if node.name() not in VIEWS and node.name() not in _passing:
            return False
        node = node.next_functions[0][0]
    return False


def release_copies(x: Tensor) -> int:
    """Release saved copies behind `x` that backward recomputes; returns their bytes.

    Does nothing under other saved-tensor hooks, which have packed the copies already, nor for tensors of other classes and
    without memory, whose values the checks cannot compare.
    """
    if type(x) is not Tensor or x.is_meta:
        return 0
    node = _before_cast(_producer(x))
    if node is None or node.name() != PRODUCT:
        return 0
    freed = 0
    written = []
    for place, (producer, _) in zip(FACTORS, node.next_functions, strict=True):
        freed += _narrow_norm_input(_before_cast(producer))
        again = _again(producer)
        if again is None:
            continue
        copy = _Copy(again)
        if _hooked(node, place, copy):
            freed += copy.nbytes
            if copy.version:
                written.append(copy)
    if written:
        unchanged = _still_made(node, x)
        for copy in written:
            copy.unchanged = unchanged
    return freed


class _SavedTensorHooks:
    """A pair of hooks of one saved tensor that saves something smaller. See Note: [Written in place]."""

    def __init__(self) -> None:
        self.nbytes = 0
        """Bytes released."""
        self.dtype = torch.float32
        self.probe: VersionProbe | None = None
        """Counter of the saved tensor, from `pack` on."""
        self.unchanged: Tensor | None = None
        """Flag on the device: nothing was written between the save and `pack`. None: the version shows it."""

    @property
    def version(self) -> int:
        """Version of the saved tensor at `pack`."""
        return self.probe.version if self.probe is not None else 0

    def pack(self, saved: Tensor) -> Tensor | None:
        self.dtype, self.probe = saved.dtype, VersionProbe(saved)
        return saved if self.version else self.reduced(saved)

    def unpack(self, kept: Tensor | None) -> Tensor:
        assert self.probe is not None
        if self.probe.now != self.version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: it is at "
                f"version {self.probe.now}; expected version {self.version} instead"
            )
        if self.unchanged is not None:
            torch._assert_async(
                self.unchanged,
                f"one of the variables needed for gradient computation has been {_MODIFIED}: it was "
                "saved for a product, and written to before a linear layer read the product",
            )
        if kept is not None and self.version:
            return kept
        with torch.no_grad():
            return self.restored(kept).to(self.dtype)

    def reduced(self, saved: Tensor) -> Tensor | None:
        """Return what is kept in place of `saved`."""
        raise NotImplementedError

    def restored(self, kept: Tensor | None) -> Tensor:
        """Return the values of the saved tensor."""
        raise NotImplementedError


class _Copy(_SavedTensorHooks):
    """Saves nothing of a copy that `again` recomputes."""

    def __init__(self, again: Callable[[], Tensor]) -> None:
        super().__init__()
        self.again = again

    def reduced(self, saved: Tensor) -> None:
        self.nbytes = saved.nbytes

    def restored(self, kept: Tensor | None) -> Tensor:
        return self.again()


class _Narrow(_SavedTensorHooks):
    """Keeps a tensor that was cast from `narrow` in that dtype.

    Args:
        other: hooks of the same tensor saved by another node, which have packed it already: what they kept is shared.
    """

    def __init__(self, narrow: torch.dtype, other: _Narrow | None = None) -> None:
        super().__init__()
        self.narrow = narrow
        self._kept: weakref.ref[Tensor] | None = other._kept if other is not None else None

    def reduced(self, saved: Tensor) -> Tensor:
        kept = self._kept() if self._kept is not None else None
        if kept is None:
            kept = _narrowed(saved.detach(), self.narrow)
            self._kept = weakref.ref(kept)
        self.nbytes = saved.nbytes - kept.nbytes
        return kept

    def restored(self, kept: Tensor | None) -> Tensor:
        assert kept is not None
        return kept


def _hooked(node: Any, place: str, hooks: _SavedTensorHooks) -> bool:
    """Set `hooks`; False where `node` saves nothing there, or other hooks are in force."""
    try:
        set_hooks(node, place, hooks.pack, hooks.unpack)
    except RuntimeError:
        if hooks.probe is not None:  # `pack` raised it, for lack of memory
            raise
        return False
    return True


def _still_made(product: Any, x: Tensor) -> Tensor:
    """Return a flag on the device: `x` is the product of what `product` saved. See Note: [Written in place]."""
    with torch.no_grad(), torch.autocast(x.device.type, enabled=False):
        try:
            factor, other = saved_factors(product)
        except RuntimeError as error:  # autograd's own check of the other factor
            if _MODIFIED not in str(error):
                raise  # lack of memory, for example
        else:
            again = (factor * other).to(x.dtype)
            if again.shape == x.shape:
                return _same(again, x.detach())
    return torch.zeros((), dtype=torch.bool, device="cpu")


def _narrowed(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast `x` to `dtype`, if that has its values. If not, return `x`; with CUDA, where a look would stall the host, the device
    raises an error."""
    narrow = x.to(dtype)
    same = _same(narrow.to(x.dtype), x)
    if x.device.type != "cuda":
        return narrow if same else x
    torch._assert_async(
        same,
        "the float32 input of a norm is not the cast of a tensor in half precision (it was written to through .data, or by "
        "a collective): set ssdtrain.compact.recompute to false",
    )
    return narrow


def _same(x: Tensor, y: Tensor) -> Tensor:
    """Return a flag on the device: equal everywhere; NaN is equal to NaN."""
    return ((x == y) | (x.isnan() & y.isnan())).all()


def _narrow_norm_input(product: Any) -> int:
    """Save x in its own dtype if `product` is `x * rsqrt(mean(x^2) + eps)` of an x cast to float32; returns bytes freed.

    See Note: [Float32 inputs of norms].
    """
    if product is None or product.name() != PRODUCT:
        return 0
    (cast, _), (square, _) = product.next_functions
    for at, name in enumerate(MEAN_SQUARE):
        if at:
            square = square.next_functions[0][0]
        if square is None or square.name() != name:
            return 0
    if cast is None or cast.name() != CAST or square.next_functions[0][0] is not cast:
        return 0
    source, output = cast.next_functions[0]
    narrow = output_dtype(source, output)
    if narrow not in _HALVES or output_dtype(cast) != torch.float32:
        return 0
    first = _Narrow(narrow)
    # Of a tensor that was written to autograd checks the version of what the square saved, which is the same tensor and older.
    if not _hooked(product, FACTORS[0], first) or first.version:
        return 0
    return first.nbytes if _hooked(square, SQUARED, _Narrow(narrow, first)) else 0


def _before_cast(node: Any) -> Any:
    """Return the node that made the input of `node` where that is a cast, else `node`."""
    return node.next_functions[0][0] if node is not None and node.name() == CAST else node


def _again(node: Any) -> Callable[[], Tensor] | None:
    """Return what recomputes the result of `node` from its saved tensors; None if that is not possible."""
    if node is None:
        return None
    name = node.name()
    if name == CAST:
        below = _before_cast(node)
        return _again(below) if below is not None and below.name() == PRODUCT else None
    if name == SILU:
        return lambda: F.silu(saved_input(node))
    if name == PRODUCT and all(function is not None for function, _ in node.next_functions):
        return lambda: torch.mul(*saved_factors(node))
    return None
