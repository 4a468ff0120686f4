"""Attaches models to runtimes, and checks that what is seen from outside keeps to the limit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ssdtrain
from ssdtrain.config import load_config
from ssdtrain.runtime import Runtime, Seams
from ssdtrain.storage import Faults
from tests.support.processes import DEVICE

Attach = Callable[..., Runtime]


@pytest.fixture(autouse=True)
def on_the_device() -> Iterator[None]:
    """Models and tensors of these tests are made on `DEVICE`."""
    with torch.device(DEVICE):
        yield


@pytest.fixture
def attach(tmp_path: Path) -> Iterator[Attach]:
    """Attaches a model and its optimizer, and closes the runtime at the end of the test."""
    made: list[Runtime] = []

    def make(
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        *,
        tier: str = "ssd",
        faults: Faults | None = None,
        staged: bool | None = None,
        offload: dict[str, Any] | None = None,
        optimizer_on: str = "device",
        **options: Any,
    ) -> Runtime:
        if optimizer_on != "device":
            options["optimizer"] = optimizer_on
        options.setdefault("min_bytes", 256)
        options |= {"directories": str(tmp_path / "state")} if tier == "ssd" else {"host": "64MiB"}
        config: dict[str, Any] = {"state": options, "report": {"interval": 0}}
        if offload is not None:
            config["offload"] = {"directories": str(tmp_path / "activations"), **offload}
        if faults is None and staged is None:
            runtime = ssdtrain.attach(model, config, optimizer=optimizer)
        else:
            device = next(model.parameters()).device
            runtime = Runtime(load_config(config), device, seams=Seams(faults, staged), chunked_state=True)
            runtime.state.optimizer = optimizer
            runtime.register(model)
        made.append(runtime)
        return runtime

    yield make
    for runtime in made:
        runtime.close()


class LiveBytes:
    """The bytes of the storages of all parameters, gradients and optimizer state, each once, looked at in hooks of every module,
    of every gradient, and around every operator of the optimizer's step."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.peak = 0
        self._model = model
        self._optimizer = optimizer
        self._parameters = list(model.parameters())
        # Not what the tensors show now, but the storages that they have while they are in memory.
        self._storages = [parameter.untyped_storage() for parameter in self._parameters]
        for module in model.modules():
            module.register_forward_pre_hook(self._look)
            module.register_forward_hook(self._look)
            module.register_full_backward_hook(self._look)
        for parameter in self._parameters:
            parameter.register_post_accumulate_grad_hook(self._look)

    def _look(self, *_: Any) -> None:
        self.peak = max(self.peak, self.now())

    def now(self) -> int:
        found = {storage._cdata: storage.nbytes() for storage in self._storages}
        for parameter in self._parameters:
            tensors = [parameter.grad, *self._optimizer.state.get(parameter, {}).values()]
            for tensor in tensors:
                if isinstance(tensor, torch.Tensor):
                    storage = tensor.untyped_storage()
                    found[storage._cdata] = storage.nbytes()
        return sum(found.values())

    def watch_step(self) -> torch.utils._python_dispatch.TorchDispatchMode:
        look = self._look

        class Watch(torch.utils._python_dispatch.TorchDispatchMode):
            def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                found = func(*args, **(kwargs or {}))
                look()
                return found

        return Watch()
