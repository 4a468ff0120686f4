"""One mode of the demo: trains and writes JSON lines, one per step and the result at the end.

python -m examples.deepspeed_gpt.train --mode keep --settings '{"steps": 6}'
"""

import argparse
import hashlib
import os
import sys
import time
from typing import Any, TextIO

import torch
import torch.distributed

from examples.deepspeed_gpt.settings import MODES, Settings
from examples.support.data import batches, corpus
from examples.support.figures import figures_of
from examples.support.model import GPT
from examples.support.process_memory import GLIBC_STEADY, PeakMemory, return_freed_blocks
from examples.support.result import RunResult
from ssdtrain.config.units import MiB
from ssdtrain.telemetry.lines import write_line
from ssdtrain_ds import runtime_of


def start_distributed(device: torch.device) -> None:
    """A world of one process without a launcher, a port or a compiled extension.

    DeepSpeed takes a process group that is there already; its `deepspeed_shm_comm` for CPU would be compiled on first use.
    """
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}.items():
        os.environ[name] = value
    if sys.platform == "linux":
        # Otherwise gloo resolves the host's name, which a fresh machine need not know.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    backend = "nccl" if device.type == "cuda" else "gloo"
    torch.distributed.init_process_group(backend, store=torch.distributed.HashStore(), rank=0, world_size=1)
    deepspeed.init_distributed(dist_backend=backend, auto_mpi_discovery=False)


def make_deterministic(device: torch.device) -> None:
    """Some CUDA kernels sum in any order by default; on the CPU all that the model uses have one order."""
    if device.type == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)


def build_engine(settings: Settings, mode: str, device: torch.device) -> Any:
    import deepspeed

    if mode == "ssdtrain":
        import ssdtrain_ds

        ssdtrain_ds.install()
    torch.manual_seed(settings.seed)
    model = GPT(settings.model, recomputed_blocks=settings.layers if mode == "recompute" else 0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.learning_rate)
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=optimizer,
        config=settings.deepspeed_config(mode, bf16=device.type == "cuda"),
        dist_init_required=False,
    )
    return engine


def train(settings: Settings, mode: str, channel: TextIO, *, lockstep: bool = False) -> RunResult:
    """Trains `settings.steps` steps and writes a line for each to `channel`.

    Raises:
        EOFError: `lockstep`, and standard input ended before the last step.
    """
    return_freed_blocks(MiB)
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    make_deterministic(device)
    start_distributed(device)
    engine = build_engine(settings, mode, device)
    figures = figures_of(engine.module, runtime_of(engine))
    text = corpus(settings.data)
    source = batches(text, microbatch=settings.microbatch, sequence=settings.sequence, seed=settings.seed)
    memory = PeakMemory()
    losses: list[str] = []
    for step in range(settings.steps):
        if step == 1:
            memory.reset()
        elif step == settings.memory_steps:
            resident_peak = memory.resident_bytes
            device_peak = memory.device_bytes
            return_freed_blocks(GLIBC_STEADY)
        tokens, targets = (part.to(device) for part in next(source))
        if lockstep and not sys.stdin.readline():
            raise EOFError(f"standard input ended before step {step + 1} of {settings.steps}")
        began = time.perf_counter()
        with figures.step() as record:
            loss = engine(tokens, targets)
            record.mark("backward")
            engine.backward(loss)
        engine.step()
        losses.append(loss.item().hex())  # item() waits for the device
        took = time.perf_counter() - began
        if step >= settings.memory_steps + settings.warmup:
            figures.take(record, took)
        write_line(channel, {"event": "step", "step": step + 1, "loss": loss.item(), "seconds": took})
    return RunResult(
        name=mode,
        losses=losses,
        weights_sha256=weights_digest(engine.module),
        resident_peak_bytes=resident_peak,
        resident_peak_covers=memory.covers,
        device_peak_bytes=device_peak,
        about=about(settings, engine, text),
        **figures.fields(),
    )


def weights_digest(module: torch.nn.Module) -> str:
    digest = hashlib.sha256()
    for name, parameter in sorted(module.named_parameters()):
        digest.update(name.encode())
        digest.update(parameter.detach().cpu().contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def about(settings: Settings, engine: Any, text: torch.Tensor) -> dict[str, Any]:
    import deepspeed

    return {
        "parameters": sum(parameter.numel() for parameter in engine.module.parameters()),
        "dtype": str(next(engine.module.parameters()).dtype).removeprefix("torch."),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "deepspeed": deepspeed.__version__,
        "text_bytes": len(text),
    }


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mode", choices=MODES, required=True)
    parser.add_argument("--settings", type=Settings.from_json, default=Settings(), help="JSON of Settings")
    parser.add_argument(
        "--lockstep", action="store_true", help="wait for a line on standard input before every step"
    )
    parser.add_argument(
        "--channel", type=int, default=1, help="file descriptor for the lines; 1 is standard output"
    )
    chosen = parser.parse_args(arguments)
    with open(chosen.channel, "w", closefd=False) as channel:
        result = train(chosen.settings, chosen.mode, channel, lockstep=chosen.lockstep)
        write_line(channel, {"event": "result", "result": result.to_json()})
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
