"""Estimates for a real model on hardware that is not available: its blocks are counted under fake tensors, which take no memory.

Bytes are counted (`ssdtrain.tools.model_profile`), FLOPs too (torch's counter, attention as matrix products); seconds are
FLOPs over the part of the peak rate that is expected, backward twice forward. Of few blocks parts may leave, as where a plan is
made while training: a part has its share of the block's seconds by its bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from ssdtrain.config.errors import InvalidValue
from ssdtrain.config.units import format_size
from ssdtrain.planner.model.types import Block, Link, Machine, Tier, one_after_the_other
from ssdtrain.planner.parts import UNITS, runs
from ssdtrain.planner.plans import Limits, NoPlan, Plan, SearchProblem, actions_for, kept_step, play
from ssdtrain.profile.blocks import find_blocks
from ssdtrain.tools.model_profile import CountedStep, count_blocks
from ssdtrain.tools.whatif.cluster import BRIEF, searched
from ssdtrain.tools.whatif.cluster_job import WHOLE, bandwidth_of, transfer_budgets
from ssdtrain.tools.whatif.gain import RECOMPUTATION, Gain, Trial, more_drives
from ssdtrain.tools.whatif.hardware import LINK_EFFICIENCY, Gpu, Ssds

__all__ = ["Estimate", "Hardware", "estimate"]

Make = Callable[[int], tuple[nn.Module, CountedStep]]
"""Builds a model and a step with so many sequences. Called under fake tensors."""


@dataclass(frozen=True)
class Hardware:
    """One GPU and its share of a node.

    Attributes:
        ssds: of the node, shared by `node` GPUs; None: none.
        reserve: bytes of device memory for all that is not counted.
        state: bytes of parameters, gradients and optimizer state per parameter.
        efficiency: part of the peak FLOP rate.
        host: host memory takes all that is offloaded to it.
    """

    gpu: Gpu
    ssds: Ssds | None
    node: int
    reserve: int
    state: int
    efficiency: float
    host: bool = False

    @property
    def link_rate(self) -> float:
        """Bytes per second between host and device, each way."""
        return self.gpu.host_rate * LINK_EFFICIENCY

    def machine(self, blocks: Sequence[Block]) -> Machine:
        """Return the machine as the cost model takes it, for a forward of these blocks."""
        link = self.link_rate
        tiers: tuple[Tier, ...] = (Tier("host", link, link),) if self.host else ()
        if self.ssds is not None:
            write, read = self.ssds.write_rate / self.node, self.ssds.read_rate / self.node
            tiers += (Tier("ssd", min(write, link), min(read, link)),)
        return Machine(tiers, Link(link, link), **transfer_budgets(blocks))


@dataclass(frozen=True)
class Estimate:
    """What one microbatch takes.

    Attributes:
        blocks: as they run, and last all that is outside of them, "rest".
        plan: what would be done with each; None: nothing fits.
        state: bytes of parameters, gradients and optimizer.
        budget: bytes for activations.
        largest: the largest microbatch with a plan, to within a sixteenth of it; 0: none.
        gain: what it gains, over all sizes of the microbatch.
    """

    batch: int
    blocks: list[Block]
    plan: Plan | None
    state: int
    budget: int
    largest: int
    gain: Gain

    @property
    def saved(self) -> int:
        """Bytes saved for backward by one microbatch."""
        return sum(block.saved for block in self.blocks)

    @property
    def seconds(self) -> float:
        """Seconds of forward and backward with everything kept."""
        return sum(block.forward + block.backward for block in self.blocks)

    @property
    def bandwidth_for_all(self) -> float:
        """Bytes per second that offloading everything would need: half of the time is forward's."""
        return bandwidth_of(self.blocks)


def estimate(make: Make, batch: int, hardware: Hardware, *, patterns: Sequence[str] = ()) -> Estimate:
    """What `batch` sequences take, and how many would fit.

    How bytes grow with the batch is taken from two counts, of `batch` and twice as many.

    Args:
        patterns: of blocks: see `find_blocks`.

    Raises:
        InvalidValue: model state alone does not fit.
        ValueError: the model has no blocks.
    """
    once, parameters = _blocks(make, batch, hardware, patterns)
    twice, _ = _blocks(make, 2 * batch, hardware, patterns)
    state = parameters * hardware.state
    budget = hardware.gpu.memory - hardware.reserve - state
    if budget <= 0:
        raise InvalidValue(
            f"needs {format_size(state)} of model state ({parameters} parameters at {hardware.state} bytes) beside "
            f"{format_size(hardware.reserve)} of reserve, and {hardware.gpu.name} has {format_size(hardware.gpu.memory)}",
            "a larger GPU, or fewer bytes per parameter (--state-bytes) where states are split over ranks",
        )

    def problem(size: int, given: Hardware) -> SearchProblem:
        blocks = _scaled(once, twice, size / batch)
        machine = given.machine(blocks)
        rest = frozenset({len(blocks) - 1})
        by_parts = any(block.parts for block in blocks)
        return SearchProblem(
            [blocks], one_after_the_other(), machine, actions_for(machine), rest, by_parts=by_parts
        )

    def plan(size: int, effort: float = BRIEF) -> Plan | None:
        try:
            return searched(problem(size, hardware), Limits(budget), effort=effort)[0]
        except NoPlan:
            return None

    def same_speed(given: Hardware) -> Callable[[float], Trial]:
        def within(seconds: float) -> Trial:
            def took(size: int) -> float | None:
                try:
                    limits = Limits(budget, seconds=seconds * size)
                    return searched(problem(size, given), limits, effort=BRIEF)[0].seconds / size
                except NoPlan:
                    return None

            return took

        return within

    def uniform(action: str) -> Trial:
        def seconds(size: int) -> float | None:
            asked = problem(size, hardware)
            played = play(asked, [*[action] * (len(asked.blocks) - 1), "keep"])
            return played.seconds / size if played.peak <= budget else None

        return seconds

    found = plan(batch, 1.0)
    low, high = (batch, 2 * batch) if found else (0, batch)
    while found and high < batch * 4096 and plan(high):
        low, high = high, 2 * high
    while high - low > max(1, low // 16):
        middle = (low + high) // 2
        low, high = (middle, high) if plan(middle) else (low, middle)
    named, ssds = more_drives(hardware.ssds)
    others = {
        named: same_speed(replace(hardware, ssds=ssds)),
        "host memory": same_speed(replace(hardware, ssds=None, host=True)),
        RECOMPUTATION: lambda _: uniform("recompute"),
    }
    alone = kept_step(problem(batch, hardware)).seconds / batch
    carried = None
    if hardware.ssds is not None:
        rate = min(hardware.ssds.write_rate / hardware.node, hardware.link_rate)
        carried = min(1.0, rate / bandwidth_of(once))
    gain = Gain.of(uniform("keep"), same_speed(hardware), alone, carried, others)
    return Estimate(batch, once, found, state, budget, low, gain)


def _blocks(make: Make, batch: int, hardware: Hardware, patterns: Sequence[str]) -> tuple[list[Block], int]:
    profile = count_blocks(lambda: make(batch), patterns=patterns)
    with FakeTensorMode(allow_non_fake_inputs=True), FlopCounterMode(display=False) as counter:
        model, step = make(batch)
        with sdpa_kernel(SDPBackend.MATH):
            step()
        names = find_blocks(model, patterns)
    counted = counter.get_flop_counts()
    rate = hardware.gpu.flops * hardware.efficiency
    top = type(model).__name__
    flops = {name: sum(counted.get(f"{top}.{name}", {}).values()) for name in names}
    found = []
    for block in profile.blocks:
        seconds = flops[block.name] / rate
        whole = Block(
            block.name,
            seconds,
            2 * seconds,
            block.saved,
            recompute=seconds,
            inputs=min(block.inputs, block.saved),
            forward_transient=block.forward_transient,
            backward_transient=block.backward_transient,
        )
        sizes = block.storages
        neighbours = runs(sizes, UNITS // len(profile.blocks)) if len(profile.blocks) < WHOLE else ()
        found.append(_cut(whole, [sum(sizes[begin:end]) for begin, end in neighbours]))
    rest = (counter.get_total_flops() - sum(flops.values())) / rate
    found.append(Block("rest", rest, 2 * rest, profile.outside))
    return found, sum(p.numel() for p in model.parameters())


def _scaled(once: list[Block], twice: list[Block], factor: float) -> list[Block]:
    """Blocks of a batch `factor` times as large as the first's, by the line through both counts."""

    def line(one: float, two: float) -> float:
        return max(one + (two - one) * (factor - 1), 0.0)

    return [
        _cut(
            Block(
                a.name,
                line(a.forward, b.forward),
                line(a.backward, b.backward),
                round(line(a.saved, b.saved)),
                recompute=line(a.recompute, b.recompute),
                inputs=round(line(a.inputs, b.inputs)),
                forward_transient=round(line(a.forward_transient, b.forward_transient)),
                backward_transient=round(line(a.backward_transient, b.backward_transient)),
            ),
            [part.saved for part in a.parts],
        )
        for a, b in zip(once, twice, strict=True)
    ]


def _cut(block: Block, sizes: Sequence[int]) -> Block:
    """Return the block in parts whose bytes have these proportions. What is alive for a moment may be in each of them."""
    total, before, parts = sum(sizes), 0, list[Block]()
    if len(sizes) < 2 or not total:
        return block
    for size in sizes:
        saved = block.saved * (before + size) // total - block.saved * before // total
        share, before = size / total, before + size
        parts.append(
            Block(
                block.name,
                share * block.forward,
                share * block.backward,
                saved,
                forward_transient=block.forward_transient,
                backward_transient=block.backward_transient,
            )
        )
    return replace(block, parts=tuple(parts))
