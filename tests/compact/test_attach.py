"""Compressed inputs through `ssdtrain.attach`: what changes, what does not, and what is refused."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import ssdtrain
from benchmarks.compact_training import Llama, LlamaConfig
from ssdtrain.compact import autograd_nodes, register_passing
from ssdtrain.compact import recompute as copies
from ssdtrain.compact.feature import CompactLinear
from ssdtrain.compact.projection import Projections, layer_key, layout_of
from ssdtrain.compact.saved import Projected
from ssdtrain.config import CompactConfig, ConfigError
from ssdtrain.features import Placement
from ssdtrain.runtime import Runtime
from tests.support.tensors import equal_by_name

QUIET = {"report": {"interval": 0}}


def llama(dtype: torch.dtype = torch.float64) -> Llama:
    torch.manual_seed(0)
    return Llama(LlamaConfig()).to(dtype)


def batch() -> tuple[Tensor, Tensor]:
    tokens = torch.randint(256, (2, 17), generator=torch.Generator().manual_seed(1))
    return tokens[:, :-1], tokens[:, 1:]


def gradients(model: nn.Module) -> dict[str, Tensor]:
    for parameter in model.parameters():
        parameter.grad = None
    model(*batch()).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def attach(model: nn.Module, **section: Any) -> Runtime:
    return ssdtrain.attach(model, {"compact": section, **QUIET})


class Calling(nn.Module):
    """Two layers whose forward is that of `call`."""

    def __init__(self, call: Callable[[nn.Linear, nn.Linear, Tensor], tuple[Tensor, Tensor]]) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 8).double(), nn.Linear(64, 8).double()
        self.call = call

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.call(self.first, self.second, x)


def test_all_features_kept_give_the_gradients_of_the_model_without() -> None:
    model = llama()
    expected = gradients(model)
    with attach(model, ratio=1):
        found = gradients(model)
    for name, gradient in expected.items():
        assert float((found[name] - gradient).abs().max() / gradient.abs().max()) < 1e-12, name


def test_only_gradients_of_compressed_weights_change() -> None:
    model = llama()
    expected = gradients(model)
    for section in ({"ratio": 0.25}, {"mode": "quant"}):
        with attach(model, **section):
            found = gradients(model)
        changed = {
            name
            for name in expected
            if not torch.allclose(found[name], expected[name], rtol=1e-10, atol=1e-14)
        }
        # Attention keeps its own output, which o_proj reads.
        assert changed == {name for name in expected if "_proj" in name and "o_proj" not in name}
    assert equal_by_name(gradients(model), expected), "detached, the model is what it was"


def test_a_layer_is_keyed_by_its_name_and_the_step() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 8)).double()
    x = torch.randn(5, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    with attach(model, ratio=0.25, seed=11) as runtime:
        for step in range(3):
            model.zero_grad()
            inner = model[0](x)
            model(x).sum().backward()
            for name, layer, read in (("0", model[0], x), ("1", model[1], inner.detach())):
                block = Projections("orthonormal", 11).block(layout_of(64, 0.25), layer_key(name), step, x)
                upstream = torch.ones(5, 8, dtype=torch.float64)
                gradient = upstream if name == "1" else upstream @ model[1].weight.detach()
                way = Projected(block)
                expected = way.weight_gradient(gradient, way.compress(read))
                assert torch.allclose(layer.weight.grad, expected, rtol=1e-12, atol=1e-12), (name, step)
            runtime.step_end()


def test_microbatches_of_a_step_share_projections() -> None:
    model = llama()
    with attach(model, ratio=0.25) as runtime:
        first, second = gradients(model), gradients(model)
        assert equal_by_name(first, second)
        runtime.step_end()
        assert not equal_by_name(first, gradients(model))


def test_a_loop_that_ends_no_steps_is_followed_by_its_optimizer() -> None:
    """To the bit as one that does, also where a second optimizer makes steps and gradients are accumulated."""
    found = []
    for ends_steps in (False, True):
        model = llama()
        optimizer = torch.optim.SGD(model.layers.parameters(), lr=0.1)
        other = torch.optim.SGD(model.lm_head.parameters(), lr=0.1)
        with attach(model, ratio=0.25) as runtime:
            for number in range(3):
                assert runtime.compact.step() == number
                model.zero_grad()
                for _ in range(2):
                    model(*batch()).backward()
                other.step()
                optimizer.step()
                if ends_steps:
                    runtime.step_end()
        optimizer.step()
        assert runtime.compact.step() == 3
        found.append({name: p.detach().clone() for name, p in model.named_parameters()})
    assert equal_by_name(*found)


def test_a_replaced_optimizer_is_followed() -> None:
    """Also where the old one is still held by somebody; two with a step each are one step."""
    layer = nn.Linear(64, 8)
    with attach(layer) as runtime:

        def step(optimizer: torch.optim.Optimizer) -> int:
            layer(torch.ones(1, 64)).sum().backward()
            optimizer.step()
            return runtime.compact.step()

        first = torch.optim.SGD([layer.weight], lr=0.1)
        second = torch.optim.SGD(layer.parameters(), lr=0.1)
        assert [step(o) for o in (first, second, first, second)] == [1, 1, 2, 2]
        assert [step(second), step(second)] == [3, 4], "the first makes no more steps"
        del second
        gc.collect()
        assert step(torch.optim.SGD(layer.parameters(), lr=0.1)) == 5


def test_steps_before_the_first_end_of_a_step_stay_counted() -> None:
    layer = nn.Linear(64, 8)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    with attach(layer) as runtime:
        for _ in range(3):
            layer(torch.ones(1, 64)).sum().backward()
            optimizer.step()
        runtime.step_end()
        assert runtime.compact.step() == 3
        runtime.step_end()
        assert runtime.compact.step() == 4


def test_an_abandoned_feature_keeps_no_layer() -> None:
    model = nn.Sequential(nn.Linear(64, 8))
    feature = CompactLinear(CompactConfig(), Placement(torch.device("cpu")))
    feature.attach(model)
    held = weakref.ref(model[0])
    del model, feature
    gc.collect()
    assert held() is None


def test_a_resumed_loop_says_where_it_goes_on() -> None:
    model = llama()
    with attach(model, ratio=0.25) as runtime:
        for _ in range(3):
            runtime.step_end()
        expected = gradients(model)
    with attach(model, ratio=0.25) as runtime:
        runtime.compact.steps = 3
        assert equal_by_name(gradients(model), expected)


def test_forwards_without_a_step_are_worth_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(nn.Linear(16, 16))
    with attach(model):
        for _ in range(3000):
            model(torch.zeros(1, 16))
    assert caplog.text.count("Call runtime.step_end() after each optimizer step") == 1


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_recomputed_block_has_the_same_projection(reentrant: bool) -> None:
    model = llama()
    with attach(model, ratio=0.25):
        expected = gradients(model)
        for layer in model.layers:
            plain = layer.forward
            layer.forward = lambda x, plain=plain: checkpoint(plain, x, use_reentrant=reentrant)
        found = gradients(model)
    assert equal_by_name(found, expected)


@pytest.mark.parametrize("stepped", [True, False], ids=["another step", "another layer's"])
def test_a_recomputation_with_another_projection_is_exact_where_all_is_kept(stepped: bool) -> None:
    """The second layer had its z from the first, which is not in the region."""
    model = Calling(lambda first, second, x: (first(x), checkpoint(second, x, use_reentrant=False)))
    with attach(model, ratio=1) as runtime:
        x = torch.randn(4, 64, dtype=torch.float64)
        y, z = model(x)
        assert runtime.compact.compression.counted.shared_inputs == 1
        if stepped:
            runtime.step_end()
        (y.sum() + z.sum()).backward()
    for layer in (model.first, model.second):
        assert torch.allclose(layer.weight.grad, x.sum(0).expand(8, 64))


def test_layers_that_read_one_input_save_it_once() -> None:
    model = llama()
    with attach(model, ratio=0.25) as runtime:
        gradients(model)
        counted = runtime.compact.compression.counted
    assert counted.shared_inputs == 2 * 3  # k, v and up of both blocks
    tokens, width, middle = 2 * 16, 128, 384
    assert counted.input_bytes == 2 * tokens * (2 * width + middle) * 8
    assert counted.saved_bytes == counted.input_bytes // 4


class Passing(torch.autograd.Function):
    """As ZeRO-3 puts it around the inputs and outputs of every module."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


def test_functions_that_only_pass_on_are_looked_through() -> None:
    model = llama()
    with attach(model, ratio=0.25) as runtime:
        expected = gradients(model)
        counted = copy.copy(runtime.compact.compression.counted)
    register_passing("Passing")
    for module in list(model.modules())[1:]:
        if not isinstance(module, nn.Embedding | nn.ModuleList):
            module.register_forward_pre_hook(lambda _, args: (Passing.apply(args[0]), *args[1:]))
            module.register_forward_hook(lambda _, args, y: Passing.apply(y))
    with attach(model, ratio=0.25) as runtime:
        found = gradients(model)
        assert runtime.compact.compression.counted == counted
    for name, gradient in expected.items():
        assert float((found[name] - gradient).abs().max()) < 1e-12, name


def test_an_input_that_was_changed_in_between_is_not_shared() -> None:
    """Also where the second layer gets a tensor with a version counter of its own."""
    model = Calling(lambda first, second, x: (first(x), second(x.add_(1).data)))
    x = torch.randn(4, 64, dtype=torch.float64)
    with attach(model, ratio=1):
        y, z = model(x)
        (y.sum() + z.sum()).backward()
    assert torch.allclose(model.second.weight.grad, x.sum(0).expand(8, 64))
    assert torch.allclose(model.first.weight.grad, (x - 1).sum(0).expand(8, 64))


def test_a_buffer_that_is_refilled_between_two_aliases_is_not_shared() -> None:
    """The aliases have version counters of their own, which are both at zero."""
    buffer, x = torch.randn(2, 4, 64, dtype=torch.float64)
    before = buffer.sum(0)
    model = Calling(lambda first, second, refilled: (first(buffer.data), second(buffer.copy_(refilled).data)))
    runtime = attach(model, ratio=1)
    y, z = model(x)
    (y.sum() + z.sum()).backward()
    runtime.close()
    assert torch.allclose(model.first.weight.grad, before.expand(8, 64))
    assert torch.allclose(model.second.weight.grad, x.sum(0).expand(8, 64))


class Gated(nn.Module):
    """silu(gate) * up, where `write` gets at silu(gate) before the product, or after it."""

    def __init__(self, write: Callable[[Tensor], object], after: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gate, self.up, self.down = nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 64)
        self.write, self.after = write, after

    def forward(self, x: Tensor) -> Tensor:
        opened = torch.nn.functional.silu(self.gate(x))
        if not self.after:
            self.write(opened)
        product = opened * self.up(x)
        found: Tensor = self.down(product)
        if self.after:
            self.write(opened)
        return found


def under_no_grad(x: Tensor) -> None:
    with torch.no_grad():
        x.add_(1)


WRITES = {"under no_grad": under_no_grad, "a detached alias": lambda x: x.detach().add_(1)}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_a_copy_that_was_written_to_is_not_made_again(write: Callable[[Tensor], object]) -> None:
    x = torch.randn(16, 64, generator=torch.Generator().manual_seed(1))
    found = []
    for recompute in (False, True):
        model = Gated(write)
        with attach(model, ratio=0.25, recompute=recompute):
            model(x).square().sum().backward()
        found.append([parameter.grad for parameter in model.parameters()])
    for kept, again in zip(*found, strict=True):
        assert torch.equal(kept, again)


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
@pytest.mark.parametrize("recompute", [False, True])
def test_a_copy_that_is_written_to_after_it_was_saved_is_an_error(
    recompute: bool, write: Callable[[Tensor], object]
) -> None:
    model = Gated(write, after=True)
    with attach(model, ratio=0.25, recompute=recompute):
        loss = model(torch.randn(16, 64)).square().sum()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("write", [Tensor.zero_, under_no_grad], ids=["zeroed", "under no_grad"])
def test_a_copy_that_is_written_to_before_the_layer_is_an_error(
    write: Callable[[Tensor], object], recompute: bool
) -> None:
    gate, up = (torch.randn(4, 64, requires_grad=True) for _ in range(2))
    layer = nn.Linear(64, 8)
    with attach(layer, recompute=recompute):
        opened = nn.functional.silu(gate)
        product = opened * up
        write(opened)
        out = layer(product)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()


def test_an_activation_in_place_is_no_error() -> None:
    x = torch.randn(4, 64)
    found = []
    for recompute in (False, True):
        gate, up = (x.clone().requires_grad_() for _ in range(2))
        torch.manual_seed(0)
        layer = nn.Linear(64, 8)
        with attach(layer, ratio=0.25, recompute=recompute):
            layer(nn.functional.silu(gate * 2, inplace=True) * up).square().sum().backward()
        found.append([gate.grad, up.grad, layer.weight.grad])
    for kept, again in zip(*found, strict=True):
        assert torch.equal(kept, again)


def test_the_check_of_an_activation_in_place_does_not_make_the_host_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Reading a flag of the device waits for all that is queued there: the device checks it."""
    gate, up = (torch.randn(4, 64, requires_grad=True) for _ in range(2))
    layer = nn.Linear(64, 8)
    checked = []
    check = torch._assert_async
    monkeypatch.setattr(torch, "_assert_async", lambda *given: (checked.append(given), check(*given)))
    with attach(layer, ratio=0.25):
        out = layer(nn.functional.silu(gate * 2, inplace=True) * up).sum()
        with monkeypatch.context() as patched:
            patched.setattr(torch.Tensor, "__bool__", lambda flag: pytest.fail("the host waits"))
            out.backward()
    assert checked and gate.grad is not None


def test_lack_of_memory_is_not_taken_for_a_write_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU it is a RuntimeError, as autograd's check is."""

    def without_memory(product: Any) -> tuple[Tensor, Tensor]:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    monkeypatch.setattr(copies, "saved_factors", without_memory)
    gate, up = (torch.randn(4, 64, requires_grad=True) for _ in range(2))
    layer = nn.Linear(64, 8)
    with attach(layer), pytest.raises(RuntimeError, match="can't allocate memory"):
        layer(nn.functional.silu(gate * 2, inplace=True) * up)


@pytest.mark.parametrize("name", ["SILU", "FACTORS"])
def test_a_torch_without_the_names_that_are_read_is_an_error_at_the_start(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    missing = ("_raw_saved_absent",) * 2 if name == "FACTORS" else "AbsentBackward0"
    monkeypatch.setattr(autograd_nodes, name, missing)
    autograd_nodes.missing_names.cache_clear()
    try:
        with pytest.raises(ConfigError, match=r"ssdtrain.compact.recompute: .*(AbsentB|_raw_saved_absent)"):
            attach(nn.Linear(64, 8))
        attach(nn.Linear(64, 8), recompute=False).close()
    finally:
        autograd_nodes.missing_names.cache_clear()


def test_released_copies_come_back_to_the_bit() -> None:
    model = llama(torch.float32)
    with attach(model, ratio=0.25, recompute=False):
        expected = gradients(model)
    with attach(model, ratio=0.25) as runtime:
        found = gradients(model)
        released = runtime.compact.compression.counted.released_bytes
    assert equal_by_name(found, expected)
    assert released == 2 * (2 * 16) * (2 * 128 + 384) * 4  # two norms and silu(gate) of both blocks


def test_a_changed_gate_is_still_noticed() -> None:
    gate = torch.randn(4, 64, requires_grad=True) * 1.0
    up = torch.randn(4, 64, requires_grad=True)
    layer = nn.Linear(64, 8)
    with attach(layer):
        out = layer(nn.functional.silu(gate) * up)
        with torch.no_grad():
            gate.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()


def test_an_input_that_is_saved_anyway_is_left_alone() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    with attach(model) as runtime:
        x = torch.randn(4, 64)
        model(x).sum().backward()
        assert runtime.compact.compression.counted.skipped_inputs == 1


def test_state_dict_copies_and_pickles_know_nothing_of_it() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 8))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    runtime = attach(model)
    assert "forward" in model[0].__dict__
    assert equal_by_name(dict(model.state_dict()), before)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        with torch.no_grad():
            other[0].weight.zero_()
        x = torch.randn(3, 64)
        assert torch.equal(other[0](x), other[0].bias.expand(3, 64)), "a copy computes with its own weights"
    runtime.close()
    assert all("forward" not in module.__dict__ for module in model.modules())


@pytest.mark.parametrize("section", [{"ratio": 0.25}, {"mode": "quant"}], ids=["reconstruct", "quant"])
def test_with_offload_what_is_saved_is_spilled_to_the_bit(section: dict[str, Any], tmp_path: Path) -> None:
    model = llama(torch.float32)
    with attach(model, recompute=False, **section):
        expected = gradients(model)
    offload = {"directories": str(tmp_path), "min_bytes": 0}
    with ssdtrain.attach(model, {"compact": section, "offload": offload, **QUIET}) as runtime:
        found = gradients(model)
        both = runtime.statistics()
    with ssdtrain.attach(model, {"offload": offload, **QUIET}) as only:
        gradients(model)
        without = only.statistics()
    assert equal_by_name(found, expected)
    width, middle, tokens = 128, 384, 2 * 16
    inputs = 2 * tokens * (2 * width + middle) * 4
    blocks = 2 * 3 * 64 * 16 * 4 if "ratio" in section else 0  # of P, which layers hold anyway
    assert without.offload.saved_bytes - both.offload.saved_bytes + blocks > 0.7 * inputs


class Conv1D(nn.Module):
    def __init__(self, nf: int, nx: int) -> None:
        super().__init__()
        self.nf, self.nx = nf, nx
        self.weight = nn.Parameter(torch.randn(nx, nf, dtype=torch.float64))
        self.bias = nn.Parameter(torch.zeros(nf, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x.view(-1, self.nx), self.weight).view(*x.shape[:-1], self.nf)


def test_gpt2s_transposed_layers_are_found() -> None:
    model = Conv1D(24, 64)
    x = torch.randn(2, 5, 64, dtype=torch.float64)
    model(x).pow(2).sum().backward()
    expected = model.weight.grad.clone()
    model.weight.grad = None
    with attach(model, ratio=1):
        model(x).pow(2).sum().backward()
    assert torch.allclose(model.weight.grad, expected, rtol=1e-12, atol=1e-12)


def test_patterns_choose_layers_and_their_ratios() -> None:
    model = llama()
    with attach(model, ratio={"*.down_proj": 0.125, "*.mlp.*": 0.5}, exclude=["layers.0"]):
        chosen = {name for name, module in model.named_modules() if "forward" in module.__dict__}
    assert chosen == {f"layers.1.mlp.{name}_proj" for name in ("gate", "up", "down")}


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ({"ratio": 1.5}, "ssdtrain.compact.ratio: 1.5"),
        ({"include": ["nothing"]}, r"ssdtrain.compact.include: \['nothing'\] leaves no layer"),
        ({"ratio": {"nothing": 0.5}}, "ssdtrain.compact.ratio: .* leaves no layer"),
        ({"mode": "quant", "ratio": 0.5}, "ssdtrain.compact.ratio: .* concerns projections"),
        ({"codec": "int8"}, 'ssdtrain.compact.codec: .* concerns "quant"'),
        ({"mode": "smaller"}, "ssdtrain.compact.mode: 'smaller'"),
    ],
)
def test_a_config_that_cannot_be_had_is_an_error_with_its_key(section: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        attach(llama(), **section)


def test_hadamard_names_the_layer_it_does_not_fit() -> None:
    with pytest.raises(
        ConfigError, match=r"compact.projection: 'hadamard' does not fit the layer 1: .* width 344"
    ):
        attach(nn.Sequential(nn.Linear(64, 344), nn.Linear(344, 8)), projection="hadamard")


def test_a_second_runtime_on_the_same_layers_is_refused() -> None:
    model = llama()
    with attach(model):
        with pytest.raises(ConfigError, match="another runtime compresses already"):
            attach(model)
    attach(model).close()


def test_a_feature_that_does_nothing_says_so(caplog: pytest.LogCaptureFixture) -> None:
    model = llama().requires_grad_(False)
    model.lm_head.requires_grad_(True)
    with attach(model) as runtime:
        for _ in range(3):
            model(*batch()).backward()
            runtime.step_end()
    assert "compact is enabled and compressed nothing" in caplog.text


def test_a_frozen_layer_lets_go_of_copies_too() -> None:
    model = llama(torch.float32).requires_grad_(False)
    model.embed_tokens.requires_grad_(True)
    expected = gradients(model)
    with attach(model) as runtime:
        found = gradients(model)
        counted = runtime.compact.compression.counted
    assert equal_by_name(found, expected)
    assert counted.released_bytes == 2 * (2 * 16) * 384 * 4  # silu(gate); frozen norms keep no second copy
    assert counted.input_bytes == 0


@pytest.mark.slow
def test_gpt2_of_hugging_face_trains_with_compressed_inputs() -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"n_layer": 1, "n_head": 2, "n_embd": 64, "vocab_size": 64, "n_positions": 16}
    dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **dropout)).double()
    tokens = torch.randint(64, (2, 16))

    def found() -> dict[str, Tensor]:
        model.zero_grad()
        model(input_ids=tokens, labels=tokens).loss.backward()
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    expected = found()
    with attach(model, ratio=1):
        whole = found()
    with attach(model, ratio=0.25):
        compressed = found()
    assert expected.keys() == whole.keys() == compressed.keys()
    changed = set()
    for name, gradient in expected.items():
        assert torch.allclose(whole[name], gradient, rtol=1e-10, atol=1e-13), name
        if not torch.allclose(compressed[name], gradient, rtol=1e-6, atol=1e-10):
            changed.add(name)
    # The input of attn.c_proj is attention's output, which attention keeps; lm_head shares the embedding's weight.
    assert changed == {f"transformer.h.0.{name}.weight" for name in ("attn.c_attn", "mlp.c_fc", "mlp.c_proj")}
    assert equal_by_name(found(), expected)


def test_the_input_of_a_layer_may_be_a_column() -> None:
    class Column(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.feature = nn.Linear(1, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.feature(x[:, 3:4]).square().sum()

    torch.manual_seed(0)
    model, x = Column(), torch.randn(300, 5)
    model(x).backward()
    exact, model.feature.weight.grad = model.feature.weight.grad, None
    with attach(model, mode="quant", codec="int8") as runtime:
        model(x).backward()
        assert runtime.statistics() is not None and runtime.compact.compression.counted.input_bytes
    assert (model.feature.weight.grad - exact).norm() <= 0.05 * exact.norm()
