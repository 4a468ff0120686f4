"""A sample of operators on the emulated device equals the CPU to the bit, forward and backward."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import emulated_cuda
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

FLOATS = [torch.float32, torch.bfloat16, torch.float16]


def moved(value: object, device: torch.device) -> object:
    if isinstance(value, Tensor):
        copy = value.detach().to(device)
        return copy.requires_grad_(value.requires_grad)
    return type(value)(moved(each, device) for each in value) if isinstance(value, (list, tuple)) else value


def results(function: Callable[..., object], arguments: list[object], device: torch.device) -> list[Tensor]:
    """What the function returns and the gradients of its inputs, on the CPU."""
    inputs = [moved(argument, device) for argument in arguments]
    outputs = function(*inputs)
    tensors = [
        each
        for each in (outputs if isinstance(outputs, (list, tuple)) else [outputs])
        if isinstance(each, Tensor)
    ]
    wanted = [each for each in inputs if isinstance(each, Tensor) and each.requires_grad]
    differentiable = [each for each in tensors if each.requires_grad]
    if differentiable and wanted:
        total = sum(each.float().square().sum() for each in differentiable)
        total.backward()
        tensors += [each.grad for each in wanted if each.grad is not None]
    return [each.detach().cpu() for each in tensors]


def x(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape).to(dtype).requires_grad_()


def convolution(a: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """The operator that both have: oneDNN's is the CPU's alone."""
    with torch.backends.mkldnn.flags(enabled=False):
        return F.conv2d(a, weight, bias)


INDEX = torch.tensor([3, 1, 3, 0])
OPERATORS: dict[str, tuple[Callable[..., object], Callable[[torch.dtype], list[object]]]] = {
    "linear": (F.linear, lambda d: [x(4, 8, 16, dtype=d), x(32, 16, dtype=d), x(32, dtype=d)]),
    "matmul": (torch.matmul, lambda d: [x(3, 4, 8, dtype=d), x(3, 8, 5, dtype=d)]),
    "layer_norm": (
        lambda a, w, b: F.layer_norm(a, (16,), w, b),
        lambda d: [x(4, 16, dtype=d), x(16, dtype=d), x(16, dtype=d)],
    ),
    "gelu": (F.gelu, lambda d: [x(100, dtype=d)]),
    "silu": (F.silu, lambda d: [x(100, dtype=d)]),
    "softmax": (lambda a: a.softmax(-1), lambda d: [x(4, 33, dtype=d)]),
    "cross_entropy": (lambda a: F.cross_entropy(a, INDEX.to(a.device)), lambda d: [x(4, 9, dtype=d)]),
    "embedding": (lambda w: F.embedding(INDEX.to(w.device), w), lambda d: [x(9, 8, dtype=d)]),
    "index": (lambda a: a[INDEX.to(a.device)], lambda d: [x(5, 6, dtype=d)]),
    "masked": (lambda a: a[a > 0], lambda d: [x(50, dtype=d)]),
    "where": (lambda a, b: torch.where(a > b, a, b), lambda d: [x(20, dtype=d), x(20, dtype=d)]),
    "cat and split": (
        lambda a, b: torch.cat([a, b]).split(3),
        lambda d: [x(4, 5, dtype=d), x(5, 5, dtype=d)],
    ),
    "transposed copy": (lambda a: a.transpose(0, 2).contiguous(), lambda d: [x(3, 4, 5, dtype=d)]),
    "reductions": (lambda a: (a.sum(1), a.mean(), a.amax(0), a.norm()), lambda d: [x(7, 11, dtype=d)]),
    "topk and sort": (lambda a: (*a.topk(3), *a.sort()), lambda d: [x(6, 10, dtype=d)]),
    "cumsum": (lambda a: a.cumsum(1), lambda d: [x(6, 10, dtype=d)]),
    "conv2d": (convolution, lambda d: [x(2, 3, 8, 8, dtype=d), x(4, 3, 3, 3, dtype=d), x(4, dtype=d)]),
    "max_pool2d": (lambda a: F.max_pool2d(a, 2), lambda d: [x(2, 3, 8, 8, dtype=d)]),
    "casts": (lambda a: (a.double(), a.to(torch.int32), a > 0), lambda d: [x(40, dtype=d)]),
    "einsum": (
        lambda a, b: torch.einsum("bij,bkj->bik", a, b),
        lambda d: [x(2, 3, 4, dtype=d), x(2, 5, 4, dtype=d)],
    ),
    "attention": (
        lambda a: F.scaled_dot_product_attention(a, a, a, is_causal=True),
        lambda d: [x(2, 4, 32, 16, dtype=d)],
    ),
    "views": (lambda a: a.view(4, -1).t().unfold(0, 2, 1) * 2, lambda d: [x(4, 6, dtype=d)]),
    "scatter": (
        lambda a: torch.zeros(5, 6, device=a.device, dtype=a.dtype).index_add(0, INDEX.to(a.device), a),
        lambda d: [x(4, 6, dtype=d)],
    ),
}
MIXED_STATISTICS = {"layer_norm"}
"""torch's kernels for CUDA keep statistics of half precision in float, those of the CPU do not: gradients are close."""


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("name", OPERATORS)
def test_an_operator_has_the_bits_of_the_cpu(name: str, dtype: torch.dtype, device: torch.device) -> None:
    function, make = OPERATORS[name]
    torch.manual_seed(5)
    arguments = make(dtype)
    expected, found = results(function, arguments, torch.device("cpu")), results(function, arguments, device)
    assert len(expected) == len(found) > 0
    for a, b in zip(expected, found, strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        if name in MIXED_STATISTICS and dtype != torch.float32:
            torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2)
        else:
            assert torch.equal(a.nan_to_num(7), b.nan_to_num(7))


OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
    "AdamW": lambda p: torch.optim.AdamW(p, 0.01),
    "AdamW foreach": lambda p: torch.optim.AdamW(p, 0.01, foreach=True),
    "AdamW fused": lambda p: torch.optim.AdamW(p, 0.01, fused=True),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_of_an_optimizer_do_not_make_the_host_wait(name: str, device: torch.device) -> None:
    parameters = [torch.randn(5, 5, device=device, requires_grad=True) for _ in range(3)]
    optimizer = OPTIMIZERS[name](parameters)
    waits = []
    for _ in range(2):
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        before = emulated_cuda.counts()
        optimizer.step()
        waits.append(emulated_cuda.host_waits(before))
    assert not waits[1]
    assert all(bool(parameter.isfinite().all()) for parameter in parameters)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_fused_attention_saves_what_it_saves_on_a_gpu(dtype: torch.dtype, device: torch.device) -> None:
    saved: list[Tensor] = []
    q, k, v = (torch.randn(2, 4, 40, 16, device=device, dtype=dtype, requires_grad=True) for _ in range(3))
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        F.scaled_dot_product_attention(q, k, v)
    names = {"bfloat16": "Flash", "float32": "Efficient"}
    assert (
        names[str(dtype).removeprefix("torch.")]
        in type(F.scaled_dot_product_attention(q, k, v).grad_fn).__name__
    )
    rows = 40 if dtype == torch.bfloat16 else 64  # the memory-efficient kernel aligns them
    assert (2, 4, rows) in [tuple(tensor.shape) for tensor in saved]
    assert not any(tensor.shape[-2:] == (40, 40) for tensor in saved), "no scores"


SEEDS = {
    torch.float32: [((), torch.int64, "cpu"), ((), torch.int64, "cpu")],
    torch.bfloat16: [((2,), torch.uint64, "cuda"), ((), torch.uint64, "cuda")],
}
"""What fused attention saves of its random numbers: shape, type and device."""


def seeds_saved(q: Tensor, dropout: float) -> list[Tensor]:
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        F.scaled_dot_product_attention(q, q, q, dropout_p=dropout).sum().backward()
    return [tensor for tensor in saved if not tensor.is_floating_point()]


@pytest.mark.parametrize("dtype", SEEDS, ids=str)
def test_attention_without_dropout_saves_numbers_that_nobody_has_written(
    dtype: torch.dtype, device: torch.device
) -> None:
    q = torch.randn(2, 4, 40, 16, device=device, dtype=dtype, requires_grad=True)
    torch.manual_seed(3)
    first = seeds_saved(q, 0)
    torch.manual_seed(3)
    second = seeds_saved(q, 0)
    assert [(tuple(seed.shape), seed.dtype, seed.device.type) for seed in first] == SEEDS[dtype]
    assert not any(torch.equal(a.cpu(), b.cpu()) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("dtype", SEEDS, ids=str)
def test_attention_with_dropout_saves_the_numbers_of_the_generator(
    dtype: torch.dtype, device: torch.device
) -> None:
    q = torch.randn(2, 4, 40, 16, device=device, dtype=dtype, requires_grad=True)
    torch.manual_seed(3)
    numbers = [number for seed in seeds_saved(q, 0.5) for number in seed.flatten().tolist()]
    assert numbers.count(3) == 1
    assert 0 in numbers, "the offset: nothing has been drawn before"


def test_what_efficient_attention_saves_beyond_its_rows_is_infinite(device: torch.device) -> None:
    q = torch.randn(2, 4, 40, 16, device=device)
    sums = torch.ops.aten._scaled_dot_product_efficient_attention(q, q, q, None, True)[1]
    assert sums.shape[-1] == 64 and bool(sums[..., :40].isfinite().all())
    assert bool((sums[..., 40:] == float("inf")).all())


@pytest.mark.parametrize("letters", [254, 255])
def test_an_assertion_of_the_device_takes_no_message_of_255_letters(
    letters: int, device: torch.device
) -> None:
    holds = torch.ones((), dtype=torch.bool, device=device)
    refused = letters == 255
    with pytest.raises(RuntimeError, match="Message length") if refused else contextlib.nullcontext():
        torch._assert_async(holds, "x" * letters)
    torch.cuda.synchronize()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_dropout_in_attention_is_that_of_its_own_backward(dtype: torch.dtype, device: torch.device) -> None:
    q, k = (torch.randn(1, 2, 8, 8, device=device, dtype=dtype) for _ in range(2))
    v = torch.eye(8, device=device, dtype=dtype).expand(1, 2, 8, 8).clone().requires_grad_()
    torch.manual_seed(1)
    weights = F.scaled_dot_product_attention(q, k, v, dropout_p=0.5)  # the values are a unit matrix
    torch.rand(3, device=device)  # another operator draws in between
    weights.sum().backward()
    assert v.grad is not None
    torch.testing.assert_close(v.grad, weights.sum(-2).unsqueeze(-1).expand_as(v), rtol=2e-2, atol=2e-2)
    torch.manual_seed(1)
    assert torch.equal(F.scaled_dot_product_attention(q, k, v, dropout_p=0.5), weights)


def test_rms_norm_and_its_gradient(device: torch.device) -> None:
    a, w = torch.randn(4, 16, requires_grad=True), torch.randn(16, requires_grad=True)
    expected = results(lambda a, w: F.rms_norm(a, (16,), w), [a, w], torch.device("cpu"))
    found = results(lambda a, w: F.rms_norm(a, (16,), w), [a, w], device)
    assert torch.equal(expected[0], found[0])
    for gradient, other in zip(expected[1:], found[1:], strict=True):
        torch.testing.assert_close(gradient, other)


def test_a_saved_state_of_the_generator_gives_the_same_draws(device: torch.device) -> None:
    def draws() -> list[Tensor]:
        y = torch.ones(50, device=device)
        return [torch.rand(9, device=device), torch.randn(9, device=device), F.dropout(y, 0.3), torch.randperm(20, device=device),
                torch.bernoulli(torch.full((30,), 0.5, device=device)), torch.empty(9, device=device).exponential_()]  # fmt: skip

    state = torch.cuda.get_rng_state()
    first, second = draws(), draws()
    assert not any(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    torch.cuda.set_rng_state(state)
    assert all(torch.equal(a, b) for a, b in zip(first, draws(), strict=True))


def test_recomputation_draws_again_what_forward_drew(device: torch.device) -> None:
    from torch.utils.checkpoint import checkpoint

    def gradient(recompute: bool) -> Tensor:
        torch.manual_seed(2)
        a = torch.ones(1000, device=device, requires_grad=True)

        def block(a: Tensor) -> Tensor:
            return F.dropout(a * 2, 0.4).square()

        (checkpoint(block, a, use_reentrant=False) if recompute else block(a)).sum().backward()
        assert a.grad is not None
        return a.grad

    assert torch.equal(gradient(False), gradient(True))


def test_tensors_of_two_places_are_refused(device: torch.device) -> None:
    with pytest.raises(RuntimeError, match="same device"):
        torch.ones(3, device=device) + torch.ones(3)


def test_shapes_that_depend_on_values_make_the_host_wait(device: torch.device) -> None:
    a = torch.arange(6, device=device)
    before = emulated_cuda.counts()
    assert (a > 2).nonzero().flatten().tolist() == [3, 4, 5]
    assert emulated_cuda.host_waits(before)


def test_errors_of_shapes_are_those_of_the_host(device: torch.device) -> None:
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        torch.ones(2, 3, device=device) @ torch.ones(2, 3, device=device)
    assert torch.ones(2, device=device).sum().item() == 2


@pytest.fixture
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize(
    ("name", "kernel"),
    [
        ("adaptive_avg_pool2d", "adaptive_avg_pool2d_backward_cuda"),
        ("grid_sample", "grid_sampler_2d_backward_cuda"),
        ("interpolate", "upsample_linear1d_backward_out_cuda"),
        ("pad", "reflection_pad1d_backward_out_cuda"),
    ],
)
def test_an_operator_without_a_deterministic_version_raises(
    name: str, kernel: str, device: torch.device
) -> None:
    x = torch.randn(2, 3, 8, 8, device=device, requires_grad=True)
    y = {
        "adaptive_avg_pool2d": lambda: F.adaptive_avg_pool2d(x, 3),
        "grid_sample": lambda: F.grid_sample(x, torch.zeros(2, 4, 4, 2, device=device), align_corners=False),
        "interpolate": lambda: F.interpolate(x[0], scale_factor=2.0, mode="linear"),
        "pad": lambda: F.pad(x[0], (1, 1), mode="reflect"),
    }[name]()
    with pytest.raises(RuntimeError, match=f"{kernel} does not have a deterministic implementation"):
        y.sum().backward()


@pytest.mark.usefixtures("deterministic")
def test_what_a_transformer_computes_has_deterministic_versions(device: torch.device) -> None:
    layer = torch.nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, device=device)
    embedding = torch.nn.Embedding(50, 32, device=device)
    words = torch.randint(0, 50, (2, 16), device=device)
    loss = F.cross_entropy(layer(embedding(words)).flatten(0, 1), words.flatten() % 32)
    loss.backward()
    assert bool(embedding.weight.grad.isfinite().all())
