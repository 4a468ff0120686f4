"""A training job on machines that are not at hand: what a rank computes, saves and holds, from shapes and published figures.

What is assumed, beside `ssdtrain.tools.whatif.models` and `hardware`: a block's backward takes twice its forward; tensor-parallel
all-reduces (two in forward, two in backward) are not overlapped; gradients are reduced after the last backward, but what ZeRO-3
gathers and scatters overlaps with computation; drives are shared evenly by the GPUs of a node. Interleaved stages are planned
as if a rank's blocks were one chunk, with the microbatches alive that the interleaved schedule has.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from ssdtrain.config.errors import InvalidValue
from ssdtrain.config.units import GiB
from ssdtrain.offload.pacing.limits import NEWEST
from ssdtrain.planner.model.types import Block, Link, Machine, Tier
from ssdtrain.tools.whatif.hardware import (
    HOP_BETWEEN_NODES,
    HOP_IN_NODE,
    LINK_EFFICIENCY,
    MATMUL_EFFICIENCY,
    Gpu,
    Ssds,
)
from ssdtrain.tools.whatif.models import (
    BlockKind,
    Item,
    ParallelLayout,
    Transformer,
    model_state_bytes,
    module_of,
)

__all__ = [
    "HEAD",
    "OPTIMIZER_TRAFFIC",
    "PIECES",
    "SHARES_OF_BLOCK",
    "WHOLE",
    "ClusterJob",
    "bandwidth_of",
    "transfer_budgets",
]

OPTIMIZER_TRAFFIC = 28
"""Bytes of memory that Adam in mixed precision reads and writes per parameter."""

ITEMSIZE = 2

HEAD = "head"
"""Name of the block with the output layer and the loss."""


PIECES = 48
"""Number of pieces as which a stage is planned, at most: fewer blocks are cut into parts, more are joined. The engine has
three of them on the device anyway (`DEVICE_SHARE` in `ssdtrain.offload.pacing.limits`)."""

WHOLE = 16
"""Number of blocks of a stage from which on one is not larger than what the engine has there, and moves as one."""

SHARES_OF_BLOCK = 4
"""Number of equal shares in which a block of such a stage may be offloaded."""


def transfer_budgets(blocks: Sequence[Block]) -> dict[str, Any]:
    """Bytes of stores under way, of loads ahead, and of both on the device, as the engine sizes them (Note: [Two budgets] in
    `ssdtrain.offload.pacing.limits`), and stores whose tensors stay in any case: one of whole blocks. A piece is several tensors,
    which the engine copies and writes one by one: so that writes do not wait here for the copy of a whole piece, a third one is
    under way."""
    pieces = [piece.saved for block in blocks for piece in block.parts or (block,) if block.name != HEAD]
    largest, saved = max(pieces), sum(block.saved for block in blocks)
    newest = NEWEST if any(block.parts for block in blocks) else 1
    return {
        "in_flight": 3 * largest,
        "prefetch": 2 * largest,
        "window": max(2 * largest, saved // 16),
        "newest": newest,
    }


def _parts(block: Block, items: Sequence[Item], count: int, message: int) -> tuple[Block, ...]:
    """Parts of a block, each of neighbouring items of one module, with its share of the time by its bytes. Where they are large
    enough they are `count`, and one more for each module.

    Args:
        message: bytes of the residual's gradient.
    """
    least, groups = block.saved / count, [[items[0]]]
    for item in items[1:]:
        large = sum(one.nbytes for one in groups[-1]) >= least
        if large or module_of(item.name) != module_of(groups[-1][0].name):
            groups.append([])
        groups[-1].append(item)
    found = []
    for group in groups:
        name, saved = group[0].name, sum(item.nbytes for item in group)
        seconds = saved / block.saved * block.forward, saved / block.saved * block.backward
        transient = block.backward_transient if module_of(name) == "mlp" else message
        found.append(Block(name, *seconds, saved, backward_transient=transient))
    return tuple(found)


def bandwidth_of(blocks: Sequence[Block]) -> float:
    """Bytes per second to be written if all that the blocks save is offloaded: half of the time is forward's."""
    seconds = sum(block.forward + block.backward for block in blocks)
    return 2 * sum(block.saved for block in blocks) / seconds if seconds else 0.0


@dataclass(frozen=True)
class ClusterJob:
    """A model, how it is spread, and what it runs on.

    Attributes:
        batch: sequences in a step, over all data-parallel ranks; 0: as many as fill the pipeline four times.
        ssds: of one node; None: none.
        host: bytes of host memory per node for offloaded activations and model state; 0: none.
        network: bytes per second of one GPU to another node.
        node: GPUs of a node, which share its drives and host memory.
        reserve: bytes of device memory for the driver, communication buffers and fragmentation.
        efficiency: part of the GPU's peak FLOP rate that computation reaches.
        gradient, optimizer: bytes per parameter of gradients and of optimizer state (12: Adam with a float32 copy; 0: plain SGD).
        recompute: may be chosen.
        state: where model state is: "device", or blocks of it pass through the device from "host" or "ssd".
        cpu_rate: bytes per second of a node's memory, with which CPUs run the optimizer of these blocks; 0: the device runs it.
    """

    model: Transformer
    layout: ParallelLayout
    gpu: Gpu
    ssds: Ssds | None = None
    host: int = 0
    batch: int = 0
    network: float = 50e9
    node: int = 8
    reserve: int = 4 * GiB
    efficiency: float = MATMUL_EFFICIENCY
    gradient: int = 2
    optimizer: int = 12
    recompute: bool = True
    state: Literal["device", "host", "ssd"] = "device"
    cpu_rate: float = 0.0

    def __post_init__(self) -> None:
        blocks, chunks = len(self.model.block_kinds), self.layout.pp * self.layout.virtual
        if blocks % chunks:
            raise InvalidValue(
                f"has {blocks} blocks on {chunks} pipeline chunks", "a number of blocks that they divide"
            )
        if self.model.heads % self.layout.tp or self.model.hidden % self.layout.tp:
            raise InvalidValue(
                f"has {self.model.heads} heads and hidden {self.model.hidden} on {self.layout.tp} tensor-parallel ranks",
                "a number of ranks that divides both",
            )
        if self.batch % self.layout.dp:
            raise InvalidValue(
                f"has a batch of {self.batch} sequences on {self.layout.dp} data-parallel ranks",
                "a multiple of dp",
            )
        if not 0 < self.efficiency <= 1:
            raise InvalidValue(f"has the efficiency {self.efficiency}", "above 0, at most 1")
        if self.state == "host" and not self.host:
            raise InvalidValue(
                "has its model state in host memory, and no host memory", "--host, the bytes of a node"
            )
        if self.state == "ssd" and self.ssds is None:
            raise InvalidValue("has its model state on SSD, and no drives", "--ssd, the drives of a node")
        if self.cpu_rate and self.state == "device":
            raise InvalidValue(
                "has an optimizer on CPUs for model state on the device", "--state host or --state ssd"
            )

    @property
    def local_node(self) -> int:
        """GPUs that share a node's drives."""
        return min(self.node, self.layout.ranks)

    def microbatches(self, microbatch: int) -> int:
        """Return the microbatches of one step, on each data-parallel rank; 0: the batch is no multiple."""
        if not self.batch:
            return 4 * self.layout.pp
        each, rest = divmod(self.batch, microbatch * self.layout.dp)
        return 0 if rest else each

    def rank_parameters(self, last: bool) -> float:
        """Parameters of the first or the last pipeline stage, on one tensor-parallel rank."""
        model, layout = self.model, self.layout
        ends = 0 if last else model.embedding_parameters()
        if last or layout.pp == 1:
            ends += model.head_parameters()
            if model.tied and layout.pp > 1:
                ends += model.vocabulary * model.hidden
        return sum(map(self.block_parameters, self.stage_kinds(last))) + ends / layout.tp

    def stage_kinds(self, last: bool) -> tuple[BlockKind, ...]:
        kinds = self.model.block_kinds
        each = len(kinds) // self.layout.pp
        return kinds[-each:] if last else kinds[:each]

    def block_parameters(self, kind: BlockKind) -> float:
        """Parameters of one block, on one tensor-parallel rank."""
        model = self.model
        others = model.block_parameters(kind) - (model.mlp_parameters(kind) if model.experts > 1 else 0)
        return others / self.layout.tp + self.expert_parameters(kind)

    def expert_parameters(self, kind: BlockKind) -> float:
        """Parameters of the experts of one block, on one tensor-parallel rank."""
        model, layout = self.model, self.layout
        return model.mlp_parameters(kind) / layout.expert / layout.tp if model.experts > 1 else 0.0

    def rank_experts(self, last: bool) -> float:
        """Part of `rank_parameters` that experts have."""
        return sum(map(self.expert_parameters, self.stage_kinds(last)))

    def block_state(self, kind: BlockKind) -> dict[str, int]:
        """Bytes of parameters, gradients and optimizer state of one block on one rank."""
        return self._state(self.block_parameters(kind), self.expert_parameters(kind))

    def state_bytes(self, last: bool) -> dict[str, int]:
        """Return the bytes of one rank, by what they are."""
        found = self._state(self.rank_parameters(last), self.rank_experts(last))
        if self.layout.zero >= 3:
            largest = max(map(self.block_parameters, self.stage_kinds(last)))
            found["gathered parameters"] = int(2 * ITEMSIZE * largest)
        return found

    def _state(self, parameters: float, experts: float) -> dict[str, int]:
        return model_state_bytes(
            parameters, self.layout, experts=experts, gradient=self.gradient, optimizer=self.optimizer
        )

    def updated_in_block(self, kind: BlockKind) -> float:
        """Parameters of one block whose optimizer runs on one rank."""
        return self._updated(self.block_parameters(kind), self.expert_parameters(kind))

    def updated_on_rank(self, last: bool) -> float:
        """Parameters of a stage whose optimizer runs on one rank."""
        return self._updated(self.rank_parameters(last), self.rank_experts(last))

    def _updated(self, parameters: float, experts: float) -> float:
        return self.layout.shard(parameters, experts) if self.layout.zero else parameters

    def blocks(self, microbatch: int, last: bool) -> list[Block]:
        """Parameters of the first or the last pipeline stage."""
        model, layout = self.model, self.layout
        rate = layout.tp * self.gpu.flops * self.efficiency
        tokens = microbatch * model.sequence
        message = tokens * model.hidden * ITEMSIZE
        reduced = 2 * (layout.tp - 1) / layout.tp * message / (self.tp_rate * LINK_EFFICIENCY)
        inputs = model.block_input_bytes(microbatch, layout)
        kinds = self.stage_kinds(last)
        wide = tokens * model.ffn * (model.top_k if model.experts > 1 else 1) * ITEMSIZE // layout.tp
        found = []
        for number, kind in enumerate(kinds):
            computing = model.block_flops(microbatch, kind, computed=not model.score_bytes) / rate
            reduces = 3 if kind == "decoder" else 2
            block = Block(
                f"{kind} {number}",
                computing + reduces * reduced,
                2 * computing + reduces * reduced,
                saved=model.saved_bytes(microbatch, layout, kind),
                recompute=computing + reduces * reduced,
                inputs=inputs,
                # Gradients of the MLP's inner tensors and of the residual.
                backward_transient=2 * wide + message,
            )
            if len(kinds) < WHOLE:
                items = model.saved_items(microbatch, layout, kind)
                block = replace(block, parts=_parts(block, items, PIECES // len(kinds), message))
            found.append(block)
        if last or layout.pp == 1:
            computing = model.head_flops(microbatch) / rate
            found.append(
                Block(
                    HEAD,
                    computing,
                    2 * computing,
                    saved=model.head_saved_bytes(microbatch, layout),
                    backward_transient=model.head_transient_bytes(microbatch, layout),
                )
            )
        return found

    @property
    def tp_rate(self) -> float:
        return self.gpu.peer_rate if self.layout.tp <= self.node else self.network

    @property
    def link_rate(self) -> float:
        """Bytes per second between host and device, each way."""
        return self.gpu.host_rate * LINK_EFFICIENCY

    def machine(self, blocks: Sequence[Block], away: int = 0, state_buffers: int = 0) -> Machine:
        """Return the machine of one rank, with the engine's own budgets of transfers.

        Args:
            blocks: of a stage.
            away: bytes of model state that are not on the device.
            state_buffers: blocks whose model state is there at a time, beside those that stay.
        """
        link = self.link_rate
        tiers = []
        host = self.host // self.local_node - (away if self.state == "host" else 0)
        if host > 0:
            tiers.append(Tier("host", link, link, capacity=host))
        drives = None
        if self.ssds is not None:
            each = self.ssds.write_rate / self.local_node, self.ssds.read_rate / self.local_node
            drives = Tier("ssd", min(each[0], link), min(each[1], link))
            tiers.append(drives)
        return Machine(
            tuple(tiers),
            Link(link, link),
            **transfer_budgets(blocks),
            copies=self.gpu.memory_rate / 2,  # reads and writes
            state=drives if self.state == "ssd" else None,
            state_buffers=state_buffers,
        )

    def alive(self, last: bool, microbatches: int) -> int:
        """Microbatches between forward and backward, at most."""
        layout = self.layout
        if last:
            return 1
        chunks = (
            layout.pp if layout.virtual == 1 else (layout.virtual - 1) * layout.pp + 2 * (layout.pp - 1) + 1
        )
        return min(microbatches, -(-chunks // layout.virtual))

    @property
    def ends(self) -> tuple[bool, ...]:
        """Pipeline stages that are planned, by whether they are the last one."""
        return (False, True) if self.layout.pp > 1 else (False,)

    def bandwidth_for_all(self, microbatch: int) -> float:
        """Bytes per second that one GPU would have to write if every block were offloaded and nothing were recomputed."""
        return max(bandwidth_of(self.blocks(microbatch, last)) for last in self.ends)

    def update_seconds(self) -> tuple[float, float]:
        """(reducing gradients over dp, optimizer) of the larger stage. With ZeRO-3 the former is in `sharding_seconds`."""
        reducing = 0.0 if self.layout.zero >= 3 else 2 * self._passed_around_seconds
        return reducing, max(map(self.updated_on_rank, self.ends)) * OPTIMIZER_TRAFFIC / self.gpu.memory_rate

    @property
    def sharding_seconds(self) -> float:
        """Return the seconds of the network for one microbatch under ZeRO-3: parameters are gathered for its forward and again
        for its backward, gradients scattered after it."""
        return 3 * self._passed_around_seconds if self.layout.zero >= 3 else 0.0

    def with_sharding(self, seconds: float) -> float:
        """Return the seconds of a microbatch that computes for `seconds`. Under ZeRO-3 other blocks compute while one is gathered
        or scattered, all but one: the first has to come before anything computes, and the last is scattered after it."""
        network = self.sharding_seconds
        blocks = len(self.stage_kinds(False))
        return max(seconds, network) + min(seconds, network) / blocks

    @property
    def _passed_around_seconds(self) -> float:
        """Return the seconds of a gather over the data-parallel ranks, or of a reduction that leaves each a part, of the larger
        stage."""
        layout = self.layout
        rate = self.gpu.peer_rate if layout.ranks <= self.node else self.network
        passed = max(
            self.rank_parameters(last) - layout.shard(self.rank_parameters(last), self.rank_experts(last))
            for last in self.ends
        )
        return passed * ITEMSIZE / (rate * LINK_EFFICIENCY) + self._hops_seconds

    @property
    def _hops_seconds(self) -> float:
        """Return the seconds that the data-parallel ranks of a ring take to hand on the first bytes, once for each block."""
        layout = self.layout
        nodes = -(-layout.dp // max(1, self.node // layout.tp)) if layout.ranks > self.node else 1
        hops = (nodes - 1) * HOP_BETWEEN_NODES + (layout.dp - nodes) * HOP_IN_NODE
        return hops * len(self.stage_kinds(False))
