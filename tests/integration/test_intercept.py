"""What an intercepted collective does: compressed where it is classified, else the plain call to the last argument."""

from __future__ import annotations

from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ssdtrain.comm import Bucket
from ssdtrain.integration.intercept import Interception, by_caller
from ssdtrain.integration.patching import Patches
from ssdtrain.integration.traffic import Traffic, current_traffic, in_scope, traffic_scope

GROUP = object()


class Work:
    def __init__(self) -> None:
        self.waited = 0

    def wait(self) -> None:
        self.waited += 1


class Comm:
    """Compresses what has at least two dimensions, and notes what it is given."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.works: list[Work] = []
        self.point_to_point = SimpleNamespace(send=self.message, receive=self.message)

    def __getattr__(self, name: str) -> Any:
        def verb(*args: Any) -> Work | None:
            self.calls.append((name, *args))
            if args[0].dim() < 2:
                return None
            self.works.append(Work())
            return self.works[-1]

        return verb

    def message(self, tensor: Any, dimension: str, peer: int, issue: Any) -> Work | None:
        self.calls.append(("message", dimension, peer))
        issue(torch.zeros(3, dtype=torch.uint8))
        self.works.append(Work())
        return self.works[-1]


class Backend:
    """Of a framework: methods with names of their own for the arguments."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def all_reduce(self, tensor: Any, op: Any = "SUM", group: Any = None, async_op: bool = False) -> str:
        self.calls.append((tensor, op, group, async_op))
        return "plain"

    def reduce_scatter_tensor(
        self,
        output_tensor: Any,
        input_tensor: Any,
        op: Any = "SUM",
        group: Any = None,
        async_op: bool = False,
    ) -> str:
        self.calls.append((output_tensor, input_tensor, op, group, async_op))
        return "plain"

    def inference_all_reduce(self, tensor: Any, op: Any, group: Any = None) -> str:
        self.calls.append((tensor, op, group))
        return "plain"

    def send(self, *args: Any, **kwargs: Any) -> None:
        """Decorated so that its signature is lost, as those of DeepSpeed's backend are."""
        given = {**dict(zip(("tensor", "dst", "group", "tag"), args, strict=False)), **kwargs}
        self.calls.append((given["tensor"], given["dst"], given.get("group"), given.get("tag")))


FLAT, WIDE = torch.zeros(4), torch.zeros(2, 2)


def intercepted(classify: Any) -> tuple[Backend, Patches]:
    patches = Patches()
    interception = Interception(classify)
    for name in ("all_reduce", "reduce_scatter_tensor", "inference_all_reduce", "send"):
        patches.replace(Backend, name, interception.wrap(name))
    return Backend(), patches


def test_what_is_not_classified_is_the_plain_call() -> None:
    seen = []
    backend, patches = intercepted(lambda tensor, group: seen.append((tensor, group)))
    assert backend.all_reduce(FLAT, group=GROUP) == "plain"
    assert backend.reduce_scatter_tensor(input_tensor=WIDE, output_tensor=FLAT, async_op=True) == "plain"
    assert backend.calls == [(FLAT, "SUM", GROUP, False), (FLAT, WIDE, "SUM", None, True)]
    # An argument that torch does not have yet.
    with pytest.raises(TypeError, match="later"):
        backend.all_reduce(FLAT, later=1)
    # It is classified by the tensor that holds all ranks' parts.
    assert seen == [(FLAT, GROUP), (WIDE, None)]
    patches.undo()


def test_what_is_classified_is_compressed_and_falls_back_to_the_plain_call() -> None:
    comm: Any = Comm()
    backend, patches = intercepted(lambda tensor, group: Traffic(comm, "dp", Bucket("b")))
    assert backend.all_reduce(WIDE, group=GROUP) is None
    assert comm.calls.pop() == ("all_reduce", WIDE, "dp", GROUP, dist.ReduceOp.SUM, Bucket("b"))
    assert comm.works[-1].waited == 1
    handle: Any = backend.all_reduce(WIDE, "AVG", GROUP, True)
    assert handle is comm.works[-1] and handle.waited == 0
    assert comm.calls.pop()[4] == dist.ReduceOp.AVG
    assert backend.inference_all_reduce(WIDE, "SUM") is WIDE
    assert not backend.calls
    assert backend.all_reduce(FLAT, async_op=True) == "plain"  # the engine returned None
    assert backend.calls == [(FLAT, "SUM", None, True)]
    patches.undo()


def test_messages_carry_payloads_and_only_the_first_floating_point_tensor_of_a_scope() -> None:
    comm: Any = Comm()
    backend, patches = intercepted(lambda tensor, group: current_traffic())
    mask, hidden = torch.zeros(2, 2, dtype=torch.int64), WIDE
    with traffic_scope(Traffic(comm, "pp_forward", first_only=True)):
        for tensor in (mask, hidden, hidden):
            backend.send(tensor, 1, tag=7)
    assert comm.calls == [("message", "pp_forward", 1)]
    assert [call[0].dtype for call in backend.calls] == [torch.int64, torch.uint8, torch.float32]
    assert {call[1:] for call in backend.calls} == {(1, None, 7)}
    patches.undo()


def test_a_scope_ends_with_the_function_also_where_it_raises() -> None:
    comm: Any = Comm()

    def function(fails: bool) -> Traffic | None:
        if fails:
            raise ValueError
        return current_traffic()

    scoped = in_scope(lambda fails: Traffic(comm, "tp"))(function)
    assert scoped(False).dimension == "tp"
    with pytest.raises(ValueError):
        scoped(True)
    assert current_traffic() is None


class Manager:
    """torch's, which issues at its end what was added."""

    def __init__(self, *_: Any) -> None:
        self.work = Work()

    def __enter__(self) -> Work:
        return self.work

    def __exit__(self, *_: object) -> None:
        pass


@pytest.mark.parametrize("asynchronous", [False, True])
def test_coalesced_calls_are_issued_at_the_end_and_one_handle_waits_for_all(asynchronous: bool) -> None:
    comm: Any = Comm()
    managers: list[Manager] = []
    interception = Interception(lambda tensor, group: Traffic(comm, "dp"))
    sent: list[Any] = []

    def all_reduce(tensor: Any, op: Any = "SUM", group: Any = None, async_op: bool = False) -> None:
        sent.append(tensor)

    def manager(*args: Any) -> Manager:
        managers.append(Manager())
        return managers[-1]

    wrapped = interception.wrap("all_reduce")(all_reduce)
    with interception.coalescing(manager)(GROUP, None, asynchronous) as handle:
        for tensor in (WIDE, FLAT):
            assert wrapped(tensor, async_op=asynchronous) is handle
        assert not comm.calls and not sent
    assert sent == [FLAT] and len(managers) == 1  # the one that the engine left
    assert comm.works[0].waited == int(not asynchronous)
    handle.wait()
    assert comm.works[0].waited == 1
    assert managers[0].work.waited == int(asynchronous)
    assert wrapped(FLAT) is None and sent == [FLAT, FLAT]  # no manager is open


def test_calls_inside_of_a_manager_that_raises_are_not_issued() -> None:
    comm: Any = Comm()
    interception = Interception(lambda tensor, group: Traffic(comm, "dp"))

    def all_reduce(tensor: Any, op: Any = "SUM", group: Any = None, async_op: bool = False) -> None: ...

    wrapped = interception.wrap("all_reduce")(all_reduce)
    with pytest.raises(ValueError), interception.coalescing(Manager)(GROUP):
        wrapped(WIDE)
        raise ValueError
    assert not comm.calls and interception.open is None


def test_only_calls_of_chosen_modules_are_intercepted() -> None:
    comm: Any = Comm()
    owner: Any = ModuleType("owner")

    def all_reduce(tensor: Any, op: Any = "SUM", group: Any = None, async_op: bool = False) -> str:
        return "plain"

    owner.all_reduce = all_reduce
    interception = Interception(lambda tensor, group: Traffic(comm, "tp"))
    patches, others = Patches(), Patches()
    choose = {"layers": interception}.get
    others.replace(owner, "all_reduce", by_caller("all_reduce", lambda module: None))
    patches.replace(owner, "all_reduce", by_caller("all_reduce", choose))
    for module, expected in (("layers", None), ("norms", "plain")):
        made = ModuleType(module)
        exec("def call(owner, tensor):\n    return owner.all_reduce(tensor)", made.__dict__)
        assert made.call(owner, WIDE) == expected
    others.undo()
    patches.undo()
    assert owner.all_reduce is all_reduce


def test_traffic_with_a_reason_is_counted_and_sent_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "get_world_size", lambda group: 2)
    comm: Any = Comm()
    counted: list[Any] = []
    comm.router = SimpleNamespace(count_fallback=lambda *args: counted.append(args))
    for off in (False, True):
        comm.policy = SimpleNamespace(rules={"dp": SimpleNamespace(off=off)})
        backend, patches = intercepted(
            lambda tensor, group: Traffic(comm, "dp", uncompressed="master weights")
        )
        assert backend.all_reduce(FLAT) == "plain"
        patches.undo()
    assert counted == [("dp", "master weights", 16)]
    assert [call[0] for call in comm.calls] == ["all_reduce"]  # where it is off, the engine counts that
