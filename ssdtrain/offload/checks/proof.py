"""`offload.prove_steps`: every saved tensor of the first steps is also copied to host memory, by PyTorch and not by the engine,
and what unpack hands to backward is compared with the copy to the bit.

Note: [Why this is the same run without offload]
Of a step, offload changes nothing but the tensors that unpack returns: the graph, the kernels and their order are those of the
framework. If each of them has the same bytes, sizes and strides as the one that was saved, then backward computes what it
would have computed without. Against comparing the gradients of two runs this needs no second backward, holds where kernels
are not deterministic, in any schedule of a pipeline, and names the tensor, also where its error would vanish in a gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ssdtrain.codecs import Codec
from ssdtrain.device import Device

_sequence_number = torch.autograd._get_sequence_nr


class ProofFailed(RuntimeError):
    """Unpack would have handed backward another tensor than was saved."""


@dataclass(slots=True)
class Totals:
    """What was compared so far."""

    tensors: int = 0
    nbytes: int = 0


class Proof:
    """What one handle proves: first the tensor itself, then, once its operator has ended, a copy of it in host memory."""

    __slots__ = ("_copied", "_like", "_tensor", "_totals")

    def __init__(self, tensor: torch.Tensor, totals: Totals) -> None:
        self._tensor = tensor.detach()
        self._like = tensor.dtype, tuple(tensor.shape), tensor.stride()
        self._copied = False
        self._totals = totals

    def copy(self) -> None:
        tensor = self._tensor
        span = (
            tensor.storage_offset()
            + 1
            + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
        )
        # Else its owner has freed the memory meanwhile (storage.resize_): there is nothing to compare with.
        if not self._copied and tensor.untyped_storage().nbytes() >= span * tensor.itemsize:
            self._tensor = _bytes(tensor)
            self._copied = True

    def check(self, tensor: torch.Tensor, origin: Callable[[], str]) -> None:
        """Compare what unpack returns.

        Raises:
            ProofFailed: another byte, size or stride.
        """
        if not self._copied:
            return  # backward runs inside of the forward that saved it: the bytes have not left
        if (tensor.dtype, tuple(tensor.shape), tensor.stride()) != self._like:
            found = f"it has dtype, size and strides {tensor.dtype, tuple(tensor.shape), tensor.stride()}"
            raise ProofFailed(_message(self._like, origin(), found))
        came = _bytes(tensor)
        self._totals.tensors += 1
        self._totals.nbytes += came.numel()
        if torch.equal(came, self._tensor):
            return
        differing = torch.nonzero(came != self._tensor).flatten()
        first = int(differing[0])
        found = (
            f"{differing.numel()} of {came.numel()} bytes differ, the first at {first}: saved {int(self._tensor[first]):#04x}, "
            f"came back {int(came[first]):#04x}"
        )
        raise ProofFailed(_message(self._like, origin(), found))


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of the elements, in their order, in host memory."""
    return tensor.detach().to("cpu", copy=True).contiguous().reshape(-1).view(torch.uint8)


def _message(like: tuple[Any, ...], origin: str, found: str) -> str:
    dtype, shape, _ = like
    return (
        f"offload.prove_steps: the saved tensor [{dtype}, {list(shape)}] of {origin} did not come back as it was saved: {found}. "
        "Gradients with this offload would be wrong: run without it, and see whether the drive or the memory is faulty"
    )


class Prover:
    """Makes the proofs, while it is the engine's. Called on the threads that run forward, without the engine's lock.

    Args:
        device: whose streams run the operators.
    """

    def __init__(self, device: Device) -> None:
        self.totals = Totals()
        self._device = device

    def saved(self, unproven: list[tuple[int, Any, Proof]], tensor: torch.Tensor) -> Proof:
        """Return the proof of a tensor that was saved just now. See Note: [After the operator] in `pacing.starter`.

        Args:
            unproven: of its tape: proofs whose operators may still run, with number of the operator and stream.
        """
        number = _sequence_number()
        self.copy(unproven, before=number)
        proof = Proof(tensor, self.totals)
        unproven.append((number, self._device.current_stream(), proof))
        return proof

    def copy(self, unproven: list[tuple[int, Any, Proof]], *, before: int | None = None) -> None:
        """Copy what the operators that have ended have saved: those of other numbers than `before`; None: all."""
        while unproven and unproven[0][0] != before:
            _, stream, proof = unproven.pop(0)
            self._device.wait_stream(stream)
            proof.copy()


def provable(codec: Codec | None) -> bool:
    """Return whether what it encodes comes back to the bit: what a policy has encoded by a lossy codec cannot be proven."""
    return codec is None or codec.lossless
