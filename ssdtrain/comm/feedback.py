"""Error feedback: what compression lost in this step is added to what is sent in the next.

Sources: Seide et al., 1-bit SGD (Interspeech 2014); Karimireddy et al., arXiv 1901.09847. The residual at the sender, of the full
gradient, is what matters; the owner of a shard has one too where the summed shard is quantised again.

Note: [Loss scale]
    Gradients of float16 training are multiplied by a loss scale, and so is what compression loses of them. When the scale grows
    after a series of good steps, what was kept is multiplied by the ratio before it is added to gradients of the new scale.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ssdtrain.codecs import Key, make_fixed_size_codec, payload_finite
from ssdtrain.comm.coding import Coder, TensorPiece

_INT8 = make_fixed_size_codec("int8:block=128")


def _all_finite(coder: Coder, payload: Tensor) -> bool:
    """Read the finite flag of a payload in host memory; uncompressed elements are outside of it."""
    return coder.codec is not None and bool(payload_finite(payload))


class _Residual(NamedTuple):
    kept: Tensor
    """A payload of int8, or float32 [numel]."""
    numel: int
    scale: float
    """Loss scale of the gradients that lost it."""


class Feedback:
    """The residuals of one rank, one for each piece that it sends.

    Args:
        kind: "int8" keeps them in about 8 bits a value, "fp32" in 32.
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._residuals: dict[str, _Residual] = {}
        self._used: set[str] = set()
        self.scale = 1.0
        """Loss scale of the gradients that are encoded now. See Note: [Loss scale]."""

    @property
    def nbytes(self) -> int:
        """Bytes of the residuals."""
        return sum(residual.kept.nbytes for residual in self._residuals.values())

    def encode(
        self, name: str, coder: Coder, piece: TensorPiece, out: Tensor, key: Key, measured: bool = False
    ) -> Tensor | None:
        """Encode `piece` plus its residual into `out` and keep the new residual.

        Args:
            name: of the piece, the same in every step.
            piece: without a reference; it is not modified.
            measured: return the error.

        Returns:
            A number on the device of the piece: its relative error |lost| / |sent|; NaN where it was not finite.
        """
        corrected = piece._replace(values=self.corrected(name, piece.values))
        coder.encode(corrected, out, key)
        decoded = torch.empty_like(corrected.values)
        coder.decode(out, piece._replace(values=decoded), known=coder.known_sections(corrected))
        size = corrected.values.norm() if measured else None
        lost = corrected.values.sub_(decoded)
        error = lost.norm() / size if size is not None else None
        # An overflow, or what surrounds it in its block, must not stay behind.
        if lost.is_cuda or not _all_finite(coder, out):
            lost.masked_fill_(~torch.isfinite(lost), 0.0)
        for start, stop in piece.uncompressed_ranges:
            lost[start:stop].zero_()
        self._keep(name, lost)
        return error

    def corrected(self, name: str, x: Tensor) -> Tensor:
        """Return a copy of `x` with what is kept under `name` added."""
        corrected = x.to(torch.float32, copy=True)
        self._used.add(name)
        residual = self._residuals.get(name)
        if residual is None:
            return corrected
        kept = residual.kept
        if residual.numel != x.numel() or kept.device != x.device:
            del self._residuals[name]  # its bucket was rebuilt
            return corrected
        ratio = self.scale / residual.scale
        if self.kind == "fp32":
            return corrected.add_(kept, alpha=ratio)
        if ratio == 1.0:
            return _INT8.decode(kept, corrected, accumulate=True)
        return corrected.add_(_INT8.decode(kept, torch.empty_like(corrected)), alpha=ratio)

    def residual(self, name: str) -> Tensor | None:
        """Return what is kept under `name`, as float32 [numel]."""
        residual = self._residuals.get(name)
        if residual is None:
            return None
        return self.corrected(name, torch.zeros(residual.numel, device=residual.kept.device))

    def _keep(self, name: str, lost: Tensor) -> None:
        kept = lost
        if self.kind == "int8":
            if name in self._residuals:
                kept = self._residuals[name].kept
            else:
                size = _INT8.payload_bytes(lost.numel(), torch.float32)
                kept = torch.empty(size, dtype=torch.uint8, device=lost.device)
            _INT8.encode(lost, kept, Key(0))
        self._residuals[name] = _Residual(kept, lost.numel(), self.scale)

    def step_end(self) -> int:
        """Drop residuals that this step had no use for: their buckets were rebuilt, or reduced by another collective. Returns
        how many."""
        stale = [name for name in self._residuals if name not in self._used]
        for name in stale:
            del self._residuals[name]
        self._used.clear()
        return len(stale)

    def clear(self) -> int:
        """Drop all residuals; returns how many there were."""
        count = len(self._residuals)
        self._residuals.clear()
        return count

    def state_dict(self) -> dict[str, Any]:
        """Return plain tensors on the CPU and numbers, for a checkpoint."""
        return {
            "kind": self.kind,
            "pieces": {
                name: (kept.to("cpu", copy=True), numel) for name, (kept, numel, _) in self._residuals.items()
            },
            "scales": {name: residual.scale for name, residual in self._residuals.items()},
        }

    def load_state_dict(self, state: dict[str, Any], device: torch.device) -> None:
        """Take the residuals of `state_dict`.

        Raises:
            ValueError: they are of the other kind.
        """
        if state["kind"] != self.kind:
            raise ValueError(f"the residuals are {state['kind']}, this run keeps {self.kind}")
        self.clear()
        for name, (kept, numel) in state["pieces"].items():
            scale = state.get("scales", {}).get(name, self.scale)
            self._residuals[name] = _Residual(kept.to(device, copy=True), numel, scale)
