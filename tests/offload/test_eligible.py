"""What must not move does not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.masked import masked_tensor

from ssdtrain.offload.tensors.eligible import Eligibility
from tests.offload.conftest import MakeRuntime


def moved(runtime: object) -> int:
    found = runtime.statistics()
    return int(found.offload.saved_bytes)


def test_parameters_and_views_of_them_stay(make_runtime: MakeRuntime) -> None:
    runtime = make_runtime()
    weight = nn.Parameter(torch.randn(128, 128))
    with runtime.forward():
        loss = (weight.t() @ weight.view(-1)[:128]).sum() + (weight[4:] * weight[:124]).sum()
    assert moved(runtime) == 0
    loss.backward()


def test_registered_parameters_are_known_by_storage(make_runtime: MakeRuntime) -> None:
    """A detached view of a parameter has lost every sign of it but the storage."""
    runtime = make_runtime()
    model = nn.Linear(128, 128)
    x = torch.randn(128, requires_grad=True)
    runtime.register(model)
    with runtime.forward():
        loss = (x * model.weight.detach()[0]).sum() + (x * model.weight.data.view(-1)[:128]).sum()
        big = (x.expand(128, 128) * model.weight.detach()).sum()
    assert moved(runtime) == 0
    (loss + big).backward()


def test_buffers_stay_where_the_model_is_registered(make_runtime: MakeRuntime) -> None:
    runtime = make_runtime()
    model = nn.Module()
    model.register_buffer("mask", torch.randn(128, 128))
    x = torch.randn(128, 128, requires_grad=True)
    runtime.register(model)
    with runtime.forward():
        loss = (x * model.mask).sum()
    assert moved(runtime) == 0
    loss.backward()


def test_a_parameter_that_moved_is_found_again_at_the_next_step(make_runtime: MakeRuntime) -> None:
    """A distributed optimizer re-maps parameters into a flat buffer."""
    runtime = make_runtime()
    model = nn.Linear(128, 128)
    runtime.register(model)
    flat = torch.cat([p.detach().view(-1) for p in model.parameters()])
    offset = 0
    for p in model.parameters():
        p.data = flat[offset : offset + p.numel()].view_as(p)
        offset += p.numel()
    x = torch.randn(128, 128, requires_grad=True)
    with runtime.step(), runtime.forward():
        loss = (x * model.weight.detach()).sum()
    assert moved(runtime) == 0
    loss.backward()


def test_the_copy_that_autocast_makes_of_a_parameter_stays(make_runtime: MakeRuntime) -> None:
    runtime = make_runtime()
    model = nn.Linear(256, 256)
    x = torch.randn(8, 256, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16), runtime.forward():
        loss = model(x).float().sum()
    # The input's copy may move, the weight's (256 x 256 x 2 bytes) may not.
    assert 0 < moved(runtime) < 256 * 256 * 2
    loss.backward()


def test_small_tensors_stay(make_runtime: MakeRuntime) -> None:
    runtime = make_runtime(min_bytes="1MiB")
    x = torch.randn(256, 256, requires_grad=True)
    with runtime.forward():
        loss = (x.sin() * x.cos()).sum()
        tall = x.mean().expand(4096, 4096)  # looks like 64 MiB, is 4 bytes
        loss = loss + (tall * tall).sum()
    assert moved(runtime) == 0
    loss.backward()


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_classes_the_engine_does_not_know_stay(make_runtime: MakeRuntime) -> None:
    runtime = make_runtime()

    class Mine(torch.Tensor):
        pass

    dense = torch.randn(128, 128)
    with runtime.forward():
        mine = dense.clone().as_subclass(Mine).requires_grad_()
        loss = (mine * mine).sum()
        loss.backward()
        conj = torch.randn(128, 128, dtype=torch.complex64, requires_grad=True)
        (torch.conj(conj + 1) * 2).abs().sum().backward()
        sparse = torch.eye(512).to_sparse().requires_grad_()
        torch.sparse.mm(sparse, torch.randn(512, 4)).sum().backward()
        masked = masked_tensor(dense, dense > 0, requires_grad=True)
        (masked * masked).sum().backward()
        nested = torch.nested.nested_tensor([dense, dense[:64]], requires_grad=True)
        (nested * nested).backward(nested.detach())
    assert isinstance(mine.grad, torch.Tensor) and nested.grad is not None


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors", "ignore:torch.quantize_per_tensor")
def test_a_tensor_whose_bytes_are_not_its_value_stays() -> None:
    """Seen from inside of a transform too; of a view with an offset, whose address is none."""
    eligible = Eligibility(1, torch.device("cpu"))
    x = torch.randn(8, 8)
    found: list[bool] = []

    def look(tensor: torch.Tensor) -> torch.Tensor:
        found.extend((eligible.may_move(tensor), eligible.may_move(tensor[1:])))
        return tensor.sum()

    look(x)
    look(torch.view_as_complex(x.view(8, 4, 2)))
    assert found == [True] * 4
    found.clear()
    torch.vmap(look)(x)
    torch.func.grad(look)(x)
    torch.func.jvp(look, (x,), (x,))
    torch.func.functionalize(look)(x)
    look(torch._efficientzerotensor(8))
    look(torch.view_as_complex(x.view(8, 4, 2)).conj())
    look(torch.view_as_complex(x.view(8, 4, 2)).conj().imag)
    others = torch.quantize_per_tensor(x, 0.1, 0, torch.qint8), torch.nested.nested_tensor([x]), x.to_sparse()
    found += [eligible.may_move(one) for one in others]
    assert len(found) == 17 and not any(found)


def test_memory_that_is_copied_when_it_is_written_is_not_copied_by_looking_at_it(
    make_runtime: MakeRuntime,
) -> None:
    runtime = make_runtime()
    x = torch.randn(64, 64, requires_grad=True)
    shared = torch._lazy_clone(x)
    with runtime.forward():
        loss = (shared * shared).sum()
    assert torch._C._is_cow_tensor(shared) and torch._C._is_cow_tensor(x)
    assert moved(runtime) == 0
    loss.backward()
    assert torch.equal(x.grad, 2 * x)
    assert torch._C._is_cow_tensor(shared)


def test_what_is_saved_while_backward_runs_stays(make_runtime: MakeRuntime) -> None:
    runtime = make_runtime()
    x = torch.randn(128, 128, requires_grad=True)
    with runtime.forward():
        y = x.sin().sin()  # its slope is a product whose factors are new tensors
        before = moved(runtime)
        (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    assert moved(runtime) == before
    slope.sum().backward()


def test_an_adapter_can_name_what_its_framework_resizes(make_runtime: MakeRuntime) -> None:
    runtime = make_runtime()
    x = torch.randn(128, 128, requires_grad=True)
    y = x.detach() + 1
    runtime.engine.eligible.add_exclusion(
        lambda tensor: tensor.untyped_storage()._cdata == y.untyped_storage()._cdata
    )
    with runtime.forward():
        loss = (x * y).sum()
    assert moved(runtime) == x.nbytes * 0
    loss.backward()


class Quantised(torch.Tensor):
    """A weight in fp8 as Transformer Engine makes them: of a class of its own, with its bytes in attributes."""

    _data: torch.Tensor
    _transpose: torch.Tensor

    @staticmethod
    def of(values: torch.Tensor) -> Quantised:
        made = torch.Tensor._make_wrapper_subclass(Quantised, values.shape, dtype=values.dtype)
        made._data = values.to(torch.float8_e4m3fn).view(torch.uint8)
        made._transpose = made._data.t().contiguous()
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            made = torch.Tensor._make_wrapper_subclass(cls, args[0].shape, dtype=args[0].dtype)
            made._data, made._transpose = args[0]._data, args[0]._transpose
            return made
        raise NotImplementedError(func)


class QuantisedLinear(torch.autograd.Function):
    """Saves what a linear layer of Transformer Engine does: bytes of a weight, or the weight itself, and its input in fp8."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: Any, saved: list[torch.Tensor]) -> torch.Tensor:
        ctx.save_for_backward(*saved, x.to(torch.float8_e4m3fn).view(torch.uint8))
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        *weight, _ = ctx.saved_tensors
        assert all(one is None or one.numel() for one in weight)
        return gradient, None, None


@pytest.mark.parametrize(
    ("kind", "saves"),
    [("primary weight", "its bytes"), ("primary weight", "itself"), ("workspace", "itself")],
)
def test_fp8_weights_stay_and_fp8_activations_move(make_runtime: MakeRuntime, kind: str, saves: str) -> None:
    """They are needed in every microbatch. A workspace is the copy of a weight that a layer keeps: it is saved as itself."""
    runtime = make_runtime()
    weight = Quantised.of(torch.randn(128, 128))
    model = nn.Module()
    if kind == "primary weight":
        model.weight = nn.Parameter(weight, requires_grad=False)
        weight = model.weight
    runtime.register(model)
    x = torch.randn(128, 128, requires_grad=True)
    with runtime.forward():
        saved = [weight._data, weight._transpose] if saves == "its bytes" else [weight]
        loss = QuantisedLinear.apply(x, weight, saved).sum()
    assert moved(runtime) == x.numel(), "the input in fp8 moves, and nothing else"
    loss.backward()
