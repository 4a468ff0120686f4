"""Model state with the optimizer on the CPU, beside DeepSpeed's ZeRO-Offload and beside the section `state` without it.

    python -m benchmarks.protrain --json

All train the same GPT in float32 with AdamW, in one process, and take steps in turn. On a CPU the device's memory is host memory,
too: what is compared is the work that each does, not a link. With `--device cuda` (and a GPU's sizes) products are in bfloat16 by
autocast, what leaves the device goes to pinned host memory, and "plain" is the same optimizer of the CPU without overlap: all
gradients are copied there, and all weights back.

- Against ZeRO-Offload (stage 2, one rank, CPUAdam, buckets of a block) the limit on the device is what that keeps there:
  parameters and two buckets of gradients; gradients and optimizer state are in host memory in both. FSDP2 with CPUOffloadPolicy
  is beside them.
- Against the section `state` all blocks are on the drive, and two at a time in memory.
- `plan` beside `state`: activations and state within a quarter of the state, against recomputing every block with the state that
  then fits. Its predictions are compared with what was measured: `step_time_ratios` has predicted over measured seconds of three
  plans, uncorrected, and `step_time_noise` how far medians of as many steps of one plan lie apart in that run (half of the
  quartiles' distance, over the median).
- On ProTrain's machine nothing is run: see `benchmarks.protrain_simulated`.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

import ssdtrain
from benchmarks.common import finish, hardware, parser
from benchmarks.gpu.measure import be_deterministic
from benchmarks.models import GPT, gpt
from benchmarks.protrain_simulated import simulated
from ssdtrain.config.state import StateConfig
from ssdtrain.planner.controller import PlanController
from ssdtrain.planner.plans import play
from ssdtrain.runtime import Runtime
from ssdtrain.tools.bench.ratios import interval, paired_ratio

LR = 1e-4
MIN_BYTES = StateConfig.model_fields["min_bytes"].default

BEGAN = time.monotonic()


def note(text: str) -> None:
    """Say on stderr what comes next, with the seconds since the start."""
    print(f"{time.monotonic() - BEGAN:5.0f} s: {text}", file=sys.stderr, flush=True)


class Way:
    """A model of its own and a step with it.

    Attributes:
        losses: of all steps, as hex.
        seconds: of all steps.
    """

    def __init__(self, arguments: Any, recomputed_blocks: int = 0) -> None:
        torch.manual_seed(0)
        shape = {name: getattr(arguments, name) for name in ("layers", "hidden", "sequence")}
        self.device = torch.device(arguments.device)
        with self.device:
            self.model: GPT = gpt(heads=arguments.heads, recomputed_blocks=recomputed_blocks, **shape)
        self.losses: list[str] = []
        self.seconds: list[float] = []

    def step(self, microbatches: Sequence[tuple[torch.Tensor, torch.Tensor]], count: int = 1) -> None:
        """Take `count` steps, one behind the other; each has taken its share of the time."""
        losses = []
        self.settle()
        began = time.perf_counter()
        for _ in range(count):
            losses += self.train(microbatches)
        self.settle()
        self.seconds += [(time.perf_counter() - began) / count] * count
        self.losses += [loss.item().hex() for loss in losses]

    def settle(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def loss(self, microbatch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return loss_of(self.model, microbatch)

    def train(self, microbatches: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> list[torch.Tensor]:
        raise NotImplementedError


def loss_of(model: nn.Module, microbatch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    with torch.autocast("cuda", torch.bfloat16, enabled=microbatch[0].is_cuda):
        loss: torch.Tensor = model(*microbatch)
    return loss


class OurWay(Way):
    """torch's fused AdamW, with the section `state` or without.

    Args:
        state: the section; None: none.
        clip: norm of gradients.
        vertical: microbatches run block by block.
        recomputed: every block is.
        plan: there is a section `plan` beside it.
    """

    def __init__(
        self,
        arguments: Any,
        state: dict[str, Any] | None = None,
        clip: float | None = None,
        *,
        vertical: bool = False,
        recomputed: bool = False,
        plan: bool = False,
    ) -> None:
        super().__init__(arguments, arguments.layers if recomputed else 0)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LR, fused=True)
        self.clip, self.vertical = clip, vertical
        self.runtime: Runtime | None = None
        if state is not None:
            config = {"state": state, "report": {"interval": 0}} | ({"plan": "auto"} if plan else {})
            self.runtime = ssdtrain.attach(self.model, config, optimizer=self.optimizer)

    def train(self, microbatches: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> list[torch.Tensor]:
        if self.vertical:
            assert self.runtime is not None
            losses = self.runtime.accumulate(self.model, microbatches, loss_of)
        else:
            losses = []
            for microbatch in microbatches:
                losses.append(self.loss(microbatch))
                losses[-1].backward()
        if self.clip is not None:
            if self.runtime is None or self.runtime.state is None:
                torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
            else:
                self.runtime.state.clip_grad_norm_(self.clip)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return losses

    def metrics(self) -> dict[str, Any]:
        """Values of all metrics so far."""
        assert self.runtime is not None
        found = self.runtime.statistics()
        assert found is not None
        return found.values()

    def moved(self) -> tuple[int, int]:
        """Bytes read and written so far."""
        values = self.metrics()
        return int(values["state/loaded_bytes"]), int(values["state/stored_bytes"])

    def close(self) -> None:
        if self.runtime is not None:
            self.runtime.close()


class ZeroOffload(Way):
    """DeepSpeed's ZeRO stage 2 with gradients and optimizer state in host memory."""

    def __init__(self, arguments: Any, clip: float = 0.0) -> None:
        import deepspeed

        super().__init__(arguments)
        block = sum(parameter.numel() for parameter in self.model.blocks[0].parameters())
        config = {
            "train_micro_batch_size_per_gpu": arguments.batch,
            "zero_optimization": {
                "stage": 2,
                "offload_optimizer": {"device": "cpu", "pin_memory": self.device.type == "cuda"},
                "reduce_bucket_size": block,
                "overlap_comm": self.device.type == "cuda",
            },
            "optimizer": {"type": "AdamW", "params": {"lr": LR, "weight_decay": 0.01}},
            "gradient_clipping": clip,
            "steps_per_print": 10**9,
        }
        if self.device.type == "cuda":  # the engine leaves the autocast that it is called in
            self.model.forward = torch.autocast("cuda", torch.bfloat16)(self.model.forward)  # type: ignore[method-assign]
        self.engine, *_ = deepspeed.initialize(model=self.model, config=config)

    def train(self, microbatches: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> list[torch.Tensor]:
        (microbatch,) = microbatches
        loss = self.engine(*microbatch)
        self.engine.backward(loss)
        self.engine.step()
        return [loss]


class Fsdp(Way):
    """FSDP2 with parameters, gradients and optimizer state in host memory."""

    def __init__(self, arguments: Any) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

        super().__init__(arguments)
        mesh = init_device_mesh(self.device.type, (1,))
        policy = CPUOffloadPolicy(pin_memory=self.device.type == "cuda")
        for block in self.model.blocks:
            fully_shard(block, mesh=mesh, offload_policy=policy)
        fully_shard(self.model, mesh=mesh, offload_policy=policy)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LR, fused=True)

    def train(self, microbatches: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> list[torch.Tensor]:
        (microbatch,) = microbatches
        loss = self.loss(microbatch)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return [loss]


class StepOnHost(Way):
    """A model on the GPU; what the section `state` steps in host memory is stepped there, all of it behind backward."""

    def __init__(self, arguments: Any, clip: float | None = None) -> None:
        super().__init__(arguments)
        self.clip = clip
        blocks = {p for p in self.model.blocks.parameters() if p.nbytes >= MIN_BYTES}
        self.parameters = [p for p in self.model.parameters() if p in blocks]
        self.copies = [p.detach().cpu().pin_memory().requires_grad_() for p in self.parameters]
        for copy in self.copies:
            copy.grad = torch.empty_like(copy, pin_memory=True)
        self.optimizer = torch.optim.AdamW(self.copies, lr=LR, fused=True)
        others = [p for p in self.model.parameters() if p not in blocks]
        self.on_device = torch.optim.AdamW(others, lr=LR, fused=True)

    def train(self, microbatches: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> list[torch.Tensor]:
        losses = []
        for microbatch in microbatches:
            losses.append(self.loss(microbatch))
            losses[-1].backward()
        if self.clip is not None:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        self.on_device.step()
        with torch.no_grad():
            for parameter, copy in zip(self.parameters, self.copies, strict=True):
                assert copy.grad is not None and parameter.grad is not None
                copy.grad.copy_(parameter.grad, non_blocking=True)
            self.settle()
            self.optimizer.step()
            for parameter, copy in zip(self.parameters, self.copies, strict=True):
                parameter.copy_(copy, non_blocking=True)
        self.model.zero_grad()
        return losses


def plain(arguments: Any, clip: float | None = None) -> Way:
    """All in memory, stepped by the optimizer of the CPU."""
    return StepOnHost(arguments, clip) if arguments.device == "cuda" else OurWay(arguments, None, clip)


def take_turns(ways: dict[str, Way], microbatches: Sequence[Any], arguments: Any) -> dict[str, list[float]]:
    """Run `arguments.pairs` rounds of `arguments.burst` steps after two that warm up. Returns the seconds of each way."""
    for turn in range(arguments.pairs + 2):
        if turn % 4 == 0:
            note(f"round {turn + 1} of {arguments.pairs + 2}: {', '.join(ways)}")
        names = list(ways)[turn % len(ways) :] + list(ways)[: turn % len(ways)]
        for name in names:
            ways[name].step(microbatches, arguments.burst)
    return {name: way.seconds[2 * arguments.burst :: arguments.burst] for name, way in ways.items()}


def compare(figures: dict[str, Any], name: str, theirs: Sequence[float], ours: Sequence[float]) -> None:
    """Add the throughput over another way, with its 95% interval."""
    figures[name] = paired_ratio(theirs, ours)
    low, high = interval([a / b for a, b in zip(theirs, ours, strict=True)])
    figures |= {f"{name}_low": low, f"{name}_high": high}


def on_one_rank(device: str, body: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Run `body` with DeepSpeed as a job of one rank."""
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # compiled for a minute, and not needed
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    backend = "nccl" if device == "cuda" else "gloo"
    torch.distributed.init_process_group(backend, store=torch.distributed.HashStore(), rank=0, world_size=1)
    deepspeed.init_distributed(dist_backend=backend, auto_mpi_discovery=False)
    figures = body() | {"deepspeed": deepspeed.__version__}
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    return figures


def against_zero_offload(arguments: Any, microbatches: Sequence[Any]) -> dict[str, Any]:
    """Compare with gradients and optimizer state in host memory, without clipping and with it."""
    whole, block = sizes(arguments)
    limit = whole // 4 + 2 * block
    state = {"optimizer": "cpu", "host": whole + whole // 4, "device_limit": limit}
    makers: dict[str, Callable[[], Way]] = {
        "ours": lambda: OurWay(arguments, {**state, "clip": "none"}),
        "zero": lambda: ZeroOffload(arguments),
        "fsdp": lambda: Fsdp(arguments),
        "ours clipped": lambda: OurWay(arguments, state, 1.0),
        "zero clipped": lambda: ZeroOffload(arguments, 1.0),
        "plain": lambda: plain(arguments),
        "plain clipped": lambda: plain(arguments, 1.0),
    }
    ways: dict[str, Way] = {}
    for name, make in makers.items():
        note(f"making {name}")
        ways[name] = make()
    seconds = take_turns(ways, microbatches, arguments)
    equal = [ways[name].losses == ways[f"plain{name[4:]}"].losses for name in ("ours", "ours clipped")]
    figures: dict[str, Any] = {"bits_equal": all(equal), "device_limit_of_state": limit / whole}
    compare(figures, "throughput_over_zero_offload", seconds["zero"], seconds["ours"])
    compare(figures, "throughput_over_zero_offload_clipped", seconds["zero clipped"], seconds["ours clipped"])
    compare(figures, "throughput_over_plain", seconds["plain"], seconds["ours"])
    compare(figures, "throughput_over_fsdp_cpu_offload", seconds["fsdp"], seconds["ours"])
    for name in ("ours", "zero", "fsdp", "plain"):
        figures[f"step_seconds_{name}_in_host_memory"] = statistics.median(seconds[name])
    for way in ways.values():
        if isinstance(way, OurWay):
            way.close()
    return figures


def away(arguments: Any, directory: Path) -> dict[str, Any]:
    """Keys of the section `state`: of a GPU, host memory takes what leaves the device, else the drive."""
    if arguments.device != "cuda":
        return {"directories": str(directory)}
    whole, _ = sizes(arguments)
    return {"host": whole + whole // 4}


def sizes(arguments: Any) -> tuple[int, int]:
    """Bytes of all model state, and of a block's parameters."""
    model = Way(arguments).model
    return 4 * _nbytes(model), _nbytes(model.blocks[0])


def _nbytes(module: nn.Module) -> int:
    return sum(parameter.nbytes for parameter in module.parameters())


def against_plain_state(arguments: Any, microbatches: Sequence[Any], directory: Path) -> dict[str, Any]:
    """Compare with the steps on the device, on the drive within the default limit of two chunks."""
    state = away(arguments, directory)
    ours = OurWay(arguments, {**state, "optimizer": "cpu", "clip": "none"})
    exact = OurWay(arguments, {**state, "optimizer": "cpu"})
    device, kept = OurWay(arguments, state), plain(arguments)
    ways: dict[str, Way] = {"ours": ours, "exact": exact, "device": device, "plain": kept}
    for way in ways.values():
        way.step(microbatches)
    before = {way: way.moved() for way in (ours, exact, device)}
    seconds = take_turns(ways, microbatches, arguments)
    figures: dict[str, Any] = {}
    compare(figures, "throughput_over_plain_state", seconds["device"], seconds["ours"])
    compare(figures, "throughput_over_plain_state_exact", seconds["device"], seconds["exact"])
    for way, name in ((ours, ""), (exact, "_exact"), (device, "_of_plain_state")):
        assert (
            way.runtime is not None and way.runtime.state is not None and way.runtime.state.plan is not None
        )
        plan = way.runtime.state.plan
        moving = arguments.layers - plan.persistent - plan.kept
        block = sum(
            parameter.nbytes
            for parameter in way.model.blocks[0].parameters()
            if parameter.nbytes >= way.runtime.state._config.min_bytes
        )
        for kind, now, then in zip(("read", "written"), way.moved(), before[way], strict=True):
            moved = (now - then) / (arguments.pairs + 2) / (moving * block)
            figures[f"bytes_{kind}_per_parameter_byte{name}"] = moved
    figures["bits_equal"] = ours.losses == exact.losses == kept.losses
    if arguments.device != "cuda":  # whose arithmetic differs
        figures["bits_equal"] &= ours.losses == device.losses
    for name, taken in seconds.items():
        figures[f"step_seconds_{name}_on_the_drive"] = statistics.median(taken)
    for way in (ours, exact, device):
        way.close()
    return figures


PLANS = 3
"""Runs of which each makes a plan of its own, for the errors of its predictions."""

MEASURED = 5
"""Steps whose median a prediction is compared with."""


def planned(arguments: Any, microbatches: Sequence[Any], directory: Path) -> dict[str, Any]:
    """Compare the joint plan with every block recomputed and the state that then fits, in the same memory of the device; and its
    predictions with what was measured in the steps after it was made."""
    whole, _ = sizes(arguments)
    section = away(arguments, directory)
    ratios, peaks = [], []
    for run in range(PLANS):
        note(f"run {run + 1} of {PLANS} that makes a plan")
        ours = OurWay(arguments, {**section, "device_limit": whole // 4}, plan=True)
        for _ in range(10):  # eight are profiled, and the plan is made at the begin of the next one
            ours.step(microbatches)
        assert ours.runtime is not None
        controller = next(part for part in ours.runtime.features if isinstance(part, PlanController))
        plan, problem = controller.plan, controller.problem
        assert plan is not None and problem is not None, "there is no plan yet"
        ours.runtime.reset_peak()
        for _ in range(MEASURED):
            ours.step(microbatches)
        values = ours.metrics()
        peaks.append(values["activation_peak_bytes"] + values["state/resident_peak_bytes"])
        ratios.append((plan.peak / peaks[-1], plan.seconds / statistics.median(ours.seconds[-MEASURED:])))
        if len(ratios) < PLANS:
            ours.close()
    # What every block recomputed saves is the peak of that plan less the state in it.
    every = play(
        replace(problem, beside=0, after=0.0),
        ["recompute" if block.recompute else "keep" for block in problem.blocks],
    )
    recompute = OurWay(arguments, {**section, "device_limit": whole // 4 - every.peak}, recomputed=True)
    kept = OurWay(arguments)
    for way in (recompute, kept):
        for _ in range(10 + MEASURED):
            way.step(microbatches)
    ways: dict[str, Way] = {"planned": ours, "recompute": recompute, "plain": kept}
    seconds = {
        name: taken[-arguments.pairs :] for name, taken in take_turns(ways, microbatches, arguments).items()
    }
    figures: dict[str, Any] = {
        "bits_equal": ours.losses == recompute.losses == kept.losses,
        "peak_error": max(abs(peak - 1) for peak, _ in ratios),
        "step_time_error": abs(statistics.median(ratio for _, ratio in ratios) - 1),
        "step_time_ratios": [ratio for _, ratio in ratios],
        "step_time_noise": noise(seconds["planned"]),
        "largest_model_ratio": whole / max(peaks),
        "plan": plan.summary(),
        "persistent_chunks": ours.metrics()["state/persistent_chunks"],
        "step_seconds_planned": statistics.median(seconds["planned"]),
        "step_seconds_recompute": statistics.median(seconds["recompute"]),
    }
    compare(figures, "throughput_over_recompute", seconds["recompute"], seconds["planned"])
    ours.close()
    recompute.close()
    return figures


def noise(seconds: Sequence[float]) -> float:
    """Return half of the distance of the quartiles of medians of `MEASURED` steps in a row, over their median."""
    medians = [
        statistics.median(seconds[at : at + MEASURED]) for at in range(max(2, len(seconds) - MEASURED + 1))
    ]
    first, middle, third = statistics.quantiles(medians, n=4)
    return (third - first) / 2 / middle


def papers() -> dict[str, Any]:
    """Count the published rows that the planner of clusters is within a quarter of."""
    from benchmarks.papers.__main__ import compare as compare_rows

    note("published rows")
    found = compare_rows()
    return {"rows_within_25": sum(not one.far for one in found), "rows": len(found)}


def by_blocks(arguments: Any, microbatch: Any, directory: Path) -> dict[str, Any]:
    """Compare accumulation block by block with the usual order."""
    count = arguments.microbatches
    state = away(arguments, directory) | {"optimizer": "cpu", "clip": "none"}
    vertical = OurWay(arguments, state, vertical=True)
    usual = OurWay(arguments, {**state, "microbatches": count})
    ways: dict[str, Way] = {"vertical": vertical, "usual": usual}
    seconds = take_turns(ways, [microbatch] * count, arguments)
    figures: dict[str, Any] = {"bits_equal": vertical.losses == usual.losses, "microbatches": count}
    compare(figures, "throughput_over_usual_order", seconds["usual"], seconds["vertical"])
    figures["bytes_over_usual_order"] = sum(vertical.moved()) / sum(usual.moved())
    vertical.close()
    usual.close()
    return figures


PARTS: dict[str, Callable[[Any, Any, Path], dict[str, Any]]] = {
    "zero": lambda arguments, batch, directory: on_one_rank(
        arguments.device, lambda: against_zero_offload(arguments, [batch])
    ),
    "state": lambda arguments, batch, directory: against_plain_state(arguments, [batch], directory),
    "vertical": by_blocks,
    "plan": lambda arguments, batch, directory: planned(arguments, [batch], directory),
    "simulated": lambda arguments, batch, directory: simulated(note),
    "papers": lambda arguments, batch, directory: papers(),
}
"""By the names of `--parts`."""


def main() -> None:
    arguments = parser(__doc__ or "")
    arguments.add_argument("--device", default="cpu", choices=("cpu", "cuda"), help="that trains")
    arguments.add_argument("--layers", type=int, default=8, help="blocks")
    arguments.add_argument("--hidden", type=int, default=256, help="width")
    arguments.add_argument("--heads", type=int, default=8, help="of attention")
    arguments.add_argument("--sequence", type=int, default=128, help="tokens")
    arguments.add_argument("--batch", type=int, default=1, help="sequences")
    arguments.add_argument("--microbatches", type=int, default=4, help="that are accumulated block by block")
    arguments.add_argument("--pairs", type=int, default=12, help="interleaved rounds")
    arguments.add_argument("--burst", type=int, default=1, help="steps of a way in a round")
    arguments.add_argument("--parts", default=",".join(PARTS), help="to run, comma-separated")
    chosen = arguments.parse_args()
    if chosen.device == "cuda":
        be_deterministic()
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.manual_seed(1)
    batch = [torch.randint(256, (chosen.batch, chosen.sequence), device=chosen.device) for _ in range(2)]
    sizes = ("layers", "hidden", "sequence", "batch", "pairs", "burst")
    figures: dict[str, Any] = {name: getattr(chosen, name) for name in sizes}
    with tempfile.TemporaryDirectory(prefix="ssdtrain-") as directory:
        parts = {name: PARTS[name](chosen, tuple(batch), Path(directory)) for name in chosen.parts.split(",")}
        figures["bits_equal"] = all([part.pop("bits_equal", True) for part in parts.values()])
        for part in parts.values():
            figures |= part
        finish(figures | hardware(directory) | {"torch": torch.__version__}, chosen.json)


if __name__ == "__main__":
    main()
