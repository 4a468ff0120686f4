"""The runtime under the orders in which pipelines run microbatches, and as the plain API shows it."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ssdtrain
from ssdtrain.config import ConfigError, load_config
from ssdtrain.offload.feature import MOST_TAPES
from ssdtrain.pytorch.attached import attach_model
from ssdtrain.runtime import Runtime, Seams
from ssdtrain.storage import SpillStore
from tests.offload import zoo
from tests.offload.conftest import MakeRuntime, Variant, io_threads, open_files, settled
from tests.offload.test_equality import asked_for, same

Event = tuple[str, int, int]  # "F" or "B", chunk, microbatch


def one_f_one_b(stage: int, stages: int, microbatches: int) -> list[Event]:
    """The order of one stage: warm-up, steady state, cool-down (PipeDream-flush)."""
    warm = min(stages - stage - 1, microbatches)
    order: list[Event] = [("F", 0, m) for m in range(warm)]
    for m in range(microbatches - warm):
        order += [("F", 0, warm + m), ("B", 0, m)]
    return order + [("B", 0, m) for m in range(microbatches - warm, microbatches)]


def interleaved(stage: int, stages: int, chunks: int, microbatches: int) -> list[Event]:
    """Megatron's interleaved schedule for one stage (arXiv 2104.04473, section 2.2)."""
    total = chunks * microbatches
    warm = min((stages - stage - 1) * 2 + (chunks - 1) * stages, total)

    def forward(k: int) -> Event:
        group, within = divmod(k, stages * chunks)
        return "F", within // stages, group * stages + within % stages

    def backward(k: int) -> Event:
        _, chunk, microbatch = forward(k)
        return "B", chunks - 1 - chunk, microbatch

    order = [forward(k) for k in range(warm)]
    for k in range(total - warm):
        order += [forward(warm + k), backward(k)]
    return order + [backward(k) for k in range(total - warm, total)]


SCHEDULES: dict[str, list[Event]] = {
    "1F1B, first of four": one_f_one_b(0, 4, 8),
    "1F1B, third of four": one_f_one_b(2, 4, 8),
    "1F1B, last of four": one_f_one_b(3, 4, 8),
    "interleaved, first of two, two chunks": interleaved(0, 2, 2, 4),
    "interleaved, last of two, three chunks": interleaved(1, 2, 3, 4),
    "all forwards first (GPipe)": [("F", 0, m) for m in range(6)] + [("B", 0, m) for m in range(6)],
}


def play(order: list[Event], runtime: Runtime | None, steps: int = 2) -> tuple[list[torch.Tensor], int]:
    """One stage of a pipeline: every chunk gets its input from nowhere and hands its output to a loss.

    Returns the losses and gradients, and the most tapes alive at once.
    """
    torch.manual_seed(0)
    chunks = nn.ModuleList(
        [nn.Sequential(zoo.Block(), zoo.Block()) for _ in range(1 + max(e[1] for e in order))]
    )
    if runtime is not None:
        runtime.register(chunks)
    found, most = [], 0
    for _ in range(steps):
        alive: dict[tuple[int, int], torch.Tensor] = {}
        with runtime.step() if runtime is not None else nullcontext():
            for at, (kind, chunk, microbatch) in enumerate(order):
                key = chunk, microbatch
                if kind == "F":
                    follows_at_once = at + 1 < len(order) and order[at + 1] == ("B", *key)
                    x = torch.randn(
                        2, 16, zoo.D, generator=torch.Generator().manual_seed(100 * chunk + microbatch)
                    )
                    recording = (
                        runtime.forward(*key, keep=follows_at_once) if runtime is not None else nullcontext()
                    )
                    with recording:
                        alive[key] = chunks[chunk](x).square().mean()
                else:
                    loss = alive.pop(key)
                    if runtime is not None:
                        runtime.next_backward(
                            *[e[1:] for e in order[at + 1 :] if e[0] == "B" and e[1:] in alive][:2]
                        )
                    with runtime.backward(*key) if runtime is not None else nullcontext():
                        loss.backward()
                    found.append(loss.detach())
                    del loss
                most = max(most, len(alive))
    return [*found, *(p.grad for p in chunks.parameters() if p.grad is not None)], most


@pytest.mark.parametrize("name", SCHEDULES)
def test_pipeline_schedules_change_no_bit(name: str, variant: Variant, make_runtime: MakeRuntime) -> None:
    order = SCHEDULES[name]
    plain, alive = play(order, None)
    assert alive > 1 or "last of four" in name
    runtime = make_runtime(variant)
    assert same(plain, play(order, runtime)[0])
    found = runtime.statistics()
    assert found.steps == 2
    if "1F1B, last" in name:
        assert found.offload.kept_bytes == found.offload.saved_bytes > 0, (
            "its backward follows at once: nothing moves"
        )
    elif "last" not in name:
        assert asked_for(runtime) > 0


def test_the_next_tape_is_loaded_while_this_one_runs_backward(make_runtime: MakeRuntime) -> None:
    runtime = make_runtime()
    losses = {}
    blocks = nn.Sequential(zoo.Block(), zoo.Block())
    for microbatch in range(2):
        with runtime.forward(0, microbatch):
            losses[microbatch] = blocks(zoo.noise(2, 16, zoo.D)).square().mean()
    settled(runtime)
    runtime.next_backward((0, 1))
    with runtime.backward(0, 0):
        losses[0].backward()
    del losses[0]
    assert runtime.engine.mover.loads.prefetched_bytes > 0
    tape = runtime.offload.tape(0, 1)
    assert any(region is not None and region.transfer.prefetched for region in tape.regions)
    del tape
    losses[1].backward()


def test_disabled_means_that_nothing_is_there(tmp_path: Path) -> None:
    for config in ({}, {"enabled": False, "offload": {"directories": str(tmp_path / "never")}}):
        with Runtime(load_config(config)) as runtime:
            model = nn.Linear(4, 4)
            forward = model.forward
            attach_model(runtime, model)
            assert model.forward == forward and not runtime.enabled and runtime.statistics() is None
            with runtime.step(), runtime.forward(), runtime.backward():
                pass
        assert not (tmp_path / "never").exists()


def test_a_feature_that_does_nothing_is_reported(
    make_runtime: MakeRuntime, caplog: pytest.LogCaptureFixture
) -> None:
    for options, expected in (
        ({}, "no saved tensor was seen"),
        ({"min_bytes": "1GiB"}, "offload.min_bytes"),
        ({"amount": 1e-9}, "offload.amount"),
    ):
        runtime = make_runtime(**options)
        caplog.clear()
        for _ in range(5):
            with runtime.step():
                if options:
                    with runtime.forward():
                        loss = zoo.noise(64, 64).requires_grad_().sin().sum()
                    loss.backward()
                    if "amount" in options:  # the first tape is offloaded: its size has to be learnt
                        found = runtime.engine.metrics
                        found.offloaded_bytes = found.avoided_write_bytes = 0
        warnings = [
            record.getMessage() for record in caplog.records if "moved nothing" in record.getMessage()
        ]
        assert len(warnings) == 1 and expected in warnings[0], warnings


@pytest.mark.parametrize("section", ["report", "offload"])
def test_a_baseline_measures_and_moves_nothing(
    section: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config: dict[str, object] = {"report": {"path": str(tmp_path)}}
    if section == "offload":
        config["offload"] = {"amount": 0, "min_bytes": 1}
    with Runtime(load_config(config)) as runtime:
        for _ in range(4):
            with runtime.step():
                with runtime.forward():
                    loss = zoo.noise(64, 64).requires_grad_().sin().sum()
                loss.backward()
                del loss
        found = runtime.statistics()
        assert found.offload.saved_bytes == 4 * 64 * 64 * 4
        assert not found.offload.offloaded_bytes and not found.offload.avoided_write_bytes
    lines = [json.loads(line) for line in (tmp_path / "rank-0.jsonl").read_text().splitlines()]
    assert [line["activation_peak_bytes"] for line in lines] == [64 * 64 * 4] * 4
    assert "moved nothing" not in caplog.text


def test_keeping_every_tape_as_asked_is_no_idleness(
    make_runtime: MakeRuntime, caplog: pytest.LogCaptureFixture
) -> None:
    runtime = make_runtime()
    for _ in range(5):
        with runtime.step():
            with runtime.forward(keep=True):
                loss = zoo.noise(64, 64).requires_grad_().sin().sum()
            loss.backward()
    assert "moved nothing" not in caplog.text


def test_a_runtime_says_what_was_wrong_with_a_directory(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"ssdtrain\.offload\.directories"):
        Runtime(load_config({"offload": {"directories": str(tmp_path / "file")}}))


@pytest.fixture
def model() -> Iterator[nn.Module]:
    yield zoo.Gpt()


def test_attach_offloads_every_call_until_close(model: nn.Module, tmp_path: Path) -> None:
    plain = zoo.run(lambda recording: zoo.train(zoo.Gpt(), zoo.tokens(), recording), nullcontext)
    before = open_files()

    def attached(recording: zoo.Recording) -> list[torch.Tensor]:
        own = zoo.Gpt()
        original = own.forward
        with ssdtrain.attach(
            own, {"offload": {"directories": str(tmp_path / "ssdtrain"), "min_bytes": 1024}}
        ) as runtime:
            found = zoo.train(own, zoo.tokens(), recording)
            with torch.no_grad():
                own(zoo.tokens())
            assert asked_for(runtime) > 0
        assert own.forward == original and "forward" not in own.__dict__
        return found

    assert same(plain, zoo.run(attached, nullcontext))
    assert open_files() <= before


def test_attach_takes_a_file(model: nn.Module, tmp_path: Path) -> None:
    path = tmp_path / "ssdtrain.yaml"
    path.write_text(f"offload:\n  directories: {tmp_path}/ssdtrain\n  min_bytes: 1KiB\n  amount: 60%\n")
    with ssdtrain.attach(model, path) as runtime:
        assert runtime.config.offload.amount.value == 0.6


def test_an_amount_keeps_the_last_saved(make_runtime: MakeRuntime) -> None:
    runtime = make_runtime(amount=0.5, min_bytes=1)
    x = torch.randn(64, 64, requires_grad=True)
    for _ in range(2):
        with runtime.forward() as tape:
            y = x
            for _ in range(10):
                y = y.sin()
            loss = y.sum()
        states = [
            "kept" if region.transfer.slot is None else "left"
            for region in tape.regions
            if region is not None
        ]
        loss.backward()
        del loss, y
    assert states == ["left"] * 5 + ["kept"] * 5


def test_kept_regions_cost_no_io(make_runtime: MakeRuntime) -> None:
    runtime = make_runtime()
    x = torch.randn(64, 64, requires_grad=True)
    with runtime.forward(keep=True):
        loss = x.sin().cos().sum()
    loss.backward()
    found = runtime.statistics()
    assert found.store.bytes_written == found.store.bytes_read == 0
    assert found.offload.kept_bytes == found.offload.saved_bytes > 0


def test_an_engine_that_cannot_be_made_leaves_no_file_and_no_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No memory for the arena, say."""

    def fails(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(sys.modules["ssdtrain.offload.build"], "OffloadEngine", fails)
    before = open_files(), io_threads()
    with pytest.raises(MemoryError) as caught:
        Runtime(load_config({"offload": {"directories": str(tmp_path)}}))
    assert (open_files(), io_threads()) == before
    del caught


@pytest.mark.parametrize(("staged", "asks"), [(False, True), (True, False)])
def test_what_is_written_from_where_it_lies_is_put_into_huge_pages(
    staged: bool, asks: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The arena, which staged tensors are written from, lies in them."""
    asked: list[bool] = []

    class Asked(SpillStore):
        def __init__(self, *places: Any, huge_pages: bool, **settings: Any) -> None:
            asked.append(huge_pages)
            super().__init__(*places, huge_pages=huge_pages, **settings)

    monkeypatch.setattr(sys.modules["ssdtrain.offload.build"], "SpillStore", Asked)
    Runtime(load_config({"offload": {"directories": str(tmp_path)}}), seams=Seams(staged=staged)).close()
    assert asked == [asks]


def test_microbatches_that_are_numbered_on_and_on_take_no_memory(make_runtime: MakeRuntime) -> None:
    runtime = make_runtime()
    offload = runtime.offload
    with runtime.forward(microbatch=0):
        loss = torch.randn(64, 64, requires_grad=True).sin().sum()
    for microbatch in range(1, 4 * MOST_TAPES):
        with runtime.forward(microbatch=microbatch):
            pass
    assert len(offload._tapes) <= MOST_TAPES
    assert offload.tape(0, 0) is not None, "its backward has not come"
    loss.backward()
