"""What `attach` changes, rejects and leaves."""

from __future__ import annotations

import dataclasses
import functools
import pickle
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.pipeline_parallel import schedules
from megatron.core.tensor_parallel import random

import ssdtrain_megatron
from ssdtrain.config import ConfigError
from ssdtrain.integration.compatibility import conflict_table
from ssdtrain.offload import engine
from ssdtrain_megatron import _compat
from ssdtrain_megatron.attachment import attach
from ssdtrain_megatron.conflicts import MEGATRON_CONFLICTS, flag
from tests.megatron import training
from tests.megatron.rows import Row, selective
from tests.megatron.training import Trainer
from tests.support.ended import ended

Config = dict[str, Any]


def replaceable() -> list[Any]:
    """All of megatron-core that offloading replaces."""
    places = [place for found in _compat.replaceable().values() for place in found]
    return [vars(place.owner)[place.name] for place in places]


ONE = Row("one process")


def plain_steps(count: int, row: Row = ONE) -> list[tuple[str | None, str]]:
    trainer = Trainer(row)
    return [trainer.step(number) for number in range(count)]


def nothing_alive(attachment: ssdtrain_megatron.Attachment) -> bool:
    found = ended(attachment.statistics)
    return found.offload.live_regions == 0 and found.store.live_slots == 0


@pytest.mark.parametrize("asked", [None, {}, {"enabled": False, "offload": {"directories": "/nowhere"}}])
def test_a_config_that_enables_nothing_leaves_the_function_objects(
    trainer: Trainer, asked: Config | None
) -> None:
    before = replaceable()
    with attach(trainer.chunks, asked) as attachment:
        assert replaceable() == before
        assert attachment.statistics() is None
        trainer.step(0)
    assert replaceable() == before


def test_what_is_replaced_is_put_back_with_the_last_attachment(trainer: Trainer, config: Config) -> None:
    before = replaceable()
    other = Trainer(ONE)
    first, second = attach(trainer.chunks, config), attach(other.chunks, config)
    assert not any(now is then for now, then in zip(replaceable(), before, strict=True))
    first.close()
    assert replaceable() != before
    second.close()
    second.close()
    assert replaceable() == before


def test_each_model_has_its_own_runtime_and_others_have_none(config: Config) -> None:
    expected = plain_steps(2)
    mine, other, bare = (Trainer(ONE) for _ in range(3))
    with attach(mine.chunks, config) as first, attach(other.chunks, config) as second:
        assert [mine.step(number) for number in range(2)] == expected
        assert [other.step(0)] == expected[:1]
        bare.step(0)
        steps = [attachment.runtime.steps for attachment in (first, second)]
        assert steps == [2, 1]
        assert nothing_alive(first) and nothing_alive(second)


def test_hooks_inside_the_model_win_and_what_they_take_is_reported(
    config: Config, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = Trainer(ONE)
    layer = trainer.chunks[0].module.decoder.layers[0]
    forward = layer.forward

    def inside(*args: Any, **kwargs: Any) -> Any:
        with torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda saved: saved):
            return forward(*args, **kwargs)

    layer.forward = inside
    with attach(trainer.chunks, config):
        for number in range(3):
            trainer.step(number)
    assert "clone" in caplog.text and "bytes a step" in caplog.text


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("fine_grained_activation_offloading", True, "only one of the two can be on"),
        ("cpu_offloading", True, "Transformer Engine"),
        ("overlap_moe_expert_parallel_comm", True, "combined 1F1B"),
        ("enable_cuda_graph", True, "replays kernels"),
        ("external_cuda_graph", True, "replays kernels"),
        ("cuda_graph_impl", "local", "replays kernels"),
    ],
)
def test_what_excludes_offloading_is_rejected_by_its_flag(
    trainer: Trainer, config: Config, option: str, value: object, said: str
) -> None:
    if option not in {field.name for field in dataclasses.fields(trainer.config)}:
        pytest.skip(f"this megatron-core has no {option}")
    setattr(trainer.config, option, value)
    before = replaceable()
    with pytest.raises(ConfigError, match=f"--{option.replace('_', '-')}: {value!r}.*{said}"):
        attach(trainer.chunks, config)
    assert replaceable() == before
    with attach(trainer.chunks, {**config, "enabled": False}):
        pass


def test_the_docs_have_the_table_of_conflicts() -> None:
    page = (Path(__file__).parents[3] / "docs" / "megatron.md").read_text()
    assert conflict_table(MEGATRON_CONFLICTS, flag) in page


def test_sharded_parameters_are_rejected_by_name(trainer: Trainer, config: Config) -> None:
    class FullyShardedDataParallel(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module, self.config = trainer.chunks[0].module, trainer.config

    with pytest.raises(ConfigError, match="Megatron FSDP"):
        attach([FullyShardedDataParallel()], config)


def test_a_mistake_in_the_config_is_named(trainer: Trainer) -> None:
    with pytest.raises(ConfigError, match=r"ssdtrain\.offload\.treads"):
        attach(trainer.chunks, {"offload": {"directories": "/x", "treads": 3}})


@pytest.mark.parametrize(
    ("owner", "name", "other", "said"),
    [
        (schedules, "forward_step", lambda model: None, "current_microbatch of .*schedules.forward_step"),
        (schedules, "backward_step", None, "schedules.backward_step"),
        (random.CheckpointWithoutOutput, "checkpoint", None, "CheckpointWithoutOutput.checkpoint"),
        (random.CudaRNGStatesTracker, "set_states", None, "CudaRNGStatesTracker.set_states"),
    ],
)
def test_a_name_that_megatron_lacks_is_rejected_by_that_name(
    trainer: Trainer,
    config: Config,
    monkeypatch: pytest.MonkeyPatch,
    owner: Any,
    name: str,
    other: Callable[..., Any] | None,
    said: str,
) -> None:
    monkeypatch.setattr(owner, name, other)
    with pytest.raises(ImportError, match=said):
        attach(trainer.chunks, config)


def test_an_untried_version_is_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(_compat.megatron.core, "__version__", "9.9.9")
    _compat.check()
    assert "megatron-core 9.9.9 was never run" in caplog.text
    monkeypatch.setattr(_compat.megatron.core, "__version__", _compat.TESTED_IN_PART[0])
    _compat.check()
    assert f"megatron-core {_compat.TESTED_IN_PART[0]} was run in part (docs/versions.md)" in caplog.text


def test_evaluation_before_and_between_steps_moves_nothing(config: Config) -> None:
    plain = Trainer(ONE)
    trainer = Trainer(ONE)
    with attach(trainer.chunks, config) as attachment:
        for which in (plain, trainer):
            with torch.no_grad():
                which.step(7, forward_only=True)
        assert attachment.runtime.steps == 0
        for number in range(2):
            assert trainer.step(number) == plain.step(number)
            moved = attachment.statistics().offload.saved_bytes  # type: ignore[union-attr]
            with torch.no_grad():
                assert trainer.step(8, forward_only=True) == plain.step(8, forward_only=True)
            assert attachment.statistics().offload.saved_bytes == moved  # type: ignore[union-attr]
        assert nothing_alive(attachment)


def test_a_schedule_of_ones_own_that_bypasses_the_replaced_functions_is_warned_of(
    config: Config, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It has forward_step and backward_step by name from before."""
    own = types.FunctionType(
        schedules.forward_backward_no_pipelining.__code__, dict(vars(schedules)), argdefs=None
    )
    own.__kwdefaults__ = schedules.forward_backward_no_pipelining.__kwdefaults__
    trainer = Trainer(ONE)
    with attach(trainer.chunks, config) as attachment:
        hooks = [len(chunk._forward_pre_hooks) for chunk in trainer.chunks]
        pickle.dumps([hook for chunk in trainer.chunks for hook in chunk._forward_pre_hooks.values()])
        with torch.no_grad():
            trainer.step(7, forward_only=True)
        monkeypatch.setattr(training, "get_forward_backward_func", lambda: own)
        for number in range(4):
            trainer.step(number)
        assert attachment.statistics().offload.saved_bytes == 0  # type: ignore[union-attr]
        assert [len(chunk._forward_pre_hooks) for chunk in trainer.chunks] == [n - 1 for n in hooks]
    assert sum("none of them by forward_step" in line for line in caplog.messages) == 1
    caplog.clear()
    monkeypatch.undo()
    with attach(trainer.chunks, config) as attachment:
        for number in range(4):
            trainer.step(number)
    assert not [line for line in caplog.messages if "none of them" in line]


@pytest.mark.parametrize("where", ["forward_step", "backward_step"])
def test_after_a_step_that_raised_the_next_is_as_without_the_plugin(
    config: Config, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    def failing(plain: Callable[..., Any]) -> Callable[..., Any]:
        calls = []

        @functools.wraps(plain)
        def function(*args: Any, **kwargs: Any) -> Any:
            calls.append(1)
            if len(calls) == 6:  # the second microbatch of the second step
                raise ArithmeticError("a failing kernel")
            return plain(*args, **kwargs)

        return function

    def run(trainer: Trainer) -> list[Any]:
        first = trainer.step(0)
        with pytest.raises(ArithmeticError):
            trainer.step(1)
        return [first, *(trainer.step(number) for number in (2, 3))]

    # A pretend failure below the plugin, where a kernel would fail.
    plain_trainer = Trainer(ONE)
    with monkeypatch.context() as patch:
        patch.setattr(schedules, where, failing(getattr(schedules, where)))
        expected = run(plain_trainer)
    trainer = Trainer(ONE)
    plain = getattr(schedules, where)
    with monkeypatch.context() as patch:
        patch.setattr(schedules, where, failing(plain))
        with attach(trainer.chunks, config) as attachment:
            assert run(trainer) == expected
            assert nothing_alive(attachment)


def test_outputs_that_megatron_empties_stay(config: Config) -> None:
    row = Row("recompute layernorm", options=selective("layernorm"))
    expected = plain_steps(1, row)
    trainer = Trainer(row)
    emptied: list[torch.UntypedStorage] = []
    discard = random.CheckpointWithoutOutput.discard_output_and_register_recompute

    def noting(self: Any, hook_tensor: torch.Tensor) -> None:
        emptied.extend(output.untyped_storage() for output in self.outputs)
        discard(self, hook_tensor)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(random.CheckpointWithoutOutput, "discard_output_and_register_recompute", noting)
        with attach(trainer.chunks, config) as attachment:
            assert attachment.runtime.engine is not None
            seen = []
            make = engine.make_region
            patch.setattr(
                engine,
                "make_region",
                lambda known, tensor, storage, *args: (
                    seen.append(storage) or make(known, tensor, storage, *args)
                ),
            )
            assert [trainer.step(0)] == expected
    assert emptied and seen
    assert not any(one is other for one in emptied for other in seen)


def test_ranks_come_from_torchrun_or_slurm(
    trainer: Trainer, config: Config, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    config["offload"]["directories"] = str(tmp_path / "local{local_rank}-{rank}")
    monkeypatch.setenv("LOCAL_RANK", "3")
    attach(trainer.chunks, config).close()
    monkeypatch.delenv("LOCAL_RANK")
    monkeypatch.setenv("SLURM_LOCALID", "5")
    attach(trainer.chunks, config).close()
    attach(trainer.chunks, config, local_rank=6, rank=70).close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["local3-0", "local5-0", "local6-70"]


@pytest.mark.parametrize("mark", ["_TE_do_not_offload", "_do_not_offload"])
def test_what_is_marked_not_to_be_offloaded_stays(trainer: Trainer, tmp_path: Path, mark: str) -> None:
    with attach(trainer.chunks, {"offload": {"directories": str(tmp_path)}}) as attachment:
        eligible = attachment.runtime.engine.eligible
        tensor = torch.empty(1024)
        assert not eligible.is_excluded(tensor, tensor.untyped_storage())
        setattr(tensor, mark, True)
        assert eligible.is_excluded(tensor, tensor.untyped_storage())


EXCLUDED = [
    ("recompute_granularity", "full", "--recompute-granularity"),
    ("num_moe_experts", 4, "--num-experts"),
    ("fp8", "e4m3", "--fp8-format"),
]


@pytest.mark.parametrize(("option", "value", "flag"), EXCLUDED)
def test_a_plan_recomputes_no_layer_where_something_else_would_see_it(
    option: str, value: Any, flag: str, trainer: Trainer
) -> None:
    setattr(trainer.config, option, value)
    with pytest.raises(ConfigError, match=f"can recompute no block here: Megatron's {flag} .*no tier"):
        attach(trainer.chunks, {"plan": "auto"})


def test_a_plan_without_tiers_recomputes_layers_and_puts_them_back(trainer: Trainer) -> None:
    layers = trainer.chunks[0].module.decoder.layers
    with attach(trainer.chunks, {"plan": "auto"}):
        assert [("forward" in layer.__dict__) for layer in layers] == [True] * (len(layers) - 1) + [False]
    assert not any("forward" in layer.__dict__ for layer in layers)


def test_a_plan_recomputes_no_layer_whose_random_states_cannot_be_restored(
    trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_compat.random_tracker(), "use_cudagraphable_rng", True)
    with pytest.raises(ConfigError, match=r"no block here: the random states of megatron\.core.* no tensors"):
        attach(trainer.chunks, {"plan": "auto"})


@pytest.mark.parametrize("plan", ["auto", {"blocks": ["decoder.layers.*"], "recompute": "on"}], ids=str)
def test_a_pipeline_stage_without_layers_has_nothing_to_plan_for(trainer: Trainer, plan: Any) -> None:
    chunk = trainer.chunks[0].module
    layers, chunk.decoder.layers = chunk.decoder.layers, torch.nn.ModuleList()
    try:
        if plan == "auto":
            with pytest.raises(ConfigError, match="its blocks are no TransformerLayer"):
                attach(trainer.chunks, {"plan": plan})
        trainer.config.pipeline_model_parallel_size = 2
        with attach(trainer.chunks, {"plan": plan}) as attachment:
            assert attachment.statistics() is not None
    finally:
        chunk.decoder.layers = layers
        trainer.config.pipeline_model_parallel_size = 1
