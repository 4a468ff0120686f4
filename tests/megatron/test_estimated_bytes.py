"""Bytes that `ssdtrain estimate` says for a command line, against those that layers of Transformer Engine save.

On a device (`make test-cuda`); `arranged/test_estimated_bytes.py` has megatron-core's own layers.
"""

from __future__ import annotations

import functools
import json

import pytest

from ssdtrain.tools.whatif.hardware import find_gpu
from ssdtrain.tools.whatif.megatron_command import read
from tests.support.processes import DEVICE, start

HIDDEN, HEADS, SEQUENCE, BATCH = 256, 4, 128, 2
SBH = SEQUENCE * BATCH * HIDDEN
SHAPE = f"--num-layers 2 --hidden-size {HIDDEN} --num-attention-heads {HEADS} --seq-length {SEQUENCE} --bf16"
LLAMA = "--normalization RMSNorm --swiglu --ffn-hidden-size 640 --hidden-dropout 0 --attention-dropout 0"


def predicted(flags: str) -> int:
    words = f"pretrain_gpt.py {SHAPE} --micro-batch-size {BATCH} {flags}".split()
    return read(words, {}, find_gpu("h100")).job.model.saved_bytes(BATCH)


@functools.cache
def saved() -> dict[str, int]:
    """Bytes that a layer of each kind saves."""
    output = start(1, ["-m", "tests.megatron.saved_bytes"])
    found: dict[str, int] = json.loads(next(line for line in output.splitlines() if line.startswith("{")))
    return found


pytestmark = pytest.mark.skipif(DEVICE != "cuda", reason="Transformer Engine needs a device: make test-cuda")


def test_a_gpt_layer_saves_34_sbh_as_estimated() -> None:
    assert predicted("") == pytest.approx(saved()["gpt"], rel=0.001)
    assert predicted("") == pytest.approx(34 * SBH, rel=0.005)


@pytest.mark.parametrize(
    ("kind", "flags"),
    [
        ("llama", LLAMA),
        ("llama, grouped queries", f"{LLAMA} --group-query-attention --num-query-groups 2"),
        ("llama, rotary embeddings", LLAMA),
    ],
)
def test_a_llama_layer_saves_what_is_estimated(kind: str, flags: str) -> None:
    # Sines and cosines in bf16, of queries and of keys.
    turns = 2 * 2 * 2 * SEQUENCE * HIDDEN // HEADS if "rotary" in kind else 0
    assert predicted(flags) + turns == pytest.approx(saved()[kind], rel=0.001)


def test_of_experts_more_is_estimated_than_a_layer_saves() -> None:
    """megatron-core multiplies by a token's probabilities before the last matrix, and need not save what comes out."""
    flags = f"{LLAMA} --num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 512"
    assert 1 < predicted(flags) / saved()["llama, experts"] < 1.1
