"""What is replaced in megatron-core and in torch.distributed while something that compresses is attached."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn

from ssdtrain.comm import Communicator
from ssdtrain.integration.patching import Patches
from ssdtrain_megatron import _compat_comm
from ssdtrain_megatron.comm.data_parallel import DataParallel
from ssdtrain_megatron.comm.expert import Expert
from ssdtrain_megatron.comm.pipeline import Pipeline
from ssdtrain_megatron.comm.tensor_parallel import TensorParallel

__all__ = ["Hooks"]

Function = Callable[..., Any]

TRANSFORMER_ENGINE = "transformer_engine"
# Its fused cross entropy exchanges maxima and sums.
LEFT_OUT = "cross_entropy"


class Hooks:
    """Sends Megatron's collectives through a communicator, from `install` to `remove`.

    There is one at a time in a process: the names are module globals, and of two communicators neither could know which model a
    collective is about.

    Args:
        chunks: wrapped by Megatron's DistributedDataParallel.
        params_are_master: see Note: [Parameters that are also the master copy] in `data_parallel`.
    """

    _installed: Hooks | None = None

    def __init__(
        self, comm: Communicator, chunks: Sequence[nn.Module], params_are_master: bool = False
    ) -> None:
        dimensions = _compat_comm.groups(chunks)
        self._tensor = TensorParallel(comm, dimensions)
        self._expert = Expert(comm, dimensions)
        self._data = DataParallel(comm, chunks, params_are_master)
        self._pipeline = Pipeline(comm)
        self._patches = Patches()

    @staticmethod
    def refuse_second() -> None:
        """Say no where one is installed already.

        Raises:
            ValueError: one is.
        """
        if Hooks._installed is not None:
            raise ValueError(
                "collectives of this process are compressed already: close that attachment first, or leave comm out of this one"
            )

    def install(self) -> None:
        """Replace what is to be replaced.

        Raises:
            ValueError: another one is installed.
        """
        self.refuse_second()
        Hooks._installed = self
        wrappers = self._wrappers()
        for name, places in _compat_comm.places().items():
            for place in places:
                self._patches.replace(*place, wrappers[name])

    def step_end(self) -> None:
        """An optimizer step is over, on all ranks."""
        self._pipeline.settle()

    def remove(self) -> None:
        """Put everything back. Idempotent."""
        self._patches.undo()
        if Hooks._installed is self:
            Hooks._installed = None

    def _wrappers(self) -> Mapping[str, Callable[[Function], Function]]:
        tensor = dict.fromkeys(_compat_comm.TENSOR_PARALLEL)
        return {
            "all_gather": self._tensor.all_gather,
            "reduce_scatter": self._tensor.reduce_scatter,
            "buffer_all_gather": self._data.all_gather,
            "buffer_reduce_scatter": self._data.reduce_scatter,
            "coalescing": self._data.coalescing,
            "batched_p2p": self._pipeline.batched,
            "p2p": self._pipeline.ordered,
            "called_all_reduce": lambda plain: self._by_caller(
                plain,
                self._tensor.all_reduce(plain),
                {
                    **dict.fromkeys(tensor, self._tensor.all_reduce(plain)),
                    _compat_comm.BUFFERS: self._data.all_reduce(plain),
                },
            ),
            "called_all_gather": lambda plain: self._by_caller(plain, self._tensor.all_gather(plain), {}),
            "called_reduce_scatter": lambda plain: self._by_caller(
                plain, self._tensor.reduce_scatter(plain), {}
            ),
            "called_all_to_all": lambda plain: self._by_caller(
                plain, None, dict.fromkeys(tensor, self._expert.all_to_all(plain))
            ),
        }

    def _by_caller(
        self, plain: Function, in_transformer_engine: Function | None, by_module: Mapping[str, Function]
    ) -> Function:
        """`plain` for all but the modules that are known. See Note: [Whose call it is] in `tensor_parallel`."""

        def function(*args: Any, **kwargs: Any) -> Any:
            # The frame between is the dispatcher's.
            caller = sys._getframe(2).f_globals.get("__name__", "")
            ours = by_module.get(caller)
            if ours is None and caller.startswith(TRANSFORMER_ENGINE) and LEFT_OUT not in caller:
                ours = in_transformer_engine
            if ours is None:
                return plain(*args, **kwargs)
            return ours(*args, **kwargs)

        return function
