"""Published figures, one row each: where it stands, its value, and the setting as `ssdtrain plan` takes it.

What a paper does not say is assumed, and named in `families`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.papers import measures
from ssdtrain.config.units import GiB
from ssdtrain.tools.whatif.cluster_job import ClusterJob
from ssdtrain.tools.whatif.hardware import Ssds, find_gpu
from ssdtrain.tools.whatif.models import ParallelLayout, Transformer

__all__ = ["Row", "rows"]

Measure = Callable[[ClusterJob, int], float | None]


@dataclass(frozen=True)
class Row:
    """A published figure.

    Attributes:
        where: section, table or figure.
        low, high: the published range; equal for one value, `high` infinite for "more than".
        jobs: with one, the setting; with several, the mean of what is computed for each is compared.
        microbatch: sequences.
    """

    family: str
    what: str
    where: str
    low: float
    high: float
    unit: str
    measure: Measure
    jobs: tuple[ClusterJob, ...]
    microbatch: int

    def computed(self) -> float | None:
        """None: the planner has no plan for it."""
        found = [self.measure(job, self.microbatch) for job in self.jobs]
        known = [each for each in found if each is not None]
        return sum(known) / len(known) if len(known) == len(found) else None

    def ratio(self, computed: float) -> float:
        """Of what is computed to the published value, or to the nearest end of its range; 1 inside of it."""
        return computed / min(max(computed, self.low), self.high)


A100, A100_40 = find_gpu("a100"), find_gpu("a100-40gb")
SAMSUNG_980_PRO = Ssds(4 * 8, 7e9, 5e9, 10**12, 600e12 * 2.5 * 86)
P5800X = Ssds(2 * 3, 7.2e9, 6.1e9)
"""Seven drives, four for one of two GPUs and three for the other, which tensor-parallel ranks wait for."""

H100_DRIVES = Ssds(8, 4e9, 4e9)


def rows() -> list[Row]:
    """All of them, by family."""
    return [*_megatron(), *_ssdtrain(), *_protrain(), *_teraio()]


def _one(
    family: str,
    what: str,
    where: str,
    value: float,
    unit: str,
    measure: Measure,
    job: ClusterJob,
    microbatch: int = 1,
) -> Row:
    return Row(family, what, where, value, value, unit, measure, (job,), microbatch)


# Parameters (billion), heads, hidden, layers, tp, pp, GPUs, batch, TFLOP/s per GPU.
WEAK_SCALING = (
    (1.7, 24, 2304, 24, 1, 1, 32, 512, 137),
    (3.6, 32, 3072, 30, 2, 1, 64, 512, 138),
    (7.5, 32, 4096, 36, 4, 1, 128, 512, 142),
    (18.4, 48, 6144, 40, 8, 1, 256, 1024, 135),
    (39.1, 64, 8192, 48, 8, 2, 512, 1536, 138),
    (76.1, 80, 10240, 60, 8, 4, 1024, 1792, 140),
    (145.6, 96, 12288, 80, 8, 8, 1536, 2304, 148),
    (310.1, 128, 16384, 96, 8, 16, 1920, 2160, 155),
    (529.6, 128, 20480, 105, 8, 35, 2520, 2520, 163),
    (1008.0, 160, 25600, 128, 8, 64, 3072, 3072, 163),
)

# Parameters (billion), pp with tp 8 (0: ZeRO-3); for each run GPUs, batch, microbatch, TFLOP/s per GPU.
SAME_MODEL = [
    (billions, stages, *run)
    for billions, stages, runs in (
        (174.6, 12, ((384, 1536, 1, 153), (768, 1536, 1, 149), (1536, 1536, 1, 141))),
        (529.6, 35, ((560, 2240, 1, 171), (1120, 2240, 1, 167), (2240, 2240, 1, 159))),
        (174.6, 0, ((384, 1536, 4, 144), (768, 1536, 2, 88), (1536, 1536, 1, 44))),
        (529.6, 0, ((640, 2560, 4, 138), (1120, 2240, 2, 98), (2240, 2240, 1, 48))),
    )
    for run in runs
]


def _gpt(heads: int, hidden: int, layers: int) -> Transformer:
    return Transformer.of("gpt", hidden=hidden, layers=layers, heads=heads, sequence=2048, vocabulary=51200)


def _same_model(billions: float, stages: int, gpus: int, batch: int) -> tuple[str, ClusterJob]:
    model = _gpt(96, 12288, 96) if billions < 200 else _gpt(128, 20480, 105)
    if stages:
        name, layout = f"TP 8, PP {stages}", ParallelLayout(tp=8, pp=stages, dp=gpus // (8 * stages))
    else:
        name, layout = "ZeRO-3", ParallelLayout(dp=gpus, zero=3)
    return f"{billions}B on {gpus}, {name}", ClusterJob(model, layout, A100, batch=batch, network=25e9)


def _megatron() -> list[Row]:
    found = []
    for billions, heads, hidden, layers, tp, pp, gpus, batch, rate in WEAK_SCALING:
        layout = ParallelLayout(tp=tp, pp=pp, dp=gpus // (tp * pp))
        job = ClusterJob(_gpt(heads, hidden, layers), layout, A100, batch=batch, network=25e9)
        what = f"{billions}B on {gpus}, TP {tp}, PP {pp}"
        found.append(_one("rate", what, "Table 1", rate, "TFLOP/s", measures.flop_rate, job))
    for billions, stages, gpus, batch, microbatch, rate in SAME_MODEL:
        what, job = _same_model(billions, stages, gpus, batch)
        found.append(_one("rate", what, "Table 2", rate, "TFLOP/s", measures.flop_rate, job, microbatch))
    return found


def _ssdtrain() -> list[Row]:
    found, lives = [], []
    for billions, stages, gpus, batch, microbatch, rate in SAME_MODEL:
        what, job = _same_model(billions, stages, gpus, batch)
        job = replace(job, efficiency=rate * 1e12 / A100.flops, ssds=SAMSUNG_980_PRO)
        split = replace(job, layout=replace(job.layout, sequence_parallel=bool(stages)))
        need = ("III-D, Fig. 5", 0.0, 12.1, "GB/s", measures.bandwidth_for_all)
        found.append(
            Row("bandwidth", f"{what}{', sequence parallel' * bool(stages)}", *need, (split,), microbatch)
        )
        if gpus in (384, 560, 640):
            if stages:
                found.append(Row("bandwidth", what, *need, (job,), microbatch))
            age = ("III-D, Fig. 5", 2.0, math.inf, "years", measures.life)
            lives.append(
                Row("bandwidth", f"{what}{', sequence parallel' * bool(stages)}", *age, (split,), microbatch)
            )
    return [*found, *lives, *_two_gpus()]


def _two_gpus() -> list[Row]:
    found = []
    for family, depth in (("bert", 1), ("gpt", 1), ("t5", 2)):
        for hidden, layers in ((8192, 4), (12288, 3), (16384, 2)):
            if layers % depth:
                continue
            model = Transformer.of(
                family, hidden=hidden, layers=layers // depth, sequence=1024, heads=hidden // 128
            )
            job = ClusterJob(
                model, ParallelLayout(tp=2), A100_40, P5800X, node=2, batch=16, optimizer=0, recompute=False
            )
            what = f"{family.upper()}, hidden {hidden}, {layers} layers: peak lower by"
            reduced = ("IV-B, Fig. 6", 28.0, 40.0, "%", measures.peak_reduction)
            found.append(Row("memory", what, *reduced, (job,), 16))
    for hidden in (12288, 14336):
        model = Transformer.of("bert", hidden=hidden, layers=3, sequence=1024, heads=hidden // 128)
        job = ClusterJob(model, ParallelLayout(tp=2), A100_40, P5800X, node=2, optimizer=0, recompute=False)
        what = f"BERT, hidden {hidden}, 3 layers: batch in the same memory"
        found.append(_one("memory", what, "IV-C, Fig. 7", 2, "times", measures.batch_gain, job, 16))
    return found


def _protrain() -> list[Row]:
    shapes: dict[str, tuple[str, int, int, dict[str, Any]]] = {
        "Mistral-7B": ("llama", 4096, 32, {"kv_heads": 8, "ffn": 14336}),
        "GPT-2 10B": ("gpt", 4096, 48, {}),
        "LLaMA-13B": ("llama", 5120, 40, {"ffn": 13824}),
        "GPT-2 20B": ("gpt", 6144, 44, {}),
    }
    jobs = {}
    for name, (family, hidden, layers, more) in shapes.items():
        model = Transformer.of(family, hidden=hidden, layers=layers, sequence=1024, **more)
        jobs[name] = ClusterJob(
            model, ParallelLayout(dp=4, zero=3), A100, host=512 * GiB, batch=64, optimizer=0
        )
    gain, unit = measures.gain_over_recomputation, "times"
    found = [
        Row(
            "speed",
            f"{which} of the published means",
            "abstract",
            value,
            value,
            unit,
            gain,
            tuple(jobs.values()),
            4,
        )
        for which, value in (("lowest", 1.43), ("highest", 2.71))
    ]
    for name, value in (("Mistral-7B", 1.43), ("GPT-2 10B", 1.28), ("LLaMA-13B", 1.46), ("GPT-2 20B", 1.47)):
        what = f"{name} against DeepSpeed"
        found.append(_one("speed", what, "Table 3, second-hand", value, unit, gain, jobs[name], 4))
    wide = Transformer.of("gpt", hidden=4096, layers=1, sequence=1024)
    for name, value, host in (("rtx3090", 34, 384 * GiB), ("a100", 75, 1024 * GiB)):
        away: dict[str, Any] = {"host": host, "state": "host", "cpu_rate": 200e9}
        job = ClusterJob(wide, ParallelLayout(), find_gpu(name), batch=1, node=1, **away)
        where = "Table 2, second-hand"
        found.append(_one("size", name.upper(), where, value, "billion", measures.largest_model, job))
    return found


def _teraio() -> list[Row]:
    gpu = find_gpu("h100-nvl")

    def job(
        batch: int, sequence: int, hidden: int, layers: int, heads: int, ffn: int, vocabulary: int
    ) -> ClusterJob:
        model = Transformer.of(
            "llama",
            hidden=hidden,
            layers=layers,
            heads=heads,
            kv_heads=8,
            ffn=ffn,
            sequence=sequence,
            vocabulary=vocabulary,
        )
        return ClusterJob(model, ParallelLayout(pp=2), gpu, H100_DRIVES, batch=batch)

    llama = job(128, 4096, 4096, 32, 32, 14336, 128256)
    granite = job(128, 4096, 4096, 36, 32, 14336, 49152)
    large = job(256, 2048, 8192, 80, 64, 28672, 128256)
    ideal, need = measures.share_of_ideal, measures.bandwidth_for_all
    mean = "mean of all models; here of Llama 3 8B and Granite 8B"
    return [
        Row("ideal", mean, "abstract, 4.2", 80.7, 80.7, "%", ideal, (llama, granite), 1),
        _one("ideal", "Llama 3 70B", "4.2", 59.7, "%", ideal, replace(large, state="ssd"), 8),
        Row(
            "ideal", "Llama 3 8B: bandwidth that is enough", "2.2, Fig. 3", 32, 48, "GB/s", need, (llama,), 1
        ),
        Row(
            "ideal", "Llama 3 70B: bandwidth that is enough", "2.2, Fig. 3", 32, 48, "GB/s", need, (large,), 1
        ),
    ]
