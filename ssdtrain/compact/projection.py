"""Random projections P with E[P P^T] = I, as a function of (seed, layer, step) alone.

Shapes: n features of a layer's input, b features of a block, k = n / b blocks, r features kept of each block.

Note: [Blocks]
    P is block-diagonal with one b x r block repeated k times: P = I_k (x) Q. It needs b * r numbers whatever n is, so nothing of
    it is stored in the graph but 4 KiB, it is made on the host in a fraction of a millisecond, and a shard of a row-parallel
    layer has its part of the very P of the whole layer, as long as b divides the shard. Nothing is lost in the mean:

    orthonormal, hadamard   Q^T Q = (b / r) I, so E|P P^T x - x|^2 = (n / r - 1) |x|^2 with n / r the ratio of the whole
    gaussian                E|P P^T x - x|^2 = ((b + 1) / r) |x|^2, where one block of b = n has the paper's (n + 1) / r

    A large feature disturbs the gradients of the features of its own block only.

Note: [Keys]
    The words of Philox have the counter (number, step, layer, 0) and the key seed. No rank is in it: data-parallel replicas,
    tensor-parallel ranks and a recomputation have the same P.
"""

from __future__ import annotations

import math
import zlib
from collections import OrderedDict
from typing import Literal, NamedTuple, cast

import torch
from torch import Tensor

from ssdtrain.codecs.base import Key
from ssdtrain.codecs.hadamard import rotate
from ssdtrain.codecs.philox import philox

ProjectionKind = Literal["orthonormal", "gaussian", "hadamard"]

FEATURES_OF_BLOCK = 64
"""Features of a block, where that divides the width."""
_SMALLEST = 16
_STEPS = 16
"""Steps whose projections are made in one call."""
_REMEMBERED = 4096
"""Series of `_STEPS` projections, about 128 KiB each at n / 4, of which a model needs one for each layer."""


class ProjectionLayout(NamedTuple):
    """How a projection divides `width` input features. See Note: [Blocks]."""

    width: int
    """n"""
    block: int
    """b, a divisor of n."""
    kept: int
    """r of b."""

    @property
    def compressed(self) -> int:
        """Features that are saved of each token."""
        return self.width // self.block * self.kept


def layer_key(name: str) -> int:
    """The 32-bit word that a layer's qualified name stands for."""
    return zlib.crc32(name.encode())


def layout_of(width: int, ratio: float) -> ProjectionLayout:
    """The layout for `width` features of which `ratio` is kept.

    Args:
        width: n, of the input as this rank has it.
        ratio: above 0 and at most 1.

    Raises:
        ValueError: `ratio` is out of its range.
    """
    if not 0 < ratio <= 1:
        raise ValueError(f"ratio {ratio} is not above 0 and at most 1")
    block = math.gcd(width, FEATURES_OF_BLOCK)
    if block < _SMALLEST:
        divisors = [b for b in range(_SMALLEST, FEATURES_OF_BLOCK + 1) if width % b == 0]
        block = max(divisors, default=width)
    return ProjectionLayout(width, block, max(1, round(ratio * block)))


class Projections:
    """The blocks Q of all layers and steps, made when they are needed.

    Args:
        kind: "orthonormal" (Haar-distributed), "gaussian" (the paper's) or "hadamard" (signs, a Hadamard matrix, and a random
            choice of its columns; blocks that are powers of two).
        seed: 64 bits.
        every: steps that share a projection.
    """

    def __init__(self, kind: ProjectionKind, seed: int, every: int = 1) -> None:
        self.kind = kind
        self.seed = seed
        self.every = every
        self._series: OrderedDict[tuple[ProjectionLayout, int, int], Tensor] = OrderedDict()
        self._cast: dict[tuple[ProjectionLayout, int], tuple[int, torch.dtype, torch.device, Tensor]] = {}

    def check(self, layout: ProjectionLayout) -> None:
        """Raises ValueError: there is no projection of this kind for such a layout."""
        if self.kind == "hadamard" and layout.block & (layout.block - 1):
            raise ValueError(
                f"a hadamard projection needs blocks of a power of two, and the width {layout.width} has blocks of {layout.block}"
            )

    def period(self, step: int) -> int:
        """The number of the projection that is used at `step`."""
        return step // self.every

    def block(self, layout: ProjectionLayout, layer: int, step: int, like: Tensor) -> Tensor:
        """Q [b, r] in the dtype and on the device of `like`.

        Args:
            layer: see `layer_key`.
        """
        period = self.period(step)
        # The host waits for all that a device has been given, at each copy to it: so there is one for many steps.
        count = 1 if like.device.type == "cpu" or layout.block > FEATURES_OF_BLOCK else _STEPS
        first = period - period % count
        cast = self._cast.get((layout, layer))
        if cast is None or cast[:3] != (first, like.dtype, like.device):
            blocks = self._blocks(layout, layer, first, count).to(device=like.device, dtype=like.dtype)
            cast = self._cast[layout, layer] = (first, like.dtype, like.device, blocks)
        return cast[3][period - first]

    def _blocks(self, layout: ProjectionLayout, layer: int, period: int, count: int) -> Tensor:
        """Return Q of `count` periods, which lie in one series."""
        first = period - period % _STEPS
        key = (layout, layer, first)
        series = self._series.get(key)
        if series is None:
            series = self._series[key] = self._make(layout, layer, first)
            while len(self._series) > _REMEMBERED:
                self._series.popitem(last=False)
        self._series.move_to_end(key)
        return series[period - first :][:count]

    def _make(self, layout: ProjectionLayout, layer: int, first: int) -> Tensor:
        """Q of `_STEPS` periods from `first` on, float64 [_STEPS, b, r] on the host."""
        _, b, r = layout
        if self.kind == "hadamard":
            words = self._words(layer, first, b)
            signs_SB = 1.0 - 2.0 * (words[0] & 1).double()
            chosen_SR = words[1].argsort(dim=1, stable=True)[:, :r]
            matrix_BB = _hadamard(b)
            columns_SBR = matrix_BB[:, chosen_SR].permute(1, 0, 2)
            return signs_SB[:, :, None] * columns_SBR * math.sqrt(b / r)
        normal_SBR = self._normal(layer, first, b * r).view(_STEPS, b, r)
        if self.kind == "gaussian":
            return normal_SBR / math.sqrt(r)
        return torch.linalg.qr(normal_SBR)[0] * math.sqrt(b / r)

    def _words(self, layer: int, first: int, count: int) -> tuple[Tensor, ...]:
        """Four int64 [_STEPS, count] of 32 random bits."""
        steps = torch.arange(first, first + _STEPS, dtype=torch.int64, device="cpu")[:, None]
        counter = torch.arange(count, dtype=torch.int64, device="cpu").expand(_STEPS, count)
        return philox(counter, Key(self.seed, cast(int, steps), layer))

    def _normal(self, layer: int, first: int, count: int) -> Tensor:
        """Float64 [_STEPS, count], by Box and Muller."""
        words = self._words(layer, first, -(-count // 4))
        uniform = [(word.double() + 0.5) * 2.0**-32 for word in words]
        normal = []
        for radius, angle in (uniform[:2], uniform[2:]):
            length = (-2.0 * radius.log()).sqrt()
            normal += [length * (2 * math.pi * angle).cos(), length * (2 * math.pi * angle).sin()]
        return torch.cat(normal, dim=1)[:, :count]


def _hadamard(size: int) -> Tensor:
    """Float64 [size, size], orthonormal."""
    return rotate(torch.eye(size, dtype=torch.float64, device="cpu") * math.sqrt(size)).round() / math.sqrt(
        size
    )


def project(x: Tensor, Q_BR: Tensor) -> Tensor:
    """x P: [..., n] to [..., k r]."""
    b, r = Q_BR.shape
    return (x.reshape(-1, b) @ Q_BR).view(*x.shape[:-1], x.shape[-1] // b * r)


def unproject(z: Tensor, Q_BR: Tensor) -> Tensor:
    """z P^T: [..., k r] to [..., n]."""
    b, r = Q_BR.shape
    return (z.reshape(-1, r) @ Q_BR.t()).view(*z.shape[:-1], z.shape[-1] // r * b)
