"""DeepSpeed with SSDTrain, beside what else a DeepSpeed user can do about activations, in one process.

    python -m benchmarks.deepspeed_offloads --json

Three engines of the same model take steps in turn: keeping activations, torch's `save_on_cpu` around the forward, and the
`ssdtrain` block. DeepSpeed's own `cpu_checkpointing` is tried, and what it says is reported: without an accelerator it fails
upstream, and `save_on_cpu` moves nothing, since the tensors are there already.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import finish, hardware, parser
from benchmarks.models import DTYPES, gpt
from examples.support.activation_meter import SavedTensorMeter
from ssdtrain.config.units import MiB
from ssdtrain.tools.bench.ratios import interval, paired_ratio

KEEP, SAVE_ON_CPU, SSDTRAIN = "keep", "save_on_cpu", "ssdtrain"


class Way:
    """An engine of its own, and a step with it."""

    def __init__(self, name: str, arguments: Any, directory: Path) -> None:
        import deepspeed

        torch.manual_seed(0)
        model = gpt(
            layers=arguments.layers,
            hidden=arguments.hidden,
            sequence=arguments.sequence,
            vocabulary=arguments.vocabulary,
        )
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": arguments.batch,
            "zero_optimization": {"stage": arguments.stage},
            "bf16": {"enabled": arguments.dtype == "bfloat16"},
            "zero_allow_untested_optimizer": True,
            "steps_per_print": 10**9,
        }
        if name == SSDTRAIN:
            config["ssdtrain"] = {
                "offload": {"directories": str(directory), "amount": arguments.amount},
                "report": {"interval": 0},
            }
        self.name = name
        self.engine, *_ = deepspeed.initialize(
            model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-4), config=config
        )
        self.meter = SavedTensorMeter(self.engine.module)
        self.losses: list[str] = []
        self.gradients: list[torch.Tensor] = []
        """Of the last step with `keep_gradients`."""

    def step(self, tokens: torch.Tensor, targets: torch.Tensor, *, keep_gradients: bool = False) -> float:
        around: AbstractContextManager[Any] = nullcontext()
        if self.name == SAVE_ON_CPU:
            around = torch.autograd.graph.save_on_cpu(pin_memory=torch.cuda.is_available())
        began = time.perf_counter()
        with around:
            loss = self.engine(tokens, targets)
        self.engine.backward(loss)
        if keep_gradients:
            from deepspeed.utils import safe_get_full_grad

            self.gradients = [safe_get_full_grad(p).clone() for p in self.engine.module.parameters()]
        self.engine.step()
        self.losses.append(loss.item().hex())
        return time.perf_counter() - began

    def peak(self, tokens: torch.Tensor, targets: torch.Tensor) -> int:
        import ssdtrain_ds

        runtime = ssdtrain_ds.runtime_of(self.engine)
        if runtime is not None:
            runtime.reset_peak()
            self.step(tokens, targets)
            found = runtime.statistics()
            assert found is not None
            return found.offload.activation_peak_bytes
        if self.name == SAVE_ON_CPU and torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
            self.step(tokens, targets)
            return torch.cuda.max_memory_allocated()
        with self.meter.step() as record:
            # On the CPU save_on_cpu's hooks keep the very tensors that the meter sees.
            name, self.name = self.name, KEEP
            self.step(tokens, targets)
            self.name = name
        return record.peak_bytes


def offloaded_bytes(way: Way) -> int:
    """That SSDTrain has offloaded so far."""
    import ssdtrain_ds

    runtime = ssdtrain_ds.runtime_of(way.engine)
    assert runtime is not None
    found = runtime.statistics()
    assert found is not None
    return found.offload.offloaded_bytes


def cpu_checkpointing() -> str:
    """What DeepSpeed's own cpu_checkpointing says here."""
    from deepspeed import checkpointing

    checkpointing.configure(None, partition_activations=False, checkpoint_in_cpu=True)
    try:
        x = torch.randn(64, 64, requires_grad=True)
        checkpointing.checkpoint(torch.sin, x).sum().backward()
    except Exception as error:  # noqa: BLE001 - it is the figure
        return f"{type(error).__name__}: {error}"[:120]
    finally:
        checkpointing.reset()
    return "runs"


def run(arguments: Any, directory: Path) -> dict[str, Any]:
    import deepspeed

    import ssdtrain_ds

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    torch.distributed.init_process_group(backend, store=torch.distributed.HashStore(), rank=0, world_size=1)
    deepspeed.init_distributed(dist_backend=backend, auto_mpi_discovery=False)
    upstream = cpu_checkpointing()
    ssdtrain_ds.install()
    ways = [Way(name, arguments, directory) for name in (KEEP, SAVE_ON_CPU, SSDTRAIN)]
    device = ways[0].engine.device
    shape = (arguments.batch, arguments.sequence)
    tokens, targets = (torch.randint(arguments.vocabulary, shape).to(device) for _ in range(2))
    for way in ways:
        for _ in range(8 if arguments.amount == "auto" else 2):  # "auto" plans after some
            way.step(tokens, targets, keep_gradients=True)
    peaks = {way.name: [way.peak(tokens, targets) for _ in range(2)][-1] for way in ways}
    seconds: dict[str, list[float]] = {way.name: [] for way in ways}
    before = offloaded_bytes(ways[-1])
    for pair in range(arguments.pairs):
        for way in ways[pair % 3 :] + ways[: pair % 3]:
            seconds[way.name].append(way.step(tokens, targets))
    moved = (offloaded_bytes(ways[-1]) - before) / arguments.pairs
    ratios = [a / b for a, b in zip(seconds[SSDTRAIN], seconds[KEEP], strict=True)]
    low, high = interval(ratios)
    figures = {
        "layers": arguments.layers,
        "hidden": arguments.hidden,
        "vocabulary": arguments.vocabulary,
        "dtype": arguments.dtype,
        "amount": arguments.amount,
        "zero_stage": arguments.stage,
        "pairs": arguments.pairs,
        "losses_equal": ways[0].losses == ways[1].losses == ways[2].losses,
        "grads_equal": all(
            torch.equal(a, b) and torch.equal(a, c)
            for a, b, c in zip(*(way.gradients for way in ways), strict=True)
        ),
        "moved_bytes_per_step": moved,
        "activation_peak_keep_mib": peaks[KEEP] / MiB,
        "activation_peak_ratio": peaks[SSDTRAIN] / peaks[KEEP],
        "save_on_cpu_peak_ratio": peaks[SAVE_ON_CPU] / peaks[KEEP],
        "step_seconds_keep": statistics.median(seconds[KEEP]),
        "step_time_ratio": paired_ratio(seconds[SSDTRAIN], seconds[KEEP]),
        "step_time_ratio_low": low,
        "step_time_ratio_high": high,
        "save_on_cpu_step_time_ratio": paired_ratio(seconds[SAVE_ON_CPU], seconds[KEEP]),
        "cpu_checkpointing": upstream,
        **hardware(directory),
        "torch": torch.__version__,
        "deepspeed": deepspeed.__version__,
    }
    for way in ways:
        way.engine.destroy()
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    return figures


def main() -> None:
    arguments = parser(__doc__ or "")
    arguments.add_argument("--layers", type=int, default=6, help="blocks")
    arguments.add_argument("--hidden", type=int, default=384, help="width")
    arguments.add_argument("--sequence", type=int, default=256, help="tokens")
    arguments.add_argument("--batch", type=int, default=6, help="sequences")
    arguments.add_argument("--vocabulary", type=int, default=256, help="tokens that there are")
    arguments.add_argument(
        "--dtype", choices=sorted(DTYPES), default="float32", help="bfloat16: by DeepSpeed's bf16 optimizer"
    )
    arguments.add_argument("--amount", default="all", help="of `offload.amount`")
    arguments.add_argument("--stage", type=int, choices=range(4), default=2, help="of ZeRO")
    arguments.add_argument("--pairs", type=int, default=30, help="interleaved rounds")
    chosen = arguments.parse_args()
    with tempfile.TemporaryDirectory(prefix="ssdtrain-") as directory:
        finish(run(chosen, Path(directory)), chosen.json)


if __name__ == "__main__":
    main()
