"""The section `state` of the schema."""

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from ssdtrain.config.kinds import Patterns, PositiveSize, Size
from ssdtrain.config.section import ValueConflict
from ssdtrain.config.storage import StorageSection
from ssdtrain.config.units import KiB


class StateConfig(StorageSection):
    """Parameters, gradients and optimizer state of a model of plain PyTorch in chunks, on SSD or in host memory while they are
    not needed (docs/state.md)."""

    key = "state"
    purpose = "for the model's state"

    device_limit: PositiveSize | None = None
    """Bytes of parameters, gradients and optimizer state on the device at most. As many of the first chunks as fit stay on the
    device. A limit that is too small is an error at start. Default: what two chunks take, beside all that is in no chunk. With a
    plan (`"plan": "auto"`) activations count as well, and the plan decides how many chunks stay (docs/state.md)."""

    blocks: Patterns = ()
    """The modules whose parameters are a chunk each: patterns of qualified names, such as "layers.*". Default: the children of
    the longest ModuleList and of all others of the same class."""

    min_bytes: Size = 64 * KiB
    """Smaller parameters, with their gradients and optimizer state, stay on the device."""

    optimizer: Literal["device", "cpu"] = "device"
    """Where the chunks that do not stay on the device are stepped. "cpu": in host memory, by a thread of its own, while backward
    or the next forward goes on; optimizer state never comes to the device, and lies in `host` memory as far as that has room.
    Optimizers of torch that have a fused version for the CPU use it, unless their options say otherwise (docs/state.md)."""

    clip: Literal["exact", "delayed", "none"] = "exact"
    """Clipping by the norm of all gradients, with `optimizer: "cpu"`. "exact": a chunk is stepped after `optimizer.step()`, so
    that `runtime.state.clip_grad_norm_` can come before. "none": in the backward that completes its gradients, which are never
    kept. "delayed": the same, by the factor that the norm of the step before gives, which is another result (docs/state.md)."""

    microbatches: Annotated[int, Field(ge=1)] = 1
    """Backwards that make a step, with `clip: "none"` or "delayed": the last one steps. `runtime.accumulate` counts its own."""

    def conflicts(self) -> Iterator[ValueConflict]:
        yield from super().conflicts()
        if self.optimizer == "device" and self.clip != "exact":
            yield "clip", self.clip, 'is for optimizer "cpu"', '"exact", or optimizer "cpu"'
        if self.clip == "exact" and self.microbatches != 1:
            why = 'is counted only with clip "none" or "delayed"'
            yield (
                "microbatches",
                self.microbatches,
                why,
                "leaving it out: any number of backwards makes a step",
            )
