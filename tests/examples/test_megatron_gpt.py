"""The trainer on megatron-core and its demo, as commands."""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.processes import ROOT, start

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


def train(world: int, directory: Path, *flags: str) -> list[tuple[str, str]]:
    """(loss, gradient norm) of every iteration, as printed."""
    command = ["-W", "ignore", "-m", "tests.megatron.cpu", "-m", "examples.megatron_gpt", *TINY]
    output = start(world, [*command, "--data-cache-path", str(directory), *flags])
    assert ("saved for backward/step: " in output) == any(flag.startswith("--ssdtrain") for flag in flags)
    return re.findall(r"lm loss: (\S+) \| grad norm: (\S+)", output)


@pytest.mark.parametrize(
    ("world", "flags"),
    [
        (1, []),
        pytest.param(
            4,
            shlex.split(
                "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --sequence-parallel --bf16 "
                "--num-virtual-stages-per-pipeline-rank 2 --use-distributed-optimizer"
            ),
            marks=pytest.mark.long,
        ),
    ],
    ids=["one process", "four"],
)
def test_training_with_the_flags_prints_the_losses_of_training_without(
    tmp_path: Path, world: int, flags: list[str]
) -> None:
    flags = [*flags, "--train-iters", "4"]
    expected = train(world, tmp_path, *flags)
    assert len(expected) == 4 and len(set(expected)) == 4
    offload = [
        "--ssdtrain-offload-directories",
        str(tmp_path / "ssd"),
        "--ssdtrain-offload-min-bytes",
        "1KiB",
    ]
    assert train(world, tmp_path, *flags, *offload) == expected
    assert {path.suffix for path in tmp_path.glob("library_document.*")} == {".bin", ".idx"}
    assert list((tmp_path / "ssd").iterdir()) == []


@pytest.mark.long
def test_two_ranks_that_compress_print_what_they_sent(tmp_path: Path) -> None:
    flags = shlex.split("--tensor-model-parallel-size 2 --sequence-parallel --train-iters 3")
    command = ["-W", "ignore", "-m", "tests.megatron.cpu", "-m", "examples.megatron_gpt", *TINY, *flags]
    command += ["--data-cache-path", str(tmp_path)]
    sizes = {}
    for codec in ("raw", "int8"):
        asked = ["--ssdtrain-comm-tp", codec, "--ssdtrain-comm-min-bytes", "0", "--no-ssdtrain-comm-probe"]
        output = start(2, [*command, *asked])
        assert "saved for backward/step: " not in output
        sizes[codec] = re.findall(
            r"tp sent/step: ([\d.]+) MiB \| tp without compression/step: ([\d.]+) MiB", output
        )
    assert len(sizes["raw"]) == len(sizes["int8"]) == 3
    assert all(wire == raw for wire, raw in sizes["raw"])
    assert all(float(wire) < 0.3 * float(raw) for wire, raw in sizes["int8"])


@pytest.mark.long
def test_the_demo_ends_with_a_table_and_equal_bits(tmp_path: Path) -> None:
    flags = [*TINY, "--train-iters", "5", "--out", str(tmp_path), "--data-cache-path", str(tmp_path / "data")]
    small = ["--ssdtrain-offload-min-bytes", "1KiB", "--ssdtrain-offload-in-flight", "1MiB"]
    done = subprocess.run(
        [sys.executable, "-m", "tests.megatron.demo", *flags, *small, "--ssdtrain-offload-prefetch", "64KiB"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert done.stdout.count("equal to the bit") == 2
    runs = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert [run["name"] for run in runs] == ["keep", "recompute", "ssdtrain"]
    assert "activation memory, peak" in done.stdout
    assert runs[1]["activation_peak_bytes"] < runs[0]["activation_peak_bytes"]
    assert runs[2]["bytes_written"] > 2**20
