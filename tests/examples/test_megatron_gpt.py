"""The trainer on megatron-core and its demo: bits, bytes and what they print. Ranks are forked, and several runs share them."""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from benchmarks.two_nodes.ports import free_port
from tests.support.processes import ROOT, forked, ran

pytestmark = [
    pytest.mark.slow,
    pytest.mark.distributed,
    pytest.mark.skipif(
        importlib.util.find_spec("megatron.core") is None, reason="megatron-core is not installed"
    ),
]

TINY = shlex.split(
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --micro-batch-size 2 "
    "--global-batch-size 8 --distributed-backend gloo --log-interval 1"
)
TP_PP = shlex.split("--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2")
SMALL_OFFLOAD = shlex.split("--ssdtrain-offload-min-bytes 1KiB")


class Start(NamedTuple):
    """A run of a program, and what the last rank printed in it."""

    program: str
    flags: Sequence[str]


def outputs(world: int, directory: Path, runs: dict[str, Start]) -> dict[str, str]:
    """Run all on the same `world` ranks, one after the other; by name what the last rank printed."""
    words = [
        (name, run.program, free_port(), [*TINY, "--data-cache-path", str(directory / "data"), *run.flags])
        for name, run in runs.items()
    ]
    printed = forked(world, "tests.examples.megatron_ranks", json.dumps(words))
    parts = re.split(r"^=== (.*)$", printed.split(f"--- rank {world - 1},")[1], flags=re.M)[1:]
    found = dict(zip(parts[::2], parts[1::2], strict=True))
    assert list(found) == list(runs)
    return found


def losses(output: str, *, offloaded: bool) -> list[tuple[str, str]]:
    """(loss, gradient norm) of every iteration."""
    assert ("saved for backward/step: " in output) == offloaded
    return re.findall(r"lm loss: (\S+) \| grad norm: (\S+)", output)


def offload(directory: Path) -> list[str]:
    return ["--ssdtrain-offload-directories", str(directory), *SMALL_OFFLOAD]


def check_demo(directory: Path, printed: str) -> None:
    assert printed.count("equal to the bit") == 2
    runs = [json.loads(line) for line in (directory / "results.jsonl").read_text().splitlines()]
    assert [run["name"] for run in runs] == ["keep", "recompute", "ssdtrain"]
    assert "activation memory, peak" in printed
    assert runs[1]["activation_peak_bytes"] < runs[0]["activation_peak_bytes"]
    assert runs[2]["bytes_written"] > 2**20


def test_one_process_prints_the_losses_of_training_without(tmp_path: Path) -> None:
    flags = ["--train-iters", "4"]
    runs = {
        "plain": Start("trainer", flags),
        "offload": Start("trainer", [*flags, *offload(tmp_path / "ssd")]),
    }
    printed = outputs(1, tmp_path, runs)
    expected = losses(printed["plain"], offloaded=False)
    assert len(expected) == 4 and len(set(expected)) == 4
    assert losses(printed["offload"], offloaded=True) == expected
    assert {path.suffix for path in (tmp_path / "data").glob("library_document.*")} == {".bin", ".idx"}
    assert list((tmp_path / "ssd").iterdir()) == []


def test_two_by_two_processes_train_and_the_demo_compares(tmp_path: Path) -> None:
    """Tensor parallel 2 and pipeline parallel 2: the trainer with interleaved chunks without and with, and the whole demo."""
    more = shlex.split(
        "--sequence-parallel --bf16 --num-virtual-stages-per-pipeline-rank 2 --use-distributed-optimizer"
    )
    flags = [*TP_PP, *more, "--train-iters", "2"]
    small = shlex.split("--ssdtrain-offload-in-flight 1MiB --ssdtrain-offload-prefetch 64KiB")
    demo = [*TP_PP, *SMALL_OFFLOAD, *small, "--train-iters", "4", "--out", str(tmp_path)]
    runs = {
        "plain": Start("trainer", flags),
        "offload": Start("trainer", [*flags, *offload(tmp_path / "ssd")]),
        "demo": Start("demo", demo),
    }
    printed = outputs(4, tmp_path, runs)
    expected = losses(printed["plain"], offloaded=False)
    assert len(expected) == 2 and len(set(expected)) == 2
    assert losses(printed["offload"], offloaded=True) == expected
    check_demo(tmp_path, printed["demo"])


def test_two_ranks_that_compress_print_what_they_sent(tmp_path: Path) -> None:
    flags = shlex.split("--tensor-model-parallel-size 2 --sequence-parallel --train-iters 2")
    flags += shlex.split("--ssdtrain-comm-min-bytes 0 --no-ssdtrain-comm-probe --ssdtrain-comm-tp")
    printed = outputs(2, tmp_path, {codec: Start("trainer", [*flags, codec]) for codec in ("raw", "int8")})
    sizes = {}
    for codec, output in printed.items():
        assert "saved for backward/step: " not in output
        sizes[codec] = re.findall(
            r"tp sent/step: ([\d.]+) MiB \| tp without compression/step: ([\d.]+) MiB", output
        )
    assert len(sizes["raw"]) == len(sizes["int8"]) == 2
    assert all(wire == raw for wire, raw in sizes["raw"])
    assert all(float(wire) < 0.3 * float(raw) for wire, raw in sizes["int8"])


@pytest.mark.long
def test_the_launcher_of_the_demo_starts_four_processes(tmp_path: Path) -> None:
    """What `make demo-megatron` starts, with torch's launcher."""
    flags = [*TINY, "--train-iters", "4", "--out", str(tmp_path), "--data-cache-path", str(tmp_path / "data")]
    small = [*SMALL_OFFLOAD, "--ssdtrain-offload-in-flight", "1MiB", "--ssdtrain-offload-prefetch", "64KiB"]
    done = ran([sys.executable, "-m", "tests.megatron.demo", *flags, *small], cwd=ROOT, timeout=280)
    check_demo(tmp_path, done.stdout)
