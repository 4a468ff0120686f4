"""Training with encoded activations: does the loss stay where it was, and how many bytes reach the drive?

    python -m benchmarks.spill_codec --json

The demo's GPT is trained on the demo's text several times from the same seed and batches: without offloading, with plain
offloading, with the lossless codec (losses must be equal to the bit), with int8; and without offloading from other seeds, whose
spread is the noise that the int8 run is compared with.
"""

from __future__ import annotations

import statistics
import tempfile
from typing import Any

import torch

from benchmarks.common import finish, hardware, parser
from benchmarks.models import gpt
from examples.support.data import batches, corpus
from ssdtrain.config import load_config
from ssdtrain.runtime import Runtime

TAIL = 20  # last steps whose mean loss is compared


def train(
    arguments: Any, seed: int, codec: str | None, offload: bool, directory: str
) -> tuple[list[str], float, int, int]:
    """Losses of all steps as hex, the mean of the last ones, bytes saved and bytes written to the drive."""
    torch.manual_seed(seed)
    model = gpt(layers=arguments.layers, hidden=arguments.hidden, heads=4, sequence=arguments.sequence)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    source = batches(corpus(None), microbatch=arguments.batch, sequence=arguments.sequence, seed=7)
    section: dict[str, Any] = {"directories": directory, "amount": "all", "min_bytes": "64KiB"}
    if codec is not None:
        section["codec"] = codec
    runtime = Runtime(load_config({"offload": section} if offload else {}), logs=False)
    runtime.register(model)
    losses: list[float] = []
    for _ in range(arguments.steps):
        tokens, targets = next(source)
        optimizer.zero_grad()
        with runtime.step():
            with runtime.forward():
                loss = model(tokens, targets)
            with runtime.backward():
                loss.backward()
        optimizer.step()
        losses.append(loss.item())
    found = runtime.statistics()
    saved = found.offload.saved_bytes if found is not None else 0
    written = found.store.ssd_bytes_written if found is not None else 0
    runtime.close()
    return [loss.hex() for loss in losses], statistics.mean(losses[-TAIL:]), saved, written


def main() -> None:
    arguments = parser(__doc__ or "")
    arguments.add_argument("--steps", type=int, default=200, help="of each run")
    arguments.add_argument("--layers", type=int, default=4, help="blocks")
    arguments.add_argument("--hidden", type=int, default=128, help="width")
    arguments.add_argument("--sequence", type=int, default=128, help="tokens")
    arguments.add_argument("--batch", type=int, default=8, help="sequences")
    arguments.add_argument("--seeds", type=int, default=4, help="plain runs, for the noise")
    chosen = arguments.parse_args()
    with tempfile.TemporaryDirectory(prefix="ssdtrain-") as directory:
        plain = [train(chosen, seed, None, False, directory) for seed in range(chosen.seeds)]
        offloaded = train(chosen, 0, None, True, directory)
        lossless = train(chosen, 0, "lossless", True, directory)
        int8 = train(chosen, 0, "int8", True, directory)
        figures = {
            "steps": chosen.steps,
            "loss_plain": plain[0][1],
            "offload_equal": offloaded[0] == plain[0][0],
            "lossless_equal": lossless[0] == plain[0][0],
            "lossless_written_ratio": lossless[3] / offloaded[3],
            "loss_int8": int8[1],
            "int8_written_ratio": int8[3] / offloaded[3],
            "int8_loss_difference": int8[1] - plain[0][1],
            "seed_noise": statistics.stdev(run[1] for run in plain),
            **hardware(directory),
            "torch": torch.__version__,
        }
    finish(figures, chosen.json)


if __name__ == "__main__":
    main()
