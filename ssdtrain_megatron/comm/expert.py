"""Tokens on their way to experts and back: the all-to-all of the token dispatchers, forward and backward."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from ssdtrain.comm import Communicator
from ssdtrain_megatron.comm.tensor_parallel import finish, is_activation

__all__ = ["Expert"]

Function = Callable[..., Any]


class Expert:
    """The replacement of `all_to_all_single`.

    Args:
        dimensions: "tp" or "ep" of each process group; calls on other groups are not touched.
    """

    def __init__(self, comm: Communicator, dimensions: Mapping[dist.ProcessGroup, str]) -> None:
        self._comm = comm
        self._dimensions = dimensions

    def all_to_all(self, plain: Function) -> Function:
        @functools.wraps(plain)
        def all_to_all_single(
            output: Tensor,
            input: Tensor,
            output_split_sizes: Any = None,
            input_split_sizes: Any = None,
            group: dist.ProcessGroup | None = None,
            async_op: bool = False,
        ) -> Any:
            dimension = self._dimensions.get(group) if group is not None else None
            work = None
            if dimension is not None and is_activation(input):
                work = self._comm.all_to_all(
                    output, input, dimension, _sizes(output_split_sizes), _sizes(input_split_sizes), group
                )
            if work is None:
                return plain(output, input, output_split_sizes, input_split_sizes, group, async_op)
            return finish(work, async_op)

        return all_to_all_single


def _sizes(given: Any) -> Sequence[int] | None:
    """Dispatchers leave tensors or arrays where they have counted tokens."""
    return None if given is None else [int(size) for size in given]
