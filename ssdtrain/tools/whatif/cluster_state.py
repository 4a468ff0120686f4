"""Where the model state of a pipeline stage is: on the device, or passing through it block by block from host memory or SSD.

Which blocks' state stays, and through how many buffers the others pass, is as `ssdtrain.state` plans its chunks (`plan_state`);
what that costs in forward and backward is played by the one cost model (`ssdtrain.planner.model`). The optimizer's part is
counted here:

- On the device, blocks that are away come for it once more, and go: the link and the drives are busy, and nothing else runs.
- On CPUs (`Job.cpu_rate`) the optimizer state of no block comes. It runs while the last microbatch's backward does, in memory
  that is as fast as is given, and the devices wait for the rest of it (ProTrain, arXiv 2406.08334, section 3.3). Gradients of
  blocks that stay are summed on the device and leave in that backward; their new parameters come after the update.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ssdtrain.config.errors import InvalidValue
from ssdtrain.config.units import format_size
from ssdtrain.planner.model.types import Block
from ssdtrain.planner.parts import streamed
from ssdtrain.state.plan import CHUNK_BUFFERS, plan_state
from ssdtrain.tools.whatif.cluster_job import OPTIMIZER_TRAFFIC, ClusterJob

__all__ = ["StatePlacement", "placements"]

_PARTS = 3
"""Parts of the memory that buffers leave on the device: multiples of one part in so many are tried for blocks that stay."""


@dataclass(frozen=True)
class StatePlacement:
    """The model state of one rank.

    Attributes:
        persistent: the first so many blocks' state stays on the device.
        buffers: blocks that may be there beside them.
        device: bytes on the device, by what they are.
        away: bytes of parameters, gradients and optimizer state in host memory or on SSD.
    """

    job: ClusterJob
    last: bool
    persistent: int
    buffers: int
    device: dict[str, int]
    away: int

    @property
    def passing(self) -> list[dict[str, int]]:
        """Parameters, gradients and optimizer state of each block that passes through."""
        kinds = self.job.stage_kinds(self.last)
        return [self.job.block_state(kind) for kind in kinds[self.persistent :]]

    def blocks(self, blocks: Sequence[Block], microbatches: int) -> list[Block]:
        """Return the blocks with what the device loads and stores for them. Gradients come back to be added to, unless CPUs have
        the optimizer."""
        found = list(blocks)
        for number, each in enumerate(self.passing, self.persistent):
            added = each["gradients"] if microbatches > 1 and not self.job.cpu_rate else 0
            found[number] = streamed(
                found[number],
                forward_loads=each["parameters"],
                backward_loads=each["parameters"] + added,
                backward_stores=each["gradients"],
            )
        return found

    def optimizer_seconds(self, backward: float) -> float:
        """Seconds that devices wait for the optimizer.

        Args:
            backward: seconds of the last microbatch's backward.
        """
        job = self.job
        kinds = job.stage_kinds(self.last)[0 if job.cpu_rate else self.persistent :]
        moved = sum(map(job.updated_in_block, kinds))
        stay = job.updated_on_rank(self.last) - moved
        on_device = stay * OPTIMIZER_TRAFFIC / job.gpu.memory_rate
        if job.state == "device":
            return on_device
        each = [job.block_state(kind) for kind in kinds]
        if job.cpu_rate:
            gradients = sum(one["gradients"] for one in each)
            busy = [moved * OPTIMIZER_TRAFFIC * job.local_node / job.cpu_rate, gradients / job.link_rate]
        else:  # what is read is more than what is written
            busy = [moved * OPTIMIZER_TRAFFIC / job.gpu.memory_rate, self.away / job.link_rate]
        if job.state == "ssd" and job.ssds is not None:
            busy.append(self.away * job.local_node / job.ssds.read_rate)
            busy.append(self.written_by_optimizer * job.local_node / job.ssds.write_rate)
        if not job.cpu_rate:
            return on_device + max(busy)
        returned = sum(one["parameters"] for one in each[: self.persistent]) / job.link_rate
        return max(on_device, max(0.0, max(busy) - backward) + returned)

    @property
    def written_by_optimizer(self) -> int:
        """Bytes to SSD in a step, where the state is there: all but gradients."""
        if self.job.state != "ssd":
            return 0
        return self.away - sum(each["gradients"] for each in self.passing)


def placements(job: ClusterJob, last: bool) -> list[StatePlacement]:
    """Yield the placements that are possible, the one with the fewest bytes on the device first.

    Raises:
        InvalidValue: the device, host memory or the drives are too small for any.
    """
    state = job.state_bytes(last)
    available = job.gpu.memory - job.reserve
    if job.state == "device":
        if sum(state.values()) >= available:
            raise _too_large(
                job,
                state,
                "more tensor, pipeline or ZeRO parallelism, ssdtrain plan --state, or a larger GPU",
            )
        return [StatePlacement(job, last, len(job.stage_kinds(last)), 0, state, 0)]
    each = [job.block_state(kind) for kind in job.stage_kinds(last)]
    optimizer = sum(one["optimizer"] for one in each)
    chunks = [sum(one.values()) - (one["optimizer"] if job.cpu_rate else 0) for one in each]
    outside = max(0, sum(state.values()) - sum(chunks) - (optimizer if job.cpu_rate else 0))
    largest = max(chunks)
    total, least = outside + sum(chunks), outside + CHUNK_BUFFERS * largest
    limits = {outside + largest} if least >= available else {min(total, least)}
    limits |= {least + (available - least) * part // _PARTS for part in range(1, _PARTS)}
    limits |= {total}
    found: dict[tuple[int, int], StatePlacement] = {}
    for limit in sorted(limits):
        if outside + largest <= limit < available:
            plan = plan_state(chunks, outside, min(limit, total))
            device = {
                "outside of blocks": outside,
                "blocks that stay": plan.fixed - outside,
                "buffers": plan.buffers * max(chunks[plan.persistent :], default=0),
            }
            away = sum(chunks[plan.persistent :]) + (optimizer if job.cpu_rate else 0)
            place = StatePlacement(job, last, plan.persistent, plan.buffers, device, away)
            found[plan.persistent, plan.buffers] = place
    if not found:
        needed = {"outside of blocks": outside, "the largest block": largest}
        raise _too_large(job, needed, "more tensor or pipeline parallelism, or a larger GPU")
    room = _room(job)
    fits = [place for place in found.values() if room is None or place.away * job.local_node <= room]
    if not fits:
        need = min(place.away for place in found.values()) * job.local_node
        where, more = ("host memory", "--host") if job.state == "host" else ("drives", "--ssd")
        raise InvalidValue(
            f"needs {format_size(need)} in the {where} of a node for model state, which has {format_size(room or 0)}",
            f"more of it by {more}, fewer GPUs of a node that share it, or more parallelism",
        )
    return fits


def _room(job: ClusterJob) -> int | None:
    """Bytes of a node for model state; None: not known."""
    if job.state == "host":
        return job.host
    assert job.ssds is not None
    return job.ssds.count * job.ssds.capacity or None


def _too_large(job: ClusterJob, state: dict[str, int], allowed: str) -> InvalidValue:
    parts = ", ".join(f"{name} {format_size(size)}" for name, size in state.items())
    return InvalidValue(
        f"needs {format_size(sum(state.values()))} of model state per GPU ({parts}) beside {format_size(job.reserve)} of "
        f"reserve, and {job.gpu.name} has {format_size(job.gpu.memory)}",
        allowed,
    )
