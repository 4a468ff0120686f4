"""Compressed collectives of one engine."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from ssdtrain.comm import Communicator
from ssdtrain.comm.exclusion import excluded
from ssdtrain.compact.linear import ReplacedForward
from ssdtrain.integration import residuals
from ssdtrain.integration.intercept import Interception
from ssdtrain.integration.patching import Patches, run_inside
from ssdtrain.integration.traffic import Traffic, current_traffic, in_scope, traffic_scope
from ssdtrain_ds import _compat, _compat_comm
from ssdtrain_ds.comm import gradients, weights

_SENT_BY_STAGES = {
    "SendActivation": "pp_forward",
    "RecvActivation": "pp_forward",
    "SendGrad": "pp_backward",
    "RecvGrad": "pp_backward",
}
"""Instruction of a pipeline -> dimension."""

# All of DeepSpeed's collectives pass the methods of one class; what they carry is known where they are issued.
_interception = Interception(lambda tensor, group: current_traffic())
_INTERCEPTED = {
    name: _interception.wrap(name)
    for name in (
        "all_reduce",
        "inference_all_reduce",
        "reduce_scatter_tensor",
        "all_gather_into_tensor",
        "all_to_all_single",
        "send",
        "recv",
    )
}


class CommAttachment:
    """What compression changed about one engine and its optimizer, until `detach`.

    Functions that issue gradients, weights, activations and tokens run in a traffic scope; the methods of DeepSpeed's backend
    compress what is issued there.

    Note: [Whose layer]
    The autograd functions of experts and tensor-parallel layers belong to no engine. Which communicator is theirs is set around
    the forward of each of these layers, also where it is recomputed on a thread of autograd, and kept for their backward: layers
    of an engine without a comm section, and those of another policy, send as their own engine says.
    """

    def __init__(self, engine: Any, comm: Communicator) -> None:
        _compat_comm.check()
        self.engine = engine
        self.comm = comm
        self._patches = Patches()
        # Of what belongs to no engine: undone also where the engine is dropped without `destroy`.
        self._shared = Patches()
        weakref.finalize(self, self._shared.undo)
        self._layers: list[ReplacedForward] = []
        weakref.finalize(self, _remove, self._layers)
        self.sends = True
        try:
            self._attach()
        except BaseException:
            self.detach()
            raise

    def _attach(self) -> None:
        engine, comm, patches = self.engine, self.comm, self._patches
        for name, wrap in _INTERCEPTED.items():
            self._shared.replace(_compat_comm.TorchBackend, name, wrap)
        for functions, (forward, backward) in (
            (_compat_comm.tensor_parallel_functions(), _OF_TENSOR_PARALLELISM),
            (_compat_comm.expert_functions(), _OF_EXPERTS),
        ):
            for function in functions:
                self._shared.replace(function, "forward", forward)
                self._shared.replace(function, "backward", backward)
        of_this_engine = run_inside(functools.partial(_of_engine, weakref.ref(self)))
        self._layers += [
            ReplacedForward(layer, of_this_engine) for layer in _compat_comm.layers_that_send(engine.module)
        ]
        # A quantised block is coded with its neighbours, which differ from one data-parallel group to another: what several
        # groups hold alike would drift apart.
        repeated = _compat_comm.repeated_parameters(engine)
        comm.keep_excluded(repeated)
        uncompressed = excluded(engine.module, comm.policy.exclude) | repeated
        training = [p for p in engine.module.parameters() if p.requires_grad]
        if _compat_comm.data_parallel_size(engine) > 1:
            sizes = [(_compat_comm.numel(p), p in uncompressed) for p in training]
            comm.announce(sizes, _compat_comm.dtypes_by_dimension(engine, training))
        gradients.patch_gradients(patches, engine, comm, uncompressed)
        weights.patch_gathering(self._shared)
        weights.patch_weights(patches, engine, comm, uncompressed)
        if _compat.is_pipeline(engine):
            patches.replace(engine, _compat.INSTRUCTION_MAP, self._instructions)
        patches.replace(engine, "save_checkpoint", self._saving)
        patches.replace(engine, "load_checkpoint", self._loading)
        comm.loss_scale = _compat_comm.loss_scale(engine)
        for reason in _compat_comm.bypasses(engine):
            comm.notices.add(reason, f"comm: {reason}")

    def _instructions(self, plain: dict[type, Callable[..., Any]]) -> dict[type, Callable[..., Any]]:
        """A pipeline's table of instructions; those that send or receive run in their traffic scope."""
        table = dict(plain)
        for name, dimension in _SENT_BY_STAGES.items():
            kind = getattr(_compat.schedule, name)
            if kind in table:
                table[kind] = in_scope(functools.partial(self._of_message, dimension))(table[kind])
        return table

    def _of_message(self, dimension: str, *args: Any, **kwargs: Any) -> Traffic:
        return Traffic(self.comm, dimension, first_only=True)

    def _file(self, directory: Path) -> Path:
        return directory / f"ssdtrain_comm_rank_{self.comm.rank}.pt"

    def _saving(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        # Its own signature: what stands there may be somebody's wrapper, which names no argument.
        def save_checkpoint(save_dir: Any, *args: Any, **kwargs: Any) -> Any:
            # First, so that the checkpoint is complete when DeepSpeed names it in `latest` and its last barrier is passed.
            if save_dir:
                self._save(save_dir, args[0] if args else kwargs.get("tag"))
            return plain(save_dir, *args, **kwargs)

        return save_checkpoint

    def _save(self, save_dir: Any, tag: Any) -> None:
        name = f"global_step{self.engine.global_steps}" if tag is None else str(tag)
        residuals.save(self.comm, self._file(Path(save_dir, name)), {})

    def _loading(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        def load_checkpoint(load_dir: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                found = plain(load_dir, *args, **kwargs)
            finally:
                self.comm.forget_weights()
            path = found[0] if isinstance(found, tuple) else None
            if path is not None and not _compat_comm.goes_on(load_dir, *args, **kwargs):
                self.comm.begin_anew()  # with the weights of another run, whose residuals are not of this one
                self.comm.steps = int(self.engine.global_steps)
            elif path is not None:
                directory = Path(path) if Path(path).is_dir() else Path(path).parent
                residuals.load(self.comm, self._file(directory), {})
                self.comm.steps = int(self.engine.global_steps)
            return found

        return load_checkpoint

    def detach(self) -> None:
        """The engine, its optimizer, DeepSpeed's backend and layers are as they were. Idempotent."""
        self.sends = False
        try:
            _remove(self._layers)
            self._patches.undo()
            self._shared.undo()
        finally:
            self.comm.forget_weights()


_layer_of: ContextVar[Communicator | None] = ContextVar("ssdtrain_layer_of", default=None)


@contextmanager
def _of_engine(attachment: weakref.ref[CommAttachment], *_: Any, **__: Any) -> Iterator[None]:
    owner = attachment()
    if owner is None or not owner.sends or _layer_of.get() is not None:
        yield  # where two engines were made with one model, the later one, whose replacement is outside, has said so
        return
    token = _layer_of.set(owner.comm)
    try:
        yield
    finally:
        _layer_of.reset(token)


def _remove(forwards: list[ReplacedForward]) -> None:
    while forwards:
        forwards.pop().remove()


def _of_layer(dimension: str, plain: Callable[..., Any]) -> Callable[..., Any]:
    """The forward of an autograd function. See Note: [Whose layer]."""

    def forward(ctx: Any, *args: Any, **kwargs: Any) -> Any:
        ctx.ssdtrain_layer_of = comm = _layer_of.get()
        with _sending(comm, dimension):
            return plain(ctx, *args, **kwargs)

    return forward


def _of_backward(dimension: str, plain: Callable[..., Any]) -> Callable[..., Any]:
    def backward(ctx: Any, *args: Any, **kwargs: Any) -> Any:
        # None of a forward before the first engine that compresses.
        comm = getattr(ctx, "ssdtrain_layer_of", None)
        token = _layer_of.set(comm)  # a backward may send by the function's forward
        try:
            with _sending(comm, dimension):
                return plain(ctx, *args, **kwargs)
        finally:
            _layer_of.reset(token)

    return backward


def _sending(comm: Communicator | None, dimension: str) -> AbstractContextManager[None]:
    return traffic_scope(None if comm is None else Traffic(comm, dimension))


# One object for all engines: `Patches` applies it once.
_OF_TENSOR_PARALLELISM = tuple(functools.partial(of, "tp") for of in (_of_layer, _of_backward))
_OF_EXPERTS = tuple(functools.partial(of, "ep") for of in (_of_layer, _of_backward))
