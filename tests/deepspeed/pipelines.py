"""The GPT cut into stages; with tensor parallelism written by hand, as Megatron's layers do it."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from deepspeed import comm as dist
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.pipe.topology import PipelineParallelGrid, PipeModelDataParallelTopology
from torch import nn

from tests.deepspeed.counting import Counter
from tests.deepspeed.models import HEADS, HIDDEN, LAYERS, Block, Embedding, Head, loss_of
from tests.deepspeed.rows import Row
from tests.deepspeed.upstream import LACKS

__all__ = ["MODELS", "TensorParallelUnit", "count_forwards", "tensor_parallel_block"]

BLOCKS = LAYERS + 1  # so that every stage of four has one

COMMON: dict[str, Any] = {
    "loss_fn": loss_of,
    "partition_method": "uniform",
    "seed_layers": True,
    "base_seed": 42,
}


def _layers(row: Row, block: type[nn.Module] = Block) -> list[Any]:
    blocks = [LayerSpec(block, row.dropout) for _ in range(BLOCKS)]
    if not row.tied:
        return [LayerSpec(Embedding), *blocks, LayerSpec(Head)]
    first = TiedLayerSpec("embedding", Embedding, tied_weight_attr=["token.weight"])
    last = TiedLayerSpec("embedding", Embedding, forward_fn=_logits, tied_weight_attr=["token.weight"])
    return [first, *blocks, LayerSpec(nn.LayerNorm, HIDDEN), last]


def _logits(embedding: Embedding, x: torch.Tensor) -> torch.Tensor:
    return F.linear(x, embedding.token.weight)


def pipeline(row: Row) -> PipelineModule:
    from tests.deepspeed.training import CHECKPOINTS

    if row.checkpoint is None:
        return PipelineModule(_layers(row), num_stages=row.stages, **COMMON)
    return PipelineModule(
        _layers(row),
        num_stages=row.stages,
        activation_checkpoint_interval=1,
        activation_checkpoint_func=CHECKPOINTS[row.checkpoint],
        checkpointable_layers=["Block"],
        **COMMON,
    )


def dualpipev(row: Row) -> Any:
    from deepspeed.runtime.pipe.dualpipev import DualPipeVModule

    return DualPipeVModule(_layers(row), num_stages=row.stages, **COMMON)


class _ToTensorParallel(torch.autograd.Function):
    """Identity forward, all-reduce backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        return x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        grad = grad.contiguous().clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class _FromTensorParallel(torch.autograd.Function):
    """All-reduce forward, identity backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        x = x.contiguous().clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad, None


class TensorParallelUnit:
    """What DeepSpeed asks about model parallelism, where all ranks are one group of it."""

    def get_model_parallel_rank(self) -> int:
        return int(dist.get_rank())

    def get_model_parallel_world_size(self) -> int:
        return int(dist.get_world_size())

    def get_model_parallel_group(self) -> Any:
        return dist.get_world_group()


def tensor_parallel_block(group: Any, size: int, *, marked: bool = True) -> type[nn.Module]:
    """Args: marked: DeepSpeed is told which parameters are one rank's part; it then needs a grid or an mpu."""

    class TensorParallelBlock(nn.Module):
        def __init__(self, _: float = 0.0) -> None:
            super().__init__()
            self.norm1, self.norm2 = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
            self.q, self.k, self.v = (nn.Linear(HIDDEN, HIDDEN // size) for _ in range(3))
            self.up = nn.Linear(HIDDEN, 4 * HIDDEN // size)
            self.out = nn.Linear(HIDDEN // size, HIDDEN, bias=False)
            self.down = nn.Linear(4 * HIDDEN // size, HIDDEN, bias=False)
            for linear in (self.q, self.k, self.v, self.up, self.out, self.down):
                for parameter in linear.parameters():
                    parameter.model_parallel = marked  # type: ignore[attr-defined]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            b, s, _ = x.shape

            def heads(t: torch.Tensor) -> torch.Tensor:
                return t.view(b, s, -1, HIDDEN // HEADS).transpose(1, 2)

            y = _ToTensorParallel.apply(self.norm1(x), group)
            y = F.scaled_dot_product_attention(
                heads(self.q(y)), heads(self.k(y)), heads(self.v(y)), is_causal=True
            )
            x = x + _FromTensorParallel.apply(self.out(y.transpose(1, 2).reshape(b, s, -1)), group)
            y = F.gelu(self.up(_ToTensorParallel.apply(self.norm2(x), group)))
            return x + _FromTensorParallel.apply(self.down(y), group)

    return TensorParallelBlock


def tensor_pipeline(row: Row) -> PipelineModule:
    ranks = dist.get_world_size()
    topology = PipeModelDataParallelTopology(num_pp=row.stages, num_mp=2, num_dp=ranks // row.stages // 2)
    # The group of tensor parallelism has to be there before layers are built.
    grid = PipelineParallelGrid(topology=topology, process_group=dist.new_group(ranks=range(ranks)))
    block = tensor_parallel_block(grid.get_slice_parallel_group(), 2)
    return PipelineModule(_layers(row, block), topology=topology, **COMMON)


MODELS = {"pipeline": pipeline, "dualpipev": dualpipev, "tensor_pipeline": tensor_pipeline}

_ENGINES = [PipelineEngine]
if "dualpipev" not in LACKS:
    from deepspeed.runtime.pipe.dualpipev import DualPipeVEngine

    _ENGINES.append(DualPipeVEngine)

_PLAIN = {cls: cls._exec_forward_pass for cls in _ENGINES}


def count_forwards(counter: Counter | None) -> None:
    """Count what every forward instruction of any pipeline saves; None stops it."""
    from deepspeed.runtime.pipe.schedule import ForwardPass

    for cls, plain in _PLAIN.items():

        def counted(self: Any, *args: Any, plain: Any = plain, **kwargs: Any) -> Any:
            with counter.forward():
                return plain(self, *args, **kwargs)

        cls._INSTRUCTION_MAP[ForwardPass] = plain if counter is None else counted
