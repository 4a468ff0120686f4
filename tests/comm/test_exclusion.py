"""Which parameters are excluded, in models as they are written."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ssdtrain.comm.coding import clip
from ssdtrain.comm.exclusion import excluded, ranges_of

KINDS = ("norm", "bias", "embedding")


class LayerNormLinear(nn.Module):
    """As Transformer Engine's: a norm and a linear layer in one module."""

    def __init__(self) -> None:
        super().__init__()
        self.layer_norm_weight = nn.Parameter(torch.ones(8))
        self.layer_norm_bias = nn.Parameter(torch.zeros(8))
        self.weight = nn.Parameter(torch.zeros(8, 8))
        self.bias = nn.Parameter(torch.zeros(8))


class RMS(nn.Module):
    """A norm whose class does not say so."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))


class VocabParallelEmbedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(16, 8))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = VocabParallelEmbedding()
        self.wpe = nn.Embedding(4, 8)
        self.pos_embed = nn.Parameter(torch.zeros(4, 8))
        self.qkv = LayerNormLinear()
        self.ln_2 = RMS()
        self.norm = nn.LayerNorm((2, 4))
        self.attention = nn.MultiheadAttention(8, 2)
        self.fc = nn.Linear(8, 8)
        self.router = nn.Linear(8, 2, bias=False)
        self.gru = nn.GRU(8, 8)
        self.lm_head = nn.Linear(8, 16, bias=False)
        self.lm_head.weight = self.words.weight


def names(model: nn.Module, patterns: tuple[str, ...]) -> set[str]:
    found = excluded(model, patterns)
    return {name for name, parameter in model.named_parameters() if parameter in found}


def test_norms_are_found_by_class_and_by_name_and_a_fused_linear_layer_is_none() -> None:
    expected = {"qkv.layer_norm_weight", "qkv.layer_norm_bias", "ln_2.scale", "norm.weight", "norm.bias"}
    assert names(Model(), ("norm",)) == expected


def test_biases_are_found_whatever_holds_them() -> None:
    found = names(Model(), ("bias",))
    assert found == {
        "qkv.layer_norm_bias", "qkv.bias", "norm.bias", "attention.in_proj_bias", "attention.out_proj.bias", "fc.bias",
        "gru.bias_ih_l0", "gru.bias_hh_l0",
    }  # fmt: skip


def test_embeddings_are_found_with_what_is_tied_to_them() -> None:
    model = Model()
    assert names(model, ("embedding",)) == {"words.weight", "wpe.weight", "pos_embed"}
    assert model.lm_head.weight in excluded(model, ("embedding",))


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_pattern_meets_whole_names_below_wrappers(wrapped: bool) -> None:
    model = Model()
    outer = nn.ModuleDict({"module": model}) if wrapped else model
    chosen = excluded(outer, ("router.*", "*.out_proj.weight"))
    assert chosen == {model.router.weight, model.attention.out_proj.weight}
    assert excluded(outer, ("router",)) == set()


def test_what_is_neither_is_compressed() -> None:
    left = {
        "qkv.weight",
        "attention.in_proj_weight",
        "attention.out_proj.weight",
        "fc.weight",
        "router.weight",
    }
    model = Model()
    everything = {name for name, _ in model.named_parameters()}
    assert everything - names(model, KINDS) == left | {"gru.weight_ih_l0", "gru.weight_hh_l0"}
    assert excluded(model, ()) == set()


def test_ranges_are_ascending_and_neighbours_are_one() -> None:
    a, b, c, d = (nn.Parameter(torch.zeros(1)) for _ in range(4))
    places = {c: (0, 4), b: (10, 20), a: (4, 10), d: (64, 80)}
    assert ranges_of(places, {a, c, d}) == ((0, 10), (64, 80))
    assert ranges_of(places, {nn.Parameter(torch.zeros(1))}) == ()


class Looked(tuple[tuple[int, int], ...]):
    """Ranges that count which of them are looked at."""

    count = 0

    def __getitem__(self, at: object) -> object:
        found = super().__getitem__(at)
        Looked.count += len(found) if isinstance(at, slice) else 1
        return found

    def __iter__(self) -> object:
        Looked.count += len(self)
        return super().__iter__()


def test_clipping_looks_at_few_of_many_ranges() -> None:
    """With 512 ranks a bucket has thousands, and each of its pieces is clipped for each rank."""
    ranges = tuple((10 * at, 10 * at + 4) for at in range(4096))
    for start, stop in ((0, 10), (20_003, 20_031), (20_004, 20_010), (40_954, 40_960), (5, 5), (0, 40_960)):
        Looked.count = 0
        expected = tuple(
            (max(a, start) - start, min(b, stop) - start) for a, b in ranges if a < stop and b > start
        )
        assert clip(Looked(ranges), start, stop) == expected
        assert Looked.count <= len(expected) + 30
