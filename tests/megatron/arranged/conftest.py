"""One process that is a whole world, and what every test leaves behind."""

from __future__ import annotations

import gc
import logging
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.megatron.rows import Row
from tests.megatron.training import Trainer, layout

warnings.filterwarnings("ignore")
logging.getLogger("megatron.core.tensor_parallel.random").setLevel(logging.ERROR)

MIN_BYTES = 1024


@pytest.fixture(autouse=True, scope="session")
def world() -> Iterator[None]:
    dist.init_process_group("gloo")
    yield
    dist.destroy_process_group()


@pytest.fixture(autouse=True)
def groups() -> Iterator[None]:
    torch.manual_seed(0)
    with layout(Row("one process")):
        yield
    gc.collect()


@pytest.fixture
def config(tmp_path: Path) -> dict[str, Any]:
    spill = str(tmp_path / "ssdtrain")
    return {"offload": {"directories": spill, "min_bytes": MIN_BYTES, "amount": "all"}}


@pytest.fixture
def trainer() -> Trainer:
    return Trainer(Row("one process"))
