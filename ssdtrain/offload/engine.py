"""The offload engine: what autograd's saved-tensor hooks call.

Note: [Threads]
Pack runs on the threads that run forward, unpack on those that run backward (autograd's own threads for devices). One lock
guards all regions, tapes and counters. No wait holds it, and nothing that runs at an arbitrary moment (`__del__`, the end of a
buffer, the death of a storage) takes it: those append to queues, which the next call drains. The I/O pool's workers know
nothing of Python.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from operator import attrgetter
from typing import Any

import torch

from ssdtrain.device import Device, Event, Timestamp
from ssdtrain.offload.checks.module_tally import ModuleTally
from ssdtrain.offload.checks.proof import Prover, provable
from ssdtrain.offload.functorch import compiler, modes, tracing, without_compiler, without_modes
from ssdtrain.offload.metrics import OffloadMetrics
from ssdtrain.offload.options import EngineOptions
from ssdtrain.offload.pacing import closing
from ssdtrain.offload.pacing.closing import wait_for_load
from ssdtrain.offload.pacing.limits import EngineLimits
from ssdtrain.offload.pacing.prefetch import Prefetcher
from ssdtrain.offload.pacing.starter import StoreStarter, operator_number
from ssdtrain.offload.policy import (
    KEEP,
    OFFLOAD,
    STAY,
    Action,
    AmountPolicy,
    ForwardProfile,
    OffloadPolicy,
    SavedTensorInfo,
)
from ssdtrain.offload.tensors.eligible import Eligibility
from ssdtrain.offload.tensors.meter import ActivationMeter, Seen
from ssdtrain.offload.tensors.region import Handle, Kept, Region, Releases, captured, modified
from ssdtrain.offload.tensors.sharing import Geometries, find_region, make_region
from ssdtrain.offload.tensors.tape import FAR, Tape
from ssdtrain.offload.transfer.buffers import Buffers
from ssdtrain.offload.transfer.coding import OWN_MEMORY, Coding
from ssdtrain.offload.transfer.gpudirect import GpuDirectTransfer
from ssdtrain.offload.transfer.mover import Mover
from ssdtrain.offload.transfer.restore import Restorer
from ssdtrain.offload.transfer.staged import StagedTransfer
from ssdtrain.offload.transfer.targets import LoadTargets, NoTargetYet
from ssdtrain.offload.transfer.transfer import DirectTransfer, Transfer
from ssdtrain.profile.modules import ModuleNames
from ssdtrain.profile.passes import PassRecorder
from ssdtrain.profile.time_spans import Spans
from ssdtrain.storage import SpillStore, forks, make_signal_safe_lock

__all__ = ["OffloadEngine"]

_bytes_of = attrgetter("nbytes")
_graph_task = torch._C._current_graph_task_id
REAP_EVERY = 4
"""Saved tensors of a device between two looks at what has ended: they leave it at fixed points of the tape anyway."""
PATIENCE = 60.0  # seconds of waiting for one load between warnings


class OffloadEngine:
    """Moves saved tensors between memory and the tiers of a store.

    Args:
        store: the tiers; the engine does not close it.
        device: the layer for streams and events.
        torch_device: tensors of this device move, others stay.
        policy: which regions leave.
        options: sizes and times.

    Raises:
        StoreFull, IOFailure: from `pack` and `unpack`, on the thread that trains.
    """

    def __init__(
        self,
        store: SpillStore,
        device: Device,
        torch_device: torch.device,
        policy: OffloadPolicy,
        options: EngineOptions,
    ) -> None:
        self.options = options
        self.policy = policy
        self.modules = ModuleNames()
        self.device = device
        self.metrics = OffloadMetrics()
        self.meter = ActivationMeter()
        self.eligible = Eligibility(max(1, options.min_bytes), torch_device)
        counted = self.meter if device.kind == "cpu" else None  # on a GPU the arena is host memory
        self.buffers = Buffers(options.buffer, device.host_register(), counted, device.numa_node())
        staged = device.kind != "cpu" if options.staged is None else options.staged
        made = (GpuDirectTransfer if options.by_cufile else StagedTransfer) if staged else DirectTransfer
        tried = options.codec is not None and options.codec.automatic  # see `CodecTrial`
        codec = None if tried else options.codec
        self.coding = Coding(codec, options.rank, writes_pinned=staged and device.writes_pinned())
        transfer: Transfer = made(store, self.buffers, self.meter, self.coding, device, options.verified)
        self._copies = transfer.copies  # off a device with streams
        self._reap_every = REAP_EVERY if transfer.copies else 1
        # Looked up once: each saved tensor comes by here.
        self._capturing, self._current_stream, self._record_use = (
            device.capturing,
            device.current_stream,
            device.record_use,
        )
        self._targets = transfer.targets
        self.mover = Mover(store, transfer, self.metrics, raise_when_full=options.raise_when_full)
        self._departures = self.mover.departures
        self._release = self.mover.release  # a region whose last handle is gone
        self.prefetcher = Prefetcher(self.mover, self.buffers, options)
        self._restorer = Restorer(self.mover, self.prefetcher, self.eligible.modules)
        self._released = Releases()
        self._nothing_died = self._released.empty
        self._geometries = Geometries()
        self._lock = make_signal_safe_lock()
        self._starter = StoreStarter(self.mover, self.metrics, self.meter, device, options)
        self._closed = False
        self.prover: Prover | None = None  # `offload.prove_steps`
        self.recorder = PassRecorder(
            self.metrics.transfers if device.kind == "cpu" else None, lambda: self.coding.device_seconds
        )
        """Gets the begin and end of passes and hooks while it is active."""
        self._largest_region = 0
        self._resting = False
        self.forked = False  # True in a forked child: files and buffers are the parent's, and its threads may have held the lock
        forks.track(self)

    def after_fork(self) -> None:
        """Do nothing any more, in a forked child."""
        self.forked = self._closed = True

    @property
    def policy(self) -> OffloadPolicy:
        """Which regions leave."""
        return self._policy

    @policy.setter
    def policy(self, policy: OffloadPolicy) -> None:
        self._policy = policy
        self._always = policy.always if type(policy) is AmountPolicy else None  # it need not be asked

    # What others record

    def observe_releases(self, tally: ModuleTally | None) -> None:
        """Let `tally` count each region that is released from now on; None: nothing is counted."""
        release = self.mover.release
        self._release = release if tally is None else functools.partial(tally.release, release)

    def record_spans(self, spans: Spans | None) -> None:
        """Record stores, loads and waits as spans from now on; None: record none."""
        self.metrics.spans = spans

    # Rest

    def rest(self, resting: bool) -> None:
        """Have forwards run without saved-tensor hooks from the next one on, or with them again. Called between steps, or before
        a forward."""
        self._resting = resting

    @property
    def resting(self) -> bool:
        """Forwards run without hooks: nothing is worth moving, and nobody records what is saved."""
        return self._resting and not (self.recorder.active or self.meter.record or self.prover is not None)

    # What a plan reads and decides, between steps

    def limits(self) -> EngineLimits:
        """What transfers may take now."""
        stores, prefetcher = self.mover.stores, self.prefetcher
        return EngineLimits(
            stores.limit,
            max(prefetcher.limit, 1),
            max(self.mover.departures.limit, 1),
            self.buffers.counted_bytes,
            self.mover.batch_bytes,
            stores.in_order,
            self.metrics.carried,
        )

    @property
    def largest_region(self) -> int:
        """Bytes of the largest region so far that was stored, or alive at the end of its forward."""
        return max(self._largest_region, self._starter.largest)

    @property
    def backwards(self) -> int:
        """Backwards so far."""
        return self.prefetcher.backwards

    @property
    def arena_is_optional(self) -> bool:
        """Whether the arena is of the memory of activations, and sized by what forwards save."""
        return self.buffers.optional and not self._copies

    def set_plan_bound(self, nbytes: int | None) -> None:
        """Bound the stores in flight by a plan for a CPU, where they are a part of the peak: tensors then leave in order, see
        Note: [Departure in order] in `in_flight`. None: by `offload.in_flight` alone."""
        self.mover.stores.bound = nbytes

    def set_arena_in_use(self, used: bool) -> None:
        """Have an arena of buffers for what comes back, or none where its size is not given. See `Buffers.optional`."""
        self.buffers.used = used
        self.grow(between_steps=True)

    def defer(self, defers: bool) -> None:
        """Let small stores wait for others that wake the I/O pool with them, or begin each at once."""
        self.mover.defers = defers

    # Forward

    def pack(self, tape: Tape, tensor: torch.Tensor) -> Handle | Kept:
        """Return what autograd keeps instead of `tensor`.

        Raises:
            StoreFull: no tier has room, and the config says to raise.
        """
        if compiler() is not None:  # see `dynamo_leaves_alone`
            return without_compiler(self.pack, tape, tensor)  # type: ignore[no-any-return]
        if self._closed or not self.eligible.may_move(tensor) or ((other_modes := modes()) and tracing()):
            return Kept(tensor)
        if other_modes:
            with without_modes():  # what the engine does with the tensor is not the program's
                return self._pack(tape, tensor)
        return self._pack(tape, tensor)

    def _pack(self, tape: Tape, tensor: torch.Tensor) -> Handle | Kept:
        storage = tensor.untyped_storage()
        began = self._timestamp() if self.recorder.active else None
        postponed = None
        with self._lock:
            if self._closed:  # meanwhile, by another thread
                return Kept(tensor)
            metrics = self.metrics
            metrics.saved_tensors = number = metrics.saved_tensors + 1
            stream = None
            if self._copies:
                stream = self._current_stream()
                if stream and self._capturing():  # the next call does the rest, see `_drain`
                    self.meter.see(storage)
                    return Kept(tensor)
            if not self._nothing_died():
                self._drain_released()
            if not number % self._reap_every:
                self.mover.reap()
            operator = operator_number()
            unstored = tape.unstored
            if unstored and unstored[-1].operator != operator:
                postponed = self._starter.begin(tape, stream, storage)
            held = self._save(tape, tensor, storage, operator, stream)
        if postponed:
            for region in postponed:
                self._starter.wait(region, self._lock)
        if self.prover is not None:
            self._copy_to_prove(tape, tensor, held)
        if began is not None:
            self.recorder.packed(tape, began, self.device.timestamp())
        return held

    def _copy_to_prove(self, tape: Tape, tensor: torch.Tensor, held: Handle | Kept) -> None:
        prover = self.prover  # another thread may end it meanwhile
        if prover is not None and isinstance(held, Handle) and provable(held.region.transfer.codec):
            held.proof = prover.saved(tape.unproven, tensor)

    def _save(
        self,
        tape: Tape,
        tensor: torch.Tensor,
        storage: torch.UntypedStorage,
        operator: int,
        stream: Any | None,
    ) -> Handle | Kept:
        eligible = self.eligible
        seen: Seen = self.meter.see(storage)
        # What is saved while a backward runs (recomputation, double backward) is needed at once.
        if (
            tensor.nbytes < eligible.min_bytes
            or _graph_task() != -1
            or ((eligible.excludes or not storage.resizable()) and eligible.is_excluded(tensor, storage))
        ):
            return Kept(tensor)
        geometry: Any = tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset()
        geometry, extent, form = self._geometries.get(geometry) or self._geometries.add(geometry, tensor)
        if extent[2] < eligible.min_bytes:
            return Kept(tensor)  # an expanded tensor looks larger than it is
        if stream is not None:
            self._record_use(tensor)  # see Note: [Memory of another stream] in `pacing.starter`
        if seen.regions and (region := find_region(seen, tensor, extent, tape)) is not None:
            self.metrics.shared_tensors += 1
            region.shared = True
            region.handles += 1
            region.pending_unpacks += 1
            if len(tape.regions) - region.index > FAR:
                tape.join(region)
            return Handle(region, self._geometries.within(region, geometry, extent), self._released)
        region = make_region(seen, tensor, storage, geometry, extent, form, tape, operator, stream)
        try:
            always = self._always
            if tape.keep:
                action = STAY
            elif always is None or self.modules.watching:
                action = self._decide(tape, region)
            else:
                action = always
            if action.offload and (action is not OFFLOAD or region.dtype in self.coding.dtypes):
                codec = self.coding.choose(tensor, extent, region, action)
                if codec is None and action.tier == OWN_MEMORY:
                    action = KEEP
                else:
                    self.mover.plan(region, codec, action)
        except BaseException:
            seen.regions.remove(region)  # the policy has failed
            raise
        metrics = self.metrics
        nbytes = region.nbytes
        metrics.saved_bytes += nbytes
        metrics.live_regions += 1
        tape.regions.append(region)
        tape.nbytes += nbytes
        if region.form is None:
            geometry = self._geometries.within(region, geometry, extent)
            if nbytes == extent[2] and region.origin is None:
                region.form = geometry
        handle = Handle(region, geometry, self._released)
        if action.offload:
            if self._departures.parting:
                self._departures.advance(metrics.saved_bytes)
            tape.unstored.append(region)  # until its operator has ended
        else:
            region.stays = action.stays
            self.mover.keep(region)
        return handle

    def _decide(self, tape: Tape, region: Region) -> Action:
        policy = self.policy
        modules = self.modules.stack if self.modules.watching else ()
        if modules:
            region.module = modules[-1].name
        return policy.decide(SavedTensorInfo(
            tape.chunk, tape.microbatch, region.index, tape.nbytes, region.nbytes, region.dtype, modules
        ))  # fmt: skip

    # Backward

    def unpack(self, held: Handle | Kept) -> torch.Tensor:
        """Return the tensor that `pack` was given: same bytes, dtype, sizes and strides.

        Raises:
            RuntimeError: it was modified in place since, as autograd says without hooks; it was closed; or a graph is captured.
            IOFailure: it could not be read back.
        """
        if compiler() is not None:  # see `dynamo_leaves_alone`
            return without_compiler(self.unpack, held)  # type: ignore[no-any-return]
        if isinstance(held, Kept):
            return held.unchanged()
        if self.forked:
            raise RuntimeError("a saved tensor that was offloaded cannot be used in a forked process")
        if self.device.capturing():
            raise captured()
        if modes():
            with without_modes():
                return self._unpack(held)
        return self._unpack(held)

    def _timestamp(self) -> Timestamp | None:
        """Return the time at which a hook begins, where passes are recorded."""
        return self.device.timestamp() if self.recorder.active and not self.device.capturing() else None

    def _unpack(self, handle: Handle) -> torch.Tensor:
        region = handle.region
        tape = region.tape
        entered = self._timestamp() if self.recorder.active else None
        waited, cause = 0.0, ""
        while True:
            with self._lock:
                if waited:
                    self.metrics.count_load_wait(cause, region.name, waited)
                if region.changed():
                    dtype, size, *_ = handle.geometry
                    raise modified(dtype, size, region.probe._version, region.version)
                if not self._released.empty():
                    self._drain_released()
                if tape.cursor is None:
                    tape.cursor = tape.place(region) + 1  # backward begins here, which need not be the end
                    self.prefetcher.begin(tape)
                self._note_ends()
                tape.asked(region, handle.last_pass)
                try:
                    tensor = self._restorer.restore(handle)
                    lacking = False
                    self.prefetcher.run(tape, region.nbytes)
                except NoTargetYet:
                    tensor, lacking = None, True
                if tensor is not None:
                    if entered is not None:
                        ended, from_tier = self.device.timestamp(), region.transfer.slot is not None
                        self.recorder.unpacked(tape, region.index, entered, ended, from_tier=from_tier)
                    break
                operation = region.transfer.operation
                passing = self.mover.transfer.returning() if operation is None else None
            if lacking:
                waited = 0.0
                self._targets.allocate(self._lock)  # type: ignore[union-attr]
                continue
            began, cause = self.options.clock(), "event" if operation is None else "load"
            if operation is not None:
                wait_for_load(operation, region, self.mover.loads, self._lock, PATIENCE)
            elif passing is not None:
                self.device.block(passing)  # every buffer is in use by copies that are under way
            waited = self.options.clock() - began
        if self._targets is not None:
            if self._targets.missing:
                self._prefetch_into_new_memory(tape, self._targets)
            if self._closed:  # nobody looks later at the copy that uses the arena
                closing.wait_for_copies(self._next_copy, self.device, PATIENCE)
        return tensor

    def _prefetch_into_new_memory(self, tape: Tape, targets: LoadTargets) -> None:
        """Go on with what found no memory ahead of its use: the allocator, which may wait for the device, is asked without the
        lock. See `LoadTargets.allocate`."""
        while targets.missing:
            try:
                targets.allocate(self._lock)
            except torch.OutOfMemoryError:
                return  # it is not needed yet; where backward asks for it, it is an error
            with self._lock:
                self.prefetcher.run(tape)

    # Between the two

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Around what is none of the model's computation, and runs in its passes."""
        began = self._timestamp()
        try:
            yield
        finally:
            if began is not None:
                self.recorder.aside(began, self.device.timestamp())

    def begin_forward(self, tape: Tape) -> None:
        """The forward of `tape` begins."""
        if (began := self._timestamp()) is not None:
            self.recorder.forward_began(tape, began)

    def finish_forward(self, tape: Tape, *, complete: bool = True) -> None:
        """The forward of `tape` is over; not `complete`: by an exception, and its size says nothing of the next."""
        if self.forked:
            return
        if (prover := self.prover) is not None:
            prover.copy(tape.unproven)
        if (ended := self._timestamp()) is not None:
            self.recorder.forward_ended(tape, ended)
        with self._lock:
            # What the drive has finished is not processed here: if backward comes next, it is still in memory.
            if not (capturing := self.device.capturing()):
                self._drain_released()
            postponed = []
            alive = filter(None, tape.regions)
            self._largest_region = max(self._largest_region, *map(_bytes_of, alive), 0)
            if complete:
                waits = self.metrics.store_wait_seconds, self.metrics.load_wait_seconds
                self.policy.observe(ForwardProfile(tape.chunk, tape.microbatch, tape.nbytes, *waits))
                if tape.unstored and not capturing:
                    postponed = self._starter.begin(tape, self.device.current_stream())
            self._starter.abandon(tape)
        for region in postponed:
            self._starter.wait(region, self._lock)

    def prefetch(self, tape: Tape) -> None:
        """The backward of `tape` is about to begin: start its loads."""
        if not self.forked and not self.device.capturing():
            with self._lock:
                self._drain_released()
                tape.begin()
                self.prefetcher.begin(tape)
                self._note_ends()
            if self._targets is not None and self._targets.missing:
                self._prefetch_into_new_memory(tape, self._targets)

    def next_backward(self, tapes: list[Tape]) -> None:
        """Note whose backward follows the current one, in order: reads go on there when a tape runs out."""
        if not self.forked:
            with self._lock:
                self.prefetcher.follow(tapes)

    def drain(self) -> None:
        """Process what autograd dropped and what the drives have finished, and begin what was deferred."""
        if self.forked:
            return
        if (ended := self._timestamp()) is not None:
            self.recorder.backward_ended(ended)
        with self._lock:
            self._drain()
            self.mover.flush()
        self._released.look_again()

    def grow(self, *, between_steps: bool) -> None:
        """See Note: [Two budgets]. Not `between_steps`: it may be one, if nothing that was saved is alive."""
        if not self.forked and not self.device.capturing():
            with self._lock:
                self._drain_released()
                if between_steps or not self.metrics.live_regions:
                    self._starter.limits.between_steps()
            self._starter.limits.grow(self._lock)

    def _drain(self) -> None:
        if self.device.capturing():
            return  # asking an event, or a copy on another stream, would break the capture: the next call does it
        self._drain_released()
        self._note_ends()

    def _drain_released(self) -> None:
        released = self._released
        while not released.empty():
            release = released.next()
            region = release.region
            if release.last_pass != region.last_pass:
                region.pending_unpacks -= 1
            region.handles = handles = region.handles - 1
            if not handles:
                self.meter.release(region)
                self._release(region)
                self.metrics.live_regions -= 1

    def _note_ends(self) -> None:
        self.mover.reap()
        if not self.meter.settled():
            self.meter.drain()

    def snapshot(self) -> OffloadMetrics:
        """Return the counters now; in a forked child as they were at the fork."""
        if self.forked:
            return self.metrics.copy()
        with self._lock:
            self._drain()
            self.mover.flush()
            self.buffers.close_returned()
            metrics = self.metrics.copy()
            metrics.in_flight_bytes = self.mover.stores.under_way() + self.mover.departures.under_way()
            self.meter.write_to(metrics)
            metrics.buffer_bytes = self.buffers.counted_bytes
        self._released.look_again()
        return metrics

    def reset_peak(self) -> None:
        """Begin a new peak of activation memory, and a new timeline where one is recorded. While the engine rests the peak stays
        that of the latest step with hooks: nothing is counted."""
        if not (self.forked or self.resting):
            with self._lock:
                self._drain()
                self.meter.reset_peak()
            self._released.look_again()

    def close(self) -> None:
        """Move nothing any more, and wait for the transfers under way: for stores until the deadline (what has not begun by then
        stays in memory), for loads as long as they take, with a warning each minute.

        Handles still alive become inert: what is in memory can be unpacked, what is in a tier raises.

        Raises:
            TimeoutError: GPUDirect transfers, or copies of the device, do not end, and none has for a minute. Everything else is
                closed.
        """
        if self.forked:
            return
        with self._lock:
            if self._closed:
                return
            self._closed = self.prefetcher.closed = self._starter.closed = self.mover.transfer.closed = True
            self.set_plan_bound(None)  # no later store makes what has been written leave
            self._drain()
            closing.drain_at_deaths(self._released, self._lock, self.device, self._drain)
            busy = closing.busy_regions(self.mover.busy())
        closing.wait_for_all(busy, self.options.deadline, self._next_copy, self.device, PATIENCE)

    def _next_copy(self) -> Event | None:
        """Return the end of the next copy that uses the arena; None: there is none, and the arena is closed."""
        with self._lock:
            self._drain()
            if (passing := self.mover.transfer.passing()) is not None:
                return passing
            arenas = self.buffers.close()
        for arena in arenas:
            arena.close()
        return None
