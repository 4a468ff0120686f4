"""A few steps of a tiny model of megatron-core in any layout, with the models, schedules and optimizers it ships.

Import it after `cpu.arrange()`, with megatron imported and `cpu.finish()` called.
"""

from __future__ import annotations

import dataclasses
import gc
import hashlib
import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.enums import ModelType
from megatron.core.models.bert import bert_layer_specs
from megatron.core.models.bert.bert_model import BertModel
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.models.T5 import t5_spec
from megatron.core.models.T5.t5_model import T5Model
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import get_batch_on_this_cp_rank
from torch.distributed import distributed_c10d

from tests.megatron.cpu import DEVICE, ON_GPU
from tests.megatron.rows import Row

VOCABULARY, LENGTH, SEQUENCES, HIDDEN, HEADS, LAYERS = 128, 64, 2, 64, 4, 4
STEPS = 3

BY_TRANSFORMER_ENGINE = ON_GPU and importlib.util.find_spec("transformer_engine") is not None
"""Whether layers are those that Megatron has by default on a GPU: of Transformer Engine, where it is installed."""

gpt_layer_spec = (
    get_gpt_layer_with_transformer_engine_spec if BY_TRANSFORMER_ENGINE else get_gpt_layer_local_spec
)
"""Makes the layers of GPT. Transformer Engine, the default of Megatron's command line, needs a device."""


@contextmanager
def layout(row: Row) -> Iterator[None]:
    """The groups of one row, and none afterwards. torch.distributed stays as it is."""
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=row.tp,
        pipeline_model_parallel_size=row.pp,
        virtual_pipeline_model_parallel_size=row.vp,
        expert_model_parallel_size=row.ep,
        expert_tensor_parallel_size=row.etp,
        context_parallel_size=row.cp,
    )
    try:
        yield
    finally:
        parallel_state.destroy_model_parallel()
    _destroy_groups()


def _destroy_groups() -> None:
    """All but the one of all ranks. Megatron only forgets them, and each has three threads, of which thousands gather."""
    dist.barrier()
    for group in list(distributed_c10d._world.pg_map):
        if group is not dist.group.WORLD:
            dist.destroy_process_group(group)
    gc.collect()


def known(cls: Any, **options: Any) -> Any:
    """An instance of a dataclass of Megatron's; versions differ in what they know."""
    names = {field.name for field in dataclasses.fields(cls)}
    unknown = {name for name in options if name not in names}
    assert not unknown, f"this {cls.__name__} lacks {unknown}"
    return cls(**options)


class Trainer:
    """Model chunks, optimizer and schedule of one row on this rank."""

    def __init__(self, row: Row, **options: Any) -> None:
        self.row = row
        model_parallel_cuda_manual_seed(1234)
        torch.manual_seed(1234 + 100 * parallel_state.get_pipeline_model_parallel_rank())
        kind = torch.bfloat16 if row.bf16 else torch.float32
        self.config = known(
            TransformerConfig,
            **{
                "num_layers": LAYERS,
                "hidden_size": HIDDEN,
                "num_attention_heads": HEADS,
                "tensor_model_parallel_size": row.tp,
                "pipeline_model_parallel_size": row.pp,
                "virtual_pipeline_model_parallel_size": row.vp,
                "expert_model_parallel_size": row.ep,
                "expert_tensor_parallel_size": row.etp,
                "context_parallel_size": row.cp,
                "pipeline_dtype": kind,
                "params_dtype": kind,
                "bf16": row.bf16,
                "hidden_dropout": row.dropout,
                "attention_dropout": row.dropout,
                "bias_dropout_fusion": False,
                "bias_activation_fusion": False,
                "masked_softmax_fusion": False,
                "gradient_accumulation_fusion": False,
                "persist_layer_norm": False,
                "apply_rope_fusion": False,
                "use_cpu_initialization": True,
                **row.options,
                **options,
            },
        )
        stages = range(row.vp or 1)
        chunks = [self._model(stage if row.vp else None) for stage in stages]
        for name in row.frozen:
            for chunk in chunks:
                chunk.get_submodule(name).requires_grad_(False)
        if row.bf16:
            chunks = [Float16Module(self.config, chunk) for chunk in chunks]
        ddp = known(
            DistributedDataParallelConfig,
            grad_reduce_in_fp32=row.bf16,
            check_for_nan_in_grad=False,
            **row.ddp,
        )
        self.chunks = [
            DistributedDataParallel(
                config=self.config, ddp_config=ddp, module=chunk, disable_bucketing=index > 0
            )
            for index, chunk in enumerate(chunks)
        ]
        for chunk in self.chunks:
            chunk.broadcast_params()
        self.optimizer = get_megatron_optimizer(
            known(
                OptimizerConfig,
                optimizer="adam",
                lr=1e-3,
                clip_grad=1.0,
                bf16=row.bf16,
                params_dtype=kind,
                use_distributed_optimizer=ddp.use_distributed_optimizer,
                overlap_param_gather=ddp.overlap_param_gather,
            ),
            self.chunks,
        )
        self.config.finalize_model_grads_func = finalize_model_grads
        self.config.grad_scale_func = self.optimizer.scale_loss
        if ddp.overlap_grad_reduce:
            self.config.no_sync_func = self._one([chunk.no_sync for chunk in self.chunks])
        if ddp.overlap_param_gather:
            self.config.param_sync_func = self._one([chunk.start_param_sync for chunk in self.chunks])

    def _one(self, items: list[Any]) -> Any:
        return items if len(items) > 1 else items[0]

    def _model(self, stage: int | None) -> torch.nn.Module:
        place = {"ignore_virtual": False, "vp_stage": stage}
        common: dict[str, Any] = {
            "vocab_size": VOCABULARY,
            "max_sequence_length": LENGTH,
            "pre_process": parallel_state.is_pipeline_first_stage(**place),
            "post_process": parallel_state.is_pipeline_last_stage(**place),
            "share_embeddings_and_output_weights": True,
        }
        if self.row.model == "bert":
            model = BertModel(
                config=self.config,
                num_tokentypes=2,
                transformer_layer_spec=(
                    bert_layer_specs.get_bert_layer_with_transformer_engine_spec()
                    if BY_TRANSFORMER_ENGINE
                    else bert_layer_specs.bert_layer_local_spec
                ),
                **common,
            )
        elif self.row.model == "t5":
            kind = "with_transformer_engine" if BY_TRANSFORMER_ENGINE else "with_local"
            model = T5Model(
                config=self.config,
                encoder_config=self.config,
                transformer_encoder_layer_spec=getattr(t5_spec, f"get_t5_encoder_{kind}_block_spec")(LAYERS),
                transformer_decoder_layer_spec=getattr(t5_spec, f"get_t5_decoder_{kind}_block_spec")(LAYERS),
                **common,
            )
        else:
            spec = gpt_layer_spec(num_experts=self.config.num_moe_experts, moe_grouped_gemm=False)
            model = GPTModel(config=self.config, transformer_layer_spec=spec, vp_stage=stage, **common)
        model.model_type = ModelType.encoder_or_decoder
        return model.to(DEVICE)

    def step(self, number: int, *, forward_only: bool = False) -> tuple[str | None, str]:
        """One step; (loss where this rank has it, gradient norm), every bit of them."""
        if not forward_only:
            for chunk in self.chunks:
                chunk.zero_grad_buffer()
            self.optimizer.zero_grad()
        losses = get_forward_backward_func()(
            forward_step_func=partial(_forward_step, self.row.model),
            data_iterator=self._one([_batches(self.row, number) for _ in self.chunks]),
            model=self._one(self.chunks),
            num_microbatches=self.row.microbatches,
            seq_length=LENGTH,
            micro_batch_size=SEQUENCES,
            decoder_seq_length=LENGTH,
            forward_only=forward_only,
        )
        norm = 0.0 if forward_only else float(self.optimizer.step()[1])
        loss = torch.stack([entry["loss"] for entry in losses]).sum() if losses else None
        return (float(loss).hex() if loss is not None else None), norm.hex()

    def weights(self) -> str:
        """A digest of every parameter on this rank."""
        digest = hashlib.sha256()
        for chunk in self.chunks:
            for _, parameter in sorted(chunk.named_parameters()):
                digest.update(parameter.detach().contiguous().view(torch.uint8).cpu().numpy().tobytes())
        return digest.hexdigest()


def _batches(row: Row, step: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    rank = dist.get_rank(parallel_state.get_data_parallel_group())
    for microbatch in range(row.microbatches):
        generator = torch.Generator().manual_seed(1000 * step + 10 * microbatch + rank)
        tokens = (
            torch.randint(0, VOCABULARY, (SEQUENCES, LENGTH + 1), generator=generator)
            .sort(dim=1)[0]
            .to(DEVICE)
        )
        yield tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def _forward_step(
    kind: str, data: Iterator[tuple[torch.Tensor, torch.Tensor]], model: torch.nn.Module
) -> Any:
    tokens, labels = next(data)
    positions = torch.arange(LENGTH, device=DEVICE).expand(SEQUENCES, LENGTH)
    # This rank's part of the sequences, where context parallelism divides them.
    tokens, labels, positions = get_batch_on_this_cp_rank(
        {"tokens": tokens, "labels": labels, "positions": positions}
    ).values()
    if kind == "bert":
        output = model(tokens, torch.ones_like(tokens), torch.zeros_like(tokens), lm_labels=labels)
    elif kind == "t5":
        seen = torch.zeros(SEQUENCES, 1, 1, LENGTH, dtype=torch.bool, device=DEVICE)
        if (
            BY_TRANSFORMER_ENGINE
        ):  # padding of queries and of keys; the decoder's own mask is causal by its spec
            output = model(tokens, labels, seen, None, (seen, seen), lm_labels=tokens)
        else:
            seen = seen.expand(-1, -1, LENGTH, -1)
            output = model(tokens, labels, seen, _later(), seen, lm_labels=tokens)
    else:
        output = model(tokens, positions, _later(), labels=labels)
    return output, _loss


def _later() -> torch.Tensor:
    return (
        torch.ones(LENGTH, LENGTH, dtype=torch.bool, device=DEVICE)
        .triu(1)
        .expand(SEQUENCES, 1, LENGTH, LENGTH)
    )


def _loss(output: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    losses, binary = output if isinstance(output, tuple) else (output, None)
    loss = losses.float().mean()
    if binary is not None:
        loss = loss + torch.nn.functional.cross_entropy(
            binary.float(), torch.zeros(SEQUENCES, dtype=torch.long, device=DEVICE)
        )
    return loss, {"loss": loss.detach().clone()}
