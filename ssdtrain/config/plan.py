"""The section `plan` of the schema."""

from collections.abc import Iterator
from typing import ClassVar, Literal

from ssdtrain.config.kinds import File, MemorySize, Patterns, PlanMode, Slowdown, Switch
from ssdtrain.config.section import Section, ValueConflict


class PlanConfig(Section):
    """Choice of keep, recompute, offload or encode for each block of the model, from a few profiled steps (docs/plan-auto.md).
    `"plan": "auto"` is this section with its defaults.

    Blocks are offloaded where there is an `offload` section, whose `amount` the plan then decides. Which ones may be
    recomputed, in plain PyTorch and in each framework: docs/plan-auto.md.
    """

    shorthand: ClassVar[str | None] = "mode"

    mode: PlanMode = "auto"
    """"off" leaves the section without effect."""

    device_limit: MemorySize | None = None
    """Bytes of activations on the device at most: what is saved for backward, without parameters, gradients, optimizer state and
    workspaces. A limit that no plan can meet is an error after the profiled steps. With a `state` section it is an error: what is
    there is limited by `state.device_limit`, together with the model's state. Default: no limit."""

    objective: Literal["time", "memory"] | None = None
    """"time": the shortest step within `device_limit`. "memory": the lowest peak within `max_slowdown`. Default: "time" with a
    `device_limit`, else "memory"."""

    max_slowdown: Slowdown | None = None
    """Predicted step time over that of keeping everything, minus 1, at most: 0 is no slowdown, 1.0 twice the time. Default: 0.02
    with the objective "memory", else no limit. A larger value allows a lower peak."""

    recompute: Switch = "auto"
    """Whether blocks may be recomputed. Default: those that have no side effects as far as can be seen, where nothing else
    recomputes them; "on" makes it an error where no block can be recomputed (docs/plan-auto.md)."""

    compress: bool = False
    """Whether the plan may choose compressed inputs of linear layers (lossy), in the blocks where they help. What is compressed,
    and how, is in the section `compact`, without which this is an error. Default: the plan chooses nothing lossy, and a `compact`
    section applies to all blocks."""

    encode: Literal["off", "exact", "int8", "int4"] = "off"
    """Codec by which the plan may keep what a block saves in the memory that it is in, encoded: "exact" in 0.766 of the bytes of
    bfloat16 without changing a bit, "int8" and "int4" in less, rounded. It needs no tier, and takes the time of encoding and
    decoding, which is measured at start (docs/plan-auto.md). Default: the plan encodes nothing."""

    blocks: Patterns = ()
    """What is decided about as one, and may be recomputed: patterns of module names, such as "layers.*". Default: the children of
    the longest ModuleList and of all others of the same class; the layers of a pipeline's module."""

    file: File | None = None
    """File of an answer of `ssdtrain plan --json`, whose place of model state the framework is configured for at start
    (docs/plan-apply.md); what it cannot set is an error with what to write. Default: model state is as the framework is
    configured."""

    state_limit: MemorySize | None = None
    """Bytes of a device for model state: parameters, gradients, optimizer state, and blocks that are there for a time. Under
    ZeRO-3, where by the model's shapes there is more, the optimizer runs on CPUs, and the weights of as many blocks as have to
    are in host memory (docs/plan-apply.md). In plain PyTorch it is for activations as well, and stands for the section state,
    with the drives of `offload` (docs/state.md). Default: under ZeRO-3 half of a GPU that all of the state does not fit into, if
    the config does not say where state is; else it is as configured."""

    plot: bool = False
    """Draw activation memory over a step that follows the plan, predicted against measured, into plan-rank-N.png in `report.path`
    (docs/plan-auto.md). It takes about a second of each rank, for plans 1, 2, 3, 4, 8, 16 ... of a run, and needs matplotlib.
    Default: nothing is drawn."""

    def conflicts(self) -> Iterator[ValueConflict]:
        if self.objective == "time" and self.device_limit is None:
            why = "needs a device_limit: without one, keeping everything is the fastest"
            yield "objective", self.objective, why, '"memory", or a device_limit'
        if self.state_limit is not None and self.file is not None:
            why = "is beside file, which says where model state is"
            yield "state_limit", self.state_limit, why, "one of the two"

    @property
    def memory(self) -> bool:
        """Whether the lowest peak is wanted, not the shortest step."""
        return self.objective == "memory" or (self.objective is None and self.device_limit is None)

    @property
    def slowdown(self) -> float | None:
        """`max_slowdown`, or its default."""
        return 0.02 if self.max_slowdown is None and self.memory else self.max_slowdown
