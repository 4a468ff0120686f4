"""Starts one process group for all rows of a size, and gives each test the results of its row."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from tests.deepspeed.rows import Row, rows_for
from tests.support import processes
from tests.support.ended import ended
from tests.support.ranks import StandingRanks

Results = Callable[[Row], list[dict[str, Any]]]


ACCELERATOR = {"DS_ACCELERATOR": processes.DEVICE, "HF_HUB_OFFLINE": "1"}
"""Variables of every process that imports DeepSpeed."""


def environment() -> dict[str, str]:
    """Of the only rank."""
    return {**processes.environment(1), "RANK": "0", "LOCAL_RANK": "0", **ACCELERATOR}


@pytest.fixture(scope="session")
def results(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Results]:
    """The results of a row, one for each rank. The first test of a group size starts it for all rows that were selected.

    Tests that read them are in one file: a worker of xdist runs a file, and two files would train every row twice.
    """
    done: dict[int, tuple[Path, str | None]] = {}
    wanted = {
        item.callspec.params["row"].name
        for item in request.session.items
        if hasattr(item, "callspec") and isinstance(item.callspec.params.get("row"), Row)
        if not item.get_closest_marker("skip")
    }

    def find(row: Row) -> list[dict[str, Any]]:
        if row.ranks not in done:
            directory = tmp_path_factory.mktemp(f"ranks{row.ranks}")
            names = [other.name for other in rows_for(row.ranks) if other.name in wanted]
            failure = None
            try:
                processes.forked(
                    row.ranks,
                    "tests.deepspeed.worker",
                    str(directory),
                    *names,
                    imports=["deepspeed", "ssdtrain_ds", "tests.deepspeed.training"],
                    timeout=850,
                    **ACCELERATOR,
                )
            except AssertionError as error:
                failure = str(error)
            done[row.ranks] = (directory, failure)
        directory, failure = done[row.ranks]
        files = [directory / f"{row.name}.{rank}.json" for rank in range(row.ranks)]
        found = [json.loads(file.read_text()) for file in files if file.exists()]
        errors = [result["error"] for result in found if "error" in result]
        assert not errors, errors[0]
        assert len(found) == row.ranks, failure
        return found

    return find


@pytest.fixture(autouse=True)
def linear_is_put_back() -> Iterator[None]:
    """ZeRO-3 replaces `nn.functional.linear` for good, and later tests in this process must meet torch's own."""
    from torch.nn import functional

    linear = functional.linear
    yield
    functional.linear = linear


ALONE = {**ACCELERATOR, "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}


@pytest.fixture(scope="session")
def _group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    import deepspeed
    import torch

    from tests.deepspeed import upstream
    from tests.deepspeed.training import backend

    with pytest.MonkeyPatch.context() as patched:
        for name, value in ALONE.items():
            patched.setenv(name, value)
        upstream.repair()
        deepspeed.init_distributed(
            dist_backend=backend(),
            init_method=f"file://{tmp_path_factory.mktemp('group') / 'store'}",
            rank=0,
            world_size=1,
            auto_mpi_discovery=False,
            verbose=False,
        )
    yield
    if torch.distributed.is_initialized():  # else accelerate's `end_training` has ended it
        torch.distributed.destroy_process_group()


@pytest.fixture
def process_group(_group: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """This process as a group of one; its variables are set in the tests that ask for it, and in no other of the process."""
    for name, value in ALONE.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def installed() -> Iterator[None]:
    """The plugin is installed for one test."""
    import ssdtrain_ds

    ssdtrain_ds.install()
    yield
    ssdtrain_ds.uninstall()


@pytest.fixture(scope="module")
def two_ranks() -> Iterator[StandingRanks]:
    ranks = StandingRanks(2)
    yield ranks
    ranks.close()


MakeEngine = Callable[..., Any]


@pytest.fixture
def make_engine(process_group: None, installed: None, tmp_path: Path) -> Iterator[MakeEngine]:
    """Builds engines around the small GPT; afterwards they are destroyed and must have left nothing.

    The function takes the `ssdtrain` block ("default": one that offloads; None: no block), DeepSpeed's other keys, and
    `model`.
    """
    import deepspeed
    import torch

    from tests.deepspeed import models

    made: list[Any] = []

    def make(block: Any = "default", *, model: Any = None, **config: Any) -> Any:
        if block == "default":
            directory = str(tmp_path / f"ssdtrain-{len(made)}")
            block = {
                "offload": {
                    "directories": directory,
                    "amount": "all",
                    "min_bytes": models.MIN_BYTES,
                    "threads": 1,
                }
            }
        full = {"train_micro_batch_size_per_gpu": models.BATCH, "steps_per_print": 10**9, **config}
        if block is not None:
            full["ssdtrain"] = block
        torch.manual_seed(0)
        model = models.GPT() if model is None else model
        engine, *_ = deepspeed.initialize(
            model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3), config=full
        )
        made.append(engine)
        return engine

    yield make
    gc.collect()
    import ssdtrain_ds

    for engine in made:
        runtime = ssdtrain_ds.runtime_of(engine)
        if runtime is not None and runtime.enabled:
            assert ended(runtime.statistics).store.live_slots == 0
        engine.destroy()


def train(engine: Any, steps: int = 3, seed: int = 1, done: int = 0) -> list[Any]:
    """Losses of `steps` steps, after `done` earlier ones."""
    from tests.deepspeed import models

    losses, each = [], engine.gradient_accumulation_steps()
    for ids, labels in islice(models.batches(seed, (done + steps) * each), done * each, None):
        loss = engine(ids, labels)
        engine.backward(loss)
        engine.step()
        losses.append(loss.detach().clone())
    return losses
