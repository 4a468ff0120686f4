"""The meter against autograd's own account of what it saved, and against counts worked out by hand."""

import gc
from collections.abc import Iterator
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from examples.support.activation_meter import SavedTensorMeter
from examples.support.model import GPT, GPTConfig

KiB = 1024
SHAPE = (16, 64)  # float32: 4 KiB


def saved_tensors(output: Tensor) -> Iterator[Tensor]:
    """Everything that the nodes behind `output` say they saved, from their `_saved_*` attributes."""
    seen, waiting = set(), [output.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        waiting += [following for following, _ in node.next_functions]
        for name in dir(node):
            if name.startswith("_saved_") and isinstance(value := getattr(node, name), Tensor):
                yield value


def bytes_saved_behind(output: Tensor, module: nn.Module) -> int:
    left_out = {tensor.untyped_storage().data_ptr() for tensor in (*module.parameters(), *module.buffers())}
    storages = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in saved_tensors(output)
    }
    return sum(storage.nbytes() for address, storage in storages.items() if address not in left_out)


def normed_mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 128), nn.BatchNorm1d(128), nn.GELU(), nn.Linear(128, 64), nn.Tanh())


@pytest.mark.parametrize(
    ("module", "inputs"),
    [
        (normed_mlp(), (torch.randn(32, 64),)),
        (
            GPT(GPTConfig(layers=2, hidden=32, heads=2, sequence=16)),
            (torch.randint(256, (2, 16)), torch.randint(256, (2, 16))),
        ),
    ],
    ids=["batch norm MLP", "GPT"],
)
def test_at_the_end_of_forward_it_counts_what_the_graph_says_it_saved(
    module: nn.Module, inputs: tuple[Tensor, ...]
) -> None:
    expected = bytes_saved_behind(module(*inputs), module)
    meter = SavedTensorMeter(module)
    with meter.step() as record:
        output = module(*inputs)
        counted = meter.alive_bytes
        output.sum().backward()
    assert counted == expected > 0
    assert record.peak_bytes >= expected


def test_the_timeline_rises_from_nothing_to_the_peak_and_falls_to_what_the_caller_still_holds() -> None:
    module = normed_mlp()
    inputs = torch.randn(32, 64)
    meter = SavedTensorMeter(module)
    with meter.step() as record:
        module(inputs).sum().backward()
    times = [at for at, _ in record.timeline]
    assert times == sorted(times)
    assert record.timeline[0] == (0.0, 0)
    assert max(alive for _, alive in record.timeline) == record.peak_bytes
    assert record.timeline[-1][1] == meter.alive_bytes == inputs.untyped_storage().nbytes()
    del inputs
    assert meter.alive_bytes == 0


def test_views_of_one_storage_count_once_and_with_the_whole_storage() -> None:
    meter = SavedTensorMeter()
    with meter.step() as record:
        whole = torch.randn(*SHAPE, requires_grad=True) * 1
        left, right = whole.chunk(2, dim=1)
        loss = left.exp().sum() + (left * right).sum()
        # exp saves its result (half the size), the product both halves of one storage; multiplying by 1 saves nothing.
        assert meter.alive_bytes == 4 * KiB + 2 * KiB
        loss.backward()
    assert record.peak_bytes == 4 * KiB + 2 * KiB


def test_a_storage_counts_until_its_last_holder_lets_go() -> None:
    meter = SavedTensorMeter()
    with meter.step():
        held = torch.randn(*SHAPE, requires_grad=True).exp()
        held.sum().backward()
        assert meter.alive_bytes == 4 * KiB
    view = held[3:]
    del held
    assert meter.alive_bytes == 4 * KiB
    del view
    assert meter.alive_bytes == 0


def test_parameters_their_views_and_buffers_do_not_count() -> None:
    module = nn.Linear(64, 64)
    module.register_buffer("scale", torch.full((64,), 2.0))
    meter = SavedTensorMeter(module)
    inputs = torch.randn(*SHAPE)
    with meter.step():
        loss = (nn.functional.linear(inputs, module.weight.t()[:]) * module.scale).sum()
        assert meter.alive_bytes == 4 * KiB  # the inputs
        loss.backward()


def test_memory_that_is_used_again_is_counted_again() -> None:
    meter = SavedTensorMeter()
    with meter.step() as record:
        for _ in range(50):
            torch.randn(*SHAPE, requires_grad=True).exp().sum().backward()
    assert record.peak_bytes == 4 * KiB
    assert sum(later > earlier for (_, earlier), (_, later) in pairwise(record.timeline)) == 50
    assert meter.alive_bytes == 0


def test_an_output_that_is_saved_does_not_keep_its_own_graph_alive() -> None:
    meter = SavedTensorMeter()
    gc.disable()
    try:
        with meter.step():
            output = torch.randn(*SHAPE, requires_grad=True).exp()  # exp saves its output
            assert meter.alive_bytes == 4 * KiB
            del output
            assert meter.alive_bytes == 0
    finally:
        gc.enable()


def test_recomputed_activations_count_while_they_live() -> None:
    # Beside its input, a block saves what each ReLU returned; the first is the second Linear's input too.
    blocks = [nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU()) for _ in range(3)]
    module = nn.Sequential(*blocks)
    meter = SavedTensorMeter(module)
    x = torch.randn(*SHAPE, requires_grad=True)
    with meter.step() as record:
        y = x
        for block in blocks:
            y = checkpoint(block, y, use_reentrant=True)
        assert meter.alive_bytes == 3 * 4 * KiB  # the inputs of three blocks
        record.mark("backward")
        y.sum().backward()
    assert record.peak_bytes == (3 + 2) * 4 * KiB  # and the two of the last block, run again
    peaks_at = [at for at, alive in record.timeline if alive == record.peak_bytes]
    assert min(peaks_at) > record.marks["backward"]


def test_it_changes_no_gradient() -> None:
    module = normed_mlp()
    inputs = torch.randn(32, 64)
    module(inputs).sum().backward()
    expected = [parameter.grad.clone() for parameter in module.parameters()]
    module.zero_grad()
    with SavedTensorMeter(module).step():
        module(inputs).sum().backward()
    for parameter, gradient in zip(module.parameters(), expected, strict=True):
        assert torch.equal(parameter.grad, gradient)


def test_a_tensor_without_a_storage_is_left_out() -> None:
    class Spread(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("graph", torch.eye(64).to_sparse())
            self.weight = nn.Parameter(torch.ones(64, 64))

        def forward(self, inputs: Tensor) -> Tensor:
            return torch.sparse.mm(self.graph, inputs @ self.weight).sin()

    module = Spread()
    meter = SavedTensorMeter(module)
    inputs = torch.randn(64, 64)
    with meter.step() as record:
        module(inputs).sum().backward()
    assert record.peak_bytes == 2 * 64 * 64 * 4, "the inputs and what sin saved"
    assert torch.equal(module.weight.grad, inputs.T @ (inputs @ torch.ones(64, 64)).cos())
