"""Activations and their gradients between tensor-parallel ranks: all-reduces, and the gathers and reduce-scatters of sequence
parallelism.

Note: [Whose call it is]
    megatron-core's layers call torch.distributed in two ways: by names bound at import, which are replaced where they are bound,
    and by `torch.distributed.all_reduce`, which is everybody's. So do Transformer Engine's layers. There the replacement looks at
    the module that calls, and at the group: what neither of these layers sends (the cross entropy's reductions, a norm of
    gradients, a script's own) is not touched.

Note: [Activations only]
    Activations have at least two dimensions. Vectors in these groups are routing probabilities, counts and the like.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch.distributed as dist
from torch import Tensor

from ssdtrain.comm import Communicator, CompressedWork

__all__ = ["TensorParallel", "finish", "is_activation"]

Function = Callable[..., Any]


def is_activation(tensor: Tensor) -> bool:
    """See Note: [Activations only]."""
    return tensor.dim() >= 2 and tensor.is_floating_point()


def finish(work: CompressedWork, async_op: bool) -> CompressedWork | None:
    """What torch's collectives return: a handle, or None when they have waited."""
    if async_op:
        return work
    work.wait()
    return None


class TensorParallel:
    """Replacements of the three collectives.

    Args:
        dimensions: "tp" or "ep" of each process group; calls on other groups are not touched.
    """

    def __init__(self, comm: Communicator, dimensions: Mapping[dist.ProcessGroup, str]) -> None:
        self._comm = comm
        self._dimensions = dimensions

    def _dimension(self, tensor: Tensor, group: dist.ProcessGroup | None) -> str | None:
        return self._dimensions.get(group) if group is not None and is_activation(tensor) else None

    def all_reduce(self, plain: Function) -> Function:
        @functools.wraps(plain)
        def all_reduce(
            tensor: Tensor,
            op: Any = dist.ReduceOp.SUM,
            group: dist.ProcessGroup | None = None,
            async_op: bool = False,
        ) -> Any:
            dimension = self._dimension(tensor, group)
            work = None if dimension is None else self._comm.all_reduce(tensor, dimension, group, op)
            return plain(tensor, op, group, async_op) if work is None else finish(work, async_op)

        return all_reduce

    def reduce_scatter(self, plain: Function) -> Function:
        @functools.wraps(plain)
        def reduce_scatter_tensor(
            output: Tensor,
            input: Tensor,
            op: Any = dist.ReduceOp.SUM,
            group: dist.ProcessGroup | None = None,
            async_op: bool = False,
        ) -> Any:
            dimension = self._dimension(input, group)
            work = (
                None if dimension is None else self._comm.reduce_scatter(output, input, dimension, group, op)
            )
            return plain(output, input, op, group, async_op) if work is None else finish(work, async_op)

        return reduce_scatter_tensor

    def all_gather(self, plain: Function) -> Function:
        @functools.wraps(plain)
        def all_gather_into_tensor(
            output_tensor: Tensor,
            input_tensor: Tensor,
            group: dist.ProcessGroup | None = None,
            async_op: bool = False,
        ) -> Any:
            dimension = self._dimension(input_tensor, group)
            work = (
                None
                if dimension is None
                else self._comm.all_gather(output_tensor, input_tensor, dimension, group)
            )
            return (
                plain(output_tensor, input_tensor, group, async_op)
                if work is None
                else finish(work, async_op)
            )

        return all_gather_into_tensor
