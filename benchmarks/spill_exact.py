"""The codec `exact` on the way to drives: bytes, step time and bits, of a GPT in bfloat16 whose saved tensors all leave.

    python -m benchmarks.spill_exact --json
    python -m benchmarks.spill_exact --device cuda --hidden 4096 --sequence 4096 --batch 1 --json

Three copies of one model take the same steps, one with `offload.codec: "off"`, one with "exact" and one with "auto", in turn, so
that what else the machine does meets all three. Step times are medians of the ratios of neighbouring steps. On a CPU encoding
takes cores from training, and "auto" is no codec; on a GPU it is "exact" where a measurement at start shows that to be free.
Many CPUs multiply bfloat16 slowly, which hides what a codec costs: times of `--dtype float32` say more there.

- `drive_bytes_ratio`: bytes written with "exact" over those of the tensors that left. With "off" it is 1; how much leaves before
  backward wants it depends on the drive.
- `exact_step_time_ratio`, `step_time_ratio`: step time with "exact", and with the default, "auto", over that with "off".
- `bits_equal`: losses and final weights of all three.
- `exact_codec_seconds`: of a step, on the host; on a GPU to launch kernels.
- `overflowed_share`: of the bytes that left, those that the codec could not hold.
"""

from __future__ import annotations

import hashlib
import statistics
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import finish, hardware, parser
from benchmarks.models import DTYPES, gpt
from examples.support.data import batches, corpus
from ssdtrain.config import load_config
from ssdtrain.runtime import Runtime

__all__ = ["measure"]

CODECS = ("off", "exact", "auto")
WARM_UP = 3  # steps that count for the bits alone


class Run:
    """A model that trains with one codec."""

    def __init__(
        self, codec: str, directory: Path, device: torch.device, dtype: torch.dtype, shape: dict[str, int]
    ) -> None:
        torch.manual_seed(0)
        self.model = gpt(**shape).to(device, dtype)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        section = {"directories": str(directory / codec), "amount": "all", "codec": codec}
        self.runtime = Runtime(load_config({"offload": section}), device, logs=False)
        self.runtime.register(self.model)
        self.device = device
        self.losses: list[float] = []
        self.seconds: list[float] = []

    def step(self, tokens: torch.Tensor, targets: torch.Tensor) -> None:
        tokens, targets = tokens.to(self.device), targets.to(self.device)
        self._synchronize()
        began = time.perf_counter()
        self.optimizer.zero_grad()
        with self.runtime.step():
            with self.runtime.forward():
                loss = self.model(tokens, targets)
            with self.runtime.backward():
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
    directory: Path, device: torch.device, dtype: torch.dtype, shape: dict[str, int], batch: int, steps: int
) -> dict[str, Any]:
    """Return the figures of `steps` steps."""
    source = batches(corpus(None), microbatch=batch, sequence=shape["sequence"], seed=7)
    with ExitStack() as closing:
        runs = {codec: Run(codec, directory, device, dtype, shape) for codec in CODECS}
        for run in runs.values():
            closing.callback(run.runtime.close)
        for number in range(WARM_UP + steps):
            tokens, targets = next(source)
            order = CODECS if number % 2 else CODECS[::-1]
            for codec in order:
                runs[codec].step(tokens, targets)
        found = {codec: run.runtime.statistics() for codec, run in runs.items()}

        def ratio(codec: str) -> float:
            pairs = zip(runs[codec].seconds[WARM_UP:], runs["off"].seconds[WARM_UP:], strict=True)
            return statistics.median(ours / theirs for ours, theirs in pairs)

        off, exact = found["off"], found["exact"]
        return {
            "drive_bytes_ratio": exact.store.ssd_bytes_written / exact.offload.offloaded_bytes,
            "step_time_ratio": ratio("auto"),
            "exact_step_time_ratio": ratio("exact"),
            "auto_encodes": found["auto"].offload.encoded_bytes > 0,
            "bits_equal": all(run.bits == runs["off"].bits for run in runs.values()),
            "overflowed_share": exact.offload.overflowed_bytes / exact.offload.offloaded_bytes,
            "step_seconds": statistics.median(runs["off"].seconds[WARM_UP:]),
            "offloaded_bytes": off.offload.offloaded_bytes // (WARM_UP + steps),
            "exact_codec_seconds": exact.offload.codec_seconds / (WARM_UP + steps),
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
