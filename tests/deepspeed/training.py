"""Trains one row in one mode, as a user would. Runs in a worker process."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.utils.checkpoint
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.module_inject.layers import set_autotp_mode
from deepspeed.utils import groups

import ssdtrain
import ssdtrain_ds
from tests.deepspeed import models, pipelines
from tests.deepspeed.counting import Counter
from tests.deepspeed.rows import Row
from tests.support.ended import ended

__all__ = ["CHECKPOINTS", "backend", "config_of", "run"]

CHECKPOINTS: dict[str, Callable[..., Any]] = {
    "deepspeed": deepspeed.checkpointing.checkpoint,
    "deepspeed-non-reentrant": deepspeed.checkpointing.non_reentrant_checkpoint,
    "torch": functools.partial(torch.utils.checkpoint.checkpoint, use_reentrant=False),
    "ssdtrain": ssdtrain.checkpoint,
    "ssdtrain_ds": ssdtrain_ds.checkpoint,
}

BASE = {"train_micro_batch_size_per_gpu": models.BATCH, "steps_per_print": 10**9, "gradient_clipping": 1.0}


SMALL = {"min_bytes": 0, "probe": False, "warmup_steps": 0}
COMM: dict[str, dict[str, Any]] = {
    "exact": {**SMALL, "preset": "exact"},
    "compressed": {
        **SMALL,
        "preset": "balanced",
        "exclude": "none",
        "dp": "int4:hadamard",
        "tp": "int8",
        "ep": "int8",
    },
}
"""Modes that change the collectives."""


def config_of(row: Row, directory: Path | None, mode: str = "offloaded") -> dict[str, Any]:
    """DeepSpeed's config of `row`; with the block if there is a directory."""
    config: dict[str, Any] = {**BASE, **row.config}
    if mode in COMM:
        config["ssdtrain"] = {"comm": COMM[mode]}
        return config
    if directory is not None:
        config["ssdtrain"] = {
            "offload": {
                "directories": str(directory / "{rank}"),
                "amount": "all",
                "min_bytes": models.MIN_BYTES,
                "threads": 1,
            }
        }
        if row.plan is not None:
            config["ssdtrain"]["plan"] = row.plan
        if not row.tiers:
            del config["ssdtrain"]["offload"]
    return config


def backend() -> str:
    """The collectives' backend of DeepSpeed's device."""
    return "gloo" if _on_cpu() else "nccl"


def _on_cpu() -> bool:
    return bool(get_accelerator().device_name() == "cpu")


def sha1(tensors: list[torch.Tensor]) -> str:
    found = hashlib.sha1()
    for tensor in tensors:
        found.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8).cpu().numpy().tobytes())
    return found.hexdigest()


def parameters_of(engine: Any) -> list[torch.Tensor]:
    """All parameters in full, on every rank."""
    own = list(engine.module.parameters())
    partitioned = [p for p in own if hasattr(p, "ds_id")]
    with deepspeed.zero.GatheredParameters(partitioned) if partitioned else nullcontext():
        return [p.detach().clone() for p in own]


def run(row: Row, mode: str, directory: Path) -> dict[str, Any]:
    """Train `row`.

    Args:
        mode: "plain": without the block; "counted": the same with plain hooks that count; "offloaded": with the block;
            "resumed-with": with the block from a checkpoint of a run without it; "resumed-without": the other way round.

    Returns:
        sha1 of losses and of final parameters, and figures.
    """
    with_block = mode in ("offloaded", "resumed-with", *COMM)
    config = config_of(row, directory if with_block else None, mode)
    counter = Counter() if mode == "counted" else None
    torch.manual_seed(0)
    asked = row.activation_checkpointing
    if asked is not None and _on_cpu() and mode != "offloaded" and not asked.get("partition_activations"):
        asked = {**asked, "cpu_checkpointing": False}  # DeepSpeed's own loses its inputs on CPU machines
    if asked is not None:
        mpu = pipelines.TensorParallelUnit() if row.kind == "tensor" else None
        deepspeed.checkpointing.configure(mpu, deepspeed_config={**config, "activation_checkpointing": asked})
    losses: list[torch.Tensor] = []
    saved = None
    if mode.startswith("resumed"):
        saved = directory / "saved"
        engine, losses = _train_pipeline(
            row, config_of(row, None if with_block else directory), None, steps=1
        )
        engine.save_checkpoint(str(saved))
        engine.destroy()
        _forget()
    engine, more = _train(row, config, counter, saved)
    losses += more
    if asked is not None:
        deepspeed.checkpointing.configure(None)
        deepspeed.checkpointing.deepspeed_checkpointing_enabled = False  # as before, for the rows that follow
    result: dict[str, Any] = {"losses": sha1(losses), "parameters": sha1(parameters_of(engine))}
    if counter is not None:
        result["counted_bytes"] = counter.nbytes
    runtime = ssdtrain_ds.runtime_of(engine)
    assert (runtime is not None) == with_block
    if runtime is not None:
        found = ended(runtime.statistics)
        result["offload"] = {
            key: value for key, value in vars(found.offload).items() if isinstance(value, int | float)
        }
        result["live_slots"] = found.store.live_slots
        values = found.values()
        result["plans"] = values.get("auto/plans", 0) + values.get("plan/plans", 0)
        result["recomputed"] = values.get("plan/recomputed_blocks", 0)
        result["comm"] = {dimension: vars(figures) for dimension, figures in found.comm.items()}
        if row.tied:
            result["tied"] = sha1([weight for weight, _ in engine.module.get_tied_weights_and_groups()])
        if runtime.comm is not None:
            result["finite"] = all(bool(torch.isfinite(loss)) for loss in losses)
            result["residual_bytes"] = (
                runtime.comm.feedback.nbytes if runtime.comm.feedback is not None else 0
            )
    engine.destroy()
    _forget()
    return result


def _train(
    row: Row, config: dict[str, Any], counter: Counter | None, saved: Path | None
) -> tuple[Any, list[torch.Tensor]]:
    if row.kind in ("gpt", "tensor", "llama"):
        return _train_gpt(row, config, counter)
    return _train_pipeline(row, config, counter, saved=saved)


def _llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    class Llama(LlamaForCausalLM):  # type: ignore[misc]
        def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            return super().forward(input_ids=ids, labels=labels).loss

    size = {"hidden_size": models.HIDDEN, "intermediate_size": 2 * models.HIDDEN, "num_hidden_layers": 2}
    heads = {"num_attention_heads": models.HEADS, "num_key_value_heads": models.HEADS}
    model = Llama(LlamaConfig(vocab_size=models.VOCABULARY, **size, **heads))
    return deepspeed.tp_model_init(model, tp_size=2, dtype=torch.float32)


def _train_gpt(row: Row, config: dict[str, Any], counter: Counter | None) -> tuple[Any, list[torch.Tensor]]:
    with deepspeed.zero.Init(config_dict_or_path=config) if row.zero_init else nullcontext():
        block = (
            pipelines.tensor_parallel_block(None, 2, marked=False) if row.kind == "tensor" else models.Block
        )
        model = (
            _llama()
            if row.kind == "llama"
            else models.GPT(CHECKPOINTS.get(row.checkpoint or ""), row.dropout, block)
        )
    if counter is not None and row.checkpoint is not None:
        counter.see_inputs_of(list(model.blocks), part=2 if row.kind == "tensor" else 1)
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3), config=config
    )
    if row.compile is not None:
        engine.compile(backend=row.compile)
    losses = []
    count = row.steps * int(config.get("gradient_accumulation_steps", 1))
    for ids, labels in models.batches(1 + dist.get_rank(engine.data_parallel_group), count):
        with counter.forward() if counter is not None else nullcontext():
            loss = engine(ids, labels)
        engine.backward(loss)
        engine.step()
        losses.append(loss.detach().clone())
    return engine, losses


def _train_pipeline(
    row: Row,
    config: dict[str, Any],
    counter: Counter | None,
    *,
    steps: int | None = None,
    saved: Path | None = None,
) -> tuple[Any, list[torch.Tensor]]:
    """Args: steps: fewer than the row's; saved: a checkpoint to continue from."""
    model = pipelines.MODELS[row.kind](row)
    pipelines.count_forwards(counter)
    if counter is not None and row.checkpoint is not None:
        counter.see_inputs_of([layer for layer in model.forward_funcs if isinstance(layer, models.Block)])
    try:
        trainable = [p for p in model.parameters() if p.requires_grad]
        engine, *_ = deepspeed.initialize(
            model=model, optimizer=torch.optim.AdamW(trainable, lr=1e-3), config=config
        )
        microbatches = config["gradient_accumulation_steps"]
        data = models.batches(1 + engine.grid.get_data_parallel_id(), row.steps * microbatches)
        losses = []
        done = 0
        if saved is not None:
            path, _ = engine.load_checkpoint(str(saved))
            assert path is not None
            done = engine.global_steps
            for _ in range(done * microbatches):
                next(data)
        for step in range(done, row.steps if steps is None else steps):
            losses.append(engine.train_batch(data_iter=data).detach().clone())
            if step == 0 and counter is None:  # evaluation between two steps
                held_out = models.batches(9, microbatches)
                losses.append(torch.as_tensor(engine.eval_batch(held_out)).detach().clone())
    finally:
        pipelines.count_forwards(None)
    return engine, losses


def _forget() -> None:
    """What an engine leaves in DeepSpeed and torch for whatever engine comes next: a pipeline its grid, AutoTP its groups."""
    groups.mpu = None
    groups.mesh_device = None
    for name in ("_TENSOR_MODEL_PARALLEL_GROUP", "_DATA_PARALLEL_GROUP", "_MODEL_PARALLEL_GROUP"):
        setattr(groups, name, None)
    set_autotp_mode(training=False)
    torch.compiler.reset()
