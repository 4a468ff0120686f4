"""What offloading does to the memory and the bits of training on CUDA, on the emulated device (`make test-cuda` builds it).

    .venv-cuda/bin/python -m benchmarks.emulated_device --json

GPT, BERT and T5, each trained by plain PyTorch, DistributedDataParallel on two ranks, DeepSpeed's ZeRO-3 on two ranks, and
megatron-core with tensor parallelism 2 and pipeline parallelism 2. megatron-core has no pipeline for its T5: that row is tensor
parallelism 2 and data parallelism 2. Ranks are processes, collectives NCCL's. A row is trained twice in the same processes: with
everything kept, and with everything offloaded to a drive (`offload.amount: "all"`). The device is late and its copies take time,
as a GPU's do (`LATE`). The first steps, in which sizes are learned and the arena is made, count for the bits alone.

Figures of a row, and at the top the worst of all rows:

- `bits_equal`: losses of all steps and the final weights.
- `peak_over_keep`: activation peaks, with over without. An activation peak is the highest allocation of forward and backward
  (`torch.cuda.max_memory_allocated`) less what was allocated when that step of the run *without* offloading began: parameters,
  gradients and states of the optimizer, which are the same in both runs. So what SSDTrain holds on the device from step to
  step counts as its own. Gradients exist before the step, working memory of the operators is in both sides.
- `reserved_over_keep`: the same of what the allocator has reserved (`torch.cuda.max_memory_reserved`).
- `allocated_over_keep`, `all_reserved_over_keep`: nothing subtracted. They depend on the sizes of the model's state, which here
  say nothing of a large model.
- `host_syncs`: calls in which a thread that trains waited for the device in the last steps, more than in the run without, by call
  and thread (`waits_more_than_keep`). Left out are waits for an event that code outside of SSDTrain asks for by
  `torch.cuda.Event.synchronize`, whose modules `waits_of_others` counts, in the run without and with: ZeRO-3 waits for its
  gathers where the device is behind, in forward and on autograd's thread, in both runs, as often as time has it.
  `back_pressure` are those in which the engine had no free buffer, whose seconds its metrics count; they are not in
  `host_syncs`.
- `pageable_copies`: copies between the device and memory that is not pinned, again more than in the run without.

The pack figures are those of `benchmarks.pack_hook.on_device`, run in the same process and on the same device.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import importlib
import json
import os
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import ssdtrain
from benchmarks.common import finish, parser
from benchmarks.gpu.models import KINDS, Model
from benchmarks.pack_hook import on_device
from tests.support import processes

LAYOUTS = {"plain": 1, "ddp2": 2, "zero3": 2, "tp2pp2": 4}
"""Ranks of each."""

STEPS, STEADY = 5, 2
"""Steps of a run, and how many of them, the last, count for memory and waits."""

LATE = {"delay_ms": 1.0, "h2d_gbps": 4.0, "d2h_gbps": 4.0}
"""Settings of the emulated device."""

WORKERS = ("ssdtrain-",)
"""Threads of the I/O pool, which may wait for the device: training does not wait for them."""

SMALL = {"min_bytes": "64KiB", "buffer": "256MiB"}
"""Of the section, for tensors of half a MiB. The arena is host memory, of which several ranks here have little."""

GOALS = {"peak_over_keep": 0.30, "reserved_over_keep": 0.35}

Shape = dict[str, int]


class EventWaits:
    """Counts waits for events by `torch.cuda.Event.synchronize` that are not SSDTrain's.

    Attributes:
        waits: as `emulated_cuda.host_waits` names them, by thread.
        callers: by the module that asked.
    """

    def __init__(self) -> None:
        self.waits: Counter[str] = Counter()
        self.callers: Counter[str] = Counter()
        original = torch.cuda.Event.synchronize

        def synchronize(event: torch.cuda.Event) -> None:
            name = str(sys._getframe(1).f_globals.get("__name__", ""))
            if not name.startswith("ssdtrain") and not event.query():
                thread = Path(f"/proc/self/task/{threading.get_native_id()}/comm").read_text().strip()
                self.waits[f"cudaEventSynchronize@{thread}"] += 1
                self.callers[name] += 1
            original(event)

        torch.cuda.Event.synchronize = synchronize  # type: ignore[method-assign]


OTHERS = EventWaits()


class Record:
    """What a run leaves: figures of its steps, each measured around forward and backward."""

    def __init__(self) -> None:
        self.losses: list[str | None] = []
        self.steps: list[dict[str, Any]] = []

    @contextlib.contextmanager
    def step(self) -> Iterator[Callable[[], None]]:
        """Measure until the function that this gives is called, or until the end of the block."""
        import emulated_cuda

        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        figures: dict[str, Any] = {"base": torch.cuda.memory_allocated()}
        before, others, callers = emulated_cuda.counts(), OTHERS.waits.copy(), OTHERS.callers.copy()

        def ended() -> None:
            if "waits" in figures:
                return
            after = emulated_cuda.counts()
            waits = Counter(emulated_cuda.host_waits(before, after, WORKERS))
            figures["waits"] = waits - (OTHERS.waits - others)
            figures["others"] = OTHERS.callers - callers
            figures["pageable"] = after.get("pageable copies", 0) - before.get("pageable copies", 0)
            torch.cuda.synchronize()
            figures["allocated"] = torch.cuda.max_memory_allocated()
            figures["reserved"] = torch.cuda.max_memory_reserved()

        yield ended
        ended()
        self.steps.append(figures)


def tokens_of(shape: Shape, step: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randint(shape["vocabulary"], (shape["batch"], shape["sequence"]), generator=generator).cuda()


def model_of(kind: str, shape: Shape) -> Model:
    torch.manual_seed(1)
    sizes = {name: shape[name] for name in ("hidden", "layers", "heads", "vocabulary")}
    model = Model(kind, positions=shape["sequence"], device="cuda", **sizes)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    return model


def digest(tensors: list[torch.Tensor]) -> str:
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(tensor.detach().contiguous().view(torch.uint8).cpu().numpy().tobytes())
    return found.hexdigest()


Result = tuple[Record, str, Any]
"""Figures, digest of the final weights, the engine's metrics (None: without offload)."""


def train_module(kind: str, shape: Shape, offload: dict[str, Any] | None, data_parallel: bool) -> Result:
    """Plain PyTorch, or DistributedDataParallel."""
    model = model_of(kind, shape)
    module = torch.nn.parallel.DistributedDataParallel(model) if data_parallel else model
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    config = {"offload": offload, "report": {"interval": 0}}
    runtime = None if offload is None else ssdtrain.attach(module, config)
    record, metrics = Record(), None
    try:
        for step in range(STEPS):
            tokens = tokens_of(shape, step, dist.get_rank() if data_parallel else 0)
            with record.step():
                loss = module(tokens, tokens)
                loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
            record.losses.append(loss.item().hex())
            del loss
        weights = digest(list(model.parameters()))
        metrics = runtime.statistics().offload if runtime is not None else None
    finally:
        if runtime is not None:
            runtime.close()
    return record, weights, metrics


def train_zero3(kind: str, shape: Shape, offload: dict[str, Any] | None) -> Result:
    """DeepSpeed's engine. Its buckets hold about a layer: with the defaults they are larger than this model."""
    import deepspeed

    import ssdtrain_ds

    layer = 12 * shape["hidden"] ** 2
    zero = {
        "stage": 3,
        "stage3_param_persistence_threshold": 0,
        "reduce_bucket_size": layer,
        "stage3_prefetch_bucket_size": layer,
        "stage3_max_live_parameters": 2 * layer,
        "stage3_max_reuse_distance": 2 * layer,
    }
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": shape["batch"],
        "steps_per_print": 10**9,
        "zero_optimization": zero,
        "zero_force_ds_cpu_optimizer": False,
    }
    if offload is not None:
        config["ssdtrain"] = {"offload": offload}
    model = model_of(kind, shape)
    for parameter in model.parameters():
        parameter.grad = None
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    record = Record()
    for step in range(STEPS):
        tokens = tokens_of(shape, step, dist.get_rank())
        with record.step():
            loss = engine(tokens, tokens)
            engine.backward(loss)
        engine.step()
        record.losses.append(loss.item().hex())
        del loss
    runtime = ssdtrain_ds.runtime_of(engine)
    assert (runtime is not None) == (offload is not None)
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
        weights = digest(list(engine.module.parameters()))
    metrics = runtime.statistics().offload if runtime is not None else None
    engine.destroy()
    return record, weights, metrics


def train_megatron(kind: str, shape: Shape, offload: dict[str, Any] | None) -> Result:
    """megatron-core's models and schedule, by the trainer of the tests."""
    import ssdtrain_megatron
    from tests.megatron import training
    from tests.megatron.rows import Row

    training.VOCABULARY, training.LENGTH, training.SEQUENCES = (
        shape["vocabulary"],
        shape["sequence"],
        shape["batch"],
    )
    training.HIDDEN, training.HEADS, training.LAYERS = shape["hidden"], shape["heads"], shape["layers"]
    if kind == "t5":
        training.LAYERS //= 2  # of the encoder, and of the decoder
    row = Row(kind, 4, tp=2, pp=1 if kind == "t5" else 2, model=kind, dropout=0.1)
    record = Record()
    with training.layout(row):
        trainer = training.Trainer(row)
        optimizer_step = trainer.optimizer.step
        attached: Any = contextlib.nullcontext()
        if offload is not None:
            attached = ssdtrain_megatron.attach(trainer.chunks, {"offload": offload})
        with attached as attachment:
            for number in range(STEPS):
                with record.step() as ended:

                    def step_optimizer(ended: Callable[[], None] = ended) -> Any:
                        ended()
                        return optimizer_step()

                    trainer.optimizer.step = step_optimizer
                    loss, norm = trainer.step(number)
                record.losses += [loss, norm]
            weights = trainer.weights()
            metrics = attachment.statistics().offload if offload is not None else None
        trainer.optimizer.step = optimizer_step
    return record, weights, metrics


def train(kind: str, layout: str, shape: Shape, offload: dict[str, Any] | None) -> Result:
    if layout == "zero3":
        return train_zero3(kind, shape, offload)
    if layout == "tp2pp2":
        return train_megatron(kind, shape, offload)
    return train_module(kind, shape, offload, layout == "ddp2")


def prepare(layout: str) -> None:
    """Before anything of a framework is imported; joins the other ranks."""
    torch.set_num_threads(1)
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    if layout == "ddp2":
        dist.init_process_group("nccl", timeout=_patience())
    elif layout == "zero3":
        import deepspeed

        import ssdtrain_ds
        from tests.deepspeed import upstream

        upstream.repair()
        ssdtrain_ds.install()
        deepspeed.init_distributed(dist_backend="nccl", timeout=_patience(), verbose=False)
    elif layout == "tp2pp2":
        from tests.megatron import cpu

        cpu.arrange()
        importlib.import_module("megatron.core")
        cpu.finish()
        cpu.join()


def _patience() -> Any:
    from tests.support.ranks import PATIENCE

    return PATIENCE


def main_of_rank(directory: str, kind: str, layout: str, shape: Shape) -> None:
    """Train one row in both ways, and write what this rank saw."""
    import emulated_cuda

    prepare(layout)
    spill = Path(directory, f"spill-{os.environ['RANK']}")
    section = {"directories": str(spill), "amount": "all", **SMALL}
    found: dict[str, Any] = {}
    with emulated_cuda.settings(**LATE):
        for way, offload in (("keep", None), ("offload", section)):
            gc.collect()  # cycles of the run before hold its model, and blocks of it segments
            torch.cuda.empty_cache()
            record, weights, metrics = train(kind, layout, shape, offload)
            found[way] = {"losses": record.losses, "weights": weights, "steps": record.steps}
            if metrics is not None:
                found[way] |= {
                    "offloaded": metrics.offloaded_bytes + metrics.avoided_write_bytes,
                    "kept": metrics.kept_bytes,
                    "waited": metrics.store_wait_seconds + metrics.load_wait_seconds,
                }
    Path(directory, f"{os.environ['RANK']}.json").write_text(json.dumps(found))
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def figures_of(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """The figures of a row, each of the rank for which it is worst."""
    rows = [_figures_of_rank(rank["keep"], rank["offload"]) for rank in ranks]
    more: Counter[str] = sum((more_waits(rank["keep"], rank["offload"]) for rank in ranks), Counter())
    others = {way: sum((waits_of(rank[way], "others") for rank in ranks), Counter()) for way in ranks[0]}
    worst: dict[str, Any] = {name: max(row[name] for row in rows) for name in rows[0]}
    return (
        {"bits_equal": all(row["bits_equal"] for row in rows)}
        | {name: value for name, value in worst.items() if name != "bits_equal"}
        | {"waits_more_than_keep": more, "waits_of_others": others}
    )


def waits_of(run: dict[str, Any], figure: str = "waits") -> Counter[str]:
    """Waits of the host in the last steps, by call and thread, or those of others by module."""
    return sum((Counter(step[figure]) for step in run["steps"][-STEADY:]), Counter())


def more_waits(keep: dict[str, Any], offload: dict[str, Any]) -> Counter[str]:
    """Waits of the run with offload beyond those of the run without."""
    return waits_of(offload) - waits_of(keep)


def _figures_of_rank(keep: dict[str, Any], offload: dict[str, Any]) -> dict[str, Any]:
    state = max(step["base"] for step in keep["steps"][-STEADY:])

    def most(run: dict[str, Any], figure: str) -> int:
        return max(int(step[figure]) for step in run["steps"][-STEADY:])

    def ratio(figure: str, less: int) -> float:
        return (most(offload, figure) - less) / (most(keep, figure) - less)

    more = more_waits(keep, offload).total()
    return {
        "bits_equal": keep["losses"] == offload["losses"]
        and keep["weights"] == offload["weights"]
        and offload["offloaded"] > 0,
        "host_syncs": more if not offload["waited"] else 0,
        "back_pressure": more if offload["waited"] else 0,
        "pageable_copies": most(offload, "pageable") - most(keep, "pageable"),
        "peak_over_keep": ratio("allocated", state),
        "reserved_over_keep": ratio("reserved", state),
        "allocated_over_keep": ratio("allocated", 0),
        "all_reserved_over_keep": ratio("reserved", 0),
        "keep_peak_mib": (most(keep, "allocated") - state) / 2**20,
        "keep_host_syncs": waits_of(keep).total(),
    }


def measured(kind: str, layout: str, shape: Shape, timeout: float = 3600) -> dict[str, Any]:
    """The figures of a row, of processes of its own."""
    world = LAYOUTS[layout]
    with tempfile.TemporaryDirectory(prefix="ssdtrain-emulated-") as directory:
        command = ["-m", "benchmarks.emulated_device", "--rank", directory, kind, layout, json.dumps(shape)]
        environment = {"EMULATED_DEVICES": str(world), "DS_ACCELERATOR": "cuda"}
        processes.start(world, command, timeout, SSDTRAIN_TEST_DEVICE="cuda", **environment)
        return figures_of([json.loads(Path(directory, f"{rank}.json").read_text()) for rank in range(world)])


def summary(rows: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The worst of the rows."""
    names = ("host_syncs", "pageable_copies", *GOALS)
    found: dict[str, Any] = {"bits_equal": all(row["bits_equal"] for row in rows.values())}
    found |= {name: max(row[name] for row in rows.values()) for name in names}
    found["accepted"] = (
        found["bits_equal"]
        and not found["host_syncs"]
        and not found["pageable_copies"]
        and all(found[name] <= goal for name, goal in GOALS.items())
    )
    return found


def main() -> int:
    arguments = parser("Train GPT, BERT and T5 on the emulated CUDA device, kept and offloaded")
    arguments.add_argument("--kinds", nargs="+", choices=KINDS, default=[*KINDS], help="models")
    arguments.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=[*LAYOUTS], help="how to train")
    arguments.add_argument("--layers", type=int, default=24, help="blocks")
    arguments.add_argument("--hidden", type=int, default=64, help="width")
    arguments.add_argument("--heads", type=int, default=4, help="attention heads")
    arguments.add_argument("--sequence", type=int, default=256, help="tokens of a sequence")
    arguments.add_argument("--batch", type=int, default=8, help="sequences of a microbatch")
    arguments.add_argument(
        "--vocabulary", type=int, default=256, help="four times the width, about what a GPT-3 of 175B has"
    )
    arguments.add_argument("--no-pack", action="store_true", help="leave the pack figures out")
    chosen = arguments.parse_args()
    if not torch.cuda.is_available() or not torch.cuda.get_device_name().startswith("Emulated"):
        arguments.error("this needs the emulated device: `make test-cuda` builds it in .venv-cuda")
    shape = {
        name: getattr(chosen, name)
        for name in ("layers", "hidden", "heads", "sequence", "batch", "vocabulary")
    }
    rows = {}
    for layout in chosen.layouts:
        for kind in chosen.kinds:
            rows[f"{kind} {layout}"] = measured(kind, layout, shape)
            print(f"{kind} {layout}", json.dumps(rows[f"{kind} {layout}"]), file=sys.stderr, flush=True)
    figures = summary(rows)
    if not chosen.no_pack:
        figures |= on_device()
    finish({**figures, **shape, "torch": torch.__version__, "rows": rows}, chosen.json)
    return 0 if figures["accepted"] else 1


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        main_of_rank(*sys.argv[2:5], json.loads(sys.argv[5]))
    else:
        sys.exit(main())
