"""ZeRO and pipelines with compressed inputs train what one process trains."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from ssdtrain.config import ConfigError, load_config
from tests.support.processes import forked

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed"),
]

STAGES = ("0", "1", "2", "3", "pipeline", "one")
TOLERANCE = 1e-5
"""DeepSpeed reduces no gradients in float64; the projection of another step or layer is off by 1e-2."""


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.compact.deepspeed_ranks import train_plainly

    made = tmp_path_factory.mktemp("deepspeed")
    torch.save(train_plainly(), made / "w.plain")
    torch.save(train_plainly(include=["2.*"]), made / "w.plain.one")
    forked(2, "tests.compact.deepspeed_ranks", str(made / "w"), *STAGES, imports=["deepspeed", "ssdtrain_ds"])
    return made


@pytest.mark.parametrize("stage", STAGES)
def test_two_ranks_train_what_one_process_trains(stage: str, directory: Path) -> None:
    expected = torch.load(directory / ("w.plain.one" if stage == "one" else "w.plain"))
    ranks = [torch.load(directory / f"w.{stage}.{rank}") for rank in range(2)]
    if stage in ("pipeline", "one"):
        ranks = [ranks[0] | ranks[1]]
    for found in ranks:
        assert found.keys() == expected.keys()
        for name, weight in expected.items():
            assert float((found[name] - weight).abs().max()) < TOLERANCE, name


def test_layers_of_autotp_and_the_low_rank_mode_are_refused_by_name() -> None:
    from deepspeed.module_inject.layers import LinearLayer

    from ssdtrain_ds.compact import check_layers, check_mode

    class Divided(LinearLayer):
        def __init__(self) -> None:
            nn.Module.__init__(self)

    divided = SimpleNamespace(module=nn.Sequential(nn.Linear(4, 4), Divided(), Divided()))
    with pytest.raises(ConfigError, match=r"ssdtrain.compact: .*AutoTP divides among ranks \(1 and 1 more\)"):
        check_layers(divided)
    check_layers(SimpleNamespace(module=nn.Linear(4, 4)))
    check_mode(load_config({"compact": {"mode": "quant"}}))
    with pytest.raises(ConfigError, match=r"ssdtrain.compact.mode: 'lowrank' .*not built for DeepSpeed"):
        check_mode(load_config({"compact": {"mode": "lowrank"}}))
