"""The linear function that saves a compressed input, and the replacement of a layer's forward.

Shapes: N tokens, n input features, m output features; the weight is [m, n], or [n, m] where a kind of layers is transposed.
"""

from __future__ import annotations

import copy
import functools
import operator
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from ssdtrain.compact.saved import Projected, SavedInput

Wait = Callable[[], object]


class Communication(Protocol):
    """Collectives inside a linear layer of a tensor-parallel model; sequence parallelism shards dimension 0."""

    def gather_input(self, x: Tensor) -> Tensor:
        """The input of all ranks, which the output is computed from."""

    def gather_saved(self, saved: Tensor) -> tuple[Tensor, Wait]:
        """What all ranks have saved, joined along dimension 0, and what waits for it."""

    def reduce_gradient(self, gradient: Tensor) -> tuple[Tensor, Wait]:
        """The sum over ranks of the input's gradient, or this rank's shard of it, and what waits for it."""


@dataclass(frozen=True)
class LinearKind:
    """A class of linear layers.

    Attributes:
        fits: whether a module is one.
        width: its input features, as this rank has them.
        transposed: its weight is [n, m].
        within: its own forward runs, and the function below it, which an adapter replaces, calls `current_layer`.
    """

    fits: Callable[[nn.Module], bool]
    width: Callable[[Any], int]
    transposed: bool = False
    within: bool = False


def _is_linear(module: nn.Module) -> bool:
    # Subclasses with a forward of their own may compute something else. NonDynamicallyQuantizableLinear is the output projection
    # of nn.MultiheadAttention, which reads the weight and never calls the module.
    return (
        isinstance(module, nn.Linear)
        and type(module).forward is nn.Linear.forward
        and not isinstance(module, NonDynamicallyQuantizableLinear)
    )


def _is_conv1d(module: nn.Module) -> bool:
    """GPT-2's layer: x W + b, with a weight [nx, nf]."""
    return type(module).__name__ == "Conv1D" and hasattr(module, "nx") and hasattr(module, "nf")


_kinds: list[LinearKind] = [
    LinearKind(_is_linear, lambda module: int(module.in_features)),
    LinearKind(_is_conv1d, lambda module: int(module.nx), transposed=True),
]


def register_kind(kind: LinearKind) -> None:
    """Register `kind`, with precedence over the kinds registered before. Idempotent."""
    if kind not in _kinds:
        _kinds.insert(0, kind)


def kind_of(module: nn.Module) -> LinearKind | None:
    """The kind of `module`, or None if it is not a supported linear layer."""
    return next((kind for kind in _kinds if kind.fits(module)), None)


def compact_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    saved_input: SavedInput,
    saved: Tensor,
    *,
    transposed: bool = False,
    communication: Communication | None = None,
) -> Tensor:
    """x W^T + b, which saves `saved` for the gradient of the weight in place of `x`.

    The gradients of `x` and `bias` are those of `torch.nn.functional.linear`. Inside of autocast the weight is saved as it is,
    and cast again in backward.

    Args:
        x: [..., n], in the dtype to compute in.
        weight: [m, n].
        bias: [m] or None.
        saved: `saved_input.compress(x)`; layers that read one input share it.

    Returns:
        [..., m]
    """
    y: Tensor = _LinearFunction.apply(x, weight, bias, saved_input, saved, transposed, communication)  # type: ignore[no-untyped-call]
    return y


class _LinearFunction(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        saved_input: SavedInput,
        saved: Tensor,
        transposed: bool,
        communication: Communication | None,
    ) -> Tensor:
        # Q is saved with z: a recomputation at another step, or in another order of layers, may use another projection.
        block = saved_input.block if isinstance(saved_input, Projected) else None
        ctx.save_for_backward(saved, weight, block)
        ctx.saved_input = None if block is not None else saved_input
        ctx.transposed, ctx.communication = transposed, communication
        if communication is not None:
            x = communication.gather_input(x)
        with torch.autocast(x.device.type, enabled=False):
            cast = weight.to(x.dtype)
            return F.linear(
                x, cast.t() if transposed else cast, bias.to(x.dtype) if bias is not None else None
            )

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        saved, weight, block = ctx.saved_tensors
        saved_input: SavedInput = Projected(block) if block is not None else ctx.saved_input
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        communication: Communication | None = ctx.communication
        wait_saved: Wait = _nothing
        wait_x: Wait = _nothing
        dx = dweight = dbias = None
        if needs_weight and communication is not None:
            saved, wait_saved = communication.gather_saved(saved)
        with torch.autocast(gradient.device.type, enabled=False):
            if needs_x:
                cast = weight.to(gradient.dtype)
                dx = gradient @ (cast.t() if ctx.transposed else cast)
                if communication is not None:
                    dx, wait_x = communication.reduce_gradient(dx)
            gradient_NM = gradient.reshape(-1, gradient.shape[-1])
            if needs_bias:
                dbias = gradient_NM.sum(0)
            if needs_weight:
                wait_saved()
                dweight = saved_input.weight_gradient(gradient_NM, saved)
                dweight = (dweight.t() if ctx.transposed else dweight).to(weight.dtype)
        wait_x()
        return dx, dweight, dbias, None, None, None, None


def _nothing() -> None:
    return None


class LayerForward(Protocol):
    """Computes a layer's output from its parameters."""

    def reads(self, x: Tensor) -> None:
        """Release the copies behind the input of a frozen layer."""

    def compresses(self, x: Tensor) -> bool:
        """Whether to compress this input; if not, the layer's own forward runs unchanged."""

    def __call__(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, communication: Communication | None = None
    ) -> Tensor: ...


_running = threading.local()


def current_layer() -> LayerForward | None:
    """The compressed layer whose forward is running on this thread."""
    layer: LayerForward | None = getattr(_running, "layer", None)
    return layer


@contextmanager
def _run(layer: LayerForward) -> Iterator[None]:
    outer = current_layer()
    _running.layer = layer
    try:
        yield
    finally:
        _running.layer = outer


class ReplacedForward:
    """Replaces a module's forward through its `__dict__`; `remove` restores the original.

    Deep copies and pickles of the module have the original forward.

    Args:
        compute: returns the new forward, given the original.
    """

    def __init__(
        self, module: nn.Module, compute: Callable[[Callable[..., Any]], Callable[..., Any]]
    ) -> None:
        self.module = module
        self._own = "forward" in module.__dict__
        self._plain = module.forward
        functools.update_wrapper(self, module.forward, updated=())
        self._forward = torch.compiler.disable(compute(self._plain))
        module.forward = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._forward(*args, **kwargs)

    def remove(self) -> None:
        """Restore the original forward, unless it has been replaced again since."""
        if self.module.__dict__.get("forward") is not self:
            return
        if self._own:
            self.module.forward = self._plain
        else:
            del self.module.forward

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        # A bound method is copied bound to the copy of its module.
        return copy.deepcopy(self._plain, memo)

    def __reduce__(self) -> tuple[Any, ...]:
        if self._own:
            return operator.getitem, ([self._plain], 0)
        return getattr, (self.module, "forward")


class CompactForward(ReplacedForward):
    """The forward of a linear layer while its input is compressed.

    Attributes:
        active: False: the layer's own forward runs, unchanged.
    """

    def __init__(self, module: nn.Module, kind: LinearKind, layer: LayerForward) -> None:
        self.active = True

        def compute(plain: Callable[..., Any]) -> Callable[..., Any]:
            def forward(*args: Any, **kwargs: Any) -> Any:
                weight = module.weight
                if not self.active or not torch.is_grad_enabled() or not isinstance(weight, Tensor):
                    return plain(*args, **kwargs)
                x = args[0] if args else next(iter(kwargs.values()))
                if not weight.requires_grad:
                    layer.reads(x)  # torch's function saves nothing of it
                    return plain(*args, **kwargs)
                if kind.within:
                    with _run(layer):
                        return plain(*args, **kwargs)
                if not layer.compresses(x):
                    return plain(*args, **kwargs)
                return layer(x, weight, module.bias)  # type: ignore[arg-type]

            return forward

        super().__init__(module, compute)
