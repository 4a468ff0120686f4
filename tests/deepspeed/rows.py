"""The configurations that are trained with and without the block. One process group runs all rows of its size."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

BF16 = {"bf16": {"enabled": True}}


@dataclass(frozen=True)
class Row:
    """One configuration.

    Attributes:
        config: DeepSpeed's, beside what all rows have.
        kind: "gpt" (an ordinary engine), "llama" (Hugging Face's, cut by AutoTP), "tensor" (two ranks of tensor
            parallelism by hand), "pipeline", "dualpipev", "tensor_pipeline" (pipeline x tensor x data).
        checkpoint: see `training.CHECKPOINTS`.
        tied: the pipeline's first and last layer share a weight.
        activation_checkpointing: what `deepspeed.checkpointing.configure` is called with; None: not called.
        resumes: also saved and continued, with the block on one side only.
        compressed: with several ranks also trained with compressed collectives; not where the row differs from another in what
            is recomputed only.
        needs: what not every DeepSpeed has; see `upstream.LACKS`.
        counted: the bytes that leave can be counted by plain hooks.
        plan: the section in the block, where there is one; then there are steps enough for a plan.
        tiers: the block has an offload section.
    """

    name: str
    ranks: int
    config: dict[str, Any] = field(default_factory=dict)
    kind: str = "gpt"
    checkpoint: str | None = None
    dropout: float = 0.0
    zero_init: bool = False
    compile: str | None = None
    stages: int = 2
    tied: bool = False
    steps: int = 3
    counted: bool = True
    activation_checkpointing: dict[str, Any] | None = None
    needs: tuple[str, ...] = ()
    resumes: bool = False
    compressed: bool = True
    plan: Any = None
    tiers: bool = True

    @property
    def recomputes(self) -> bool:
        """Its plan has nothing but recomputation to choose."""
        return self.plan is not None and not self.tiers


def zero(stage: int, **more: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0, **more}}


def _zero_rows() -> list[Row]:
    rows = []
    for stage in range(4):
        for name, precision in (("fp32", {}), ("bf16", BF16)):
            rows.append(Row(f"zero{stage}-{name}", 1, {**zero(stage), **precision}))
            accumulate = {"gradient_accumulation_steps": 2}
            rows.append(Row(f"zero{stage}-{name}-accumulate", 2, {**zero(stage), **precision, **accumulate}))
    overlap = {"overlap_comm": True, "reduce_bucket_size": 5000}
    rows += [Row(f"zero{stage}-overlap", 2, zero(stage, **overlap)) for stage in (1, 2, 3)]
    rows.append(Row("zero3-init", 2, zero(3), zero_init=True))
    offloaded = {"zero_force_ds_cpu_optimizer": False}
    for stage in (1, 2, 3):
        config = {**zero(stage, offload_optimizer={"device": "cpu"}), **offloaded}
        rows.append(Row(f"zero{stage}-optimizer-on-cpu", 2, config))
    rows.append(Row("dropout", 1, zero(1), dropout=0.2))
    # Of six steps the first two or three are skipped.
    fp16 = {"fp16": {"enabled": True, "initial_scale_power": 20, "hysteresis": 1}}
    rows += [Row(f"zero{stage}-fp16", 2, {**zero(stage), **fp16}, steps=6) for stage in (2, 3)]
    return rows


def _pipeline_rows() -> list[Row]:
    accumulate = {"gradient_accumulation_steps": 4}
    zero1 = {**zero(1), **BF16, **accumulate}
    return [
        Row("pipeline1", 1, accumulate, kind="pipeline", stages=1),
        Row("pipeline2", 2, accumulate, kind="pipeline", resumes=True),
        Row("pipeline2-tied", 2, accumulate, kind="pipeline", tied=True),
        Row("pipeline2-zero1-bf16", 2, zero1, kind="pipeline"),
        Row("dualpipev2", 2, accumulate, kind="dualpipev", needs=("dualpipev",)),
        Row("pipeline4", 4, {"gradient_accumulation_steps": 6}, kind="pipeline", stages=4),
        Row("pipeline2-data2", 4, accumulate, kind="pipeline"),
        Row("pipeline2-data2-zero1-bf16-tied", 4, zero1, kind="pipeline", tied=True, resumes=True),
        Row("pipeline2-tensor2", 4, accumulate, kind="tensor_pipeline"),
        Row("pipeline2-tensor2-data2", 8, {**zero(1), **accumulate}, kind="tensor_pipeline", steps=2),
    ]


def _checkpoint_rows() -> list[Row]:
    rows = []
    for function in ("deepspeed", "deepspeed-non-reentrant", "torch", "ssdtrain", "ssdtrain_ds"):
        rows.append(Row(f"checkpoint-{function}", 1, zero(1), checkpoint=function, dropout=0.1))
        accumulate = {"gradient_accumulation_steps": 4}
        rows.append(
            Row(
                f"pipeline2-checkpoint-{function}",
                2,
                accumulate,
                kind="pipeline",
                checkpoint=function,
                compressed=False,
            )
        )
        if function != "deepspeed-non-reentrant":  # fails upstream
            config = {**zero(3), **BF16}
            rows.append(Row(f"zero3-checkpoint-{function}", 2, config, checkpoint=function, compressed=False))
    for function in ("deepspeed", "deepspeed-non-reentrant"):
        for key in ("cpu_checkpointing", "partition_activations"):
            name = f"checkpoint-{function}-{key}"
            broken = function == "deepspeed-non-reentrant" and key == "partition_activations"
            rows.append(
                Row(
                    name,
                    1,
                    checkpoint=function,
                    dropout=0.1,
                    activation_checkpointing={key: True},
                    needs=("non_reentrant_partitions",) if broken else (),
                )
            )
    profiled = {"profile": True, "synchronize_checkpoint_boundary": True}
    rows.append(Row("checkpoint-profiled", 1, checkpoint="deepspeed", activation_checkpointing=profiled))
    partitioned = {
        "partition_activations": True,
        "contiguous_memory_optimization": True,
        "number_checkpoints": 3,
    }
    name = "checkpoint-contiguous"
    rows.append(Row(name, 1, checkpoint="deepspeed", activation_checkpointing=partitioned))
    both = {"partition_activations": True, "cpu_checkpointing": True}
    for name, asked in (("partitioned", {"partition_activations": True}), ("partitioned-on-cpu", both)):
        rows.append(
            Row(f"tensor2-{name}", 2, kind="tensor", checkpoint="deepspeed", activation_checkpointing=asked)
        )
    return rows


TENSOR_PARALLEL = {
    "tensor_parallel": {
        "autotp_size": 2,
        "partition_config": {
            "use_default_specs": False,
            "layer_specs": [
                {"patterns": [r".*\.(q|k|v|up)_proj\.weight$"], "partition_type": "column"},
                {"patterns": [r".*\.(o|down)_proj\.weight$"], "partition_type": "row"},
            ],
        },
    }
}


SPECS = ("partition_config",)


def _other_rows() -> list[Row]:
    rows = []
    for stage in range(4):
        needs = (*SPECS, "autotp_zero3") if stage == 3 else SPECS
        rows.append(Row(f"autotp-zero{stage}", 2, {**zero(stage), **TENSOR_PARALLEL}, needs=needs))
    rows.append(
        Row("autotp-llama-zero1", 2, {**zero(1), "tensor_parallel": {"autotp_size": 2}}, kind="llama")
    )
    rows.append(Row("autotp-data2-zero1-bf16", 4, {**zero(1), **TENSOR_PARALLEL, **BF16}, needs=SPECS))
    # A compiled graph saves what it likes: there are no plain hooks to count it by.
    for stage in (0, 1, 3):
        rows.append(Row(f"compiled-zero{stage}", 1, zero(stage), compile="aot_eager", counted=False))
    rows.append(Row("compiled-inductor", 1, zero(1), compile="inductor", counted=False))
    return rows


LEAST = {"objective": "memory", "max_slowdown": 0.99}
"""A plan that recomputes whatever may be."""


UNWRITTEN = 14
"""Steps after which there is a plan in any case: before, one with tiers needs a store that has ended, and a slow drive may have
none."""


def _plan_rows() -> list[Row]:
    pipeline = {"gradient_accumulation_steps": 4}
    recompute: dict[str, Any] = {
        "steps": 8,
        "dropout": 0.2,
        "counted": False,
        "compressed": False,
        "plan": LEAST,
        "tiers": False,
    }
    limited = {**recompute, "plan": {"device_limit": "450KiB"}}
    return [
        Row("zero1-plan-recompute", 1, {**zero(1), **BF16}, **recompute),
        Row("zero1-plan-limit", 2, zero(1, overlap_comm=True), **limited),
        Row("zero2-plan-recompute-accumulate", 2, {**zero(2), "gradient_accumulation_steps": 2}, **recompute),
        Row("zero3-plan-recompute", 2, {**zero(3), **BF16}, **recompute),
        Row("zero3-plan-limit-accumulate", 2, {**zero(3), "gradient_accumulation_steps": 2}, **limited),
        Row("pipeline2-plan-recompute", 2, pipeline, kind="pipeline", **recompute),
        Row("pipeline2-plan-limit-tied", 2, pipeline, kind="pipeline", tied=True, **limited),
        Row("zero3-plan", 2, zero(3), steps=UNWRITTEN, counted=False, compressed=False, plan="auto"),
        Row(
            "pipeline2-plan",
            2,
            pipeline,
            kind="pipeline",
            steps=UNWRITTEN,
            counted=False,
            compressed=False,
            plan="auto",
        ),
    ]


QUICK = ("zero3-bf16-accumulate", "pipeline2", "autotp-zero1", "zero3-plan-recompute")
"""One row of each kind of layout: these are trained by `make test`."""

SLOW = (
    "zero0-fp32",
    "zero0-bf16",
    "zero1-fp32",
    "zero2-bf16",
    "zero3-fp32",
    "zero3-bf16",
    "zero1-overlap",
    "dropout",
    "pipeline1",
    "dualpipev2",
    "pipeline2-tensor2",
    "checkpoint-deepspeed",
    "zero3-checkpoint-deepspeed",
    "checkpoint-deepspeed-non-reentrant",
    "checkpoint-torch",
    "checkpoint-ssdtrain",
    "checkpoint-ssdtrain_ds",
    "checkpoint-deepspeed-non-reentrant-partition_activations",
    "zero1-plan-recompute",
    "zero1-plan-limit",
    "pipeline2-plan-recompute",
    "zero3-plan",
    "compiled-zero1",
)
"""`make test-all` trains these; what the others' layout is combined with, other rows have too: `make test-long` trains them."""

ROWS: list[Row] = [*_zero_rows(), *_pipeline_rows(), *_checkpoint_rows(), *_plan_rows(), *_other_rows()]


def rows_for(ranks: int) -> list[Row]:
    return [row for row in ROWS if row.ranks == ranks]
