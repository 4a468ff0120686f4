"""What offloading costs the threads that train, per saved tensor, on a CUDA device whose computation takes no time.

    python -m benchmarks.pack_hook --device cuda --json [--size 64KiB --dtype bfloat16]

A chain of operators that compute nothing, each of which saves a tensor of its own, runs forward and backward in rounds:
plain, with each peer, with SSDTrain on each tier, and with its default amount (host tier, `auto`) once a plan is followed: what
computes nothing has nothing to hide a copy behind, so that plan may be to keep all. Counted is CPU time of the threads that
run it (`time.thread_time`): of forward (`pack`), of backward (`unpack`: the thread that calls it and autograd's own), and of both
with what ends the step (`all`), each less the plain round's, by the number of saved tensors; medians of all rounds. A round of
its own counts calls of CUDA, waits of the host, and the allocator's peaks. Meant for the emulated device (tests/cuda/emulation),
whose functions cost every side the same.

Peers: torch's `save_on_cpu` with pinned memory; torchtune's `OffloadActivations` with streams, the published class where
torchtune is installed (`pip install --no-deps torchtune`), and a stand-in of ours that makes the same calls of torch and CUDA
(`torchtune_stand_in`); the engine of DeepSpeed's `cpu_checkpointing`, as saved-tensor hooks; Megatron-core's fine-grained
offload, in groups of `GROUP` operators.
"""

from __future__ import annotations

import contextlib
import importlib.util
import statistics
import sys
import tempfile
import time
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks

from ssdtrain.config import load_config
from ssdtrain.config.units import KiB
from ssdtrain.planner.plan_metrics import PlanMetrics
from ssdtrain.runtime import Runtime

GROUP = 4
"""Operators of a group of Megatron's."""

PLANNED = 16
"""Steps in which `amount: "auto"` profiles, plans and follows its plan."""

BEST_PEER = "torchtune"
"""The fastest that overlaps copies with computation in both directions."""

UNCOUNTED = ("cudaGetDevice", "cudaGetLastError", "cudaPeekAtLastError", "cudaStreamIsCapturing")
"""Calls that a driver answers from the memory of the thread."""


class Saves(torch.autograd.Function):
    """An operator that saves a tensor of its own and computes nothing."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        y = torch.empty_like(x)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        _ = ctx.saved_tensors
        return gradient


class Chain(NamedTuple):
    """Operators of this kind, one after another."""

    size: int
    """Bytes of a saved tensor."""
    operators: int
    dtype: torch.dtype = torch.float32

    @property
    def nbytes(self) -> int:
        """Bytes of all saved tensors."""
        return self.size * self.operators

    def input(self) -> torch.Tensor:
        return torch.ones(
            self.size // self.dtype.itemsize, dtype=self.dtype, device="cuda", requires_grad=True
        )


def run_chain(x: torch.Tensor, operators: int) -> torch.Tensor:
    """Run `operators` of them on `x`."""
    for _ in range(operators):
        x = Saves.apply(x)
    return x


class Way:
    """Plain training; peers override what they change of it."""

    def forward(self, x: torch.Tensor, operators: int) -> torch.Tensor:
        with self.hooks():
            return run_chain(x, operators)

    def hooks(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def backward(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def end_step(self) -> None:
        return None

    def settle(self, chain: Chain) -> None:
        """Run the steps after which all are alike."""

    def figures(self) -> dict[str, float]:
        """Return what is to be known of it beside times."""
        return {}

    def close(self) -> None:
        return None


class SaveOnCpu(Way):
    def hooks(self) -> AbstractContextManager[Any]:
        return save_on_cpu(pin_memory=True)


class Torchtune(Way):
    def __init__(self, stand_in: bool) -> None:
        make: Any = OffloadOnStream if stand_in else torchtunes_class()
        self._hooks: AbstractContextManager[Any] = make()

    def hooks(self) -> AbstractContextManager[Any]:
        return self._hooks


class DeepSpeedEngine(Way):
    """What `cpu_checkpointing` gives each input of a checkpoint to."""

    def __init__(self) -> None:
        from deepspeed.runtime.activation_checkpointing import offload_activations

        self._engine = offload_activations._ActivationOffloadEngine()

    def hooks(self) -> AbstractContextManager[Any]:
        return saved_tensors_hooks(self._pack, self._unpack)

    def _pack(self, tensor: torch.Tensor) -> Any:
        number = self._engine.offload_input(tensor)
        return tensor if number is None else number

    def _unpack(self, held: Any) -> torch.Tensor:
        return self._engine.restore_input(held) if isinstance(held, int) else held


class MegatronGroups(Way):
    """Groups of operators as `--fine-grained-activation-offloading` makes of modules."""

    def __init__(self) -> None:
        from megatron.core.extensions import transformer_engine
        from megatron.core.pipeline_parallel import fine_grained_activation_offload as fine_grained

        if transformer_engine.cpu_offload is None:  # it sets a flag there, which nothing here reads
            transformer_engine.cpu_offload = types.SimpleNamespace(CPUOffloadEnabled=False)
        if not torch.distributed.is_initialized():
            with tempfile.NamedTemporaryFile() as file:
                torch.distributed.init_process_group(
                    "gloo", init_method=f"file://{file.name}.rendezvous", rank=0, world_size=1
                )
        self._interface = fine_grained.FineGrainedActivationOffloadingInterface
        self._interface.reset_instance()

    def forward(self, x: torch.Tensor, operators: int) -> torch.Tensor:
        interface = self._interface
        with contextlib.redirect_stdout(None):  # its table of bytes, once
            interface.reset()
        interface.init_chunk_handler(None, None, 1)
        for _ in range(operators // GROUP):
            with interface(True, x, "group") as x:
                x = run_chain(x, GROUP)
            x = interface.group_commit(x, "group")
        return x


class SSDTrain(Way):
    def __init__(self, chain: Chain, directory: Path | None, amount: str = "all") -> None:
        # Room for all stores in flight, and for all loads: a wait for room is not what is measured here.
        room = 2 * chain.nbytes
        section: dict[str, Any] = {"amount": amount, "buffer": room}
        section["min_bytes"] = min(chain.size, 256 * KiB)  # peers move small ones too
        section |= {"host": room} if directory is None else {"directories": str(directory)}
        device = torch.device("cuda", 0)
        config = load_config({"offload": section, "report": {"interval": 0}})
        self._runtime = Runtime(config, device, logs=False)

    def hooks(self) -> AbstractContextManager[Any]:
        return self._runtime.forward()

    def backward(self) -> AbstractContextManager[Any]:
        return self._runtime.backward()

    def end_step(self) -> None:
        self._runtime.step_end()

    def close(self) -> None:
        self._runtime.close()


class SSDTrainAuto(SSDTrain):
    """The default amount, once its plan is followed."""

    def __init__(self, chain: Chain) -> None:
        super().__init__(chain, None, "auto")

    def settle(self, chain: Chain) -> None:
        for _ in range(PLANNED):
            Seconds(self, chain)

    def figures(self) -> dict[str, float]:
        """Return the share of what was saved that left memory, of all steps, and how many ran without hooks."""
        found = self._runtime.statistics()
        assert found is not None
        saved, left = found.offload.saved_bytes, found.offload.offloaded_bytes
        (plan,) = (metrics for _, metrics in found.sets if isinstance(metrics, PlanMetrics))
        return {"offloaded_share": left / saved, "idle_steps": float(plan.idle_steps)}


# torchtune


def torchtunes_class() -> Any:
    """`OffloadActivations`, from its own file. What that file imports of other packages and does not use here is left empty.

    Raises:
        ImportError: torchtune is not installed.
    """
    found = importlib.util.find_spec("torchtune")
    if found is None or not found.submodule_search_locations:
        raise ImportError("torchtune is not installed")
    path = Path(found.submodule_search_locations[0]) / "training" / "_activation_offloading.py"
    empty = {
        "torchao": {"__version__": "0"},
        "torchao.dtypes": {},
        "torchao.dtypes.nf4tensor": {"NF4Tensor": type("NF4Tensor", (), {})},
        "torchtune": {},
        "torchtune.modules": {"TiedLinear": type("TiedLinear", (), {})},
        "torchtune.utils": {"get_logger": lambda level: None},
    }
    with _modules(empty):
        spec = importlib.util.spec_from_file_location("torchtune_offloading", path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return module.OffloadActivations


@contextmanager
def _modules(contents: dict[str, dict[str, Any]]) -> Iterator[None]:
    before = {name: sys.modules.get(name) for name in contents}
    for name, attributes in contents.items():
        module = types.ModuleType(name)
        module.__dict__.update(attributes)
        sys.modules[name] = module
    try:
        yield
    finally:
        for name, module_before in before.items():
            if module_before is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module_before


class OffloadOnStream(saved_tensors_hooks):
    """A measurement stand-in for torchtune's class: its sequence of calls, one side stream, five tensors kept back in forward."""

    KEPT_BACK = 5

    def __init__(self) -> None:
        self._compute = torch.cuda.default_stream()
        self._copies = torch.cuda.Stream()
        self._count = 0
        self._host: dict[int, torch.Tensor] = {}
        self._leaving: dict[int, tuple[torch.Tensor, torch.cuda.Event]] = {}
        self._back: dict[int, torch.Tensor] = {}
        self._ends: dict[int, torch.cuda.Event] = {}
        self._node: Any = None
        super().__init__(self._pack, self._unpack)

    def _pack(self, tensor: torch.Tensor) -> int:
        self._count += 1
        number = self._count
        for old in [*self._leaving]:
            if old > number - self.KEPT_BACK:
                break
            self._compute.wait_event(self._leaving.pop(old)[1])
        self._copies.wait_stream(self._compute)
        with torch.cuda.stream(self._copies):
            host = torch.empty_like(tensor, pin_memory=True, device="cpu")
            host.copy_(tensor, non_blocking=True)
        self._host[number] = host
        self._leaving[number] = tensor, self._copies.record_event()
        return number

    def _unpack(self, number: int) -> torch.Tensor:
        node = torch._C._current_autograd_node()  # type: ignore[attr-defined]
        earlier: list[int] = []
        if node != self._node:
            self._node, earlier = node, [*self._back]
        host = self._host.pop(number)
        on_device = number in self._leaving
        if on_device:
            tensor = self._leaving[number][0]
        else:
            with torch.cuda.stream(self._copies):
                tensor = host.to("cuda", non_blocking=True)
            self._compute.wait_stream(self._copies)
            self._back[number] = tensor
        uses = torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)

        def after(outputs: Any, inputs: Any) -> Any:
            if not on_device:
                tensor = self._back[number]
                if torch._C._storage_Use_Count(tensor.untyped_storage()._cdata) > uses:
                    tensor.record_stream(self._compute)
                    del self._back[number]
                else:
                    self._ends[number] = self._compute.record_event()
            for old in [*self._leaving]:
                self._compute.wait_event(self._leaving.pop(old)[1])
            for old in earlier:
                self._copies.wait_event(self._ends[old])
                del self._back[old]
            return outputs

        node.register_hook(after)
        return tensor


# Measuring


class Seconds:
    """CPU seconds of one step, of the threads that run it."""

    def __init__(self, way: Way, chain: Chain) -> None:
        x = chain.input()
        gradient = torch.empty_like(x)
        torch.cuda.synchronize()
        began = time.thread_time()
        y = way.forward(x, chain.operators)
        self.forward = time.thread_time() - began
        torch.cuda.synchronize()  # the device takes no time
        # Of autograd's thread, from the first operator of backward to the last.
        times: list[float] = []
        y.register_hook(lambda _: times.append(time.thread_time()))
        x.register_hook(lambda _: times.append(time.thread_time()))
        began = time.thread_time()
        with way.backward():
            torch.autograd.backward(y, gradient)
        calling = time.thread_time() - began
        self.backward = calling + times[1] - times[0]
        began = time.thread_time()
        way.end_step()
        self.whole = self.forward + self.backward + time.thread_time() - began
        torch.cuda.synchronize()


def counted(way: Way, chain: Chain) -> dict[str, Any]:
    """Of one step: calls of CUDA by name, waits of the host, and the allocator's peaks."""
    import emulated_cuda

    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_allocated()
    before = emulated_cuda.counts()
    Seconds(way, chain)
    after = emulated_cuda.counts()
    calls = {
        name: after[name] - before.get(name, 0)
        for name in after
        if name.startswith("cuda") and name not in UNCOUNTED and after[name] != before.get(name, 0)
    }
    waits = emulated_cuda.host_waits(before, after, ("ssdtrain-",))
    measuring = 3  # `Seconds` itself
    calls["cudaDeviceSynchronize"] = calls.get("cudaDeviceSynchronize", 0) - measuring
    return {
        "calls": {name: number / chain.operators for name, number in sorted(calls.items()) if number},
        "host_waits": sum(waits.values()) - measuring,
        "allocated_peak_bytes": torch.cuda.max_memory_allocated() - held,
        "reserved_peak_bytes": torch.cuda.max_memory_reserved(),
    }


def ways(chain: Chain, directory: Path, chosen: Sequence[str] = ()) -> tuple[dict[str, Way], dict[str, str]]:
    """All (or plain and `chosen`) that can be had here, plain first; and why others cannot."""
    makers: dict[str, Callable[[], Way]] = {
        "plain": Way,
        "save_on_cpu": SaveOnCpu,
        "torchtune": lambda: Torchtune(stand_in=False),
        "torchtune_stand_in": lambda: Torchtune(stand_in=True),
        "deepspeed": DeepSpeedEngine,
        "megatron": MegatronGroups,
        "ssdtrain_host": lambda: SSDTrain(chain, None),
        "ssdtrain_ssd": lambda: SSDTrain(chain, directory),
        "ssdtrain_auto": lambda: SSDTrainAuto(chain),
    }
    made, missing = {}, {}
    for name, make in makers.items():
        if chosen and name not in ("plain", *chosen):
            continue
        try:
            made[name] = make()
        except ImportError as error:
            missing[name] = str(error)
    return made, missing


def measure_cuda(chain: Chain, rounds: int, directory: Path, chosen: Sequence[str] = ()) -> dict[str, Any]:
    """All figures, flat. `chosen` are the ways beside plain; () is all."""
    emulated: Any = None
    if importlib.util.find_spec("emulated_cuda") is not None:
        import emulated_cuda

        emulated = emulated_cuda if emulated_cuda.active() else None
    torch.set_num_threads(1)
    made, missing = ways(chain, directory, chosen)
    rows: dict[str, list[Seconds]] = {name: [] for name in made}
    figures: dict[str, Any] = {
        "tensor_bytes": chain.size,
        "tensor_dtype": str(chain.dtype).removeprefix("torch."),
        "operators": chain.operators,
        "rounds": rounds,
        "missing": missing,
    }
    with emulated.settings(queue=1 << 20) if emulated else nullcontext():
        for way in made.values():
            way.settle(chain)
        for turn in range(rounds + 3):  # the first ones grow pools
            for name, way in made.items():
                seconds = Seconds(way, chain)
                if turn >= 3:
                    rows[name].append(seconds)
        for name, way in made.items():
            if emulated:
                for key, value in counted(way, chain).items():
                    figures[f"{name}_{key}"] = value
                figures[f"{name}_cuda_calls"] = sum(figures[f"{name}_calls"].values())
    for name, way in made.items():
        figures |= {f"{name}_{key}": value for key, value in way.figures().items()}
        way.close()
    for name, kinds in rows.items():
        for kind, attribute in (("pack", "forward"), ("unpack", "backward"), ("all", "whole")):
            plain = (getattr(seconds, attribute) for seconds in rows["plain"])
            taken = (getattr(seconds, attribute) for seconds in kinds)
            less = [one - other for one, other in zip(taken, plain, strict=True)]
            values = [getattr(seconds, attribute) for seconds in kinds] if name == "plain" else less
            figures[f"{name}_{kind}_us"] = statistics.median(values) / chain.operators * 1e6
    peer = BEST_PEER if BEST_PEER in made else f"{BEST_PEER}_stand_in"
    for name in made:
        for kind in ("pack", "unpack", "all"):
            if name.startswith("ssdtrain") and peer in made:
                ratio = figures[f"{name}_{kind}_us"] / figures[f"{peer}_{kind}_us"]
                figures[f"{name}_{kind}_over_{peer}"] = ratio
    return figures
