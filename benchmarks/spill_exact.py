"""The codec `exact` on the way to drives: bytes, step time and bits, of a GPT in bfloat16 whose saved tensors all leave.

    python -m benchmarks.spill_exact --json
    python -m benchmarks.spill_exact --device cuda --hidden 4096 --sequence 4096 --batch 1 --json
    python -m benchmarks.exact --parts spill --json  # under a plan, in DeepSpeed and in megatron-core too

Three copies of one model take the same steps, one with `offload.codec: "off"`, one with "exact" and one with "auto", the default,
in turn, so that what else the machine does meets all three. Step times are medians of the ratios of neighbouring steps. "auto" is
"exact" where a trial in the first steps shows that they are shorter with it, which needs transfers that are waited for.
Many CPUs multiply bfloat16 slowly, which hides what a codec costs: times of `--dtype float32` say more there.

- `drive_bytes_ratio`: bytes written with "exact" over those of the tensors that left. With "off" it is 1; how much leaves before
  backward wants it depends on the drive.
- `exact_step_time_ratio`, `step_time_ratio`: step time with "exact", and with "auto", over that with "off"; with the suffix
  `_interval` 95% intervals of these medians.
- `bits_equal`: losses and final weights of all three.
- `exact_codec_seconds`: of a step, on the host; on a GPU to launch kernels.
- `overflowed_share`: of the bytes that left, those that the codec could not hold.

`benchmarks.exact` also trains under `plan`, which then decides what leaves, and in the frameworks, on two ranks, with `codec`
"off" and "exact" (`spill`).
"""

from __future__ import annotations

import hashlib
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

import ssdtrain
from benchmarks.common import finish, hardware, parser
from benchmarks.models import DTYPES, gpt
from benchmarks.two_nodes.ranks import Ranks
from examples.support.data import batches, corpus
from ssdtrain.tools.bench.ratios import interval

__all__ = ["SPILLED", "in_framework", "measure", "spill"]

CODECS = ("off", "exact", "auto")
WARM_UP = 3  # steps that count for the bits alone
PLAN = {"max_slowdown": 1.0}
"""As little memory as twice the time allows."""
PLANNED_STEPS = 12
"""Number of steps from which plans are made, at most."""
_MODEL = "--bf16 --layers 2 --hidden 512 --heads 2 --sequence 64 --batch 8"
SPILLED = {
    "zero2": f"-m benchmarks.two_nodes.deepspeed_zero2 {_MODEL}",
    "megatron": f"-m tests.megatron.cpu -m benchmarks.two_nodes.megatron_gpt {_MODEL} --tensor 2 --sequence-parallel "
    "--data {cache}",
}
"""Trainings of two ranks in DeepSpeed and megatron-core. Two runs begin at once, so each has its own cache of data. Sequences are
short: attention of megatron-core that is not fused saves its probabilities in float32, of which the codec leaves 0.883."""


class Run:
    """A model that trains with one codec."""

    def __init__(
        self,
        codec: str,
        directory: Path,
        device: torch.device,
        dtype: torch.dtype,
        shape: dict[str, int],
        plan: dict[str, Any] | None,
    ) -> None:
        torch.manual_seed(0)
        self.model = gpt(**shape).to(device, dtype)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        config: dict[str, Any] = {"offload": {"directories": str(directory / codec)}}
        if codec != "auto":  # the default
            config["offload"]["codec"] = codec
        if plan is None:
            config["offload"]["amount"] = "all"
        else:
            config["plan"] = plan
        self.runtime = ssdtrain.attach(self.model, {**config, "report": {"interval": 0}})
        self.device = device
        self.losses: list[float] = []
        self.seconds: list[float] = []

    def step(self, tokens: torch.Tensor, targets: torch.Tensor) -> None:
        tokens, targets = tokens.to(self.device), targets.to(self.device)
        self._synchronize()
        began = time.perf_counter()
        self.optimizer.zero_grad()
        loss = self.model(tokens, targets)
        loss.backward()
        self.optimizer.step()
        self._synchronize()
        self.seconds.append(time.perf_counter() - began)
        self.losses.append(loss.item())

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    @property
    def bits(self) -> tuple[Any, ...]:
        weights = [p.detach().cpu().view(torch.uint8).flatten() for p in self.model.parameters()]
        return self.losses, hashlib.sha1(torch.cat(weights).numpy().tobytes()).hexdigest()


def measure(
    directory: Path,
    device: torch.device,
    dtype: torch.dtype,
    shape: dict[str, int],
    batch: int,
    steps: int,
    *,
    plan: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the figures of `steps` steps; with a section `plan`, of those after it was made."""
    source = batches(corpus(None), microbatch=batch, sequence=shape["sequence"], seed=7)
    with ExitStack() as closing:
        runs = {codec: Run(codec, directory, device, dtype, shape, plan) for codec in CODECS}
        for run in runs.values():
            closing.callback(run.runtime.close)
        first = WARM_UP + (0 if plan is None else PLANNED_STEPS)
        for number in range(first + steps):
            tokens, targets = next(source)
            order = CODECS if number % 2 else CODECS[::-1]
            for codec in order:
                runs[codec].step(tokens, targets)
        found = {codec: run.runtime.statistics() for codec, run in runs.items()}

        off, exact = found["off"], found["exact"]
        return {
            "drive_bytes_ratio": exact.store.ssd_bytes_written / exact.offload.offloaded_bytes,
            **_ratio("step_time_ratio", runs["auto"].seconds[first:], runs["off"].seconds[first:]),
            **_ratio("exact_step_time_ratio", runs["exact"].seconds[first:], runs["off"].seconds[first:]),
            "auto_encodes": found["auto"].offload.encoded_bytes > 0,
            "bits_equal": all(run.bits == runs["off"].bits for run in runs.values()),
            "overflowed_share": exact.offload.overflowed_bytes / exact.offload.offloaded_bytes,
            "step_seconds": statistics.median(runs["off"].seconds[first:]),
            "offloaded_bytes": off.offload.offloaded_bytes // (first + steps),
            "exact_codec_seconds": exact.offload.codec_seconds / (first + steps),
        }


def _ratio(name: str, ours: Sequence[float], theirs: Sequence[float]) -> dict[str, Any]:
    """Return the median of the ratios of neighbouring steps, and its 95% interval."""
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    return {name: statistics.median(ratios), f"{name}_interval": interval(ratios)}


def spill(chosen: Any) -> dict[str, Any]:
    """Bytes of `codec: "exact"`, and step times of it and of "auto": the worst, and by row; whether bits were equal in all."""
    rows: dict[str, dict[str, Any]] = {}
    shape = {"layers": 4, "hidden": 256, "heads": 4, "sequence": 256}
    for name, plan in (("all", None), ("plan", PLAN)):
        with tempfile.TemporaryDirectory(prefix="ssdtrain-") as directory:
            rows[name] = measure(
                Path(directory), torch.device("cpu"), torch.bfloat16, shape, 8, chosen.spill_steps, plan=plan
            )
        print(f"{name}: {rows[name]}", flush=True)
    for name, command in SPILLED.items():
        rows[name] = in_framework(command, chosen.spill_steps)
        print(f"{name}: {rows[name]}", flush=True)
    return {
        "drive_bytes_ratio": max(row["drive_bytes_ratio"] for row in rows.values()),
        **{
            ratio: max(row[ratio] for row in rows.values() if ratio in row)
            for ratio in ("step_time_ratio", "exact_step_time_ratio")
        },
        "bits_equal_from_drives": all(row["bits_equal"] for row in rows.values()),
        "spill": rows,
    }


def in_framework(command: str, steps: int) -> dict[str, Any]:
    """Return the figures of two runs that are alive at once, and take steps in turn."""
    seconds: dict[str, list[float]] = {"off": [], "exact": []}
    found: dict[str, list[dict[str, Any]]] = {}
    with ExitStack() as closing:
        directory = closing.enter_context(tempfile.TemporaryDirectory(prefix="ssdtrain-"))
        runs = {}
        for codec in seconds:
            section = {
                "directories": f"{directory}/{codec}", "amount": "all", "codec": codec
            }  # fmt: skip
            words = command.format(cache=f"{directory}/{codec}-data").split()
            whole = [*words, "--offload", json.dumps(section)]
            runs[codec] = closing.enter_context(Ranks(whole, 2, timeout=1800))
        for number in range(WARM_UP + steps):
            for codec in seconds if number % 2 else reversed(seconds):
                answers = runs[codec].tell("step")
                seconds[codec].append(max(answer["seconds"] for answer in answers))
        for codec, run in runs.items():
            found[codec] = run.finish()
    exact = found["exact"]
    offloaded = sum(rank["offloaded_bytes"] for rank in exact)
    return {
        "drive_bytes_ratio": sum(rank["written_bytes"] for rank in exact) / offloaded,
        **_ratio("exact_step_time_ratio", seconds["exact"][WARM_UP:], seconds["off"][WARM_UP:]),
        "bits_equal": all(
            [rank[key] for rank in exact] == [rank[key] for rank in found["off"]]
            for key in ("sha256", "losses")
        ),
        "overflowed_share": sum(rank["overflowed_bytes"] for rank in exact) / offloaded,
        "step_seconds": statistics.median(seconds["off"][WARM_UP:]),
        "offloaded_bytes": offloaded // (WARM_UP + steps),
    }


def main() -> None:
    arguments = parser(__doc__ or "")
    arguments.add_argument("--device", default="cpu")
    arguments.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="of weights and activations")
    arguments.add_argument("--steps", type=int, default=30, help="that are timed, of each run")
    for name, value in {"layers": 4, "hidden": 256, "heads": 4, "sequence": 256, "batch": 8}.items():
        arguments.add_argument(f"--{name}", type=int, default=value)
    chosen = arguments.parse_args()
    shape = {name: getattr(chosen, name) for name in ("layers", "hidden", "heads", "sequence")}
    device = torch.device(chosen.device)
    with tempfile.TemporaryDirectory(prefix="ssdtrain-") as directory:
        figures = measure(Path(directory), device, DTYPES[chosen.dtype], shape, chosen.batch, chosen.steps)
        figures |= {**hardware(directory), "torch": torch.__version__}
    finish(figures, chosen.json)


if __name__ == "__main__":
    main()
