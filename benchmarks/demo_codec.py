"""The demo itself with encoded activations: bits, loss and bytes on the drive.

    python -m benchmarks.demo_codec --json

`ssdtrain demo`'s model, text and DeepSpeed engine, one process per run: keeping activations from several seeds, whose spread is
the noise, and with SSDTrain from the first seed: as it is, with codec lossless (losses and weights must be equal to the bit)
and with int8.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.common import finish, hardware, parser
from examples.deepspeed_gpt.settings import Settings
from examples.deepspeed_gpt.train import train
from examples.support.result import RunResult

CODECS = ("none", "lossless", "int8")


@dataclass(frozen=True)
class CodecSettings(Settings):
    """The demo's settings with the one key more."""

    codec: str = "none"

    def deepspeed_config(self, mode: str, *, bf16: bool) -> dict[str, Any]:
        config = super().deepspeed_config(mode, bf16=bf16)
        if mode == "ssdtrain" and self.codec != "none":
            config["ssdtrain"]["offload"]["codec"] = self.codec
        return config


def run(settings: CodecSettings, mode: str, directory: Path) -> RunResult:
    """One run in a process of its own: DeepSpeed's process group and patches are the process's."""
    report = directory / "result.json"
    command = [sys.executable, "-m", "benchmarks.demo_codec", "--one", mode, settings.to_json(), str(report)]
    subprocess.run(command, check=True)
    return RunResult.from_json(json.loads(report.read_text()))


def one(mode: str, settings: str, report: str) -> None:
    with open("/dev/null", "w") as lines:
        result = train(CodecSettings.from_json(settings), mode, lines)
    Path(report).write_text(json.dumps(result.to_json()))


def figures(chosen: argparse.Namespace, directory: Path) -> dict[str, Any]:
    base = CodecSettings(
        layers=chosen.layers,
        hidden=chosen.hidden,
        sequence=chosen.sequence,
        microbatch=chosen.microbatch,
        steps=chosen.steps,
        directory=directory,
    )
    keep = [run(replace(base, seed=base.seed + i), "keep", directory) for i in range(chosen.seeds)]
    coded = {codec: run(replace(base, codec=codec), "ssdtrain", directory) for codec in CODECS}
    plain = coded["none"]
    return {
        "parameters": plain.about["parameters"],
        "steps": chosen.steps,
        "layers": chosen.layers,
        "hidden": chosen.hidden,
        "sequence": chosen.sequence,
        "microbatch": chosen.microbatch,
        "loss keep": keep[0].final_loss,
        "offload equal to keep": plain.differs_from(keep[0]) is None,
        "lossless equal to keep": coded["lossless"].differs_from(keep[0]) is None,
        "lossless bytes written over plain": coded["lossless"].bytes_written / plain.bytes_written,
        "loss int8": coded["int8"].final_loss,
        "int8 loss difference": coded["int8"].final_loss - keep[0].final_loss,
        "int8 bytes written over plain": coded["int8"].bytes_written / plain.bytes_written,
        "plain bytes written per step": plain.bytes_written / plain.steps,
        "seeds": chosen.seeds,
        "seed noise": statistics.stdev(result.final_loss for result in keep),
    }


def main() -> None:
    if sys.argv[1:2] == ["--one"]:
        one(*sys.argv[2:])
        return
    shape = Settings()
    arguments = parser(__doc__.splitlines()[0] if __doc__ else "")
    arguments.add_argument("--steps", type=int, default=30, help="of each run")
    arguments.add_argument("--seeds", type=int, default=3, help="runs without SSDTrain, for the noise")
    for name in ("layers", "hidden", "sequence", "microbatch"):
        arguments.add_argument(f"--{name}", type=int, default=getattr(shape, name))
    chosen = arguments.parse_args()
    with tempfile.TemporaryDirectory(prefix="ssdtrain-") as directory:
        found = figures(chosen, Path(directory))
        finish({"benchmark": "demo_codec", **found, **hardware(directory)}, chosen.json)


if __name__ == "__main__":
    main()
