"""A runtime attached to a model: what stands as `model.forward` meanwhile."""

from __future__ import annotations

import copy
import functools
import operator
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from ssdtrain.features import Feature
from ssdtrain.integration.claims import claim
from ssdtrain.offload.engine import OffloadEngine
from ssdtrain.pytorch.models import check_lowrank, check_unwrapped, compress_gradients, reduces_on_all_ranks
from ssdtrain.pytorch.sharded import watch_sharded
from ssdtrain.pytorch.steps import end_unannounced_steps
from ssdtrain.runtime import Runtime

__all__ = ["AttachedForward", "attach_model"]

FREED_FUNCTION = "CheckpointWithoutOutputFunctionBackward"
"""The node of the autograd function that recomputes into outputs which it has freed after they were saved."""

_is_exporting: Callable[[], bool] = getattr(torch.compiler, "is_exporting", bool)  # not in torch 2.6


def attach_model(runtime: Runtime, model: nn.Module) -> None:
    """Let the features of `runtime` serve every call of `model`, until it closes. Each call with gradients is one forward.

    `model.forward` is wrapped on the instance, outside of what `torch.compile` compiles; deep copies of the model and what
    is written of it by pickle are not offloaded. With `comm`, the gradients of DistributedDataParallel and FSDP2 are
    compressed from now on.

    Raises:
        ConfigError: compact.mode "lowrank" or state meets a model that a wrapper reduces or shards.
        ValueError: `comm` is asked for, and nothing about the model reduces gradients; or an adapter offloads the model.
    """
    if not runtime.enabled:
        return
    if runtime.engine is not None or runtime.state is not None:
        runtime.call_at_close(claim(model, "ssdtrain.attach"))
    if runtime.compact is not None and runtime.compact.config.mode == "lowrank":
        check_lowrank(model)
    if runtime.comm is not None:
        ends = end_unannounced_steps(runtime, runtime.comm, together=reduces_on_all_ranks(model))
        compress_gradients(model, runtime.comm, ends)
    if runtime.state is not None:
        check_unwrapped(model)
    runtime.register(model)
    if runtime.state is not None and runtime.engine is not None:
        runtime.engine.eligible.add_parameter_predicate(runtime.state.holds)
    if runtime.engine is not None:
        runtime.engine.eligible.add_freed_function(FREED_FUNCTION)
        _keep_gathered(runtime, runtime.engine, model)
    if any(type(feature).on_forward is not Feature.on_forward for feature in runtime.features):
        runtime.call_at_close(AttachedForward(model, runtime.forward).detach)


def _keep_gathered(runtime: Runtime, engine: OffloadEngine, model: nn.Module) -> None:
    """What FSDP gathers never moves."""
    gathered = watch_sharded(model)
    if gathered is not None:
        runtime.call_at_close(gathered.remove)
        engine.eligible.add_parameter_predicate(gathered.__contains__)


class AttachedForward:
    """The forward of `model`, where every call with gradients is inside of a context that `record` makes.

    Note: [Copies compute with their own weights]
    It stands in the model's `__dict__`, and so in what a copy of the model is made from. There it gives way to the forward
    that the model had before: a deep copy (an EMA of the weights) and what pickle or torch.save wrote call that, bound to
    themselves, and nothing of a copy is recorded. A shallow copy shares what is in `__dict__`, and so this object.

    Note: [Attached twice]
    Runtimes may be closed in any order: one that is not the outermost takes itself out of the chain. Where another
    function stands in front of it, it stays and only calls what is behind.
    """

    def __init__(self, model: nn.Module, record: Callable[[], AbstractContextManager[Any]]) -> None:
        self._model = model
        self._record: Callable[[], AbstractContextManager[Any]] | None = record
        own = "forward" in model.__dict__
        functools.update_wrapper(self, model.forward, updated=())
        self._stand_before(model.forward, own)

        def forward(*args: Any, **kwargs: Any) -> Any:
            record = self._record
            if record is None or not torch.is_grad_enabled():
                return self._plain(*args, **kwargs)
            with record():
                return self._plain(*args, **kwargs)

        # Outside of what torch.compile compiles, which goes on inside.
        self._forward = torch.compiler.disable(forward, recursive=False)
        model.forward = self

    def _stand_before(self, plain: Callable[..., Any], own: bool) -> None:
        self._plain = plain
        self._own = own  # it stood in the model's __dict__, not in its class
        self.__wrapped__ = plain

    @property
    def __code__(self) -> Any:
        return self._plain.__code__  # `torch.export` asks a model's forward where it is written

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if _is_exporting():  # which takes the whole forward as one graph
            return self._plain(*args, **kwargs)
        return self._forward(*args, **kwargs)

    def detach(self) -> None:
        """Record no more, and put back the forward that was there. See Note: [Attached twice]."""
        self._record = None
        found = self._model.__dict__.get("forward")
        if found is self:
            if self._own:
                self._model.forward = self._plain
            else:
                del self._model.forward
        while isinstance(found, AttachedForward):
            if found._plain is self:
                found._stand_before(self._plain, self._own)
            found = found._plain

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        # A bound method is copied bound to the copy of its model.
        return copy.deepcopy(self._plain, memo)

    def __reduce__(self) -> tuple[Any, ...]:
        if self._own:
            return operator.getitem, ([self._plain], 0)
        # The reader needs no ssdtrain, and makes the model before it gives it what was in its __dict__.
        return getattr, (self._model, "forward")
