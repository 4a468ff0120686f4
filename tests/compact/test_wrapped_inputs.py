"""Inputs that have no memory of their own, and weights of classes that compute in their own way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F

import ssdtrain
from ssdtrain.config import ConfigError


@pytest.mark.parametrize(
    "section", [{"mode": "quant"}, {"mode": "reconstruct"}], ids=["quant", "reconstruct"]
)
def test_layers_of_torchs_tensor_parallelism_are_refused_by_name(
    section: dict[str, Any], tmp_path: Path
) -> None:
    """A codec would read from the address 0."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'ranks'}", rank=0, world_size=1)
    try:
        model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64))
        parallelize_module(
            model, init_device_mesh("cpu", (1,)), {"0": ColwiseParallel(), "2": RowwiseParallel()}
        )
        with ssdtrain.attach(model, {"compact": section, "report": {"interval": 0}}):
            with pytest.raises(
                RuntimeError, match=r"the input of 0, a DTensor: name this layer in compact\.exclude"
            ):
                model(torch.randn(4, 64))
        model(torch.randn(4, 64)).sum().backward()
    finally:
        dist.destroy_process_group()


class Int8Weight(torch.Tensor):
    """A weight in int8, as packages for quantised training make them: `linear` with it is a function of its own."""

    _data: torch.Tensor
    _scale: torch.Tensor

    @staticmethod
    def of(data: torch.Tensor, scale: torch.Tensor, requires_grad: bool = False) -> Int8Weight:
        weight = torch.Tensor._make_wrapper_subclass(
            Int8Weight, data.shape, dtype=scale.dtype, requires_grad=requires_grad
        )
        weight._data, weight._scale = data, scale
        return weight

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.linear:
            return Int8Linear.apply(*args, **(kwargs or {}))
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls.of(args[0]._data, args[0]._scale)
        raise NotImplementedError(func)


class Int8Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: Any, bias: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight._data, weight._scale)
        return F.linear(x, weight._data * weight._scale, bias)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        x, data, scale = ctx.saved_tensors
        return gradient @ (data * scale), gradient.t() @ x, gradient.sum(0)


def quantised_model(trained: bool) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))
    for layer in (model[0], model[2]):
        assert isinstance(layer, nn.Linear)
        values = layer.weight.detach()
        scale = values.abs().amax() / 127
        weight = Int8Weight.of((values / scale).round().to(torch.int8), scale)
        layer.weight = nn.Parameter(weight, requires_grad=trained)
    return model


def gradients(model: nn.Module) -> list[torch.Tensor | None]:
    torch.manual_seed(1)
    x = torch.randn(32, 64, requires_grad=True)
    model(x).square().sum().backward()
    return [x.grad, *(parameter.grad for parameter in model.parameters())]


@pytest.mark.parametrize(
    "section", [{"mode": "quant"}, {"mode": "reconstruct", "ratio": 0.5}], ids=["quant", "reconstruct"]
)
def test_layers_that_train_weights_of_such_a_class_are_refused_by_name_at_start(
    section: dict[str, Any],
) -> None:
    config = {"compact": section, "report": {"interval": 0}}
    with pytest.raises(
        ConfigError,
        match=r"compact\.exclude: .* 2 layers whose weights, which are trained, are of the class Int8Weight: 0, 2; ",
    ):
        ssdtrain.attach(quantised_model(trained=True), config)
    plain = gradients(quantised_model(trained=True))
    model = quantised_model(trained=True)
    with ssdtrain.attach(model, config | {"compact": {**section, "exclude": ["0", "2"]}}) as runtime:
        compressed = gradients(model)
        metrics = runtime.statistics()
        assert metrics.values()["compact/input_bytes"] > 0
    for name, one, other in zip(["x", *dict(model.named_parameters())], plain, compressed, strict=True):
        assert torch.equal(one, other) == (name != "4.weight"), name


def test_frozen_weights_of_such_a_class_are_left_to_it() -> None:
    plain, model = gradients(quantised_model(trained=False)), quantised_model(trained=False)
    with ssdtrain.attach(model, {"compact": {"mode": "quant"}, "report": {"interval": 0}}):
        compressed = gradients(model)
    for name, one, other in zip(["x", *dict(model.named_parameters())], plain, compressed, strict=True):
        if name in ("0.weight", "2.weight"):
            assert one is None and other is None
        else:
            assert torch.equal(one, other) == (name != "4.weight"), name
