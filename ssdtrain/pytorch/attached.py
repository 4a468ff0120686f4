"""A runtime attached to a model: how it learns that a forward begins.

Note: [Calls of modules]
Every call of a module goes through `torch.nn.Module.__call__`, which stands there replaced while anything is attached, and looks
up whether the module is one of those attached: the model or any module inside of it. So it does not matter what stands as a
module's `forward`, who replaces that later, and whether a loop calls the model or parts of it: the outermost attached module that
runs is one forward. On the modules themselves there is one entry in the `__dict__` of the model. Copies, pickles and replicas are
other objects, and so are not recorded; `torch.jit.script` and `torch.export` find the model's own forward. The call is made
inside of a `with`, which ends by any exception: hooks of modules are not called after an interrupt.

Note: [Replaced by others]
Other code may replace `__call__` too, and its replacements may go in any order. So each of ours knows what it stands in front
of, and passes calls on to that. Where others have put back what stood there before ours, the next module that is attached, or the
second step of an optimizer without a forward, puts one in front again. Of several in one chain the outermost records.

Note: [Compiled calls]
Dynamo takes the function that replaces `__call__` into its graphs, where it does nothing, except that the call of an attached
model is left out of the graph of whatever calls it. What is compiled is then recorded as a whole. A graph that was compiled
before has no such break; the module that `torch.compile` made of an attached one is therefore taken for it. With fullgraph=True
the break is torch's error, which says what to compile instead.
"""

from __future__ import annotations

import functools
import inspect
import threading
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from ssdtrain.integration.claims import claim
from ssdtrain.pytorch.models import BypassedModel, check_lowrank, check_unwrapped, compress_gradients
from ssdtrain.pytorch.sharded import watch_sharded
from ssdtrain.runtime import Runtime

_FREED_FUNCTION = "CheckpointWithoutOutputFunctionBackward"
"""The node of the autograd function that recomputes into outputs which it has freed after they were saved."""

OWNED = "_ssdtrain_attached"
"""Key in the `__dict__` of an attached model whose value keeps what is attached alive as long as the model."""

NO_BREAK = (
    "a function compiled with fullgraph=True calls a model that ssdtrain.attach records: compile the model itself "
    "(model.compile() or torch.compile(model), with fullgraph=True), or leave fullgraph out"
)
"""Reason that Dynamo gives for the break of a graph."""

_is_exporting: Callable[[], bool] = getattr(torch.compiler, "is_exporting", bool)  # not in torch 2.6
_is_traced = torch.compiler.is_dynamo_compiling
_graph_task = torch._C._current_graph_task_id


def attach_model(runtime: Runtime, model: nn.Module) -> None:
    """Let the features of `runtime` serve every call of `model`, until it closes. Each call with gradients is one forward, and so
    is that of a module inside of it which is called alone.

    Deep copies of the model and what is written of it by pickle are not recorded. With `comm`, the gradients of
    DistributedDataParallel and FSDP2 are compressed from now on.

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
    if runtime.collectives is not None:
        compress_gradients(model, runtime.collectives)
    if runtime.state is not None:
        check_unwrapped(model)
    runtime.features.append(BypassedModel(_replacement.follow))
    runtime.register(model)
    if runtime.state is not None and runtime.engine is not None:
        runtime.engine.eligible.add_parameter_predicate(runtime.state.holds)
    if runtime.engine is not None:
        runtime.engine.eligible.add_freed_function(_FREED_FUNCTION)
        gathered = watch_sharded(model)  # what FSDP gathers never moves
        if gathered is not None:
            runtime.call_at_close(gathered.remove)
            runtime.engine.eligible.add_parameter_predicate(gathered.__contains__)
    runtime.call_at_close(AttachedModules(model, runtime.call).detach)


class _Recording(threading.local):
    """Whether a forward is being recorded on this thread."""

    active = False


class AttachedModules:
    """Runs the outermost call, with gradients, of `model` or of a module inside of it in a context that `record` makes of the
    module and its arguments.

    A call inside of a backward is no forward: it recomputes. See Note: [Calls of modules].

    Note: [Attached twice]
    A module may be attached several times, as a whole or as a part, and runtimes may be closed in any order. The context of
    what was attached first is the innermost one.

    Attributes:
        record: None after `detach`.
        recording: the state of each thread.
    """

    def __init__(
        self, model: nn.Module, record: Callable[[nn.Module, Any], AbstractContextManager[Any]]
    ) -> None:
        self.recording = _Recording()
        self.record: Callable[[nn.Module, Any], AbstractContextManager[Any]] | None = record
        self._model = weakref.ref(model)
        # Before `nn.Module.__call__` is replaced: Dynamo takes what it finds there when it is imported for torch's own.
        _prepare_dynamo()
        itself = weakref.ref(self)
        self._calls = [_Calls.of(module) for module in model.modules()]
        for calls in self._calls:
            calls.attached += (itself,)
        owned = model.__dict__.get(OWNED)
        if not isinstance(owned, _Owned):  # also of what a copy has
            owned = model.__dict__[OWNED] = _Owned()
        owned.attached.append(self)
        # Also where the model is dropped and nothing is closed.
        self._end = weakref.finalize(self, _replacement.remove, id(self))
        self._end.atexit = False
        _replacement.add(id(self))

    def detach(self) -> None:
        """Record no more, and leave the model as it was. Idempotent."""
        self.record = None
        for calls in self._calls:
            calls.remove(self)
        self._calls.clear()
        model = self._model()
        owned = None if model is None else model.__dict__.get(OWNED)
        if model is not None and isinstance(owned, _Owned) and self in owned.attached:
            owned.attached.remove(self)
            if not owned.attached:
                del model.__dict__[OWNED]
        self._end()


class _Owned:
    """Keeps what is attached to a model alive. A copy or pickle of it is None, for which a reader needs no ssdtrain."""

    def __init__(self) -> None:
        self.attached: list[AttachedModules] = []

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        return None

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()


class _Calls:
    """What the calls of one module are recorded for.

    Attributes:
        attached: in the order in which it was attached.
    """

    def __init__(self, module: nn.Module) -> None:
        self.attached: tuple[weakref.ref[AttachedModules], ...] = ()
        self._number = id(module)
        # Another module may get the number of one that is gone.
        self._module = weakref.ref(module, functools.partial(_forget, self._number))

    @classmethod
    def of(cls, module: nn.Module) -> _Calls:
        """Returns the one of `module`."""
        calls = _calls.get(id(module))
        if calls is None:
            calls = _calls[id(module)] = cls(module)
        return calls

    def remove(self, attached: AttachedModules) -> None:
        self.attached = tuple(known for known in self.attached if known() not in (None, attached))
        if not self.attached and _calls.get(self._number) is self:
            _forget(self._number)


_calls: dict[int, _Calls] = {}
"""Calls of the attached modules, by their `id`."""

_compiled_class: Any = ()
"""The class of what `torch.compile` makes of a module, once Dynamo is imported."""


def _forget(number: int, _: object = None) -> None:
    _calls.pop(number, None)


def _in_front_of(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Return what stands as `torch.nn.Module.__call__` in front of `plain`. See Note: [Calls of modules] and Note: [Compiled
    calls]."""

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if _is_traced():
            if self.__dict__.get(OWNED) is not None and not _is_exporting():
                return _call_eagerly(plain, self, args, kwargs)
            return plain(self, *args, **kwargs)
        calls = _calls.get(id(self))
        if calls is None and isinstance(self, _compiled_class):
            calls = _calls.get(id(self._orig_mod))
        if calls is not None and torch.is_grad_enabled():
            for known in calls.attached:
                attached = known()
                if attached is not None and not attached.recording.active:
                    return _call_recorded(plain, calls.attached, self, args, kwargs)
        return plain(self, *args, **kwargs)

    return call


def _call_eagerly(
    plain: Callable[..., Any], module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Calls an attached model from compiled code, outside of its graph. Compilation goes on inside."""
    calls = _calls.get(id(module))
    if calls is None or not torch.is_grad_enabled():
        return plain(module, *args, **kwargs)
    return _call_recorded(plain, calls.attached, module, args, kwargs)


def _call_recorded(
    plain: Callable[..., Any],
    attached: tuple[weakref.ref[AttachedModules], ...],
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Calls a module in the contexts of what is attached to it, the last one outermost."""
    if not attached or _graph_task() != -1 or _is_exporting():  # which takes the whole forward as one graph
        return plain(module, *args, **kwargs)
    *inner, outermost = attached
    found = outermost()
    record = None if found is None or found.recording.active else found.record
    if found is None or record is None:
        return _call_recorded(plain, tuple(inner), module, args, kwargs)
    try:
        found.recording.active = True
        with record(module, (args, kwargs)):
            return _call_recorded(plain, tuple(inner), module, args, kwargs)
    finally:
        found.recording.active = False


@functools.cache
def _prepare_dynamo() -> None:
    """Let Dynamo compile no frame of the functions above: with torch's own `__call__` it does the same. `call` is still traced
    where compiled code calls a module. Not done when this file is imported, since importing Dynamo takes a second."""
    global _call_eagerly, _call_recorded, _compiled_class
    from torch._dynamo.eval_frame import OptimizedModule, skip_code

    _compiled_class = OptimizedModule
    skip_code(_in_front_of(nn.Module.__call__).__code__)
    disable = functools.partial(torch.compiler.disable, recursive=False)
    if "reason" in inspect.signature(torch.compiler.disable).parameters:  # not in torch 2.6
        disable = functools.partial(disable, reason=NO_BREAK)
    _call_eagerly, _call_recorded = disable(_call_eagerly), disable(_call_recorded)


class _Replacement:
    """Replaces `torch.nn.Module.__call__` while anything is attached. See Note: [Replaced by others]."""

    def __init__(self) -> None:
        self._users: set[int] = set()
        self._plain: weakref.WeakKeyDictionary[Callable[..., Any], Callable[..., Any]] = (
            weakref.WeakKeyDictionary()
        )
        self._lock = threading.RLock()  # finalizers remove users, too

    def add(self, user: int) -> None:
        self._users.add(user)
        self.follow()

    def remove(self, user: int) -> None:
        self._users.discard(user)
        self.follow()

    def follow(self) -> None:
        """Put a replacement in front where there are users and none stands there; without users take away what is in front."""
        with self._lock:
            stands: Callable[..., Any] = nn.Module.__call__
            if self._users and stands not in self._plain:
                placed = _in_front_of(stands)
                self._plain[placed] = stands
                nn.Module.__call__ = placed  # type: ignore[method-assign]
            elif not self._users and stands in self._plain:
                while stands in self._plain:
                    stands = self._plain[stands]
                nn.Module.__call__ = stands  # type: ignore[method-assign]


_replacement = _Replacement()
