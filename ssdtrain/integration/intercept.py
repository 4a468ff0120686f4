"""Collectives of a framework, compressed as its adapter classifies what they carry.

An adapter replaces the functions that its framework sends with by `Interception.wrap`, and determines in one function,
`classify(tensor, group) -> Traffic | None`, which parallel dimension a collective belongs to. What is not classified, and what
the communicator leaves, goes through the framework's own function with the very arguments of the call.

Note: [Coalesced collectives]
    Inside of torch's coalescing manager nothing is sent. At its end each collective is offered to the communicator; those that
    stay uncompressed go through torch's own manager, together.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor

from ssdtrain.comm import ChainedWork, CompressedWork
from ssdtrain.comm.collectives import AllGather, AllReduce, ReduceScatter, Sharded
from ssdtrain.integration import patching
from ssdtrain.integration.patching import Function, Wrap
from ssdtrain.integration.traffic import Traffic

Work = CompressedWork | ChainedWork

Classify = Callable[[Tensor, Any], Traffic | None]
"""(the tensor of all ranks' parts, process group) -> what the collective carries; None: it is not compressed, nor counted."""

_Argument = tuple[tuple[str, ...], Any]
"""Names that torch and frameworks have for an argument, and its default."""

_OUT: _Argument = (("output", "output_tensor"), None)
_IN: _Argument = (("input", "input_tensor"), None)
_TENSOR: _Argument = (("tensor",), None)
_OP: _Argument = (("op",), dist.ReduceOp.SUM)
_GROUP: _Argument = (("group",), None)
_ASYNC: _Argument = (("async_op",), False)
_OUT_SPLITS: _Argument = (("output_split_sizes",), None)
_IN_SPLITS: _Argument = (("input_split_sizes",), None)


class _CollectiveKind(NamedTuple):
    """A collective and its arguments, in torch's order. `async_op`, where there is one, follows the group."""

    parameters: tuple[_Argument, ...]
    launch: Callable[..., Work | None]
    whole: int
    """The tensor that holds all ranks' parts."""
    group: int
    collective: type[Sharded] | None = None
    returns: int | None = None
    """The argument that is returned when the call has waited."""


def _all_reduce(traffic: Traffic, tensor: Tensor, op: Any, group: Any) -> Work | None:
    bucket = traffic.bucket_of(tensor, group)
    return traffic.comm.all_reduce(tensor, traffic.dimension, group, _torch_op(op), bucket)


def _reduce_scatter(traffic: Traffic, out: Tensor, tensor: Tensor, op: Any, group: Any) -> Work | None:
    bucket = traffic.bucket_of(tensor, group, by_rank=True)
    return traffic.comm.reduce_scatter(out, tensor, traffic.dimension, group, _torch_op(op), bucket)


def _all_gather(traffic: Traffic, out: Tensor, tensor: Tensor, group: Any) -> Work | None:
    bucket = traffic.bucket_of(out, group, by_rank=True)
    if traffic.delta and bucket is not None:
        return traffic.comm.gather_weights(out, tensor, group, bucket)
    return traffic.comm.all_gather(out, tensor, traffic.dimension, group, bucket)


def _all_to_all(
    traffic: Traffic, out: Tensor, tensor: Tensor, out_splits: Any, in_splits: Any, group: Any
) -> Work | None:
    return traffic.comm.all_to_all(
        out, tensor, traffic.dimension, _sizes(out_splits), _sizes(in_splits), group
    )


_KINDS = {
    "all_reduce": _CollectiveKind((_TENSOR, _OP, _GROUP, _ASYNC), _all_reduce, 0, 2, AllReduce),
    "inference_all_reduce": _CollectiveKind((_TENSOR, _OP, _GROUP), _all_reduce, 0, 2, AllReduce, returns=0),
    "reduce_scatter_tensor": _CollectiveKind(
        (_OUT, _IN, _OP, _GROUP, _ASYNC), _reduce_scatter, 1, 3, ReduceScatter
    ),
    "all_gather_into_tensor": _CollectiveKind((_OUT, _IN, _GROUP, _ASYNC), _all_gather, 0, 2, AllGather),
    "all_to_all_single": _CollectiveKind(
        (_OUT, _IN, _OUT_SPLITS, _IN_SPLITS, _GROUP, _ASYNC), _all_to_all, 1, 4
    ),
}
_MESSAGES: dict[str, tuple[_Argument, ...]] = {
    "send": (_TENSOR, (("dst",), None), _GROUP, (("tag",), 0)),
    "recv": (_TENSOR, (("src",), None), _GROUP, (("tag",), 0)),
}


def _torch_op(op: Any) -> Any:
    """A framework's reduction as torch's, by its name; torch's own stays."""
    return getattr(dist.ReduceOp, str(getattr(op, "name", op)).rsplit(".", 1)[-1], op)


def _sizes(given: Any) -> Sequence[int] | None:
    """Some callers give tensors or arrays, where they have counted tokens."""
    return None if given is None else [int(size) for size in given]


class Interception:
    """Compresses the collectives of the functions that it wraps.

    Args:
        classify: what a collective carries.
    """

    def __init__(self, classify: Classify) -> None:
        self._classify = classify
        self.open: Coalesced | None = None

    def wrap(self, name: str) -> Wrap:
        """A wrapper of a function or method with the arguments of `torch.distributed.<name>`, in torch's order.

        Args:
            name: `all_reduce`, `reduce_scatter_tensor`, `all_gather_into_tensor`, `all_to_all_single`, `send` or `recv`; or
                `inference_all_reduce`, which has no `async_op` and returns its tensor.
        """
        if name in _MESSAGES:
            return functools.partial(self._message, name)
        return functools.partial(self._collective, _KINDS[name])

    def _collective(self, kind: _CollectiveKind, plain: Function) -> Function:
        begin = int(_is_method(plain))
        # A function of the framework's own returns a handle even where torch's manager coalesces.
        own = not getattr(plain, "__module__", "").startswith("torch.")

        def collective(*args: Any, **kwargs: Any) -> Any:
            values = _read(kind.parameters, args[begin:], kwargs)
            if values is None:
                return plain(*args, **kwargs)
            traffic = self._classify(values[kind.whole], values[kind.group])
            asynchronous = len(values) > kind.group + 1 and bool(values[kind.group + 1])

            def compress() -> Work | None:
                if traffic is None or _stays_plain(traffic, kind, values):
                    return None
                return kind.launch(traffic, *values[: kind.group + 1])

            send = functools.partial(plain, *args, **kwargs)
            if self.open is not None:
                return self.open.add(compress, send, waits=own and asynchronous)
            work = compress()
            if work is None:
                return send()
            if asynchronous:
                return work
            work.wait()
            return None if kind.returns is None else values[kind.returns]

        return collective

    def _message(self, name: str, plain: Function) -> Function:
        begin = int(_is_method(plain))

        def message(*args: Any, **kwargs: Any) -> Any:
            values = _read(_MESSAGES[name], args[begin:], kwargs)
            if values is None:
                return plain(*args, **kwargs)
            tensor, peer, *others = values
            traffic = self._classify(tensor, others[0])
            work = None
            if traffic is not None and peer is not None and traffic.compresses_next(tensor):

                def issue(payload: Tensor) -> None:
                    plain(*args[:begin], payload, peer, *others)  # has waited when it returns

                through = traffic.comm.point_to_point
                verb = through.send if name == "send" else through.receive
                work = verb(tensor, traffic.dimension, peer, issue)
            if work is None:
                return plain(*args, **kwargs)
            work.wait()
            return None

        return message

    def coalescing(self, plain: Function) -> Function:
        """A wrapper of torch's `_coalescing_manager` for the wrapped functions. See Note: [Coalesced collectives]."""

        def coalescing_manager(group: Any = None, device: Any = None, async_ops: bool = False) -> Coalesced:
            return Coalesced(self, functools.partial(plain, group, device, async_ops), async_ops)

        return coalescing_manager


class Coalesced:
    """Stands for torch's coalescing manager, and for its handle."""

    def __init__(self, owner: Interception, manager: Callable[[], Any], async_ops: bool) -> None:
        self._owner = owner
        self._manager = manager
        self._async_ops = async_ops
        self._calls: list[tuple[Callable[[], Work | None], Function, bool]] = []
        self._works: list[Any] = []

    def add(self, compress: Callable[[], Work | None], send: Function, waits: bool) -> Coalesced:
        """Issue a collective at the end; the handle is that of all of them.

        Args:
            compress: issues it compressed, or returns None.
            send: issues it as the framework does.
            waits: what `send` returns has to be waited for beside the manager's handle.
        """
        self._calls.append((compress, send, waits))
        return self

    def __enter__(self) -> Coalesced:
        self._owner.open = self
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._owner.open = None
        calls, self._calls = self._calls, []
        if error is not None:
            return
        plain = []
        for compress, send, waits in calls:
            work = compress()
            if work is None:
                plain.append((send, waits))
            else:
                self._works.append(work)
        if plain:
            with self._manager() as manager:
                others = [work for send, waits in plain if (work := send()) is not None and waits]
            # Torch's own manager has waited by now unless it is asynchronous.
            if self._async_ops:
                self._works += others or [manager]
        if not self._async_ops:
            self.wait()

    def wait(self) -> None:
        """Until all results are there."""
        while self._works:
            self._works[0].wait()  # where it raises, the next wait does, too
            del self._works[0]


def by_caller(name: str, choose: Callable[[str], Interception | None]) -> Wrap:
    """A wrapper of a function that many modules look up in `torch.distributed`.

    Args:
        name: as for `Interception.wrap`.
        choose: called with the name of a module that calls; None: its calls are left alone.
    """

    def wrap(plain: Function) -> Function:
        known: dict[str, Function] = {}

        def function(*args: Any, **kwargs: Any) -> Any:
            caller = _caller()
            found = known.get(caller)
            if found is None:
                chosen = choose(caller)
                found = known[caller] = plain if chosen is None else chosen.wrap(name)(plain)
            return found(*args, **kwargs)

        return function

    return wrap


def _caller() -> str:
    """The module that called a replaced function, which calls this."""
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_globals.get("__name__") in (__name__, patching.__name__):
        frame = frame.f_back
    return str(frame.f_globals.get("__name__", ""))


def _read(parameters: Sequence[_Argument], args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any] | None:
    """The arguments of a call, in order and with defaults; None where it has one that is not among `parameters`."""
    values = list(args)
    unread = len(kwargs)
    for names, default in parameters[len(args) :]:
        given = next((name for name in names if name in kwargs), None)
        values.append(default if given is None else kwargs[given])
        unread -= given is not None
    return values if unread == 0 and len(values) == len(parameters) else None


def _stays_plain(traffic: Traffic, kind: _CollectiveKind, values: Sequence[Any]) -> bool:
    """Count a collective that has a reason to be sent uncompressed."""
    if traffic.uncompressed is None or kind.collective is None:
        return False
    if traffic.comm.policy.rules[traffic.dimension].off:
        return False  # the communicator counts it as off
    ranks = dist.get_world_size(values[kind.group])
    if ranks > 1:
        raw = kind.collective.ring_bytes(values[kind.whole].nbytes, ranks)
        traffic.comm.router.count_fallback(traffic.dimension, traffic.uncompressed, raw)
    return True


def _is_method(plain: Function) -> bool:
    return next(iter(inspect.signature(plain).parameters), "") == "self"
