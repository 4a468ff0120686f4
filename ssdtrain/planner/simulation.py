"""Passes, transfers and memory of a step in the cost model.

What is modelled, after the engine's own rules (`ssdtrain.offload`):

- A block's saved tensors are on the device from the beginning of its forward. Its store begins when its
  forward ends: a copy over the link to a staging buffer, then a write to the tier, both served in order. At
  most `in_flight` bytes of stores are under way: else forward waits.
- Without a link (CPU) tensors leave when their write has ended, and a tier that is idle begins writes
  together, when more than `together` bytes of them are queued.
- On a device with a link the host (see `Machine.hook`) is ahead: it queues an operator, and later its backward, before the stores
  of what was queued before have ended. A store begins in the hook of the next operator, and its copy is queued behind that.
  Tensors leave in the order of what is queued: those whose store has ended when the host comes to the next hook (it waits for
  room in `in_flight`), and when more than `window` bytes of stores are on the device the oldest one, for whose copy the
  stream that computes then waits. What has not left when backward is queued stays; where its store is cancelled, it is there
  until the host has seen the end of its copy.
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
    StepTimeline,
)

__all__ = ["Simulation"]


@dataclass(slots=True)
class _Saved:
    """What one block of one tape left for backward."""

    nbytes: int  # of it on the device before its store and after its load
    job: Job | None = None
    server: Server | None = None
    departed: bool = False
    pooled: bool = False  # it came back into the arena
    read: float | None = None  # when the read from the tier ends; None: there is none


class Simulation:
    def __init__(
        self, chunks: Sequence[Sequence[Block]], choices: Sequence[Sequence[Choice]], machine: Machine
    ) -> None:
        self.chunks, self.choices, self.machine = chunks, choices, machine
        self.servers = {tier.name: Server(tier) for tier in machine.tiers}
        self.now = self.began = 0.0
        self.host = 0.0  # when the thread that trains last waited for a transfer: with a link it waits for nothing else
        self.gate = (
            0.0,
            BlockTimes(),
        )  # when the operator after the next may begin, and whose store it waits for
        self.late: list[int] = []  # bytes that leave when the next operator has its memory
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
        before = self.gate
        for index, (block, choice, times) in enumerate(parts):
            before, gate = self.gate, before
            self.wait(*gate)
            if self.machine.hook is None:
                self.host = max(self.host, self.now)
            elif self.machine.link is not None:
                self.host += self.machine.hook
                while self.stores and self.end_store(wait=False):
                    pass
                self.depart()
            began = self.now
            self.run(block.forward)
            self.hold(began, block.saved + block.small + block.fixed + block.forward_transient)
            while self.late:
                self.hold(began, -self.late.pop(), late=True)
            self.hold(self.now, -block.forward_transient)
            kept = block.saved
            if choice.recompute:
                kept = block.inputs
                self.hold(self.now, kept - block.saved - block.small)
            self.run(choice.encode)
            saved = _Saved(round(kept * choice.ratio))
            self.hold(self.now, saved.nbytes - kept)
            if choice.tier != DEVICE and saved.nbytes:
                last = index + 1 == len(parts)
                following = 0.0 if last else _first_operator(*parts[index + 1][:2])
                self.store(saved, self.servers[choice.tier], times, following=following, last=last)
            elif self.machine.link is None:
                self.depart()
            tape.append(saved)
        self.wait(*self.gate)
        self.tapes[chunk, microbatch] = tape, self.now

    def store(
        self, saved: _Saved, server: Server, times: BlockTimes, *, following: float, last: bool
    ) -> None:
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
            # Its copy is queued behind the operator in whose hook it begins.
            begin = max(self.now + following, self.host, self.store_link_free)
            self.store_link_free = begin + nbytes / self.machine.link.to_host
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
        self.depart(late=full and not last)  # the host has queued the next operator before it waits

    def end_store(self, *, wait: bool) -> bool:
        """Take the oldest store off those under way if it has ended, or `wait` for its end. False: it has not ended."""
        job, server, times = self.stores[0]
        if not job.cancelled:
            now = self.now if self.machine.link is None else self.host
            server.serve(now)
            if not wait and (not job.served or job.end > now):
                return False
            self.block(server.finish(job), times)
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
                        self.block(job.left, times, host=False)
                    if late:
                        self.late.append(saved.nbytes)
                    else:
                        self.hold(self.now, -saved.nbytes)
                saved.departed = True
            self.leaving.popleft()
            self.leaving_bytes -= saved.nbytes

    def block(self, until: float, times: BlockTimes, *, host: bool = True) -> None:
        """A hook waits for a store; a device behind a host that is ahead does from the next operator but one.

        Args:
            host: the host waits; else the stream that computes.
        """
        if self.machine.hook is None:
            return self.wait(until, times)
        if host:
            self.host = max(self.host, until)
        if until > self.gate[0]:
            self.gate = until, times

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
        asked = [self.host]  # the same by the time of the host
        lingering: list[
            tuple[float, int]
        ] = []  # bytes that backward has passed, until the copies of their cancelled stores end
        for index in range(len(tape) - 1, -1, -1):
            block, choice, times = (
                self.chunks[chunk][index],
                self.choices[chunk][index],
                self.blocks[chunk][index],
            )
            saved = tape[index]
            left = 0.0
            requested = next((part.saved for part in reversed(block.parts) if part.saved), saved.nbytes)
            passed.append(total + min(requested, saved.nbytes))
            since.append(self.now)
            if self.machine.hook is None:
                self.host = max(self.host, self.now)
            asked.append(self.host)
            if saved.job is not None and saved.server is not None:
                # Along the tape, what is kept included, reads go so far ahead, and copies to the device.
                first = bisect_right(passed, total - self.machine.prefetch)
                reads = since[first]
                far = max(self.machine.prefetch, self.machine.window)
                copies = since[min(bisect_left(passed, total + saved.nbytes - far), len(since) - 1)]
                stored = saved.job
                ready = self.load(saved, saved.server, stored, reads, max(reads, copies), asked[first])
                if stored.cancelled:
                    times.stored -= saved.nbytes
                if ready > self.now:
                    times.load_stall += ready - self.now
                    self.now = ready
                if self.machine.link is not None and not saved.departed:
                    if self.machine.hook is None:
                        left = inf
                    elif stored.cancelled:
                        left = stored.left
                if saved.read is not None:  # the host has waited for it, and notices what has ended
                    self.host = max(self.host, saved.read)
                    seen = inf if self.machine.hook is None else self.host
                    gone = sum(size for until, size in lingering if until <= seen)
                    self.hold(self.now, -gone, late=self.machine.hook is None)
                    lingering = [(until, size) for until, size in lingering if until > seen]
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
            lingers = saved.nbytes if left > self.host else 0
            if lingers:
                lingering.append((left, lingers))
            self.hold(self.now, pooled - alive + lingers)
            if self.machine.link is None:
                self.depart()
        self.hold(self.now, -sum(size for _, size in lingering))
        self.flush()
        while self.stores and self.end_store(wait=False):
            pass

    def load(
        self, saved: _Saved, server: Server, job: Job, announced: float, copied: float, asked: float
    ) -> float:
        """When the bytes are on the device, in memory that is counted from when they may be copied into it.

        Args:
            announced: when the read may begin.
            copied: when the copy to the device may.
            asked: `announced`, by the time of the host, which is ahead of the device.
        """
        nbytes, link = saved.nbytes, self.machine.link
        issued = self.staged.admit(nbytes, announced)
        seen = issued if link is None or issued > announced else min(issued, asked)
        server.serve(seen)
        server.used -= nbytes
        if not server.begun(job, seen):
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
        if job.served and job.end <= seen:
            saved.read = ready = server.begin_read(nbytes, seen)
        else:
            ready = max(issued, job.left)
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
        self.host = self.now
        for chunk in self.blocks:
            for times in chunk:
                times.store_stall = times.load_stall = 0.0
                times.stored = 0
        for server in self.servers.values():
            server.written = server.read = 0

    def outcome(self, *, memory: bool) -> StepTimeline:
        live = peak = 0
        when = 0.0
        line = [(0.0, self.machine.buffers)] if memory else []
        for time, _, change in sorted(self.memory):
            live += change
            if memory and time >= self.began:
                line.append((time - self.began, live + self.machine.buffers))
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
            line,
        )


def _first_operator(block: Block, choice: Choice) -> float:
    """Seconds from the beginning of its forward to its first hook."""
    if choice.recompute:
        return block.forward
    return block.parts[0].first_operator if block.parts else block.first_operator
