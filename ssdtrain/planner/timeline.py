"""The cost model: the time line of one training step, given what happens to each block's saved tensors.

`simulate` plays forward and backward passes of microbatches in a given order and returns step time, stalls,
peak memory and bytes per tier. It needs no device, and takes some microseconds per block and pass, so that a
search can call it thousands of times.

What is modelled, after the engine's own rules (`ssdtrain.offload`):

- A block's saved tensors are on the device from the beginning of its forward. Its store begins when its forward ends, and on a
  device the first operator of the next block: a copy over the link to a staging buffer, then a write to the tier, both served in
  order. At most `in_flight` bytes of stores are under way: else forward waits.
- Without a link (CPU) tensors leave when their write has ended, and a tier that is idle begins writes
  together, when more than `together` bytes of them are queued.
- On a device with a link the host is ahead of the device: it queues an operator, and later its backward, before the stores
  of what was queued before have ended. So tensors leave in the order of what is queued: those whose store the host has
  waited for (`in_flight`), and when more than `window` bytes of stores are on the device the oldest one, for whose copy the
  stream that computes then waits. What has not left when backward is queued stays.
- Backward asks in reverse order. Reads are issued ahead, in order, across tapes, while the bytes in staging
  buffers are at most `prefetch`, and so are those of the tape between backward and the region, kept ones
  included; copies to the device while at most `window` bytes are there ahead of their use.
- A store that has not begun when its load would begin is cancelled and its bytes stay; one whose write is
  under way is brought back from its staging buffer.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from ssdtrain.planner.queues import Bounded, Job, Server
from ssdtrain.planner.step import (
    DEVICE,
    Block,
    BlockTimes,
    Choice,
    Machine,
    Pass,
    StepTimeline,
)

__all__ = ["simulate"]


@dataclass(slots=True)
class _Saved:
    """What one block of one tape left for backward."""

    nbytes: int  # of it on the device before its store and after its load
    job: Job | None = None
    server: Server | None = None
    departed: bool = False
    pooled: bool = False  # it came back into the arena
    awaited: bool = False  # it was read, which the host waits for; not brought back from its staging buffer


class _Simulation:
    def __init__(
        self, chunks: Sequence[Sequence[Block]], choices: Sequence[Sequence[Choice]], machine: Machine
    ) -> None:
        self.chunks, self.choices, self.machine = chunks, choices, machine
        self.servers = {tier.name: Server(tier) for tier in machine.tiers}
        self.now = self.began = 0.0
        self.compute = self.idle = 0.0
        self.store_link_free = self.load_link_free = 0.0
        self.stores: deque[tuple[Job, Server, BlockTimes]] = deque()  # under way
        self.store_bytes = 0
        self.deferred: list[Job] = []  # writes that begin with others
        self.deferred_bytes = 0
        self.leaving: deque[tuple[_Saved, BlockTimes]] = deque()  # stores whose tensors are on the device
        self.leaving_bytes = 0
        self.staged = Bounded(machine.prefetch)
        self.ahead = Bounded(machine.window)
        self.memory: list[tuple[float, bool, int]] = []  # when, after all others of that time, bytes
        self.tapes: dict[tuple[int, int], tuple[list[_Saved], float]] = {}  # and the end of its forward
        self.backward_began: float | None = None  # the latest
        self.blocks = [[BlockTimes() for _ in chunk] for chunk in chunks]

    def run(self, seconds: float) -> None:
        self.now += seconds
        self.compute += seconds

    def hold(self, when: float, nbytes: int, *, late: bool = False) -> None:
        if nbytes:
            self.memory.append((when, late, nbytes))

    # Forward

    def forward(self, chunk: int, microbatch: int) -> None:
        tape: list[_Saved] = []
        parts = list(zip(self.chunks[chunk], self.choices[chunk], self.blocks[chunk], strict=True))
        for index, (block, choice, times) in enumerate(parts):
            began = self.now
            self.run(block.forward)
            self.hold(began, block.saved + block.small + block.fixed + block.forward_transient)
            self.hold(self.now, -block.forward_transient)
            kept = block.saved
            if choice.recompute:
                kept = block.inputs
                self.hold(self.now, kept - block.saved - block.small)
            self.run(choice.encode)
            saved = _Saved(round(kept * choice.ratio))
            self.hold(self.now, saved.nbytes - kept)
            if choice.tier != DEVICE and saved.nbytes:
                following = parts[index + 1][0] if index + 1 < len(parts) else None
                self.store(saved, self.servers[choice.tier], times, following)
            elif self.machine.link is None:
                self.depart()
            tape.append(saved)
        self.tapes[chunk, microbatch] = tape, self.now

    def store(self, saved: _Saved, server: Server, times: BlockTimes, following: Block | None) -> None:
        nbytes, capacity = saved.nbytes, server.tier.capacity
        if capacity is not None and server.used + nbytes > capacity:
            return
        full = False
        while self.stores:
            if self.store_bytes + nbytes > self.machine.in_flight:
                full = True
                self.flush()
                self.end_store(wait=True)
            elif self.machine.link is not None or not self.end_store(wait=False):
                break
        job = Job(nbytes, self.now)
        if self.machine.link is not None:
            # The host has queued the next operator before it queues the copy.
            queued = self.now + (following.first_operator if following is not None else 0.0)
            self.store_link_free = max(queued, self.store_link_free) + nbytes / self.machine.link.to_host
            job.ready = job.left = self.store_link_free
        elif self.machine.together:
            job.ready = inf
            self.deferred.append(job)
            self.deferred_bytes += nbytes
            server.serve(self.now)
            if self.deferred_bytes > self.machine.together or server.write_free > self.now:
                self.flush()
        server.enqueue(job)
        server.used += nbytes
        server.written += nbytes
        server.peak = max(server.peak, server.used)
        self.stores.append((job, server, times))
        self.store_bytes += nbytes
        saved.job, saved.server = job, server
        times.stored += nbytes
        self.leaving.append((saved, times))
        self.leaving_bytes += nbytes
        self.depart(
            late=full and following is not None
        )  # the host has queued the next operator before it waits

    def end_store(self, *, wait: bool) -> bool:
        """Take the oldest store off those under way if it has ended, or `wait` for its end. False: it has not ended."""
        job, server, times = self.stores[0]
        if not job.cancelled:
            server.serve(self.now)
            if not wait and (not job.served or job.end > self.now):
                return False
            self.wait(server.finish(job), times)
        job.over = True
        self.store_bytes -= job.nbytes
        self.stores.popleft()
        return True

    def flush(self) -> None:
        """Begin the writes that were deferred."""
        for job in self.deferred:
            job.ready = self.now
        self.deferred.clear()
        self.deferred_bytes = 0

    def depart(self, *, late: bool = False) -> None:
        """Let the tensors of stores go. `late`: only when the next operator has its memory."""
        while self.leaving:
            saved, times = self.leaving[0]
            job, server = saved.job, saved.server
            if job is not None and server is not None and not job.cancelled:
                if self.machine.link is None:
                    server.serve(self.now)
                    if not job.served or job.end > self.now:
                        return
                    self.hold(job.end, -saved.nbytes)
                else:
                    if not job.over:
                        if self.leaving_bytes <= self.machine.window:
                            return
                        self.wait(job.left, times)
                    self.hold(self.now, -saved.nbytes, late=late)
                saved.departed = True
            self.leaving.popleft()
            self.leaving_bytes -= saved.nbytes

    def wait(self, until: float, times: BlockTimes) -> None:
        """Forward waits for a store."""
        if until > self.now:
            times.store_stall += until - self.now
            self.now = until

    # Backward

    def backward(self, chunk: int, microbatch: int) -> None:
        tape, ended = self.tapes.pop((chunk, microbatch))
        # A tape is known to be next from the beginning of the backward before it.
        announced = max(ended, self.now if self.backward_began is None else self.backward_began)
        self.backward_began = self.now
        # Bytes of the tape that backward has requested, and since when.
        passed, since, total = [0], [announced], 0
        lingering = 0  # bytes that backward has passed, but not the copies of their cancelled stores
        for index in range(len(tape) - 1, -1, -1):
            block, choice, times = (
                self.chunks[chunk][index],
                self.choices[chunk][index],
                self.blocks[chunk][index],
            )
            saved = tape[index]
            stayed = False
            requested = next((part.saved for part in reversed(block.parts) if part.saved), saved.nbytes)
            passed.append(total + min(requested, saved.nbytes))
            since.append(self.now)
            if saved.job is not None and saved.server is not None:
                # Along the tape, what is kept included, reads go so far ahead, and copies to the device.
                reads = since[bisect_right(passed, total - self.machine.prefetch)]
                far = max(self.machine.prefetch, self.machine.window)
                copies = since[min(bisect_left(passed, total + saved.nbytes - far), len(since) - 1)]
                stored = saved.job
                ready = self.load(saved, saved.server, stored, reads, max(reads, copies))
                if stored.cancelled:
                    times.stored -= saved.nbytes
                if ready > self.now:
                    times.load_stall += ready - self.now
                    self.now = ready
                stayed = self.machine.link is not None and saved.job is None
                if saved.awaited:  # the host has waited for the read, and notices what has ended
                    self.hold(self.now, -lingering, late=True)
                    lingering = 0
            total += saved.nbytes
            began = self.now
            self.hold(began, block.backward_transient)
            self.run(choice.decode)
            self.hold(began, block.saved - saved.nbytes)
            if choice.recompute:
                self.hold(began, block.small)
                self.run(block.recompute)
            self.run(block.backward)
            pooled = saved.nbytes if saved.pooled else 0
            alive = block.saved + block.small + block.fixed + block.backward_transient
            lingering += saved.nbytes if stayed else 0
            self.hold(self.now, pooled - alive + (saved.nbytes if stayed else 0))
            if self.machine.link is None:
                self.depart()
        self.hold(self.now, -lingering)
        self.flush()
        while self.stores and self.end_store(wait=False):
            pass

    def load(self, saved: _Saved, server: Server, job: Job, announced: float, copied: float) -> float:
        """When the bytes are on the device, in memory that is counted from when they may be copied into it.

        Args:
            announced: when the read may begin.
            copied: when the copy to the device may.
        """
        nbytes, link = saved.nbytes, self.machine.link
        issued = self.staged.admit(nbytes, announced)
        server.serve(issued)
        server.used -= nbytes
        if not server.begun(job, issued):
            job.cancelled = True
            server.written -= nbytes
        if link is None:
            self.depart()
            if not job.served or job.end > issued:
                saved.job = None  # its load came near before it had left: it stays
                if saved.departed:
                    self.hold(job.end, nbytes)
                return self.now
            ready = server.begin_read(nbytes, issued)
            saved.pooled = self.machine.buffers > 0
            if not saved.pooled:
                self.hold(issued, nbytes)
            self.staged.hold(nbytes, max(ready, self.now))
            return ready
        if not saved.departed:
            saved.job = None
            return self.now
        saved.awaited = job.served and job.end <= issued
        ready = server.begin_read(nbytes, issued) if saved.awaited else max(issued, job.left)
        room = self.ahead.admit(nbytes, copied)
        self.hold(room, nbytes)
        self.load_link_free = max(ready, room, self.load_link_free) + nbytes / link.to_device
        self.staged.hold(nbytes, self.load_link_free)
        self.ahead.hold(nbytes, max(self.load_link_free, self.now))
        return self.load_link_free

    # The outcome

    def next_step(self) -> None:
        """What is counted from now on is the next step's."""
        self.began, self.compute, self.idle = self.now, 0.0, 0.0
        for chunk in self.blocks:
            for times in chunk:
                times.store_stall = times.load_stall = 0.0
                times.stored = 0
        for server in self.servers.values():
            server.written = server.read = 0

    def outcome(self) -> StepTimeline:
        live = peak = 0
        when = 0.0
        for time, _, change in sorted(self.memory):
            live += change
            if live > peak:
                peak, when = live, time
        flat = [times for chunk in self.blocks for times in chunk]
        return StepTimeline(
            self.now - self.began,
            self.compute,
            self.idle,
            sum(times.store_stall for times in flat),
            sum(times.load_stall for times in flat),
            peak + self.machine.buffers,
            when,
            {name: server.written for name, server in self.servers.items()},
            {name: server.read for name, server in self.servers.items()},
            {name: server.peak for name, server in self.servers.items()},
            self.blocks,
        )


def simulate(
    chunks: Sequence[Sequence[Block]],
    choices: Sequence[Sequence[Choice]],
    order: Sequence[Pass],
    machine: Machine,
    *,
    steps: int = 1,
) -> StepTimeline:
    """The time line of one step; with `steps` that of the last one, which begins while transfers of those before are under way.

    Args:
        chunks: the blocks of each model chunk (virtual pipeline stage), in forward order.
        choices: one for each block, [chunk][block].
        order: the passes of one rank; each forward of a (chunk, microbatch) before its backward. A backward
        that never comes (an evaluation) leaves its bytes alive to the end of the step. machine: bandwidths
        and limits.

    Raises:
        KeyError: a choice names a tier that the machine does not have, or a backward has no forward.
        ValueError: a chunk has another number of choices than of blocks.
    """
    for number, (blocks, chosen) in enumerate(zip(chunks, choices, strict=True)):
        if len(blocks) != len(chosen):
            raise ValueError(f"chunk {number} has {len(blocks)} blocks and {len(chosen)} choices")
    chunks, choices, owners = _expanded(chunks, choices)
    running = _Simulation(chunks, choices, machine)
    for number in range(steps):
        if number:
            running.next_step()
        for one in order:
            if one.kind == "idle":
                running.now += one.seconds
                running.idle += one.seconds
            elif one.kind == "forward":
                running.forward(one.chunk, one.microbatch)
            else:
                running.backward(one.chunk, one.microbatch)
    outcome = running.outcome()
    outcome.blocks = [_folded(times, of) for times, of in zip(outcome.blocks, owners, strict=True)]
    return outcome


def _expanded(
    chunks: Sequence[Sequence[Block]], choices: Sequence[Sequence[Choice]]
) -> tuple[list[list[Block]], list[list[Choice]], list[list[int]]]:
    """Blocks that are offloaded in their parts, and of which block each is."""
    all_blocks, all_choices, all_owners = [], [], []
    for chunk, chosen in zip(chunks, choices, strict=True):
        blocks: list[Block] = []
        each: list[Choice] = []
        owners: list[int] = []
        for number, (block, choice) in enumerate(zip(chunk, chosen, strict=True)):
            parts = (
                block.parts if choice.tier != DEVICE and not choice.recompute and block.parts else (block,)
            )
            blocks += parts
            each += [choice] * len(parts)
            owners += [number] * len(parts)
        all_blocks.append(blocks)
        all_choices.append(each)
        all_owners.append(owners)
    return all_blocks, all_choices, all_owners


def _folded(times: Sequence[BlockTimes], owners: Sequence[int]) -> list[BlockTimes]:
    found: list[BlockTimes] = [BlockTimes() for _ in range(owners[-1] + 1 if owners else 0)]
    for one, owner in zip(times, owners, strict=True):
        found[owner].store_stall += one.store_stall
        found[owner].load_stall += one.load_stall
        found[owner].stored += one.stored
    return found
