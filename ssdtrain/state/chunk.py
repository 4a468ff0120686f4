"""A chunk: the parameters of one block, their gradients and their optimizer state."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from enum import Enum
from typing import TYPE_CHECKING

import torch
from torch import nn

from ssdtrain.state.stored import GradientInTier, StoredTensor
from ssdtrain.state.transfers import StateTransfers
from ssdtrain.storage import Slot, signals_deferred

if TYPE_CHECKING:
    from ssdtrain.state.chunk_step import ChunkStep


class Where(Enum):
    """Place of the tensors of a part."""

    AWAY = "in their slots"
    LOADING = "on their way to memory"
    HERE = "in memory"
    LEAVING = "in memory until their stores have ended"


class Part:
    """Tensors of a chunk that come and go together. `Residency` alone changes `where`.

    Args:
        nbytes: in memory, also before there are tensors.

    Attributes:
        tensors: those that exist.
        stays: they never leave memory, and `nbytes` is 0: they count as what stays, or not as the device's.
        pinned: they are in memory, and stay there until a plan says otherwise.
        failed: a store of it has failed, which was raised; its memory has the only copy and is not freed.
    """

    def __init__(self, name: str, nbytes: int) -> None:
        self.name = name
        self.nbytes = nbytes
        self.tensors: list[StoredTensor] = []
        self.where = Where.AWAY
        self.stays = self.pinned = self.failed = False

    @property
    def counts(self) -> bool:
        """Whether it takes memory."""
        return self.where is not Where.AWAY


class StoredGradient(StoredTensor):
    """The gradient of a parameter, whose `grad` is replaced while it is away.

    Attributes:
        scales: factors for the bytes in the slot, applied when they are loaded: clipping does not rewrite gradients.
        claimed: it belongs to the step of its chunk, whatever the parameter's `grad` is.
    """

    __slots__ = ("_applied", "_standing", "claimed", "parameter", "scales")

    def __init__(
        self, name: str, parameter: nn.Parameter, slot: Slot | None, transfers: StateTransfers
    ) -> None:
        assert parameter.grad is not None
        if parameter.grad.nbytes != parameter.nbytes:
            raise RuntimeError(
                f"{name} is of {parameter.grad.dtype} and the parameter of {parameter.dtype} (config section state): leave "
                "grad_dtype as it is, or set it before ssdtrain.attach, where such parameters stay on the device"
            )
        super().__init__(name, parameter.grad, slot, transfers)
        self.parameter = parameter
        self.scales: list[torch.Tensor] = []
        self._applied = 0  # of `scales`, to the bytes in memory
        self._standing: GradientInTier | None = None
        self.claimed = False

    @property
    def dropped(self) -> bool:
        """Whether the parameter has no gradient any more, or another one."""
        mine = self.tensor if self._standing is None else self._standing
        return not self.claimed and self.parameter.grad is not mine

    def claim(self) -> None:
        """Give the gradient to the step of its chunk, which uses it up: what stands as the parameter's `grad` stays until it is
        dropped, and has no values."""
        with signals_deferred():
            if self._standing is None:
                self._stand_in()
            self.claimed = True

    def hide(self) -> None:
        with signals_deferred():
            super().hide()
            if not self.claimed:
                self._stand_in()

    def _stand_in(self) -> None:
        self._standing = GradientInTier.standing_for(self)
        self.parameter.grad = self._standing

    def show(self) -> None:
        with signals_deferred():
            super().show()
            if not self.claimed:
                self._standing = None
                self.parameter.grad = self.tensor

    def _slot_is_right(self) -> bool:
        return self._applied == 0 and super()._slot_is_right()

    def pending_scales(self) -> list[torch.Tensor]:
        """Return the factors that the bytes in memory, or in the slot where they are away, still lack."""
        return self.scales[self._applied :]

    def free(self) -> None:
        with signals_deferred():
            super().free()
            self._applied = 0

    def apply_scales(self) -> None:
        """Multiply what is shown by the factors that came while it was away.

        Raises:
            IOFailure: the store of these bytes failed.
        """
        if len(self.scales) == self._applied:
            return
        self.wait_for_store()
        self._note_changes()
        for scale in self.scales[self._applied :]:
            with signals_deferred(), torch.no_grad():
                self.tensor.mul_(scale.to(self.tensor.device))
                self._applied += 1
                self._version = self.tensor._version  # nothing to store: the slot and `scales` say the same

    def _write(self) -> None:
        super()._write()
        self.scales.clear()
        self._applied = 0


class Chunk:
    """The parameters of a block that leave memory.

    Args:
        name: of the block.
        module: the block.
        parameters: by qualified name.
        state_bytes: of the optimizer for them.

    Attributes:
        values, gradients, state: its parts.
        gradient_slots: by parameter.
        forwards: of the block that are running.
        first_node: number that autograd gave, or would have given, to the first node of that forward.
        graph_task: of autograd, whose backward through the block is running; None: none is.
        missing: parameters without their gradient in this backward.
        stepping: the optimizer works on it.
        ahead: loads have begun before it is needed.
        held: it is needed again at once: it stays between two microbatches.
        backwards: through the block that have ended since the last step.
        pending: its step that a thread makes; None: none is due.
        arriving: lets the current stream wait for parameters that stay, which come back from their step.
        norms: of its gradients, by parameter, where the step before has asked for norms; they are not known otherwise.
    """

    def __init__(
        self, name: str, module: nn.Module, parameters: dict[str, nn.Parameter], state_bytes: int
    ) -> None:
        self.name = name
        self.module = module
        self.names = {parameter: full for full, parameter in parameters.items()}
        nbytes = sum(parameter.nbytes for parameter in self.names)
        self.values = Part(f"the parameters of {name}", nbytes)
        self.gradients = Part(f"the gradients of {name}", nbytes)
        self.state = Part(f"the optimizer state of {name}", state_bytes)
        self.gradient_slots: dict[nn.Parameter, Slot | None] = {}
        self.forwards = 0
        self.first_node = 0
        self.graph_task: int | None = None
        self.missing: set[nn.Parameter] = set()
        self.stepping = False
        self.ahead = False
        self.held = False
        self.backwards = 0
        self.pending: ChunkStep | None = None
        self.arriving: list[Callable[[], None]] = []
        self.norms: dict[nn.Parameter, torch.Tensor] = {}

    def arrive(self) -> None:
        """Let the current stream wait for what comes back."""
        while self.arriving:
            self.arriving[0]()
            self.arriving.pop(0)

    @property
    def parameters(self) -> Sequence[nn.Parameter]:
        return list(self.names)

    @property
    def parts(self) -> tuple[Part, Part, Part]:
        return self.state, self.gradients, self.values

    @property
    def nbytes(self) -> int:
        """Bytes of all parts."""
        return sum(part.nbytes for part in self.parts)

    @property
    def in_use(self) -> bool:
        return self.forwards > 0 or self.graph_task is not None or self.stepping or self.held

    def stored_gradients(self) -> Iterator[StoredGradient]:
        """Yield the gradients that the parameters still have."""
        for gradient in self.gradients.tensors:
            if isinstance(gradient, StoredGradient) and not gradient.dropped:
                yield gradient
