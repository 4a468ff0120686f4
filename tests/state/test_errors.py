"""What cannot be served is refused by name; a drive that fails is an error; NaN stands where a value is not in memory."""

from __future__ import annotations

import contextlib
import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import ssdtrain
from ssdtrain.config import ConfigError, load_config
from ssdtrain.runtime import Runtime
from ssdtrain.storage import Faults
from ssdtrain.storage.errors import IOFailure
from tests.state.conftest import Attach
from tests.state.training import Recipe, adamw, batches, chunked, loss_of, make_model, run


def refused(tmp_path: Path, model: nn.Module, optimizer: Any, **options: Any) -> str:
    config = {"state": {"directories": str(tmp_path), **options}, "report": {"interval": 0}}
    with pytest.raises(ConfigError) as error:
        ssdtrain.attach(model, config, optimizer=optimizer)
    return str(error.value)


def test_what_is_refused(tmp_path: Path) -> None:
    model = make_model()
    assert "optimizer=optimizer" in refused(tmp_path, model, None)
    assert "LBFGS" in refused(tmp_path, model, torch.optim.LBFGS(model.parameters()))
    differentiable = torch.optim.AdamW(model.parameters(), differentiable=True)
    assert "differentiable" in refused(tmp_path, model, differentiable)
    scheduled = adamw(model.parameters())
    torch.optim.lr_scheduler.StepLR(scheduled, 1)
    assert "before the scheduler" in refused(tmp_path, model, scheduled)
    compiled = make_model()
    compiled.layers[2]._compiled_call_impl = compiled.layers[
        2
    ]._call_impl  # what compile() sets; it imports for seconds
    assert "layers.2 in torch.compile" in refused(tmp_path, compiled, adamw(compiled.parameters()))
    assert "state.blocks" in refused(tmp_path, model, adamw(model.parameters()), blocks=["nothing.*"])
    small = refused(tmp_path, model, adamw(model.parameters()), device_limit="1KiB", min_bytes=256)
    assert "state.device_limit" in small and "at least" in small
    room = refused(tmp_path, model, adamw(model.parameters()), capacity="4KiB", min_bytes=256)
    assert "state.capacity" in room and "take" in room
    for parameter in model.parameters():
        assert not parameter.isnan().any()


def test_other_sections_and_other_frameworks_are_refused(tmp_path: Path) -> None:
    model = make_model()
    state = {"directories": str(tmp_path)}
    with pytest.raises(ConfigError, match=r'ssdtrain\.state.*compact\.mode "lowrank"'):
        both = {"state": state, "compact": {"mode": "lowrank"}}
        ssdtrain.attach(model, both, optimizer=adamw(model.parameters()))
    with pytest.raises(ConfigError, match=r"plain PyTorch.*framework's own means"):
        Runtime(load_config({"state": state}))
    with pytest.raises(ConfigError, match="at least one directory, or host above 0"):
        load_config({"state": {}})


def test_a_wrapper_that_has_the_parameters_is_refused(tmp_path: Path) -> None:
    model = make_model()
    alone = not dist.is_initialized()
    if alone:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        wrapped = nn.parallel.DistributedDataParallel(model)
        assert "reduces or shards the same parameters" in refused(
            tmp_path, wrapped, adamw(model.parameters())
        )
    finally:
        if alone:
            dist.destroy_process_group()


@pytest.mark.parametrize("staged", [False, True], ids=["in-place", "staged"])
@pytest.mark.parametrize("kind", ["reads", "writes"])
def test_a_failing_drive_is_an_error(kind: str, staged: bool, attach: Attach) -> None:
    """Every operation from the 20th (40th) on fails: none is taken for done."""
    model = make_model()
    optimizer = adamw(model.parameters())
    some = frozenset(range(20, 4000)) if kind == "reads" else frozenset(range(40, 4000))
    faults = Faults(fail_reads=some) if kind == "reads" else Faults(fail_writes=some)
    runtime = attach(model, optimizer, faults=faults, staged=staged)
    with pytest.raises(IOFailure):
        run(Recipe(steps=5), model, optimizer)
    with contextlib.suppress(IOFailure):  # where all that failed to be written is in memory, it is back
        runtime.close()


def test_a_failed_read_leaves_nan_and_never_data(attach: Attach) -> None:
    model, _, runtime = chunked(attach, faults=Faults(fail_reads=frozenset(range(4000))))
    with pytest.raises(IOFailure):
        loss_of(model, batches(1)[0])
    assert model.layers[0].up.weight.isnan().all()
    with pytest.raises(IOFailure):
        runtime.close()


def test_values_that_are_away_are_nan_and_not_changed(attach: Attach) -> None:
    model, optimizer, runtime = chunked(attach)
    weight = model.layers[5].up.weight
    assert weight.isnan().all() and weight.shape == (128, 32)
    with pytest.raises(RuntimeError, match="single memory location"), torch.no_grad():
        weight.mul_(2)
    other = torch.optim.SGD(model.parameters(), lr=0.1)
    loss_of(model, batches(1)[0]).backward()
    with pytest.raises(RuntimeError, match="SGD would update layers"):
        other.step()
    with pytest.raises(RuntimeError, match="clip by"):
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    with pytest.raises(RuntimeError, match="set_to_none"):
        optimizer.zero_grad(set_to_none=False)
    with pytest.raises(RuntimeError, match=r"outside of the forward of layers\.5"):
        model.layers[5].up(torch.ones(1, 32))
    with pytest.raises(RuntimeError, match="copy of a model"):
        loss_of(copy.deepcopy(model), batches(1)[0])
    assert not model.layers[0].up.weight.isnan().any()  # the last of the backward is still there
    optimizer.zero_grad()
    before, weight.data = weight.data, torch.zeros_like(weight)
    with pytest.raises(RuntimeError, match="was given other data"):
        run(Recipe(steps=1), model, optimizer)
    weight.data = before
    runtime.close()
    assert not any(parameter.isnan().any() for parameter in model.parameters())


def test_an_output_that_hides_its_tensors_is_refused(attach: Attach) -> None:
    class Hidden:
        def __init__(self, value: torch.Tensor) -> None:
            self.value = value

    class Hiding(nn.Linear):
        def forward(self, x: torch.Tensor) -> Any:
            self.loss = self.weight.square().sum()  # it is seen, the output is not
            return Hidden(super().forward(x))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([Hiding(32, 32) for _ in range(4)])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = layer(x).value
            return x

    model = Model()
    attach(model, adamw(model.parameters()))
    with pytest.raises(RuntimeError, match=r"layers\.0 \(Hiding\) returned Hidden"):
        model(torch.ones(2, 32))
    with torch.no_grad():
        assert not model(torch.ones(2, 32)).isnan().any()
