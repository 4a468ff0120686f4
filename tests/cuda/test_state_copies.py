"""The section `state` in pinned host memory, to which the device copies itself: nothing waits, and no change is lost."""

from __future__ import annotations

import threading
from concurrent.futures import wait

import emulated_cuda
import pytest
import torch

from ssdtrain.codecs import kernels
from ssdtrain.device import CudaDevice, Event
from ssdtrain.state import checksum
from tests.state import test_unseen
from tests.state.conftest import Attach
from tests.state.training import Recipe, adamw, batches, loss_of, make_model, run, same


@pytest.fixture
def flags(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """Kernels are stood in for, without which the host waits: what they compute is tested elsewhere. Returns what says where the
    device would have stored."""
    found: list[torch.Tensor] = []
    monkeypatch.setattr(kernels, "usable", lambda backend, *tensors: True)
    monkeypatch.setattr(kernels, "checksum", lambda words, place, mix: checksum._sum_of(words, 1))
    monkeypatch.setattr(kernels, "copy_where_set", lambda flag, *rest: found.append(flag.clone()))
    return found


@pytest.mark.usefixtures("late")
def test_what_is_changed_past_autograd_is_stored(device: torch.device, attach: Attach) -> None:
    """By the host, or where there are kernels (Triton's interpreter) by the device itself."""
    with device:
        test_unseen.test_values_changed_through_data_in_a_forward_are_kept("host", attach)


@pytest.mark.parametrize("optimizer_on", ["device", "cpu"])
def test_a_step_makes_the_host_wait_for_nothing(
    optimizer_on: str,
    device: torch.device,
    attach: Attach,
    monkeypatch: pytest.MonkeyPatch,
    flags: list[torch.Tensor],
) -> None:
    """But for the thread of the CPU's steps."""
    block, blocked = CudaDevice.block, []

    def noted(self: CudaDevice, event: Event, timeout: float | None = None) -> bool:
        blocked.append(threading.current_thread().name.partition("_")[0])
        return block(self, event, timeout)

    monkeypatch.setattr(CudaDevice, "block", noted)
    with device:
        model = make_model()
        optimizer = adamw(model.parameters())
        attach(model, optimizer, tier="host", optimizer_on=optimizer_on)
        run(Recipe(steps=2), model, optimizer)  # sizes are known, the optimizer has its state
        batch = batches(1)[0].to(device)
        torch.cuda.synchronize()
        blocked.clear()
        before = emulated_cuda.counts()
        loss_of(model, batch).backward()
        optimizer.step()
        waits = emulated_cuda.host_waits(before)
    assert flags and not any(bool(flag) for flag in flags)
    assert set(blocked) <= {"ssdtrain-step"}
    assert sum(waits.values()) <= len(blocked)


def test_parameters_that_have_been_stepped_can_be_read_after_the_step(
    device: torch.device, attach: Attach
) -> None:
    """Also those whose step ends in `optimizer.step()`, while their copies to the device are late."""
    with device, emulated_cuda.settings(h2d_gbps=0.01):
        model = make_model()
        optimizer = adamw(model.parameters())
        limit = sum(parameter.nbytes for parameter in model.parameters()) * 3 // 2
        runtime = attach(model, optimizer, tier="host", optimizer_on="cpu", clip="none", device_limit=limit)
        assert runtime.state.plan.kept == 8
        loss_of(model, batches(1)[0]).backward()
        running = runtime.state._residency.running
        wait([step._future for step in running])
        optimizer.step()
        assert not running
        read = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        torch.cuda.synchronize()
        assert same(read, dict(model.named_parameters()))


@pytest.mark.usefixtures("late", "flags")
def test_memory_that_another_stream_still_reads_is_not_given_out(
    device: torch.device, attach: Attach
) -> None:
    """Blocks run on one stream and are stepped on another; in between the first one makes tensors that have nothing to do with
    the step."""
    side, current = torch.cuda.Stream(), torch.cuda.current_stream()

    def trained(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
        sizes = [parameter.numel() for parameter in model.parameters()]
        losses = []
        for batch in batches(4):
            side.wait_stream(current)
            with torch.cuda.stream(side):
                loss = loss_of(model, batch)
                loss.backward()
            current.wait_stream(side)
            optimizer.step()
            with torch.cuda.stream(side):
                others = [torch.full((size,), torch.nan) for size in 4 * sizes]
            optimizer.zero_grad()
            losses.append(loss.item())
            del others
        return losses

    with device:
        model = make_model()
        expected = trained(model, adamw(model.parameters()))
        model = make_model()
        optimizer = adamw(model.parameters())
        attach(model, optimizer, tier="host")
        assert trained(model, optimizer) == expected
