"""Types of the cost model: blocks, choices, the machine, the order of passes, and the outcome of a simulated step."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

from ssdtrain.offload.pacing.limits import NEWEST

__all__ = [
    "COMPRESS",
    "DEVICE",
    "ENCODE",
    "KEPT",
    "RECOMPUTE",
    "Block",
    "BlockTimes",
    "Choice",
    "Link",
    "Machine",
    "Pass",
    "StepTimeline",
    "Tier",
    "one_after_the_other",
    "one_forward_one_backward",
]

DEVICE = "device"
"""The tier name of tensors that stay where they are."""


@dataclass(frozen=True)
class Block:
    """A part of the model that has one action: a transformer layer, a module, or a single region.
    Seconds and bytes are those of one microbatch on one rank."""

    name: str
    forward: float
    backward: float
    saved: int
    """Bytes saved for backward that may be offloaded or recomputed."""
    recompute: float = 0.0
    """Seconds of running its forward again."""
    inputs: int = 0
    """Bytes of `saved` and `small` that stay where the block is recomputed: what its forward runs again from."""
    fixed: int = 0
    """Bytes alive from its forward to its backward whatever is chosen: outputs that the caller holds."""
    small: int = 0
    """Bytes of saved tensors that are too small to leave: alive until its backward, unless it is recomputed."""
    forward_transient: int = 0
    """Bytes alive during its forward only."""
    backward_transient: int = 0
    """Bytes alive during its backward only: gradients of activations, workspaces."""
    first_operator: float = 0.0
    """Seconds of `forward` until its first tensor is saved. The copies of what was saved before begin after it."""
    storing: float = 0.0
    """Seconds beside these that computation loses to beginning its stores, where the block is offloaded: of a host that computes
    itself (CPU), or of a device that encodes."""
    loading: float = 0.0
    """The same for bringing its tensors back, without waits."""
    held: int = 0
    """Bytes of `saved` that the program has too: a store does not free them before forward is past the block and `held_blocks`
    more."""
    held_blocks: int = 0
    continues: bool = False
    """Its operator saves what follows too: stores begin after that."""
    parts: tuple[Block, ...] = ()
    """What it saves, in forward order, where that is known more finely: stores begin and loads are needed part by part. Their
    seconds and bytes add up to the block's."""
    forward_loads: int = 0
    """Bytes of model state that come to the device for its forward (its parameters, where they pass through buffers)."""
    backward_loads: int = 0
    """The same for its backward: its parameters again, and gradients that are summed on the device."""
    backward_stores: int = 0
    """Bytes of model state that leave after its backward: gradients."""
    cpu_step: float = 0.0
    """Seconds that a CPU takes for the optimizer's step of its parameters, with those gradients."""
    returns: int = 0
    """Bytes of parameters that come to the device behind that step, where they stay there."""
    repeats: int = 1
    """Number of equal layers in a row that it stands for: a recomputation brings back one of them at a time."""
    compressed: Block | None = None
    """The block as it is where its linear layers keep compressed inputs; None: that saves nothing."""
    encoded: Block | None = None
    """The block as it is where what it saves stays encoded: payloads are its `inputs`, and decoding is its `recompute`. None:
    that saves nothing."""

    @cached_property
    def largest_two(self) -> int:
        """Bytes: what a forward that saves nothing has of `saved` and `small` at a time, the input and the output of an
        operator."""
        sizes = ((part.saved + part.small) // self.repeats for part in self.parts or (self,))
        return sum(sorted(sizes, reverse=True)[:2])

    @property
    def brought_back(self) -> int:
        """Bytes of `saved` when its forward has run again."""
        return self.inputs + (self.saved - self.inputs) // self.repeats


@dataclass(frozen=True, slots=True)
class Choice:
    """What happens to a block's saved tensors."""

    tier: str = DEVICE
    """Where they go: the name of a tier, or `DEVICE`."""
    recompute: bool = False
    """Drop `saved`, keep `inputs` (in `tier`), and run the forward again in backward."""
    compress: bool = False
    """The block is `Block.compressed`. Lossy."""
    encode: bool = False
    """The block is `Block.encoded`."""
    share: float = 1.0
    """Fraction of the bytes that goes to `tier`; the others are copied, and the copy stays on the device."""
    shares: tuple[float, ...] = ()
    """The same for each of `Block.parts`, where these differ: 0.0 is a part that stays. Empty: `share` of all."""


KEPT = Choice()
RECOMPUTE = Choice(recompute=True)
COMPRESS = Choice(compress=True)
ENCODE = Choice(encode=True)


@dataclass(frozen=True, slots=True)
class Tier:
    """A place for offloaded bytes.

    Args:
        name: as in `Choice.tier`.
        write, read: bytes per second for this rank.
        shared: reads and writes take turns; else both run at full speed at once.
        latency: seconds of a transfer on top, overlapped with others.
        depth: writes that may be under way at once, which cannot be cancelled any more; they share the bandwidth in turn.
        capacity: bytes; a store that finds no room stays on the device. None: no limit.
    """

    name: str
    write: float
    read: float
    shared: bool = False
    latency: float = 0.0
    depth: int = 1
    capacity: int | None = None


@dataclass(frozen=True, slots=True)
class Link:
    """Between a device and the host: bytes per second each way, at the same time."""

    to_host: float
    to_device: float


@dataclass(frozen=True, slots=True)
class Machine:
    """Bandwidths and buffers available to transfers. See `ssdtrain.planner.model.simulation` for `in_flight`, `prefetch` and
    `window` (bytes). `newest`: stores whose tensors stay whatever the window; 1 where blocks are whole layers and not tensors.

    `link` is None where tensors are stored from host memory without a copy (CPU). `buffers`: bytes of the arena that they come
    back into, where it is of the memory that activations take; it is there all the time, or where not `buffers_stay` if
    something leaves. `together`: bytes of writes that are queued before an idle tier begins them (CPU). `in_order`: without a
    link, tensors leave when later stores need
    their room in `in_flight`, and not before. `hook`: seconds of the host for one operator and its
    hook, with a link, where the host is ahead of the device by as much as it is faster; None: not known, and it is not ahead.
    `copies`: bytes per second of a copy within the memory that tensors are in; None: not known, and blocks leave whole.
    `state`: the drives of model state that passes through the device (see `StateStreaming`), the same as the tier of
    that name; None: it is in host memory. `state_buffers`: blocks whose state is there at a time, beside those that stay.
    `state_room`: bytes of parameters that are there at a time, in place of a number of blocks. `state_work`: seconds of the
    thread that trains for a byte of them that comes (checksums, where the host computes). `steps_inside`: CPUs step a block when
    the last backward has its gradients (see `HostSteps`); else when all passes are over.
    """

    tiers: tuple[Tier, ...] = ()
    link: Link | None = None
    in_flight: int = 1 << 60
    prefetch: int = 1 << 60
    window: int = 1 << 60
    buffers: int = 0
    together: int = 0
    hook: float | None = None
    copies: float | None = None
    in_order: bool = False
    state: Tier | None = None
    state_buffers: int = 2
    state_room: int | None = None
    state_work: float = 0.0
    steps_inside: bool = False
    buffers_stay: bool = True
    newest: int = NEWEST


@dataclass(frozen=True, slots=True)
class Pass:
    """A forward or backward of one microbatch on one chunk."""

    kind: Literal["forward", "backward"]
    microbatch: int = 0
    chunk: int = 0


def one_after_the_other(microbatches: int = 1) -> list[Pass]:
    """Forward and backward of each microbatch in turn."""
    order = []
    for number in range(microbatches):
        order += [Pass("forward", number), Pass("backward", number)]
    return order


def one_forward_one_backward(microbatches: int, alive: int) -> list[Pass]:
    """1F1B on a stage that has at most `alive` microbatches between forward and backward (stages after it,
    and itself)."""
    order = [Pass("forward", number) for number in range(min(alive, microbatches))]
    for number in range(microbatches):
        order.append(Pass("backward", number))
        if number + alive < microbatches:
            order.append(Pass("forward", number + alive))
    return order


@dataclass(slots=True)
class BlockTimes:
    """What one block cost in the step, over all microbatches."""

    store_stall: float = 0.0
    """Seconds that forward waited for its store."""
    load_stall: float = 0.0
    """Seconds that backward waited for its load."""
    stored: int = 0
    """Bytes written to its tier; less than was chosen where stores were cancelled or found no room."""

    @property
    def hidden(self) -> bool:
        """No computation waited for its transfers."""
        return self.store_stall + self.load_stall < 1e-9


@dataclass(slots=True)
class StepTimeline:
    """The outcome of `simulate`."""

    seconds: float
    """Seconds from the first forward to the end of the last pass, of the last step."""
    compute_seconds: float
    """Forward, backward and recomputation."""
    store_stall: float
    load_stall: float
    peak_bytes: int
    """The most bytes on the device at once, of what the blocks describe."""
    peak_seconds: float
    """When that was first reached."""
    written: dict[str, int] = field(default_factory=dict)
    """Bytes by tier."""
    read: dict[str, int] = field(default_factory=dict)
    tier_peak: dict[str, int] = field(default_factory=dict)
    """The most bytes at once, by tier."""
    blocks: list[list[BlockTimes]] = field(default_factory=list)
    """[chunk][block]"""
    memory: list[tuple[float, int]] = field(default_factory=list)
    """(seconds from the first forward, bytes on the device from then on), where it was asked for."""
    step_wait: float = 0.0
    """Seconds that the next step's forward waits for CPUs that step blocks."""

    @property
    def stall(self) -> float:
        return self.store_stall + self.load_stall
