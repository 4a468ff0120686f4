"""One rank of a layout of megatron-core that trains with compressed inputs: `python -m tests.compact.megatron_ranks LAYOUT FILE`.

Weights depend on their global names alone, and the loss is computed in float64, so that layouts can be compared.
"""

from __future__ import annotations

import argparse
import os
import sys
import warnings
import zlib
from types import SimpleNamespace
from typing import Any

warnings.filterwarnings("ignore")

from tests.megatron import cpu  # noqa: E402

cpu.arrange()

import megatron.core  # noqa: E402, F401

cpu.finish()

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from megatron.core import parallel_state, tensor_parallel  # noqa: E402
from megatron.core.distributed import (  # noqa: E402
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # noqa: E402
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer  # noqa: E402
from megatron.core.pipeline_parallel import get_forward_backward_func  # noqa: E402
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402

import ssdtrain_megatron  # noqa: E402
from ssdtrain_megatron import pretrain  # noqa: E402
from ssdtrain_megatron.compact import names_of  # noqa: E402
from ssdtrain_megatron.flags import add_arguments  # noqa: E402

VOCABULARY, LENGTH, HIDDEN, LAYERS, BATCHES, STEPS = 64, 8, 128, 2, 4, 2
COMPACT = {"ratio": 0.25, "seed": 5}
LAYOUTS: dict[str, dict[str, Any]] = {
    "one": {},
    "one recompute": {"recompute": True},
    "one resumed": {"resumed": True},
    "tp2": {"tp": 2},
    "tp2 sp": {"tp": 2, "sp": True},
    "pp2": {"pp": 2},
    "one of a layer": {"include": "*.layers.1.*"},
    "pp2 of a layer": {"pp": 2, "include": "*.layers.1.*"},
    "dp2": {},
    "one fp32": {"dtype": torch.float32},
    "dp2 distributed": {"distributed": True, "dtype": torch.float32},
}


def fill(chunk: torch.nn.Module, names: dict[int, str]) -> dict[str, torch.nn.Parameter]:
    """Give every parameter its value; returns them by global name."""
    found = {}
    tp, rank = (
        parallel_state.get_tensor_model_parallel_world_size(),
        parallel_state.get_tensor_model_parallel_rank(),
    )
    for module in chunk.modules():
        for own, parameter in module.named_parameters(recurse=False):
            name = f"{names[id(module)]}.{own}".replace("module.", "")
            shape = list(parameter.shape)
            split = getattr(parameter, "tensor_model_parallel", False)
            if split:
                shape[parameter.partition_dim] *= tp
            generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            whole = torch.randn(shape, generator=generator, dtype=torch.float64) * 0.05
            whole = whole + 1 if "norm" in name and own == "weight" else whole
            part = whole.chunk(tp, parameter.partition_dim)[rank] if split else whole
            parameter.data.copy_(part)
            found[name] = parameter
    return found


def forward_step(batches: Any, model: torch.nn.Module) -> Any:
    tokens, labels = next(batches)
    later = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1).expand(1, 1, LENGTH, LENGTH)
    output = model(tokens, torch.arange(LENGTH)[None], later)

    def loss_of(logits: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        whole = tensor_parallel.gather_from_tensor_model_parallel_region(logits)
        loss = torch.nn.functional.cross_entropy(whole.flatten(0, 1), labels.flatten())
        return loss, {"loss": loss.detach()}

    return output, loss_of


def attach_as_megatron_lm(chunk: torch.nn.Module, optimizer: Any, iteration: int) -> Any:
    """What a run of Megatron-LM does after it has loaded the checkpoint of `iteration`."""
    flags = [
        "--ssdtrain-compact-ratio",
        "0.25",
        "--ssdtrain-compact-seed",
        "5",
        "--ssdtrain-report-interval",
        "0",
    ]
    args = add_arguments(argparse.ArgumentParser()).parse_args(flags)
    args.iteration, args.load = iteration, None
    loop = SimpleNamespace(get_args=lambda: args, training_log=lambda *_: None)
    pretrain._attaching(loop, lambda: ([chunk], optimizer, None))()
    return pretrain._attachment


def main(name: str, file: str) -> None:
    layout = LAYOUTS[name]
    tp, pp, dtype = layout.get("tp", 1), layout.get("pp", 1), layout.get("dtype", torch.float64)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp)
    model_parallel_cuda_manual_seed(1)
    options: dict[str, Any] = {}
    if layout.get("recompute"):
        options = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    config = TransformerConfig(
        num_layers=LAYERS,
        hidden_size=HIDDEN,
        num_attention_heads=4,
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        sequence_parallel=layout.get("sp", False),
        pipeline_dtype=dtype,
        params_dtype=dtype,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bias_dropout_fusion=False,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
        apply_rope_fusion=False,
        use_cpu_initialization=True,
        **options,
    )
    model = GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_layer_local_spec(),
        vocab_size=VOCABULARY,
        max_sequence_length=LENGTH,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=False,
        position_embedding_type="rope",
    ).to(dtype)
    distributed = layout.get("distributed", False)
    chunk = DistributedDataParallel(
        config=config,
        ddp_config=DistributedDataParallelConfig(
            use_distributed_optimizer=distributed, overlap_grad_reduce=distributed
        ),
        module=model,
    )
    parameters = fill(chunk, names_of([chunk]))
    adam = layout.get("dtype") is torch.float32
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            # The distributed optimizer has Adam only; a large epsilon, because small gradients differ in their last bits.
            optimizer="adam" if adam else "sgd",
            lr=0.01 if adam else 0.5,
            adam_eps=0.01,
            sgd_momentum=0.0,
            clip_grad=0.0,
            weight_decay=0.0,
            params_dtype=dtype,
            use_distributed_optimizer=distributed,
        ),
        [chunk],
    )
    config.finalize_model_grads_func = finalize_model_grads
    config.grad_scale_func = optimizer.scale_loss
    dp, replica = parallel_state.get_data_parallel_world_size(), parallel_state.get_data_parallel_rank()
    compact = {**COMPACT, **({"include": layout["include"]} if "include" in layout else {})}
    attachment = ssdtrain_megatron.attach([chunk], {"compact": compact, "report": {"interval": 0}})
    for step in range(STEPS):
        if step and layout.get("resumed"):
            attachment.close()
            attachment = attach_as_megatron_lm(chunk, optimizer, step)
        generator = torch.Generator().manual_seed(step)
        tokens = torch.randint(VOCABULARY, (BATCHES, 1, LENGTH + 1), generator=generator)
        own = [(batch[:, :-1], batch[:, 1:]) for batch in tokens[replica::dp]]
        chunk.zero_grad_buffer()
        optimizer.zero_grad()
        get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iter(own),
            model=[chunk],
            num_microbatches=len(own),
            seq_length=LENGTH,
            micro_batch_size=1,
            decoder_seq_length=LENGTH,
            forward_only=False,
        )
        optimizer.step()
    counted = attachment.runtime.compact.compression.counted
    saved = {
        "weights": {
            key: (
                parameter.detach().clone(),
                parameter.partition_dim if getattr(parameter, "tensor_model_parallel", False) else None,
            )
            for key, parameter in parameters.items()
        },
        "tp_rank": parallel_state.get_tensor_model_parallel_rank(),
        "input_bytes": counted.input_bytes,
        "saved_bytes": counted.saved_bytes,
        "forwards": sum("forward" in module.__dict__ for module in chunk.modules()),
    }
    attachment.close()
    saved["left"] = sum("forward" in module.__dict__ for module in chunk.modules())
    torch.save(saved, f"{file}.{os.environ['RANK']}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
