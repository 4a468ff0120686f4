"""What is replaced in megatron-core and in torch.distributed while something that compresses is attached.

Note: [Whose call it is]
    megatron-core calls torch.distributed in two ways: by names bound at import, which are replaced where they are bound, and by
    `torch.distributed.all_reduce` and others, which are everybody's. So do Transformer Engine's layers. There the replacement
    looks at the module that calls, and at the group: what neither of these layers sends (the cross entropy's reductions, a norm
    of gradients, a script's own) is not touched.

Note: [Upstream's own function]
    Megatron's bucket groups scale gradients, look for NaN, choose between sum and average, and keep handles. All of that stays
    theirs: what is replaced are the collectives that they call and the manager that coalesces them.

Note: [Other models]
    Gradients and parameters are known by their bucket. What layers and stages send is known by its group only, and a model that
    nothing is attached to (a teacher, a reference of reinforcement learning) has the same groups. So while a schedule runs such
    a model, nothing of it is compressed. All ranks of a group run it together, so that both ends of a message agree.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from ssdtrain.comm import Communicator
from ssdtrain.integration.claims import related
from ssdtrain.integration.intercept import Interception, by_caller
from ssdtrain.integration.patching import Patches, Wrap, call_after
from ssdtrain.integration.traffic import Traffic
from ssdtrain_megatron import _compat_comm
from ssdtrain_megatron.comm.classification import Classification
from ssdtrain_megatron.comm.pipeline import Pipeline

TRANSFORMER_ENGINE = "transformer_engine"
# Its fused cross entropy exchanges maxima and sums.
LEFT_OUT = "cross_entropy"


class Hooks:
    """Sends Megatron's collectives through a communicator, from `install` to `remove`.

    There is one at a time in a process: the names are module globals, and of two communicators neither could know which model a
    collective is about.

    Args:
        chunks: wrapped by Megatron's DistributedDataParallel.
        optimizer: Megatron's, of these chunks.
        stepped: called after each optimizer step with whether its gradients were dropped (an overflow in float16), which Megatron
            decides from reduced gradients, on all ranks alike.
    """

    _installed: Hooks | None = None

    def __init__(
        self, comm: Communicator, chunks: Sequence[nn.Module], optimizer: Any, stepped: Callable[[bool], None]
    ) -> None:
        self._comm = comm
        self._optimizer = optimizer
        self._stepped = stepped
        self._chunks = list(chunks)
        self._runs_other_model = False
        self._classification = Classification(comm, chunks, _compat_comm.params_are_master(optimizer))
        self._layers = Interception(self._of_layers)
        self._buffers = Interception(self._classification.of_buffers)
        self._patches = Patches()

    @staticmethod
    def check_not_installed() -> None:
        """Check that none is installed.

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
        self.check_not_installed()
        Hooks._installed = self
        self._patches.replace_all(_compat_comm.places(), self._wraps())
        self._comm.loss_scale = _compat_comm.loss_scale(self._optimizer)
        self._patches.replace(self._optimizer, "step", call_after(self._after_step))

    def remove(self) -> None:
        """Put everything back. Idempotent."""
        self._patches.undo()
        if Hooks._installed is self:
            Hooks._installed = None

    def _wraps(self) -> dict[str, Wrap]:
        pipeline = Pipeline(self._comm)
        return {
            "all_gather": self._layers.wrap("all_gather_into_tensor"),
            "reduce_scatter": self._layers.wrap("reduce_scatter_tensor"),
            "buffer_all_gather": self._buffers.wrap("all_gather_into_tensor"),
            "buffer_reduce_scatter": self._buffers.wrap("reduce_scatter_tensor"),
            "coalescing": self._buffers.coalescing,
            "batched_p2p": self._of_attached(pipeline.batched),
            "p2p": self._of_attached(pipeline.ordered),
            "schedule": self._schedule,
            **{name: by_caller(name, self._of_caller) for name in _compat_comm.CALLED},
        }

    def _schedule(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        """See Note: [Other models]."""

        def schedule(*args: Any, **kwargs: Any) -> Any:
            outer, self._runs_other_model = self._runs_other_model, not self._is_attached(kwargs["model"])
            try:
                return plain(*args, **kwargs)
            finally:
                self._runs_other_model = outer

        return schedule

    def _is_attached(self, model: nn.Module | Sequence[nn.Module]) -> bool:
        given = [model] if isinstance(model, nn.Module) else model
        return any(related(chunk, one) for one in given for chunk in self._chunks)

    def _of_attached(self, wrap: Wrap) -> Wrap:
        """`wrap` for what the attached model sends."""

        def wrap_attached(plain: Callable[..., Any]) -> Callable[..., Any]:
            wrapped = wrap(plain)
            return lambda *args, **kwargs: (plain if self._runs_other_model else wrapped)(*args, **kwargs)

        return wrap_attached

    def _of_layers(self, tensor: Tensor, group: Any) -> Traffic | None:
        return None if self._runs_other_model else self._classification.of_layers(tensor, group)

    def _of_caller(self, module: str) -> Interception | None:
        """See Note: [Whose call it is]."""
        if module == _compat_comm.GRADIENT_BUFFERS:
            return self._buffers
        from_engine = module.startswith(TRANSFORMER_ENGINE) and LEFT_OUT not in module
        return self._layers if from_engine or module in _compat_comm.TENSOR_PARALLEL else None

    def _after_step(self, result: Any, _: object) -> None:
        successful = result[0] if isinstance(result, tuple) else result
        self._stepped(not successful)
