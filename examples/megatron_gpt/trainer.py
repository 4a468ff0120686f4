"""A GPT of megatron-core with its schedule and optimizer: flags in, steps out."""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import logging
import os
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.enums import ModelType
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig

from examples.megatron_gpt.options import parser
from examples.megatron_gpt.text import ByteTokenizer, library_text
from ssdtrain_megatron.attachment import Attachment, attach
from ssdtrain_megatron.flags import config_from_args
from ssdtrain_megatron.metrics import GatheredMetrics

__all__ = ["Trainer", "initialize", "main", "training_set"]

Batches = Iterator[dict[str, torch.Tensor]]


def layer_spec(experts: int | None = None) -> ModuleSpec:
    """Return Transformer Engine's layer where it is installed, the local one elsewhere."""
    if importlib.util.find_spec("transformer_engine") is not None:
        return get_gpt_layer_with_transformer_engine_spec(num_experts=experts)
    return get_gpt_layer_local_spec(num_experts=experts)


def initialize(options: argparse.Namespace) -> None:
    """torch.distributed from the launcher's environment, and Megatron's groups."""
    backend = options.distributed_backend
    if backend == "nccl":
        if not torch.cuda.is_available():
            raise SystemExit(
                "examples.megatron_gpt needs a GPU, as megatron-core does; without one: make demo-megatron"
            )
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    dist.init_process_group(backend)
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=options.tensor_model_parallel_size,
        pipeline_model_parallel_size=options.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=options.num_virtual_stages_per_pipeline_rank,
        expert_model_parallel_size=options.expert_model_parallel_size,
        expert_tensor_parallel_size=1,
    )


def training_set(options: argparse.Namespace) -> GPTDataset:
    """Megatron's GPTDataset over --data-path, or over text that rank 0 builds first."""
    cache = Path(options.data_cache_path)
    prefix = options.data_path
    if prefix is None:
        if dist.get_rank() == 0:
            library_text(cache)
        dist.barrier()
        prefix = library_text(cache)
    config = GPTDatasetConfig(
        random_seed=options.seed,
        sequence_length=options.seq_length,
        blend=([prefix], None),
        split="98,1,1",
        path_to_cache=str(cache / "indices"),
        tokenizer=ByteTokenizer(),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=True,
    )
    samples = options.train_iters * options.global_batch_size
    train, _, _ = BlendedMegatronDatasetBuilder(GPTDataset, [samples, 0, 0], lambda: True, config).build()
    return train


class Trainer:
    """Model chunks, optimizer and schedule on this rank, made from flags. Two of the same flags start out equal.

    Args:
        options: of `options.parser`.
        dataset: of `training_set`.
        changes: options of TransformerConfig that replace what the flags say.
    """

    def __init__(self, options: argparse.Namespace, dataset: GPTDataset, **changes: Any) -> None:
        self.options = options
        self._dataset = dataset
        replicas = parallel_state.get_data_parallel_world_size()
        self.microbatches, rest = divmod(options.global_batch_size, options.micro_batch_size * replicas)
        if rest:
            raise ValueError(
                f"--global-batch-size {options.global_batch_size} is no multiple of --micro-batch-size "
                f"{options.micro_batch_size} times {replicas} data-parallel ranks"
            )
        model_parallel_cuda_manual_seed(options.seed)
        torch.manual_seed(options.seed + 100 * parallel_state.get_pipeline_model_parallel_rank())
        self.device = torch.device(torch.cuda.current_device())
        self.kind = torch.bfloat16 if options.bf16 else torch.float32
        self.config = TransformerConfig(**{**self._config(), **changes})
        stages = range(options.num_virtual_stages_per_pipeline_rank or 1)
        self.models = [self._model(stage) for stage in stages]
        wrapped = (
            [Float16Module(self.config, model) for model in self.models] if options.bf16 else self.models
        )
        data_parallel = DistributedDataParallelConfig(
            use_distributed_optimizer=options.use_distributed_optimizer,
            overlap_grad_reduce=options.overlap_grad_reduce,
            overlap_param_gather=options.overlap_param_gather,
            grad_reduce_in_fp32=options.bf16,
        )
        self.chunks = [
            DistributedDataParallel(
                config=self.config, ddp_config=data_parallel, module=module, disable_bucketing=index > 0
            )
            for index, module in enumerate(wrapped)
        ]
        for chunk in self.chunks:
            chunk.broadcast_params()
        self.optimizer = self._optimizer()
        self.config.finalize_model_grads_func = finalize_model_grads
        self.config.grad_scale_func = self.optimizer.scale_loss
        if options.overlap_grad_reduce:
            self.config.no_sync_func = self._as_schedules_take([chunk.no_sync for chunk in self.chunks])
        if options.overlap_param_gather:
            self.config.param_sync_func = self._as_schedules_take(
                [chunk.start_param_sync for chunk in self.chunks]
            )
        self._taken = 0

    def _config(self) -> dict[str, Any]:
        options = self.options
        virtual = options.num_virtual_stages_per_pipeline_rank
        named = (
            "num_layers hidden_size num_attention_heads attention_dropout hidden_dropout tensor_model_parallel_size "
            "pipeline_model_parallel_size sequence_parallel bf16 recompute_granularity recompute_method recompute_num_layers"
        )
        experts = {
            "num_moe_experts": options.num_experts,
            "expert_model_parallel_size": options.expert_model_parallel_size,
            "expert_tensor_parallel_size": 1,
            "moe_token_dispatcher_type": "alltoall",
            "add_bias_linear": False,
        }
        return {
            **{name: getattr(options, name) for name in named.split()},
            **(experts if options.num_experts is not None else {}),
            "virtual_pipeline_model_parallel_size": virtual,
            "pipeline_dtype": self.kind,
            "params_dtype": self.kind,
            "deallocate_pipeline_outputs": True,
            "overlap_p2p_comm": virtual is not None,
            "batch_p2p_comm": virtual is None,
            "use_cpu_initialization": True,
            "gradient_accumulation_fusion": False,
            "bias_dropout_fusion": False,
            "bias_activation_fusion": False,
            "masked_softmax_fusion": False,
            "persist_layer_norm": False,
        }

    def _model(self, stage: int) -> GPTModel:
        virtual = stage if self.options.num_virtual_stages_per_pipeline_rank else None
        step = 128 * self.options.tensor_model_parallel_size
        model = GPTModel(
            config=self.config,
            transformer_layer_spec=layer_spec(self.options.num_experts),
            vocab_size=-(-ByteTokenizer.vocab_size // step) * step,
            max_sequence_length=self.options.seq_length,
            pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=virtual),
            post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=virtual),
            share_embeddings_and_output_weights=True,
            vp_stage=virtual,
        )
        model.model_type = ModelType.encoder_or_decoder
        return model.to(self.device)

    def _optimizer(self) -> Any:
        options = self.options
        return get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam",
                lr=options.lr,
                clip_grad=options.clip_grad,
                bf16=options.bf16,
                params_dtype=self.kind,
                use_distributed_optimizer=options.use_distributed_optimizer,
                overlap_param_gather=options.overlap_param_gather,
            ),
            self.chunks,
        )

    @staticmethod
    def _as_schedules_take(items: list[Any]) -> Any:
        return items if len(items) > 1 else items[0]

    def attach(self) -> Attachment:
        """What the --ssdtrain-* flags ask for."""
        return attach(self.chunks, config_from_args(self.options), optimizer=self.optimizer, logs=False)

    def gradients(self) -> float | None:
        """Forward and backward of all microbatches of the next step; the mean loss on last stages, None elsewhere."""
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        losses = get_forward_backward_func()(
            forward_step_func=partial(_forward_step, self.device),
            data_iterator=self._as_schedules_take([self._batches() for _ in self.chunks]),
            model=self._as_schedules_take(self.chunks),
            num_microbatches=self.microbatches,
            seq_length=self.options.seq_length,
            micro_batch_size=self.options.micro_batch_size,
            forward_only=False,
        )
        self._taken += self.options.global_batch_size
        return float(torch.stack([entry["loss"] for entry in losses]).mean()) if losses else None

    def update(self) -> float:
        """The optimizer's step; the norm of the gradient."""
        return float(self.optimizer.step()[1])

    def _batches(self) -> Batches:
        size = self.options.micro_batch_size
        replica = parallel_state.get_data_parallel_rank()
        first = self._taken + replica * size * self.microbatches
        for microbatch in range(self.microbatches):
            at = first + microbatch * size
            samples = [self._dataset[index % len(self._dataset)] for index in range(at, at + size)]
            yield {name: torch.stack([sample[name] for sample in samples]) for name in samples[0]}

    def parameters(self) -> int:
        """How many this rank holds."""
        return sum(parameter.numel() for model in self.models for parameter in model.parameters())

    def digest(self) -> str:
        """Of every weight on this rank, to the bit."""
        digest = hashlib.sha256()
        for model in self.models:
            for name, parameter in sorted(model.named_parameters()):
                digest.update(name.encode())
                digest.update(parameter.detach().cpu().contiguous().view(torch.uint8).numpy().data)
        return digest.hexdigest()


def _forward_step(device: torch.device, batches: Batches, model: torch.nn.Module) -> Any:
    batch = {name: tensor.to(device) for name, tensor in next(batches).items()}
    losses = model(batch["tokens"], batch["position_ids"], batch["attention_mask"], labels=batch["labels"])
    return losses, partial(_loss, batch["loss_mask"])


def _loss(mask: torch.Tensor, losses: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    loss = (losses.float() * mask).sum() / mask.sum()
    return loss, {"loss": loss.detach().clone()}


def main(arguments: list[str] | None = None) -> int:
    """Train as the flags say, and print a line at every --log-interval on the last rank."""
    options = parser("python -m examples.megatron_gpt").parse_args(arguments)
    logging.getLogger("megatron").setLevel(logging.ERROR)
    initialize(options)
    trainer = Trainer(options, training_set(options))
    last = dist.get_rank() == dist.get_world_size() - 1
    with trainer.attach() as attachment:
        figures = GatheredMetrics(attachment) if attachment.statistics() is not None else None
        for iteration in range(1, options.train_iters + 1):
            began = time.perf_counter()
            loss = trainer.gradients()
            norm = trainer.update()
            seconds = time.perf_counter() - began
            if iteration % options.log_interval == 0:
                if figures is not None:
                    figures.gather()
                if last:
                    line = f"iteration {iteration} | lm loss: {loss:.6f} | grad norm: {norm:.4f} | {1e3 * seconds:.0f} ms"
                    print(line + (f" | {figures.line()}" if figures is not None else ""), flush=True)
    dist.barrier()
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()
    return 0
