"""The layouts that the collectives are tested in, and the configs they are tested with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tests.megatron.rows import DEALLOCATE, FULL, INTERLEAVED, MOE, Row
from tests.support.processes import DEVICE

DIMENSIONS = ("dp", "dp_gather", "tp", "pp_forward", "pp_backward", "ep", "zero_gather")

RAW = dict.fromkeys(DIMENSIONS, "raw")
WAYS: dict[str, dict[str, Any]] = {
    "raw": RAW,
    "all too small": {"preset": "balanced", "min_bytes": "1MiB"},
    "raw, offload": RAW,
    "exact": {"preset": "exact"},
    "mzhybrid": {"preset": "paper-mzhybrid", "dp": "off", "dp_gather": "off"},
    "safe": {"preset": "safe", "feedback": "int8"},
    "balanced": {"preset": "balanced"},
    "paper-zhybrid": {"preset": "paper-zhybrid", "feedback": "fp32"},
}
"""By name: the comm section, beside what opens it to small messages."""

EXACT = ("raw", "raw, offload", "exact", "mzhybrid", "all too small")
"""Ways that change no bit."""


QUICK = ("tp2 sp", "dp2, distributed optimizer, overlap both, bf16") if DEVICE == "cuda" else ()
"""`make test-cuda` trains these, `make test` none: one start of Megatron's ranks is a tenth of its time. "more ways" are the
ways of a slow row that `make test-long` tries."""


SLOW = (
    "tp2 sp",
    "pp2 vp2, deallocate",
    "dp2",
    "dp2, distributed optimizer",
    "dp2, distributed optimizer, overlap both, bf16",
    "tp2 sp pp2 ep2, bf16",
    "tp2 sp dp2, distributed optimizer, bf16",
)
"""`make test-all` trains these; what the others' layout is combined with, other rows have too: `make test-long` trains them."""

CASES = (
    "skipped",
    "overflow",
    "checkpoint",
    "loss_scale",
    "transformer_engine",
    "compressed_inputs",
    "second_model",
    "probabilities",
    "rejected",
)
"""Names of the functions of `comm_cases.py`."""


@dataclass(frozen=True)
class CommRow:
    """A layout and the ways it is run in."""

    row: Row
    ways: tuple[str, ...]
    dimensions: tuple[str, ...]
    """Traffic that this layout has on every rank; a last stage sends no activations, and a first one no gradients."""
    steps: int = 3


OVERLAP = {"use_distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True}

ROWS = [
    CommRow(Row("tp2", 2, tp=2), ("raw", "balanced"), ("tp",)),
    CommRow(
        Row("tp2 sp", 2, tp=2, options={"sequence_parallel": True}),
        ("raw", "raw, offload", "exact", "balanced"),
        ("tp",),
    ),
    CommRow(
        Row("tp2 sp, more ways", 2, tp=2, options={"sequence_parallel": True}), ("paper-zhybrid",), ("tp",)
    ),
    CommRow(
        Row("tp2, dropout, recompute full", 2, tp=2, dropout=0.1, options=FULL),
        ("raw", "raw, offload"),
        ("tp",),
    ),
    CommRow(
        Row("pp2, deallocate", 2, pp=2, options=DEALLOCATE),
        ("raw", "exact", "balanced"),
        ("pp_forward", "pp_backward"),
    ),
    CommRow(
        Row("pp2 vp2, deallocate", 2, pp=2, vp=2, options={**INTERLEAVED, **DEALLOCATE}),
        ("raw", "exact", "balanced"),
        ("pp_forward", "pp_backward"),
    ),
    CommRow(
        Row("pp2 vp2, deallocate, more ways", 2, pp=2, vp=2, options={**INTERLEAVED, **DEALLOCATE}),
        ("raw, offload", "all too small", "mzhybrid", "paper-zhybrid"),
        ("pp_forward", "pp_backward"),
    ),
    CommRow(
        Row(
            "pp2, lengths exchanged",
            2,
            pp=2,
            options={"variable_seq_lengths": True, "moe_token_dispatcher_type": "alltoall"},
        ),
        ("exact", "balanced"),
        ("pp_forward", "pp_backward"),
    ),
    CommRow(Row("dp2", 2), ("raw", "balanced"), ("dp",), steps=5),
    CommRow(Row("dp2, more ways", 2), ("safe", "paper-zhybrid"), ("dp",), steps=5),
    CommRow(
        Row("dp2, overlap", 2, ddp={"overlap_grad_reduce": True, "bucket_size": 20_000}),
        ("raw", "safe"),
        ("dp",),
        steps=5,
    ),
    CommRow(Row("dp2, average", 2, ddp={"average_in_collective": True}), ("safe",), ("dp",), steps=5),
    CommRow(
        Row("dp2, distributed optimizer", 2, ddp={"use_distributed_optimizer": True}),
        ("raw", "exact", "safe"),
        ("dp", "zero_gather"),
        steps=5,
    ),
    CommRow(
        Row("dp2, distributed optimizer, bf16", 2, bf16=True, ddp={"use_distributed_optimizer": True}),
        ("raw", "exact", "balanced"),
        ("dp", "zero_gather"),
        steps=5,
    ),
    CommRow(
        Row(
            "dp2, distributed optimizer, overlap both, bf16",
            2,
            bf16=True,
            ddp={**OVERLAP, "bucket_size": 20_000},
        ),
        ("raw, offload", "exact", "balanced"),
        ("dp", "zero_gather"),
        steps=5,
    ),
    CommRow(
        Row(
            "dp2, distributed optimizer, overlap both, bf16, more ways",
            2,
            bf16=True,
            ddp={**OVERLAP, "bucket_size": 20_000},
        ),
        ("raw", "paper-zhybrid"),
        ("dp", "zero_gather"),
        steps=5,
    ),
    CommRow(
        Row("moe ep2", 2, ep=2, model="moe", options=MOE),
        ("all too small", "exact", "balanced"),
        ("ep", "dp"),
    ),
    CommRow(
        Row("moe ep2, more ways", 2, ep=2, model="moe", options=MOE), ("raw", "paper-zhybrid"), ("ep", "dp")
    ),
    # Sets a global of Megatron's for good, and comes last.
    CommRow(
        Row(
            "dp2, distributed optimizer, overlap, fp32 accumulation, bf16",
            2,
            bf16=True,
            ddp={**OVERLAP, "reduce_scatter_with_fp32_accumulation": True},
        ),
        ("raw", "balanced"),
        ("dp", "zero_gather"),
    ),
    CommRow(Row("tp2 pp2", 4, tp=2, pp=2), ("raw", "balanced"), ("tp", "pp_forward", "pp_backward")),
    CommRow(
        Row(
            "tp2 sp pp2 ep2, bf16",
            4,
            tp=2,
            pp=2,
            ep=2,
            model="moe",
            bf16=True,
            options={**MOE, "sequence_parallel": True},
        ),
        ("exact",),
        ("tp", "pp_forward", "pp_backward", "ep"),
    ),
    CommRow(
        Row(
            "tp2 sp dp2, distributed optimizer, bf16",
            4,
            tp=2,
            bf16=True,
            options={"sequence_parallel": True},
            ddp=OVERLAP,
        ),
        ("raw", "balanced"),
        ("tp", "dp", "zero_gather"),
        steps=5,
    ),
    CommRow(
        Row("dp2 pp2, distributed optimizer, bf16", 4, pp=2, bf16=True, ddp=OVERLAP),
        ("raw", "paper-zhybrid"),
        ("dp", "zero_gather", "pp_forward", "pp_backward"),
        steps=5,
    ),
]
