"""Passes, transfers and memory of a step in the cost model: one class for each kind of memory that tensors leave.

What is modelled, after the engine's own rules (`ssdtrain.offload`):

- A block's saved tensors are on the device from the beginning of its forward; where it is recomputed its inputs, and the two
  largest others while it runs. A store begins when the block's forward ends: a copy over the link to a staging buffer, then a
  write to the tier, both served in order. At most `in_flight` bytes of stores are under way: else forward waits.
- Without a link (CPU) tensors leave when their write has ended, or `in_order` when a later store needs their room in
  `in_flight`: what is left of them when their backward begins stays. A tier that is idle begins writes together, when more than
  `together` bytes of them are queued.
- On a device with a link the host (see `Machine.hook`) is ahead: it queues an operator, and later its backward, before the stores
  of what was queued before have ended. A store begins in the hook of the next operator, and its copy is queued behind that.
  Tensors leave in the order of what is queued: those whose store has ended when the host comes to the next hook (it waits for
  room in `in_flight`), and when more than `window` bytes of stores are on the device the oldest one, unless it is among the
  `newest`, for whose copy the stream that computes then waits. What has not left when backward is queued stays; where its store
  is cancelled, it is there until the host has seen the end of its copy.
- Backward asks in reverse order. Reads are issued ahead, in order, across tapes, while the bytes in staging
  buffers are at most `prefetch`, and so are those of the tape between backward and the region, kept ones
  included; copies to the device while at most `window` bytes are there ahead of their use.
- A store that has not begun when its load would begin is cancelled and its bytes stay; one whose write is
  under way is brought back from its staging buffer.
- Where the host computes itself, beginning a store and bringing it back take time from the computation (`Block.storing`); on a
  device encoding and decoding do.
- What stays of a block that leaves in part is copied when its store begins, while the whole is still there, and copied again
  into the whole that a load fills; the first copy is there until backward has had the block.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Sequence
from math import inf

from ssdtrain.planner.model.queues import Bounded, Job, Occupancy, PartialReleaseQueue, Saved, Server
from ssdtrain.planner.model.streaming import HostSteps, StateStreaming
from ssdtrain.planner.model.types import DEVICE, Block, BlockTimes, Choice, Machine

__all__ = ["Simulation", "simulation_of"]


def simulation_of(machine: Machine) -> type[Simulation]:
    """The class that plays steps on `machine`."""
    if machine.link is not None:
        return DeviceSimulation if machine.hook is None else AheadSimulation
    return InOrderSimulation if machine.in_order else Simulation


class Simulation:
    """A CPU: tensors are in the memory that is counted until their write has ended. See above.

    Args:
        owners: of which block each part is, [chunk][part].

    Attributes:
        now: the time of what computes.
        host: when the thread that trains last waited for a transfer: with a link it waits for nothing else.
        stores: under way, the oldest first.
        leaving: stores whose tensors are on the device.
        gate: when the operator after the next may begin, and whose store it waits for.
    """

    def __init__(
        self,
        chunks: Sequence[Sequence[Block]],
        choices: Sequence[Sequence[Choice]],
        machine: Machine,
        owners: Sequence[Sequence[int]],
    ) -> None:
        self.choices, self.machine = choices, machine
        self.servers = {tier.name: Server(tier) for tier in machine.tiers}
        self.now = self.began = self.host = 0.0
        self.gate = 0.0, BlockTimes()
        self.late: list[Saved] = []  # what leaves when the next operator has its memory
        self.compute = 0.0
        self.store_link_free = self.load_link_free = 0.0
        self.stores: deque[tuple[Job, Server, BlockTimes]] = deque()
        self.store_bytes = 0
        self.deferred: list[Job] = []  # writes that begin with others
        self.deferred_bytes = 0
        self.leaving: deque[tuple[Saved, BlockTimes]] = deque()
        self.leaving_bytes = 0
        self.partial_releases = PartialReleaseQueue(machine.window)
        self.staged = Bounded(machine.prefetch)
        self.ahead = Bounded(machine.window)
        self.memory = Occupancy()
        self.hold, self.leave = self.memory.hold, self.memory.leave
        self.tapes: dict[tuple[int, int], tuple[list[Saved], float]] = {}  # and the end of its forward
        self.backward_began: float | None = None  # the latest
        self.blocks = [[BlockTimes() for _ in chunk] for chunk in chunks]
        self.parts = [
            [
                (block, choice, times, (number, owner))
                for block, choice, times, owner in zip(*each, strict=True)
            ]
            for number, each in enumerate(zip(chunks, choices, self.blocks, owners, strict=True))
        ]
        self.streaming, self.host_steps = StateStreaming(self), HostSteps(self)
        self.stepped = any(block.cpu_step for chunk in chunks for block in chunk)
        self.streams = self.stepped or any(
            block.forward_loads or block.backward_loads for chunk in chunks for block in chunk
        )
        self.holds = any(block.held for chunk in chunks for block in chunk)
        self.leaves_in_part = any(choice.share != 1 for each in choices for choice in each)

    def run(self, seconds: float) -> None:
        self.now += seconds
        self.compute += seconds

    def copy(self, nbytes: int) -> None:
        """Play a copy in the memory of tensors, where the stream that computes does it."""
        if nbytes and self.machine.copies:
            self.run(nbytes / self.machine.copies)

    # Forward

    def forward(self, chunk: int, microbatch: int) -> None:
        tape: list[Saved] = []
        parts, before = self.parts[chunk], self.gate
        self.memory.past(0, self.now)
        unstored: deque[tuple[Saved, Server, BlockTimes]] = deque()
        for index, (block, choice, times, key) in enumerate(parts):
            # 1. What this operator waits for.
            before, gate = self.gate, before
            if gate[0] > self.now:
                self.wait(*gate)
            self.hook()
            if block.forward_loads:
                self.streaming.load(key, block.forward_loads, times)
            if block.cpu_step:
                self.host_steps.forward(key, block)
            # 2. It computes, and saves.
            began = self.now
            self.run(block.forward)
            if self.streams:
                self.streaming.used(key)
            kept, alive = block.saved, block.saved + block.small
            after = alive
            if choice.recompute:
                kept = after = block.inputs
                alive = min(alive, kept + block.largest_two)
            alive += block.forward_transient
            self.hold(began, alive + block.fixed)
            while self.late:
                self.leave(self.late.pop(), began, late=True)
            self.hold(self.now, after - alive)
            if self.leaves_in_part:
                for partial, job, of in self.partial_releases.passed(block.saved):
                    self.wait_in_hook(job.left, of, host=False)
                    self.leave(partial, self.now)
            saved = Saved(kept, block.storing, block.held, key[1] + block.held_blocks)
            tape.append(saved)
            # 3. Its hook: stores begin when the operator that saved has ended.
            if choice.tier != DEVICE and kept:
                if choice.share != 1:
                    saved.rest = round(kept * (1 - choice.share))
                    saved.moved = kept - saved.rest
                unstored.append((saved, self.servers[choice.tier], times))
            else:
                self.kept()
            if block.continues:
                continue
            last = index + 1 == len(parts)
            if self.holds:
                self.memory.past(key[1] + 1 if last else parts[index + 1][3][1], self.now)
            if unstored:
                following = 0.0 if last else _first_operator(*parts[index + 1][:2])
                while unstored:
                    self.store(*unstored.popleft(), following=following, last=last)
        self.memory.past(inf, self.now)
        for saved in tape:
            saved.held = 0
        self.wait(*self.gate)
        self.tapes[chunk, microbatch] = tape, self.now

    def hook(self) -> None:
        """The host comes to the hook of the next operator."""
        if self.now > self.host:
            self.host = self.now

    def kept(self) -> None:
        """A part stays."""
        self.depart()

    def store(self, saved: Saved, server: Server, times: BlockTimes, *, following: float, last: bool) -> None:
        nbytes, capacity = saved.moved, server.tier.capacity
        if capacity is not None and server.used + nbytes > capacity:
            saved.rest = 0
            return
        if saved.storing:
            self.run(saved.storing)
        full = self.admit(nbytes)
        if saved.rest:
            self.hold(self.now, saved.rest)
            self.copy(saved.rest)
        job = self.begin(Job(nbytes, self.now), server, following)
        server.enqueue(job)
        server.written += nbytes
        server.used += nbytes
        if server.used > server.peak:
            server.peak = server.used
        self.stores.append((job, server, times))
        self.store_bytes += nbytes
        saved.job, saved.server = job, server
        times.stored += nbytes
        self.leaves(saved, times)
        self.depart(late=full and not last)  # the host has queued the next operator before it waits

    def admit(self, nbytes: int) -> bool:
        """Wait until `nbytes` more may be under way, and take off what has ended. Returns whether they were too many."""
        full = False
        while self.stores:
            if self.store_bytes + nbytes > self.machine.in_flight:
                full = True
                self.flush()
                self.end_store(wait=True)
            elif not self.ends_early():
                break
        return full

    def ends_early(self) -> bool:
        """Take off the oldest store if it has ended, though there is room for more. False: it has not."""
        return self.end_store(wait=False)

    def begin(self, job: Job, server: Server, following: float) -> Job:
        """Set when a store is ready for its tier, and off the device.

        Args:
            following: seconds until the next hook.
        """
        if self.machine.together:
            job.ready = inf
            self.deferred.append(job)
            self.deferred_bytes += job.nbytes
            server.serve(self.now)
            if self.deferred_bytes > self.machine.together or server.write_free > self.now:
                self.flush()
        return job

    def leaves(self, saved: Saved, times: BlockTimes) -> None:
        """A store has begun: its tensor leaves in turn."""
        self.leaving.append((saved, times))
        self.leaving_bytes += saved.nbytes

    def end_store(self, *, wait: bool) -> bool:
        """Take the oldest store off those under way if it has ended, or `wait` for its end. False: it has not ended."""
        job, server, times = self.stores[0]
        if not job.cancelled:
            now = self.noticed()
            server.serve(now)
            if not wait and (not job.served or job.end > now):
                return False
            self.wait_in_hook(server.finish(job), times)
        job.over = True
        self.store_bytes -= job.nbytes
        self.stores.popleft()
        return True

    def noticed(self) -> float:
        """The time up to which the thread that trains has noticed what ended."""
        return self.now

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
            if job is None or server is None or job.cancelled:
                pass  # it stays
            elif not self.lets_go(saved, job, server, times, late=late):
                return
            self.leaving.popleft()
            self.leaving_bytes -= saved.nbytes

    def lets_go(self, saved: Saved, job: Job, server: Server, times: BlockTimes, *, late: bool) -> bool:
        """Let the oldest of `leaving` go, if it is time to. False: it is not."""
        server.serve(self.now)
        if not job.served or job.end > self.now:
            return False
        self.leave(saved, job.end)
        return True

    def wait_in_hook(self, until: float, times: BlockTimes, *, host: bool = True) -> None:
        """A hook waits for a store.

        Args:
            host: the host waits; else the stream that computes.
        """
        self.wait(until, times)

    def wait(self, until: float, times: BlockTimes) -> None:
        """Forward waits for a store."""
        if until > self.now:
            times.store_stall += until - self.now
            self.now = until

    # Backward

    def backward(self, chunk: int, microbatch: int, *, last: bool = True) -> None:
        tape, ended = self.tapes.pop((chunk, microbatch))
        # A tape is known to be next from the beginning of the backward before it.
        announced = max(ended, self.now if self.backward_began is None else self.backward_began)
        self.backward_began = self.now
        # Bytes of the tape that backward has requested, and since when.
        passed, since, total = [0], [announced], 0
        asked = [self.host]  # the same by the time of the host
        lingering: list[
            tuple[float, int]
        ] = []  # of stores that were cancelled: bytes, until their copies end
        moves = any(saved.job is not None for saved in tape)
        for saved, (block, choice, times, key) in zip(
            reversed(tape), reversed(self.parts[chunk]), strict=True
        ):
            if block.backward_loads:
                self.streaming.load(key, block.backward_loads, times, backward=True)
            # 1. What it saved is there, or comes back as far ahead as reads and copies go.
            left = 0.0
            self.asks()
            if moves:
                requested = next((part.saved for part in reversed(block.parts) if part.saved), saved.nbytes)
                passed.append(total + min(requested, saved.nbytes))
                since.append(self.now)
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
                    times.stored -= saved.moved
                if ready > self.now:
                    times.load_stall += ready - self.now
                    self.now = ready
                if saved.job is not None and block.loading:
                    self.run(block.loading)
                left = self.lingers(saved, stored)
                if saved.read is not None:  # the host has waited for it, and notices what has ended
                    lingering = self.notice(saved.read, lingering)
            # 2. It computes, and lets go.
            total += saved.nbytes
            whole, small = block.saved, 0
            if choice.recompute:
                whole, small = block.brought_back, block.small
            self.hold(self.now, block.backward_transient + whole + small - saved.nbytes)
            if choice.recompute:
                self.run(block.recompute)
            self.run(block.backward)
            if self.streams:
                gone = self.streaming.used(key, block.backward_stores, last=last)
                if block.cpu_step:
                    self.host_steps.backward(key, block, gone, last=last)
            pooled = saved.nbytes if saved.pooled else 0
            alive = whole + block.small + block.fixed + block.backward_transient
            lingers = saved.nbytes if left > self.host else 0
            if lingers:
                lingering.append((left, lingers))
            self.hold(self.now, pooled - alive + lingers - saved.rest)
            self.used()
        self.hold(self.now, -sum(size for _, size in lingering))
        self.flush()
        while self.stores and self.end_store(wait=False):
            pass

    def asks(self) -> None:
        """The host queues a part's backward."""
        if self.now > self.host:
            self.host = self.now

    def used(self) -> None:
        """A part's backward is over."""
        self.depart()

    def lingers(self, saved: Saved, job: Job) -> float:
        """Until when the copy of what has not left reads it, though backward is past it; 0: it does not."""
        return 0.0

    def notice(self, read: float, lingering: list[tuple[float, int]]) -> list[tuple[float, int]]:
        """The host has waited for a read until `read`: let go of what does not linger any more. Returns the others."""
        return lingering

    def load(
        self, saved: Saved, server: Server, job: Job, announced: float, copied: float, asked: float
    ) -> float:
        """When the bytes are on the device, in memory that is counted from when they may be copied into it.

        Args:
            announced: when the read may begin.
            copied: when the copy to the device may.
            asked: `announced`, by the time of the host, which is ahead of the device.
        """
        nbytes = saved.nbytes
        issued = self.staged.admit(nbytes, announced)
        self.cancel_unless_begun(saved, server, job, issued)
        if self.stays(saved):
            return self.now
        self.depart()
        if not job.served or job.end > issued:
            saved.job = None  # its load came near before it had left: it stays
            if saved.departed:
                self.hold(job.end, nbytes)
            return self.now
        ready = server.begin_read(saved.moved, issued)
        self.copy(saved.rest)
        saved.pooled = self.machine.buffers > 0
        if not saved.pooled:
            self.hold(issued, nbytes)
        self.staged.hold(nbytes, max(ready, self.now))
        return ready

    def cancel_unless_begun(self, saved: Saved, server: Server, job: Job, seen: float) -> None:
        """Its bytes are needed from `seen` on: a store that has not begun by then is cancelled."""
        server.serve(seen)
        server.used -= saved.moved
        if not server.begun(job, seen):
            job.cancelled = True
            server.written -= saved.moved

    def stays(self, saved: Saved) -> bool:
        """Whether what has not left when backward begins stays."""
        return False

    def next_step(self) -> None:
        """What is counted from now on is the next step's. Its forward waits for what is stepped late."""
        self.now += self.host_steps.wait()
        self.began = self.host = self.now
        self.compute = 0.0
        self.host_steps.next_step()
        for chunk in self.blocks:
            for times in chunk:
                times.store_stall = times.load_stall = 0.0
                times.stored = 0
        for server in self.servers.values():
            server.written = server.read = 0


class InOrderSimulation(Simulation):
    """A CPU whose stores are bounded by a plan: tensors leave when later ones need their room in `in_flight`, and what is left of
    a forward when its backward begins stays (`StoresInFlight` in `ssdtrain.offload`, Note: [Departure in order])."""

    def ends_early(self) -> bool:
        return False

    def lets_go(self, saved: Saved, job: Job, server: Server, times: BlockTimes, *, late: bool) -> bool:
        if job.over:
            self.leave(saved, self.now, late=True)
        return job.over

    def stays(self, saved: Saved) -> bool:
        if not saved.departed:
            saved.job = None
        return not saved.departed

    def cancel_unless_begun(self, saved: Saved, server: Server, job: Job, seen: float) -> None:
        if not saved.departed and self.backward_began is not None:
            seen = self.backward_began
        super().cancel_unless_begun(saved, server, job, seen)


class DeviceSimulation(Simulation):
    """A device behind a link: a tensor leaves when its copy has, and the oldest when more than `window` bytes of stores are there
    (`DeviceReleaseQueue` in `ssdtrain.offload`). The host is not ahead."""

    def kept(self) -> None:
        """What stays makes no room."""

    def used(self) -> None:
        """Stores have departed in forward."""

    def ends_early(self) -> bool:
        return False

    def begin(self, job: Job, server: Server, following: float) -> Job:
        assert self.machine.link is not None
        # Its copy is queued behind the operator in whose hook it begins.
        begin = max(self.now + following, self.host, self.store_link_free)
        self.store_link_free = begin + job.nbytes / self.machine.link.to_host
        job.ready = job.left = self.store_link_free
        return job

    def leaves(self, saved: Saved, times: BlockTimes) -> None:
        if saved.rest:
            self.partial_releases.add(saved, times)
        else:
            super().leaves(saved, times)

    def noticed(self) -> float:
        return self.host

    def lets_go(self, saved: Saved, job: Job, server: Server, times: BlockTimes, *, late: bool) -> bool:
        if not job.over:
            if self.leaving_bytes <= self.machine.window or len(self.leaving) <= self.machine.newest:
                return False
            self.wait_in_hook(job.left, times, host=False)
        if late:
            self.late.append(saved)
            saved.departed = True
        else:
            self.leave(saved, self.now)
        return True

    def lingers(self, saved: Saved, job: Job) -> float:
        return 0.0 if saved.departed else inf

    def notice(self, read: float, lingering: list[tuple[float, int]]) -> list[tuple[float, int]]:
        self.host = max(self.host, read)
        gone = sum(size for _, size in lingering)
        self.hold(self.now, -gone, late=True)
        return []

    def seen(self, issued: float, announced: float, asked: float) -> float:
        """When the host looks whether a store has begun."""
        return issued if issued > announced else min(issued, asked)

    def load(
        self, saved: Saved, server: Server, job: Job, announced: float, copied: float, asked: float
    ) -> float:
        nbytes, link = saved.nbytes, self.machine.link
        assert link is not None
        issued = self.staged.admit(nbytes, announced)
        seen = self.seen(issued, announced, asked)
        self.cancel_unless_begun(saved, server, job, seen)
        if not saved.departed:
            saved.job = None
            return self.now
        if job.served and job.end <= seen:
            saved.read = ready = server.begin_read(saved.moved, seen)
        else:
            ready = max(issued, job.left)
        room = self.ahead.admit(nbytes, copied)
        self.hold(room, nbytes)
        seconds = saved.moved / link.to_device + saved.rest / (self.machine.copies or inf)
        self.load_link_free = max(ready, room, self.load_link_free) + seconds
        self.staged.hold(nbytes, self.load_link_free)
        self.ahead.hold(nbytes, max(self.load_link_free, self.now))
        return self.load_link_free


class AheadSimulation(DeviceSimulation):
    """A device whose host is ahead of it by as much as it is faster: `Machine.hook` seconds for an operator and its hook."""

    def hook(self) -> None:
        self.host += self.machine.hook or 0.0
        while self.stores and self.end_store(wait=False):
            pass
        self.depart()

    def asks(self) -> None:
        """The host is ahead, and waits for nothing."""

    def wait_in_hook(self, until: float, times: BlockTimes, *, host: bool = True) -> None:
        """The device does from the next operator but one."""
        if host:
            self.host = max(self.host, until)
        if until > self.gate[0]:
            self.gate = until, times

    def lingers(self, saved: Saved, job: Job) -> float:
        return job.left if job.cancelled and not saved.departed else 0.0

    def notice(self, read: float, lingering: list[tuple[float, int]]) -> list[tuple[float, int]]:
        self.host = max(self.host, read)
        gone = sum(size for until, size in lingering if until <= self.host)
        self.hold(self.now, -gone)
        return [(until, size) for until, size in lingering if until > self.host]


def _first_operator(block: Block, choice: Choice) -> float:
    """Seconds from the beginning of its forward to its first hook."""
    if choice.recompute:
        return block.forward
    return block.parts[0].first_operator if block.parts else block.first_operator
