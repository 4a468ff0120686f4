"""Megatron's layouts with compressed inputs train what one process trains."""

from __future__ import annotations

import functools
import importlib.util
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ssdtrain.config import ConfigError
from tests.support.processes import forked

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("megatron.core") is None, reason="megatron-core is not installed"
    ),
]


@functools.cache
def trained(layout: str, world: int) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory, "rank")
        forked(world, "tests.compact.megatron_ranks", layout, str(file))
        return [torch.load(f"{file}.{rank}", weights_only=False) for rank in range(world)]


def whole(ranks: list[dict[str, Any]]) -> dict[str, Tensor]:
    """The weights of all ranks, put together."""
    parts: dict[str, dict[int, tuple[Tensor, int | None]]] = {}
    for rank in ranks:
        for name, entry in rank["weights"].items():
            parts.setdefault(name, {})[rank["tp_rank"]] = entry
    found = {}
    for name, by_rank in parts.items():
        dimension = by_rank[0][1]
        pieces = [by_rank[rank][0] for rank in sorted(by_rank)]
        found[name] = pieces[0] if dimension is None or len(pieces) == 1 else torch.cat(pieces, dimension)
    return found


@pytest.mark.parametrize(
    ("layout", "world", "reference", "tolerance"),
    [
        pytest.param("one recompute", 1, "one", 1e-12, marks=pytest.mark.long),
        pytest.param("one resumed", 1, "one", 1e-12, marks=pytest.mark.long),
        pytest.param("tp2", 2, "one", 1e-12, marks=pytest.mark.long),
        ("tp2 sp", 2, "one", 1e-12),
        pytest.param("pp2", 2, "one", 1e-12, marks=pytest.mark.long),
        pytest.param("dp2", 2, "one", 1e-12, marks=pytest.mark.long),
        pytest.param("dp2 distributed", 2, "one fp32", 1e-5, marks=pytest.mark.long),
    ],
)
def test_a_layout_trains_what_one_process_trains(
    layout: str, world: int, reference: str, tolerance: float
) -> None:
    expected, ranks = whole(trained(reference, 1)), trained(layout, world)
    found = whole(ranks)
    assert found.keys() == expected.keys()
    for name, weight in expected.items():
        assert float((found[name] - weight).abs().max()) < tolerance, name
    for rank in ranks:
        assert rank["forwards"] > 0 and rank["left"] == 0
        assert rank["saved_bytes"] * 4 == rank["input_bytes"]


def test_layers_may_be_on_one_stage_of_a_pipeline() -> None:
    expected, (first, last) = trained("one of a layer", 1), trained("pp2 of a layer", 2)
    assert (first["forwards"], first["input_bytes"]) == (0, 0) and last["forwards"] > 0
    assert last["input_bytes"] == expected[0]["input_bytes"] and first["left"] == last["left"] == 0
    found = whole([first, last])
    for name, weight in whole(expected).items():
        assert float((found[name] - weight).abs().max()) < 1e-12, name


def test_sequence_parallelism_saves_a_shard() -> None:
    """Column-parallel layers without it save the whole input on each rank."""
    plain, sharded = trained("tp2", 2)[0]["saved_bytes"], trained("tp2 sp", 2)[0]["saved_bytes"]
    # Of 1 (qkv) + 1/2 (proj) + 1 (fc1) + 4/2 (fc2) widths, those of qkv and fc1 are halved.
    assert sharded / plain == pytest.approx((0.5 + 0.5 + 0.5 + 2) / (1 + 0.5 + 1 + 2))


def test_what_cannot_be_compressed_is_refused_by_name() -> None:
    from megatron.core.transformer.moe.experts import GroupedMLP

    from ssdtrain_megatron.compact import refuse

    class Experts(GroupedMLP):
        def __init__(self) -> None:
            nn.Module.__init__(self)

    def chunk(module: nn.Module, **options: Any) -> nn.Module:
        module.config = SimpleNamespace(**options)
        return module

    refuse([chunk(nn.Sequential(nn.Linear(4, 4)))], "reconstruct")
    for found, mode, words in (
        (chunk(nn.Sequential(Experts())), "reconstruct", "Megatron's layer: 'GroupedMLP'"),
        (
            chunk(nn.Linear(4, 4), gradient_accumulation_fusion=True),
            "quant",
            "gradient_accumulation_fusion: True .*--no-gradient-accumulation-fusion",
        ),
        (
            chunk(nn.Linear(4, 4), defer_embedding_wgrad_compute=True),
            "reconstruct",
            "--defer-embedding-wgrad-compute: True",
        ),
        (chunk(nn.Linear(4, 4)), "lowrank", "ssdtrain.compact.mode: 'lowrank' .*not built for Megatron"),
    ):
        with pytest.raises(ConfigError, match=words):
            refuse([found], mode)
