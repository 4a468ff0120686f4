"""A training step in virtual time: layers that take set times on the device and save set bytes."""

from __future__ import annotations

import ctypes
import tempfile
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ssdtrain.config import Amount
from ssdtrain.offload.engine import OffloadEngine
from ssdtrain.offload.hooks import SavedTensorRecorder
from ssdtrain.offload.options import EngineOptions
from ssdtrain.offload.policy import AmountPolicy, OffloadPolicy
from ssdtrain.offload.tensors.tape import Tape
from ssdtrain.storage import SpillStore
from tests.support.simulated.device import Interval, SimulatedDevice
from tests.support.simulated.drive import Channel, SimulatedPool
from tests.support.simulated.timeline import Timeline

__all__ = [
    "LayerTimes",
    "Machine",
    "StepRecord",
    "keep_peak",
    "one_after_the_other",
    "one_forward_one_backward",
    "train",
]

LAUNCH = 8e-6  # seconds of the host to queue one kernel
HOOK = 30e-6  # seconds of the host in one hook of the engine


@dataclass(frozen=True)
class LayerTimes:
    """One layer: seconds of its forward and backward on the device, and the bytes of each tensor that it saves."""

    forward: float
    backward: float
    saved: tuple[int, ...]


@dataclass
class Machine:
    """A device, its link and its drives.

    Args:
        pcie: bytes per second, each way.
        memory: bytes per second of copies within the device's memory; None: not known, and they take no time.
        drives: (write, read) bytes per second of each.
        drive_latency: seconds of each transfer.
        host_bandwidth: bytes per second of copies to and from the host tier.
        jitter: of the duration of copies; see `SimulatedDevice`.
    """

    pcie: float
    drives: Sequence[tuple[float, float]]
    drive_latency: float = 100e-6
    host_bandwidth: float = 20e9
    jitter: Callable[[float], float] | None = None
    memory: float | None = None
    timeline: Timeline = field(init=False)
    device: SimulatedDevice = field(init=False)
    pool: SimulatedPool = field(init=False)

    def __post_init__(self) -> None:
        self.timeline = Timeline()
        self.device = SimulatedDevice(self.timeline, pcie=self.pcie, memory=self.memory, jitter=self.jitter)
        channels = [
            (Channel(write, self.drive_latency), Channel(read, self.drive_latency))
            for write, read in self.drives
        ]
        self.pool = SimulatedPool(self.timeline, self.device, channels, Channel(self.host_bandwidth))

    def engine(
        self,
        options: EngineOptions,
        *,
        host_bytes: int = 0,
        capacity: int = 1 << 30,
        policy: OffloadPolicy | None = None,
    ) -> OffloadEngine:
        """The real engine on a real store, whose transfers happen in virtual time."""
        self._directory = tempfile.TemporaryDirectory(prefix="ssdtrain-")
        directories = [self._directory.name for _ in self.drives]
        store = SpillStore(
            directories,
            capacity=capacity,
            host_bytes=host_bytes,
            threads=1,
            engine="python",
            direct="off",
            register=self.device.host_register(),
        )
        store.pool.close()
        store.pool = self.pool
        store.counted_from = self.pool.counters()
        self.store = store
        policy = AmountPolicy(Amount("all")) if policy is None else policy
        options = replace(options, clock=lambda: self.timeline.now)
        # The engine sees CPU tensors; to its streams, copies and transfers they are those of the device.
        engine = OffloadEngine(store, self.device, torch.device("cpu"), policy, options)
        engine.eligible.moves_foreign_memory = True  # the device's, which torch did not allocate
        self._engine = engine
        return engine

    def close(self) -> None:
        """Close the engine and the store, and give the directory back."""
        self._engine.close()
        self.store.close()
        self._directory.cleanup()

    def __enter__(self) -> Machine:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


@dataclass
class StepRecord:
    """One step: when it began and ended, what each stream did in it, and what was wrong."""

    began: float
    ended: float
    compute: list[Interval]
    to_host: list[Interval]
    to_device: list[Interval]
    host_syncs: int
    wrong: list[str]


class _Program:
    """What the layers of one step share."""

    def __init__(
        self, machine: Machine, engine: OffloadEngine | None, layers: Sequence[LayerTimes], seed: int
    ) -> None:
        self.machine = machine
        self.engine = engine
        self.layers = layers
        self.seed = seed
        self.wrong: list[str] = []

    def pattern(self, layer: int, tensor: int) -> int:
        """The byte that a saved tensor is filled with."""
        return (self.seed * 131 + layer * 31 + tensor * 7 + 1) % 200

    def run(self, layers: range, given: torch.Tensor | None) -> tuple[torch.Tensor, list[list[torch.Tensor]]]:
        """Forwards of these layers.

        Args:
            given: None: the first run, of which only the first tensor stays; else that tensor, and all are kept and counted.
        """
        device, again = self.machine.device, given is not None
        kept: list[list[torch.Tensor]] = []
        for index in layers:
            layer, saved = self.layers[index], []
            for number, nbytes in enumerate(layer.saved):
                tensor = (
                    given if again and given is not None and not kept and not saved else device.empty(nbytes)
                )
                fill = self.fill(tensor.data_ptr(), nbytes, self.pattern(index, number))
                self.machine.timeline.spend(LAUNCH)
                device.compute.work(
                    layer.forward / len(layer.saved),
                    label=f"{'again' if again else 'forward'} {index}",
                    end=fill,
                )
                if again and self.engine is not None:
                    self.engine.meter.drain()
                    self.engine.meter.see(tensor.untyped_storage())
                if given is None:
                    given = tensor
                saved.append(tensor)
            if again:
                kept.append(saved)
        assert given is not None
        return given, kept

    def fill(self, address: int, nbytes: int, value: int) -> Callable[[], None]:
        return lambda: void(ctypes.memset(address, value, nbytes))

    def check(self, address: int, nbytes: int, value: int, what: str) -> Callable[[], None]:
        def run() -> None:
            if ctypes.string_at(address, nbytes) != bytes([value]) * nbytes:
                self.wrong.append(what)

        return run


def void(_: object) -> None:
    return None


class _Layer(torch.autograd.Function):
    """Saves what it makes; its backward checks, on the device's time line, that it reads those bytes."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, program: _Program, index: int) -> torch.Tensor:
        ctx.program, ctx.index = program, index
        device, layer = program.machine.device, program.layers[index]
        saved = []
        for number, nbytes in enumerate(layer.saved):
            tensor = device.empty(nbytes)
            saved.append(tensor)
            fill = program.fill(tensor.data_ptr(), nbytes, program.pattern(index, number))
            program.machine.timeline.spend(LAUNCH)
            device.compute.work(layer.forward / len(layer.saved), label=f"forward {index}", end=fill)
        ctx.save_for_backward(*saved)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        program, index = ctx.program, ctx.index
        device, layer = program.machine.device, program.layers[index]
        for number, tensor in enumerate(ctx.saved_tensors):
            what = f"layer {index}, saved tensor {number}"
            value = program.pattern(index, number)
            address, nbytes = tensor.data_ptr(), tensor.nbytes
            begin = program.check(address, nbytes, value, f"{what} at the beginning of its use")
            end = program.check(address, nbytes, value, f"{what} at the end of its use")
            program.machine.timeline.spend(LAUNCH)
            device.compute.work(
                layer.backward / len(layer.saved), label=f"backward {index}", begin=begin, end=end
            )
        return gradient, None, None


class _Recomputed(torch.autograd.Function):
    """Layers that are run again in backward. Only the first tensor of the first is saved."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, program: _Program, layers: range) -> torch.Tensor:
        ctx.program, ctx.layers = program, layers
        given, _ = program.run(layers, None)
        ctx.save_for_backward(given)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        program, layers = ctx.program, ctx.layers
        (given,) = ctx.saved_tensors
        _, saved = program.run(layers, given)
        del given
        for index in reversed(layers):
            device, layer = program.machine.device, program.layers[index]
            for number, tensor in enumerate(saved.pop()):
                check = program.check(
                    tensor.data_ptr(),
                    tensor.nbytes,
                    program.pattern(index, number),
                    f"recomputed layer {index}, saved tensor {number}",
                )
                program.machine.timeline.spend(LAUNCH)
                device.compute.work(
                    layer.backward / len(layer.saved), label=f"backward {index}", begin=check, end=check
                )
            del tensor
        return gradient, None, None


class _TimedHooks(SavedTensorRecorder):
    """The engine's hooks, which take the host some time."""

    def __init__(self, engine: OffloadEngine, tape: Tape, timeline: Timeline) -> None:
        super().__init__(engine, tape)

        def pack(tensor: torch.Tensor) -> Any:
            timeline.spend(HOOK)
            return engine.pack(tape, tensor)

        def unpack(held: Any) -> torch.Tensor:
            timeline.spend(HOOK)
            return engine.unpack(held)

        self._hooks = torch.autograd.graph.saved_tensors_hooks(pack, unpack)


def one_after_the_other(microbatches: int) -> list[tuple[str, int]]:
    """Forward and backward of each microbatch in turn."""
    return [(phase, number) for number in range(microbatches) for phase in ("forward", "backward")]


def one_forward_one_backward(microbatches: int, alive: int) -> list[tuple[str, int]]:
    """The order of a pipeline stage that has up to `alive` microbatches between forward and backward."""
    order = [("forward", number) for number in range(min(alive, microbatches))]
    for number in range(microbatches):
        order.append(("backward", number))
        if number + alive < microbatches:
            order.append(("forward", number + alive))
    return order


def train(
    machine: Machine,
    engine: OffloadEngine | None,
    layers: Sequence[LayerTimes],
    *,
    order: Sequence[tuple[str, int]] = (("forward", 0), ("backward", 0)),
    seed: int = 0,
    recomputed: Sequence[range] = (),
) -> StepRecord:
    """One step in the given order of forwards and backwards. `engine` None keeps what is saved.

    Args:
        recomputed: layers that follow each other and are run again in backward: of each range, the first tensor that its first
            layer saves is kept, and what it runs again from.

    Raises:
        Deadlock: the host waited for something that could not happen.
    """
    device, timeline = machine.device, machine.timeline
    device.synchronize()
    streams = (device.compute, device.store, device.load)
    marks = [len(stream.log) for stream in streams]
    syncs, violations, began = device.host_syncs, len(device.violations), timeline.now
    program = _Program(machine, engine, layers, seed)
    first = {group[0]: group for group in recomputed}
    inside = {index for group in recomputed for index in group[1:]}
    alive: dict[int, tuple[torch.Tensor, Tape]] = {}
    backwards = [number for phase, number in order if phase == "backward"]
    for phase, number in order:
        if phase == "forward":
            tape = Tape(0, number)
            out = torch.zeros(1, requires_grad=True)
            with _TimedHooks(engine, tape, timeline) if engine is not None else nullcontext():
                for index in range(len(layers)):
                    if index in first:
                        out = _Recomputed.apply(out, program, first[index])
                    elif index not in inside:
                        out = _Layer.apply(out, program, index)
            alive[number] = out, tape
            continue
        out, tape = alive.pop(number)
        backwards.remove(number)
        if engine is not None:
            engine.next_backward([alive[later][1] for later in backwards if later in alive])
            engine.prefetch(tape)
        out.sum().backward()
        if engine is not None:
            engine.drain()
    if engine is not None:
        engine.grow(between_steps=True)
    timeline.wait_for(lambda: device.compute.idle)
    ended = timeline.now
    device.synchronize()
    logs = [stream.log[mark:] for mark, stream in zip(marks, streams, strict=True)]
    return StepRecord(
        began,
        ended,
        *logs,
        host_syncs=device.host_syncs - syncs,
        wrong=[*program.wrong, *device.violations[violations:]],
    )


def keep_peak(layers: Sequence[LayerTimes]) -> int:
    """Bytes alive for backward at once where everything is kept."""
    return sum(sum(layer.saved) for layer in layers)
