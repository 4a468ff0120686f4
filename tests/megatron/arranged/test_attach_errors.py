"""What `attach` would do nothing for, or count or write twice, is rejected or ended."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import ssdtrain
from ssdtrain.config import ConfigError
from ssdtrain_megatron.attachment import attach
from ssdtrain_megatron.installation import installation
from tests.megatron.arranged.test_attachment import replaceable
from tests.megatron.rows import Row
from tests.megatron.training import Trainer

Config = dict[str, Any]


class Around(torch.nn.Module):
    """A wrapper, as a framework or `torch.compile` makes one."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.module = module


@pytest.mark.parametrize("other", [lambda chunk: chunk.module, Around], ids=["inside", "around"])
def test_an_attachment_to_a_part_of_what_the_schedule_runs_is_rejected_at_the_first_step(
    trainer: Trainer, config: Config, other: Callable[[torch.nn.Module], torch.nn.Module]
) -> None:
    with attach([other(chunk) for chunk in trainer.chunks], config):
        with torch.no_grad():
            trainer.step(0, forward_only=True)
        with pytest.raises(RuntimeError, match=r"runs a DistributedDataParallel.*as the schedule gets them"):
            trainer.step(0)
        Trainer(Row("a stranger")).step(0)
    trainer.step(0)


def test_a_model_is_a_stranger_only_until_something_is_attached_to_it(
    trainer: Trainer, config: Config
) -> None:
    with attach(Trainer(Row("another")).chunks, config):
        trainer.step(0)
        with attach(trainer.chunks[0].module, config), pytest.raises(RuntimeError, match="as the schedule"):
            trainer.step(1)


def test_lists_that_are_no_list_of_chunks_are_rejected(trainer: Trainer, config: Config) -> None:
    chunk = trainer.chunks[0]
    with pytest.raises(ValueError, match="there are no model chunks"):
        attach([], config)
    for chunks in ([chunk, chunk], [chunk, chunk.module], [chunk.module, chunk]):
        with pytest.raises(ValueError, match="model chunks 0 and 1 are the same"):
            attach(chunks, config)
    with pytest.raises(ConfigError, match=r"ssdtrain\.plan\.state_limit .*: .* is for DeepSpeed's ZeRO-3"):
        attach([chunk], {"plan": {"state_limit": "1GiB"}})
    assert installation.related_chunk(chunk) is None
    attach([], {"enabled": False}).close()


def test_a_second_attachment_to_around_or_inside_of_the_first_is_rejected(
    trainer: Trainer, config: Config
) -> None:
    with attach(trainer.chunks, config):
        for other in (trainer.chunks, Around(trainer.chunks[0]), trainer.chunks[0].module):
            with pytest.raises(ValueError, match="attached to this model already"):
                attach(other, config)


@pytest.mark.parametrize("wrapped", [True, False])
def test_a_model_that_is_offloaded_call_by_call_is_rejected_and_the_other_way_round(
    trainer: Trainer, config: Config, wrapped: bool
) -> None:
    model = trainer.chunks[0] if wrapped else trainer.chunks[0].module
    with ssdtrain.attach(model, config):
        with pytest.raises(
            ValueError, match=r"ssdtrain\.attach offloads this model already.*leave out one of the two"
        ):
            attach(trainer.chunks, config)
        assert installation.related_chunk(model) is None
    with attach(trainer.chunks, config):
        with pytest.raises(ValueError, match=r"ssdtrain_megatron\.attach offloads this model already"):
            ssdtrain.attach(model, config)
        assert "forward" not in vars(model)
    with ssdtrain.attach(model, config):
        pass
    # What enables nothing is in nobody's way.
    with attach(trainer.chunks, config), ssdtrain.attach(model, {**config, "enabled": False}):
        pass


def test_an_evaluation_with_gradients_on_is_not_counted_as_a_step(trainer: Trainer, config: Config) -> None:
    plain = Trainer(trainer.row)
    with attach(trainer.chunks, config) as attachment:
        for number, forward_only in enumerate([True, False, True, True, False]):
            assert trainer.step(number, forward_only=forward_only) == plain.step(
                number, forward_only=forward_only
            )
        assert attachment.runtime.steps == 2


def test_attaching_that_fails_half_way_leaves_nothing(
    trainer: Trainer, config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(_: Any) -> None:
        raise MemoryError

    before = replaceable()
    with monkeypatch.context() as patch:
        patch.setattr("ssdtrain_megatron.installation.read_inputs_once", fails)
        with pytest.raises(MemoryError) as caught:
            attach(trainer.chunks, config)
    assert replaceable() == before and installation.related_chunk(trainer.chunks[0]) is None
    directory = config["offload"]["directories"]
    links = [os.readlink(link) for link in Path("/proc/self/fd").iterdir() if os.path.lexists(link)]
    assert not any(link.startswith(directory) for link in links), "the spill file is open"
    del caught
    with attach(trainer.chunks, config):
        trainer.step(0)
