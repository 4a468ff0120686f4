"""Functions before and after all steps of optimizers: they come and go while torch walks its table of hooks."""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

import ssdtrain
from ssdtrain.runtime import Runtime
from ssdtrain.steps import call_after_steps, call_before_steps

REGISTER = {"before": register_optimizer_step_pre_hook, "after": register_optimizer_step_post_hook}


@contextmanager
def called(register: Callable[..., object], hook: Callable[[], object]) -> Iterator[None]:
    """`hook` is called with the steps of optimizers, and one of torch's hooks comes behind it."""

    def call(*_: object) -> None:
        hook()

    handles = [register(call), register(lambda *_: None)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()  # type: ignore[attr-defined]


def attached(directory: Path) -> Runtime:
    return ssdtrain.attach(
        nn.Linear(8, 8), {"offload": {"directories": str(directory)}, "report": {"interval": 0}}
    )


def optimizer() -> Optimizer:
    parameter = nn.Parameter(torch.zeros(1))
    parameter.grad = torch.zeros(1)
    return torch.optim.SGD([parameter])


@pytest.mark.parametrize("when", REGISTER)
def test_a_runtime_may_begin_and_end_while_the_hooks_of_a_step_are_called(tmp_path: Path, when: str) -> None:
    with (  # as another thread does, which trains another model
        attached(tmp_path),
        called(REGISTER[when], lambda: attached(tmp_path).close()),
    ):
        optimizer().step()


@pytest.mark.parametrize("when", REGISTER)
def test_a_runtime_may_be_collected_while_the_hooks_of_a_step_are_called(tmp_path: Path, when: str) -> None:
    attached(tmp_path)  # and dropped, without close
    with called(REGISTER[when], gc.collect):
        optimizer().step()


def test_what_is_removed_is_called_no_more_and_what_is_added_is_called_from_the_next_step_on() -> None:
    calls: list[str] = []

    def first(*_: object) -> None:
        calls.append("first")
        second.remove()
        hooks.append(call_before_steps(lambda *_: calls.append("third")))

    hooks = [call_before_steps(first)]
    second = call_before_steps(lambda *_: calls.append("second"))
    after = call_after_steps(lambda *_: calls.append("after"))
    training = optimizer()
    training.step()
    assert calls == ["first", "after"]
    hooks.pop(0).remove()
    after.remove()
    training.step()
    assert calls == ["first", "after", "third"]
    hooks.pop().remove()
