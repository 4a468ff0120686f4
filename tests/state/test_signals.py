"""Ctrl-C at any bytecode of a section that moves model state: state dicts are right, training goes on with the same bits, and no
memory is freed that a worker writes to."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from ssdtrain.runtime import Runtime
from ssdtrain.state import (
    checkpoints,
    chunk,
    chunk_step,
    hooks,
    host_steps,
    optimizer,
    residency,
    stored,
    transfers,
)
from ssdtrain.storage import arena, slot, store
from ssdtrain.storage.signal_safe_lock import _native
from tests.state.conftest import Attach
from tests.state.training import batches, loss_of, make_model, same
from tests.support.bytecodes import Before, count_bytecodes

pytestmark = pytest.mark.skipif(_native is None, reason="the C extension was not built")

MODULES = (
    checkpoints,
    chunk,
    chunk_step,
    hooks,
    host_steps,
    optimizer,
    residency,
    stored,
    transfers,
    arena,
    slot,
    store,
)
LAYERS = 3


@pytest.fixture(autouse=True)
def ctrl_c_raises() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def ctrl_c() -> None:
    signal.raise_signal(signal.SIGINT)


def interrupted(run: Callable[[], object], number: int) -> bool:
    """Whether Ctrl-C at bytecode `number` came before the end of `run`."""
    try:
        with Before(number, ctrl_c, MODULES) as moment:
            run()
    except KeyboardInterrupt:
        return True
    return moment.count >= number  # it was heard where torch takes no exception


def drop_what_torch_queued() -> None:
    torch.ones(1, requires_grad=True).sum().backward()


class Training:
    """A model whose blocks come and go, and the same without."""

    def __init__(self, attach: Attach, *, staged: bool, lr: float = 1e-2, **options: Any) -> None:
        self.model, self.plain = make_model(layers=LAYERS), make_model(layers=LAYERS)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=lr, fused=True)
        self.plain_optimizer = torch.optim.AdamW(self.plain.parameters(), lr=lr, fused=True)
        self.runtime: Runtime = attach(self.model, self.optimizer, staged=staged, **options)
        self.clips = options.get("clip") != "none"
        self.batch = batches(1)[0]
        self.step()

    def gradients(self) -> float:
        """Forward, backward and clipping; the gradients are in the tier afterwards, with a factor. Returns their norm."""
        loss_of(self.model, self.batch).backward()
        return self.runtime.state.clip_grad_norm_(0.1).item() if self.clips else 0.0

    def plain_gradients(self) -> float:
        loss_of(self.plain, self.batch).backward()
        return torch.nn.utils.clip_grad_norm_(self.plain.parameters(), 0.1).item() if self.clips else 0.0

    def forget(self) -> None:
        drop_what_torch_queued()
        self.optimizer.zero_grad()
        self.plain_optimizer.zero_grad()

    def step(self) -> None:
        """Train both for one step."""
        assert self.gradients() == self.plain_gradients()
        self.optimizer.step()
        self.plain_optimizer.step()
        self.forget()

    def check(self) -> None:
        assert same(self.model.state_dict(), self.plain.state_dict())
        assert same(self.optimizer.state_dict(), self.plain_optimizer.state_dict())

    def close(self) -> None:
        """What was away is back, and no buffer is left in use."""
        feature: Any = self.runtime.state
        self.runtime.close()
        assert same(self.model.state_dict(), self.plain.state_dict())
        assert feature._arena is None or not feature._arena.mapped


def moments(count: int, wanted: int) -> range:
    return range(1, count, max(1, count // wanted))


ways = pytest.mark.parametrize("staged", [False, True], ids=["in-place", "staged"])
steppers = pytest.mark.parametrize("options", [{}, {"optimizer_on": "cpu"}], ids=["device", "cpu"])
some_or_many = pytest.mark.parametrize(
    "wanted", [pytest.param(40, marks=pytest.mark.slow), pytest.param(1000, marks=pytest.mark.long)]
)


@some_or_many
@ways
@steppers
def test_after_ctrl_c_at_any_bytecode_state_dicts_are_right_and_training_goes_on(
    options: dict[str, Any], staged: bool, wanted: int, attach: Attach
) -> None:
    training = Training(attach, staged=staged, **options)
    norm = training.plain_gradients()
    training.forget()

    def run() -> None:
        training.gradients()
        training.forget()

    for number in moments(count_bytecodes(run, MODULES), wanted):
        if interrupted(run, number):
            training.forget()
        training.check()
        assert training.gradients() == norm, f"after Ctrl-C at bytecode {number}"
        training.forget()
    training.step()
    training.check()
    training.close()


@some_or_many
@ways
@pytest.mark.parametrize(
    "options",
    [{}, {"optimizer_on": "cpu"}, {"optimizer_on": "cpu", "clip": "none"}],
    ids=["device", "cpu", "cpu-in-backward"],
)
def test_ctrl_c_at_any_bytecode_of_a_step_or_a_state_dict_loses_no_parameter(
    options: dict[str, Any], staged: bool, wanted: int, attach: Attach
) -> None:
    """With a learning rate of 0 every step leaves the parameters as they are; those that an interrupted one came to, too."""
    training = Training(attach, staged=staged, lr=0.0, **options)

    def run() -> None:
        training.gradients()
        training.optimizer.step()
        training.optimizer.zero_grad()
        training.model.state_dict()

    groups = [list(group["params"]) for group in training.optimizer.param_groups]
    for number in moments(count_bytecodes(run, MODULES), wanted):
        if interrupted(run, number):
            training.optimizer.step()  # where the backward has begun to step
            training.forget()
        assert [group["params"] for group in training.optimizer.param_groups] == groups
        assert same(training.model.state_dict(), training.plain.state_dict()), number
        run()
    training.close()


def test_ctrl_c_between_the_parts_of_a_step_leaves_the_groups_whole(attach: Attach) -> None:
    """Also in `finally`, before signals are deferred there."""
    training = Training(attach, staged=False, lr=0.0)
    groups = [list(group["params"]) for group in training.optimizer.param_groups]
    number, came = 0, True
    while came:
        number += 1
        training.gradients()
        try:
            with Before(number, ctrl_c, (optimizer,), ("_only", "_put_back")) as moment:
                training.optimizer.step()
        except KeyboardInterrupt:
            pass
        came = moment.count >= number
        whole = [group["params"] for group in training.optimizer.param_groups]
        assert list(map(ids, whole)) == list(map(ids, groups)), number
        training.forget()
    training.close()


def ids(parameters: list[torch.nn.Parameter]) -> list[int]:
    return [id(parameter) for parameter in parameters]


@pytest.mark.parametrize("stride", [17, pytest.param(1, marks=pytest.mark.long)])
@ways
def test_ctrl_c_at_any_bytecode_of_a_load_frees_no_memory_that_is_being_read_into(
    staged: bool, stride: int, attach: Attach, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reads of a chunk do not end before the pool is released: what they fill must be there until then."""
    training = Training(attach, staged=staged)
    feature: Any = training.runtime.state
    spill, blocks = feature._store, feature._residency
    read, reads = spill.read, []

    def recorded(*args: Any, **kwargs: Any) -> Any:
        reads.append((args[1], read(*args, **kwargs)))
        return reads[-1][1]

    monkeypatch.setattr(spill, "read", recorded)
    last = blocks.chunks[-1]
    number, came = 1 - stride, True
    while came:
        number += stride
        for each in blocks.chunks:
            blocks.release(each.values)
        blocks.wait()
        reads.clear()
        spill.pool.hold(writes=False)
        try:
            came = interrupted(lambda: blocks.prefetch(last, last.values), number)
            kept = {tensor._storage.data_ptr() for tensor in last.values.tensors if tensor.in_memory}
            for address, operation in reads:
                assert operation.done() or staged or address in kept, f"freed at bytecode {number}"
            if staged:
                leased = feature._arena.allocated
                assert leased >= sum(-(-operation.nbytes // 4096) * 4096 for _, operation in reads), number
        finally:
            spill.pool.release()
        blocks.load(last, last.values)
        for parameter, name in last.names.items():
            assert torch.equal(parameter, training.plain.get_parameter(name)), number
    assert number > 50
    training.close()


def test_a_second_close_brings_back_what_ctrl_c_has_left_in_the_tiers(
    attach: Attach, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = Training(attach, staged=False)
    feature: Any = training.runtime.state
    restore = feature._residency.restore

    def ctrl_c_first(*args: Any) -> None:
        monkeypatch.setattr(feature._residency, "restore", restore)
        ctrl_c()

    monkeypatch.setattr(feature._residency, "restore", ctrl_c_first)
    with pytest.raises(KeyboardInterrupt):
        feature.close()
    training.close()


def test_a_signal_handler_that_raises_while_a_read_is_waited_for_frees_nothing(attach: Attach) -> None:
    """An exception that is none of the drive's: the read goes on, and the next forward has its bytes."""
    training = Training(attach, staged=False)
    feature: Any = training.runtime.state

    def late(number: int, frame: Any) -> None:
        raise TimeoutError("an alarm")

    before = signal.signal(signal.SIGALRM, late)
    try:
        feature._store.pool.hold(writes=False)
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with pytest.raises(TimeoutError, match="an alarm"):
            loss_of(training.model, training.batch)
    finally:
        signal.signal(signal.SIGALRM, before)
        feature._store.pool.release()
    training.check()
    training.step()
    training.check()
