"""Compressed collectives of an engine: checkpoints, the monitor, what is left of them, and that nothing else is coded."""

from __future__ import annotations

import logging
import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.ranks import StandingRanks, on_ranks
from tests.support.tensors import all_equal
from tests.support.tiers import tiered

# Slow, all of them, for the start of two ranks of DeepSpeed; rows of the matrix train with compressed collectives in `make test`.
pytestmark = [pytest.mark.distributed, pytest.mark.timeout(300), pytest.mark.slow]

COMM = {
    "min_bytes": 0,
    "probe": False,
    "warmup_steps": 0,
    "dp": "int4:hadamard",
    "dp_gather": "int8",
    "feedback": "int8",
}


def engine_of(
    stage: int, comm: dict[str, Any] | None, make: Any = None, optimizer: Any = torch.optim.AdamW, **more: Any
) -> Any:
    """Args: make: of the model, in place of the small GPT; more: of DeepSpeed's config."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed

    import ssdtrain_ds
    from tests.deepspeed import models, upstream

    upstream.repair()
    ssdtrain_ds.install()
    if not deepspeed.comm.is_initialized():
        deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    torch.manual_seed(0)
    model = (make or models.GPT)()
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": models.BATCH,
        "steps_per_print": 10**9,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        **more,
    }
    if comm is not None:
        config["ssdtrain"] = {"comm": comm}
    optimizer = optimizer(model.parameters(), lr=1e-3)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]


def train(engine: Any, rank: int, first: int, last: int) -> list[float]:
    from tests.deepspeed import models

    losses = []
    for ids, labels in list(models.batches(1 + rank, last))[first:]:
        loss = engine(ids, labels)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def resumed(rank: int, stage: int, directory: str) -> Any:
    import ssdtrain_ds

    engine = engine_of(stage, COMM)
    train(engine, rank, 0, 3)
    engine.save_checkpoint(directory)
    on = train(engine, rank, 3, 5)
    engine.destroy()
    other = engine_of(stage, COMM)
    other.load_checkpoint(directory)
    comm = ssdtrain_ds.runtime_of(other).comm
    found = [comm.steps, comm.feedback.nbytes > 0]
    again = train(other, rank, 3, 5)
    other.destroy()
    return [on, again, *found]


@pytest.mark.parametrize("stage", tiered([0, 2, 3], quick=[]))
def test_residuals_are_in_the_checkpoint_and_a_resumed_run_goes_on_to_the_bit(
    stage: int, two_ranks: StandingRanks, tmp_path: Path
) -> None:
    for on, again, steps, residuals in two_ranks(resumed, stage, str(tmp_path)):
        assert again == on
        assert steps == 3
        assert residuals


def files_when_named(rank: int, directory: str) -> list[str]:
    """Files of `comm` in a checkpoint when rank 0 is about to write DeepSpeed's `latest`, which names it."""
    engine = engine_of(2, COMM)
    train(engine, rank, 0, 1)
    commit, files = engine.checkpoint_engine.commit, []

    def committing(info: Any) -> Any:
        files.extend(sorted(path.name for path in Path(directory, "last").glob("ssdtrain*")))
        return commit(info)

    engine.checkpoint_engine.commit = committing
    engine.save_checkpoint(directory, tag="last")
    engine.destroy()
    return files


def test_a_checkpoint_has_the_residuals_of_all_ranks_before_deepspeed_names_it(
    two_ranks: StandingRanks, tmp_path: Path
) -> None:
    expected = [f"ssdtrain_comm_rank_{rank}.pt" for rank in range(2)]
    assert two_ranks(files_when_named, str(tmp_path)) == [expected] * 2


def told_at_start(rank: int, stage: int) -> list[str]:
    said: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("ssdtrain").addHandler(handler)
    engine_of(stage, {"preset": "balanced"}).destroy()
    logging.getLogger("ssdtrain").removeHandler(handler)
    return [text for text in said if text.startswith("comm sends about")]


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_model_of_which_little_is_compressed_is_told_at_start(stage: int, two_ranks: StandingRanks) -> None:
    (text,), others = two_ranks(told_at_start, stage)
    assert "100% of the plain bytes" in text and "comm.min_bytes" in text and others == []


def without_residuals(rank: int, directory: str) -> Any:
    import ssdtrain_ds

    engine = engine_of(2, None)
    train(engine, rank, 0, 1)
    engine.save_checkpoint(directory)
    engine.destroy()
    other = engine_of(2, COMM)
    train(other, rank, 0, 1)
    other.load_checkpoint(directory)
    found = ssdtrain_ds.runtime_of(other).comm.feedback.nbytes
    other.destroy()
    return found


def test_a_checkpoint_without_residuals_begins_anew(two_ranks: StandingRanks, tmp_path: Path) -> None:
    assert two_ranks(without_residuals, str(tmp_path)) == [0, 0]


def warm_started(rank: int, directory: str, option: dict[str, bool]) -> Any:
    import ssdtrain_ds

    engine = engine_of(1, COMM)
    train(engine, rank, 0, 2)
    engine.save_checkpoint(directory)
    engine.destroy()
    other = engine_of(1, COMM)
    other.load_checkpoint(directory, **option)
    comm = ssdtrain_ds.runtime_of(other).comm
    found = comm.feedback.nbytes, comm.steps == other.global_steps
    other.destroy()
    return found


@pytest.mark.parametrize("option", [{"load_module_only": True}, {"load_optimizer_states": False}])
def test_a_run_that_takes_the_weights_of_another_begins_without_its_residuals(
    option: dict[str, bool], two_ranks: StandingRanks, tmp_path: Path
) -> None:
    assert two_ranks(warm_started, str(tmp_path), option) == [(0, True)] * 2


def gathered(rank: int, stage: int) -> Any:
    import deepspeed

    import ssdtrain_ds

    comm = {**COMM, "zero_gather": "int4", "exclude": "none"}
    engine = engine_of(stage, comm)
    train(engine, rank, 0, 3)
    parameters = list(engine.module.parameters())
    with deepspeed.zero.GatheredParameters(parameters) if stage == 3 else torch.no_grad():
        whole = [p.detach().clone() for p in parameters]
    before = ssdtrain_ds.runtime_of(engine).comm.metrics()["zero_gather"].calls
    norm = engine.get_global_grad_norm()
    assert norm is not None and norm > 0
    assert ssdtrain_ds.runtime_of(engine).comm.metrics()["zero_gather"].calls == before > 0
    if stage == 3:
        own = [p.ds_tensor.clone() for p in parameters]
    else:
        own = [master.detach().clone() for master in engine.optimizer.single_partition_of_fp32_groups]
        whole += [flat.detach().clone() for flat in engine.optimizer.bit16_groups_flat]
    engine.destroy()
    return [whole, own, float(norm)]


def test_weights_gathered_for_anything_but_training_come_as_they_are(two_ranks: StandingRanks) -> None:
    """A checkpoint of ZeRO-3's weights, or what the user gathers, holds the exact ones; norms are the same on all ranks."""
    first, second = two_ranks(gathered, 3)
    assert all_equal(first[0], second[0])
    assert first[2] == second[2]
    assert len(first[0]) == len(first[1]) == len(second[1]) > 0
    for whole, *parts in zip(first[0], first[1], second[1], strict=True):
        assert torch.equal(whole.flatten(), torch.cat([part.flatten() for part in parts])[: whole.numel()])


def test_weights_gathered_by_difference_are_close_to_the_master_copy_and_equal_on_all_ranks(
    two_ranks: StandingRanks,
) -> None:
    first, second = two_ranks(gathered, 2)
    assert all_equal(first[0], second[0])
    assert first[2] == second[2]
    assert len(first[1]) == len(second[1]) > 0
    for flat, *masters in zip(first[0][-len(first[1]) :], first[1], second[1], strict=True):
        exact = torch.cat(masters)
        assert flat.numel() == exact.numel()
        assert 0 < (flat - exact).norm() < 0.01 * exact.norm()


def detached(rank: int) -> Any:
    from deepspeed.comm.torch import TorchBackend
    from deepspeed.module_inject.layers import ColumnParallel, RowParallel
    from deepspeed.moe.sharded_moe import _AllToAll
    from deepspeed.runtime.zero import stage_1_and_2

    def functions() -> list[Any]:
        names = [
            "all_reduce",
            "reduce_scatter_tensor",
            "all_gather_into_tensor",
            "all_to_all_single",
            "send",
            "recv",
        ]
        return [
            *(getattr(TorchBackend, name) for name in names),
            *(
                getattr(cls, name)
                for cls in (ColumnParallel, RowParallel, _AllToAll)
                for name in ("forward", "backward")
            ),
            stage_1_and_2.all_gather_dp_groups,
        ]

    before = functions()
    plain = engine_of(2, None)
    assert functions() == before
    first, second = engine_of(2, COMM), engine_of(2, COMM)
    assert functions() != before
    assert "allreduce_bucket" not in plain.__dict__
    first.destroy()
    train(second, rank, 0, 1)
    assert "save_checkpoint" not in first.__dict__
    second.destroy()
    return functions() == before


def test_after_the_last_engine_everything_is_deepspeeds_own(two_ranks: StandingRanks) -> None:
    assert two_ranks(detached) == [True, True]


def monitored(rank: int, directory: str) -> Any:
    engine = engine_of(2, COMM, csv_monitor={"enabled": True, "output_path": directory, "job_name": "run"})
    train(engine, rank, 0, 2)
    engine.destroy()
    return sorted(str(path.name) for path in Path(directory).rglob("*.csv"))


def test_the_monitor_has_the_bytes_of_every_dimension(two_ranks: StandingRanks, tmp_path: Path) -> None:
    found = two_ranks(monitored, str(tmp_path))[0]
    assert any("dp_wire_bytes" in name for name in found), found
    assert any("dp_raw_bytes" in name for name in found), found


def overflowed(rank: int) -> Any:
    import ssdtrain_ds

    engine = engine_of(2, COMM)
    train(engine, rank, 0, 2)
    comm = ssdtrain_ds.runtime_of(engine).comm
    ids_and_labels = __import__("tests.deepspeed.models", fromlist=["models"]).batches(1 + rank, 1)
    for ids, labels in ids_and_labels:
        loss = engine(ids, labels)
        engine.backward(loss * float("nan") if rank == 1 else loss)
    norm = float(engine.optimizer.scaled_global_norm())
    residuals = [comm.feedback.residual(name) for name in comm.feedback.state_dict()["pieces"]]
    engine.destroy()
    return norm, residuals


def test_a_nan_on_one_rank_is_seen_by_all_and_not_kept(two_ranks: StandingRanks) -> None:
    found = two_ranks(overflowed)
    for norm, residuals in found:
        assert not math.isfinite(norm)
        assert residuals
        assert all(torch.isfinite(residual).all() for residual in residuals)
    # All gradients of rank 1 are NaN: nothing of them stays. What rank 0 lost of its own does.
    assert any(residual.any() for residual in found[0][1])
    assert not any(residual.any() for residual in found[1][1])


def test_padding_that_nobody_writes_is_outside_of_every_block() -> None:
    """Three ranks, tensors of 7 and 6 elements: parts of 3 and 2, of which the third rank's first has one element."""
    from ssdtrain_ds.comm.gradients import interleaved

    assert interleaved([(7, False), (6, False)], 15, 3) == ((11, 13),)
    assert interleaved([(7, False), (6, True)], 15, 3) == ((3, 5), (8, 10), (11, 15))
    assert interleaved([(7, False)], 8, 3) == ((0, 8),)  # not the tensors that it was said to hold


def poisoned(rank: int) -> Any:
    """ZeRO-3 on three ranks, where no tensor divides evenly, with whatever is in memory made as bad as it can be."""
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(True)  # fills new memory with NaN
    comm = {**COMM, "zero_gather": "int8", "dp": "int8", "feedback": "off", "exclude": "none"}
    engine = engine_of(3, comm)
    losses = train(engine, rank, 0, 3)
    engine.destroy()
    plain = engine_of(3, None)
    wanted = train(plain, rank, 0, 3)
    plain.destroy()
    return [losses, wanted]


@pytest.mark.long
def test_uneven_partitions_of_zero_3_meet_no_garbage() -> None:
    for losses, wanted in on_ranks(3, poisoned):
        assert losses == pytest.approx(wanted, rel=0.02)


def growing_scale(rank: int) -> Any:
    """DeepSpeed has no float16 on a CPU: the optimizer's scale is moved by hand, as its scaler would."""
    import ssdtrain_ds

    engine = engine_of(1, {**COMM, "zero_gather": "off"})
    feedback = ssdtrain_ds.runtime_of(engine).comm.feedback
    found = []
    for step in range(5):
        scale = engine.optimizer.loss_scale = float(2 ** (step // 2))
        train(engine, rank, step, step + 1)
        found.append((scale, feedback.scale, feedback.nbytes))
    engine.destroy()
    return found


def test_residuals_know_the_loss_scale_of_their_gradients(two_ranks: StandingRanks) -> None:
    for found in two_ranks(growing_scale):
        assert [scale for scale, _, _ in found] == [1.0, 1.0, 2.0, 2.0, 4.0]
        assert all(seen == scale and nbytes > 0 for scale, seen, nbytes in found)


def written_between_steps(rank: int) -> Any:
    import ssdtrain_ds

    engine = engine_of(2, {**COMM, "zero_gather": "int8", "exclude": "none"})
    train(engine, rank, 0, 3)
    figures = ssdtrain_ds.runtime_of(engine).comm.metrics
    before = figures()["zero_gather"].fallbacks.total()
    with torch.no_grad():
        for parameter in engine.module.parameters():
            parameter.data.add_(0.25)  # as averaging of weights does, past DeepSpeed's own functions
    train(engine, rank, 3, 4)
    after = figures()["zero_gather"].fallbacks.total()
    flat = torch.cat([flat.detach().float().flatten() for flat in engine.optimizer.bit16_groups_flat])
    masters = torch.cat([part.detach().clone() for part in engine.optimizer.single_partition_of_fp32_groups])
    train(engine, rank, 4, 5)
    engine.destroy()
    return after - before, flat, masters


def test_weights_written_between_steps_are_gathered_in_full_without_a_word(two_ranks: StandingRanks) -> None:
    """The step overwrites them from the master copy, on all ranks, as it does without SSDTrain."""
    (fallbacks, flat, master), (other_fallbacks, other_flat, other_master) = two_ranks(written_between_steps)
    assert fallbacks == other_fallbacks == 1
    assert torch.equal(flat, other_flat)
    assert torch.equal(flat, torch.cat([master, other_master]))
