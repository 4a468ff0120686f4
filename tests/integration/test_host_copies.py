"""What asks for copies in host memory inside an attached model goes to the tiers: equal to the bit, bytes on the drive."""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper, offload_wrapper
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import ssdtrain
from ssdtrain.offload.policy import Action
from tests.support.policies import Decides

COPIED: list[torch.Size] = []


class OffloadActivations(saved_tensors_hooks):
    """Stands for the class of this name that torchtune has, and others after it."""

    def __init__(self) -> None:
        super().__init__(self.pack, lambda tensor: tensor)

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        COPIED.append(tensor.shape)
        return tensor.clone()


WRITE_ONE = Decides(lambda _: Action(True, must_write=True))
"""One store at a time is not cancelled, however early backward comes."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = x + self.down(torch.nn.functional.gelu(self.up(x)))
        return found


class Net(nn.Module):
    """Blocks that are called by `call`."""

    def __init__(self, call: Callable[[nn.Module, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.blocks, self.call = nn.ModuleList(Block() for _ in range(3)), call

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = self.call(block, x)
        return x


def inside_of(make: Callable[[], Any]) -> Callable[[nn.Module, torch.Tensor], torch.Tensor]:
    def call(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        with make():
            found: torch.Tensor = checkpoint(block, x, use_reentrant=False)
        return found

    return call


def wrapped(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = offload_wrapper(checkpoint_wrapper(block))(x)
    return found


def answering(answer: str) -> Callable[[nn.Module, torch.Tensor], torch.Tensor]:
    def policy(_: Any, operator: Any, *__: Any, **___: Any) -> CheckpointPolicy:
        kept = operator == torch.ops.aten.addmm.default
        return CheckpointPolicy[answer if kept else "PREFER_RECOMPUTE"]

    contexts = functools.partial(create_selective_checkpoint_contexts, policy)
    return functools.partial(checkpoint, use_reentrant=False, context_fn=contexts)


def plain(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return inside_of(nullcontext)(block, x)


def trained(
    call: Callable[..., torch.Tensor],
    directory: Path | None,
    around: Callable[[], Any] = nullcontext,
    device: str = "cpu",
) -> tuple[Sequence[torch.Tensor], float]:
    """Train four steps. Returns the weights, and the bytes written to the drive, or not because backward came first."""
    torch.manual_seed(0)
    net, x, written = Net(call).to(device), torch.randn(16, 32).to(device), 0.0
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    runtime = None
    if directory is not None:
        section = {"directories": str(directory), "amount": "all", "min_bytes": 1}
        runtime = ssdtrain.attach(net, {"offload": section}, policy=WRITE_ONE)
    for _ in range(4):
        optimizer.zero_grad()
        with around():
            net(x).square().mean().backward()
        optimizer.step()
    if runtime is not None:
        statistics = runtime.statistics()
        written = statistics.offload.offloaded_bytes + statistics.offload.avoided_write_bytes
        runtime.close()
    return [parameter.detach().cpu() for parameter in net.parameters()], written


WAYS = {
    "save_on_cpu": (inside_of(save_on_cpu), "torch.autograd.graph.save_on_cpu"),
    "offload_wrapper": (wrapped, "torch.autograd.graph.save_on_cpu"),
    "OffloadActivations": (inside_of(OffloadActivations), "tests.integration.test_host_copies.OffloadActivations"),
    "MUST_CPU_OFFLOAD": (answering("MUST_CPU_OFFLOAD"), "torch.utils.checkpoint.CheckpointPolicy.MUST_CPU_OFFLOAD"),
    "PREFER_CPU_OFFLOAD": (
        answering("PREFER_CPU_OFFLOAD"),
        "torch.utils.checkpoint.CheckpointPolicy.PREFER_CPU_OFFLOAD",
    ),
}  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
def test_goes_to_the_drive(way: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    if "CPU_OFFLOAD" in way and not hasattr(CheckpointPolicy, way):
        pytest.skip("this torch has no such answer")
    caplog.set_level(logging.INFO, "ssdtrain")
    call, name = WAYS[way]
    enter = saved_tensors_hooks.__enter__
    expected, _ = trained(plain, None)
    weights, written = trained(call, tmp_path)
    assert all(map(torch.equal, weights, expected)) and written > 0
    (said,) = [record.getMessage() for record in caplog.records if "would copy" in record.getMessage()]
    assert f"what {name} would copy to host memory goes to the tiers" in said
    assert not [record for record in caplog.records if "take precedence" in record.getMessage()]
    assert saved_tensors_hooks.__enter__ is enter


def test_hooks_around_the_model_get_nothing_of_it_and_the_log_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "ssdtrain")
    expected, _ = trained(plain, None)
    COPIED.clear()
    weights, written = trained(plain, tmp_path, OffloadActivations)
    assert all(map(torch.equal, weights, expected)) and written > 0
    assert [torch.Size([16, 32])] * 4 == COPIED  # the loss alone
    (said,) = [record.getMessage() for record in caplog.records if "would copy" in record.getMessage()]
    assert "OffloadActivations" in said


def test_outside_of_forwards_and_after_close_hooks_are_their_own(tmp_path: Path) -> None:
    hooks = OffloadActivations()
    call = inside_of(lambda: hooks)
    trained(call, tmp_path)
    COPIED.clear()
    trained(call, None)
    assert COPIED


@pytest.mark.skipif(not hasattr(CheckpointPolicy, "MUST_CPU_OFFLOAD"), reason="this torch has no such answer")
def test_an_output_that_is_written_to_is_an_error(tmp_path: Path) -> None:
    class Written(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = nn.Linear(32, 32)

        def inside(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            hidden = self.block(x)
            return hidden, torch.nn.functional.gelu(hidden)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            call: Any = answering("MUST_CPU_OFFLOAD")
            hidden, found = call(self.inside, x)
            with torch.no_grad():
                hidden.add_(1)
            return found

    net = Written()
    section = {"directories": str(tmp_path), "amount": "all", "min_bytes": 1}
    with ssdtrain.attach(net, {"offload": section}):
        loss = net(torch.randn(16, 32, requires_grad=True)).sum()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_a_baseline_leaves_all_hooks_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "ssdtrain")
    net = Net(inside_of(OffloadActivations))
    with ssdtrain.attach(net, {"report": {"path": str(tmp_path)}}):
        COPIED.clear()
        net(torch.randn(16, 32)).square().mean().backward()
    assert COPIED and "would copy" not in caplog.text


def test_hooks_that_threads_share_are_not_written_to(tmp_path: Path) -> None:
    class Shared(OffloadActivations):
        def __setattr__(self, name: str, value: Any) -> None:
            assert name not in vars(self)
            super().__setattr__(name, value)

    hooks = Shared()
    trained(inside_of(lambda: hooks), tmp_path)


@pytest.mark.skipif(not hasattr(CheckpointPolicy, "MUST_CPU_OFFLOAD"), reason="this torch has no such answer")
def test_a_policy_is_asked_once_in_forwards_inside_of_forwards(tmp_path: Path) -> None:
    def offloaded(times: int) -> float:
        net = Net(answering("MUST_CPU_OFFLOAD"))
        with ExitStack() as closing:
            runtimes = []
            for _ in range(times):
                section = {"directories": str(tmp_path), "amount": "all", "min_bytes": 1}
                runtimes.append(closing.enter_context(ssdtrain.attach(net, {"offload": section})))
            net(torch.randn(16, 32)).square().mean().backward()
            found = [runtime.statistics() for runtime in runtimes]
            return sum(one.offload.offloaded_bytes + one.offload.avoided_write_bytes for one in found if one)

    assert offloaded(2) == offloaded(1) > 0


@pytest.mark.skipif(
    "respect_saved_tensors_hooks" not in inspect.getsource(checkpoint), reason="torch 2.14 and later"
)
@pytest.mark.parametrize("answer", ["MUST_SAVE", "MUST_CPU_OFFLOAD"])
def test_selective_checkpointing_that_asks_the_hooks_around_it(answer: str, tmp_path: Path) -> None:
    expected, _ = trained(plain, None)
    call = functools.partial(answering(answer), respect_saved_tensors_hooks=True)
    weights, written = trained(call, tmp_path)
    assert all(map(torch.equal, weights, expected)) and written > 0
