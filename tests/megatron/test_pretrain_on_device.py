"""Megatron-LM's own pretrain_gpt.py on its CUDA code, with its default layers, those of Transformer Engine, and with its own
(`make test-cuda`).

Needs a checkout (MEGATRON_LM_DIR), as `test_megatron_lm.py` does.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from tests.megatron.test_megatron_lm import ARRANGED, CHECKOUT, LAUNCHER, losses, script
from tests.support.processes import DEVICE, start
from tests.support.tiers import on_devices

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.skipif(
        not CHECKOUT or DEVICE != "cuda",
        reason="MEGATRON_LM_DIR names no checkout of Megatron-LM, or SSDTRAIN_TEST_DEVICE is not cuda",
    ),
]

FLAGS = shlex.split("""
    --num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64
    --micro-batch-size 2 --global-batch-size 8 --train-iters 3 --lr 1e-3 --lr-decay-style constant --seed 7
    --attention-dropout 0.1 --hidden-dropout 0.1 --mock-data --tokenizer-type NullTokenizer --vocab-size 4200
    --log-interval 1 --eval-iters 1 --eval-interval 3 --ckpt-format torch --bf16 --use-distributed-optimizer
    --overlap-grad-reduce --overlap-param-gather
""")
LAYOUTS = {
    "tensor, sequence and pipeline parallelism": (
        4,
        "--tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 2",
    ),
    "context parallelism": (2, "--context-parallel-size 2 --attention-dropout 0"),
    # The one for a single GPU without Transformer Engine and apex.
    "one rank, layers of Megatron-core": (
        1,
        "--transformer-impl local --no-gradient-accumulation-fusion --no-persist-layer-norm --no-masked-softmax-fusion",
    ),
}


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    "layout", [pytest.param(name, marks=on_devices(world)) for name, (world, _) in LAYOUTS.items()]
)
def test_losses_and_norms_are_those_without_offload(layout: str, tmp_path: Path) -> None:
    world, parallel = LAYOUTS[layout]
    flags = [*FLAGS, *shlex.split(parallel)]
    offload = ["--ssdtrain-offload-directories", str(tmp_path), "--ssdtrain-offload-min-bytes", "1KiB"]
    offload += ["--ssdtrain-offload-amount", "all"]
    expected = losses(start(world, [*ARRANGED, script(), *flags], timeout=550))
    output = start(world, [*ARRANGED, *LAUNCHER, script(), *flags, *offload], timeout=550)
    assert losses(output) == expected and len(set(expected.values())) == 3
    moved = re.findall(r"\[ssdtrain\] iteration .* offloaded/step: ([\d.]+) MiB", output)
    assert len(moved) == 3 and all(float(amount) > 0 for amount in moved)
    assert list(tmp_path.iterdir()) == []
