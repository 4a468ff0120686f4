"""Error feedback: what is lost in a step is sent in the next."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from ssdtrain.codecs import Key, make_fixed_size_codec
from ssdtrain.comm import Bucket, adaptation
from ssdtrain.comm.coding import Coder, TensorPiece
from ssdtrain.comm.feedback import Feedback
from tests.comm.test_collectives import make, values
from tests.support.ranks import on_ranks
from tests.support.tensors import all_equal
from tests.support.tiers import tiered

STEPS = 30


@pytest.mark.parametrize("kind", ["fp32", "int8"])
@pytest.mark.parametrize("spec", ["int4:hadamard", "int2:block=32,asymmetric"])
def test_what_was_decoded_plus_the_residual_is_the_sum_of_the_gradients(spec: str, kind: str) -> None:
    feedback, coder = Feedback(kind), Coder(make_fixed_size_codec(spec), torch.float32)
    exact = ((10, 20), (990, 1000))
    sent, wanted = torch.zeros(1000), torch.zeros(1000)
    out = torch.empty(coder.nbytes(TensorPiece(sent, exact)), dtype=torch.uint8)
    kept_error = torch.zeros(1000)
    for step in range(STEPS):
        gradient = values(step, 1000)
        before = feedback.residual("piece")
        feedback.encode("piece", coder, TensorPiece(gradient, exact), out, Key(0, step))
        decoded = torch.empty(1000)
        coder.decode(out, TensorPiece(decoded, exact))
        # What an 8-bit residual loses of itself is the only thing that is lost.
        after = feedback.residual("piece")
        kept_error += gradient + (before if before is not None else 0) - decoded - after
        sent += decoded
        wanted += gradient
    residual = feedback.residual("piece")
    torch.testing.assert_close(sent + residual + kept_error, wanted, rtol=0, atol=1e-4)
    assert kept_error.abs().max() <= (1e-5 if kind == "fp32" else 0.2)
    assert residual[10:20].abs().max() == 0
    assert feedback.nbytes <= (4000 if kind == "fp32" else 1100)


def summed(rank: int, feedback: str, gather: str) -> float:
    comm = make(dp="int4:hadamard", dp_gather=gather, feedback=feedback)
    sent, wanted = torch.zeros(20_000), torch.zeros(20_000)
    for step in range(STEPS):
        gradients = [values(100 * step + other, 20_000) + 0.1 for other in range(2)]
        mine = gradients[rank].clone()
        comm.all_reduce(mine, "dp", bucket=Bucket("b")).wait()
        comm.step_end()
        sent += mine
        wanted += sum(gradients)
    return float((sent - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("gather", tiered(["int8", "int4:hadamard"], quick=["int8"]))
def test_feedback_makes_a_sum_over_steps_several_times_better(gather: str) -> None:
    without = on_ranks(2, summed, "off", gather)[0]
    with_it = on_ranks(2, summed, "int8", gather)[0]
    assert with_it < 0.35 * without, (with_it, without)


def test_an_overflow_is_not_kept() -> None:
    feedback, coder = Feedback("int8"), Coder(make_fixed_size_codec("int4"), torch.float32)
    gradient = torch.ones(512)
    out = torch.empty(coder.nbytes(TensorPiece(gradient)), dtype=torch.uint8)
    gradient[3] = float("nan")
    feedback.encode("piece", coder, TensorPiece(gradient), out, Key(0))
    assert torch.isfinite(feedback.residual("piece")).all()
    assert feedback.clear() == 1
    assert feedback.residual("piece") is None


def test_a_rebuilt_bucket_drops_its_residual() -> None:
    feedback, coder = Feedback("fp32"), Coder(make_fixed_size_codec("int4"), torch.float32)
    for numel in (512, 640):
        piece = TensorPiece(torch.randn(numel))
        feedback.encode("piece", coder, piece, torch.empty(coder.nbytes(piece), dtype=torch.uint8), Key(0))
    residual = feedback.residual("piece")
    assert residual.numel() == 640
    feedback.step_end()
    assert feedback.step_end() == 1
    assert feedback.nbytes == 0


def resumed(rank: int) -> Any:
    first, second = (
        make(dp="int4", dp_gather="int8", feedback="int8"),
        make(dp="int4", dp_gather="int8", feedback="int8"),
    )

    def step(comm: Any, number: int) -> torch.Tensor:
        mine = values(10 * number + rank, 5000)
        comm.all_reduce(mine, "dp", bucket=Bucket("b")).wait()
        comm.step_end()
        return mine

    for number in range(3):
        step(first, number)
    second.load_state_dict(first.state_dict())
    other = make(dp="int2", dp_gather="int8", feedback="int8")
    other.load_state_dict(first.state_dict())
    assert torch.equal(step(first, 3), step(second, 3))
    return other.feedback.nbytes


def test_a_resumed_run_goes_on_to_the_bit_and_another_policy_drops_residuals() -> None:
    assert on_ranks(2, resumed) == [0, 0]


def reduced_another_way(rank: int) -> float:
    """Gradients of several pieces with a large quarter and a small rest; the relative error of that rest."""
    count = 2 * 65536
    comm = make(dp="int8", dp_gather="int8", feedback="fp32", chunk="64KiB")
    for step in range(3):
        gradient = values(100 * step + rank, count)
        gradient[count // 4 :] *= 1e-4
        expected = gradient.clone()
        dist.all_reduce(expected)
        if step < 2:
            comm.reduce_scatter(torch.empty(count // 2), gradient, "dp", bucket=Bucket("b")).wait()
        else:
            comm.all_reduce(gradient, "dp", bucket=Bucket("b")).wait()
        comm.step_end()
    rest = expected[count // 4 :]
    return float((gradient[count // 4 :] - rest).norm() / rest.norm())


def test_residuals_of_a_reduce_scatter_are_not_added_to_the_pieces_of_an_all_reduce() -> None:
    """Megatron reduces a step whose gradients are saved (--save-wgrads-interval) that way."""
    assert max(on_ranks(2, reduced_another_way)) < 0.05


def skipped(rank: int) -> Any:
    comm = make(dp="int4", dp_gather="int8", feedback="int8")
    found = []
    for skip in (False, True):
        comm.all_reduce(values(rank, 5000), "dp", bucket=Bucket("b")).wait()
        found.append(comm.feedback.nbytes > 0)
        comm.step_end(skipped=skip)
    return [*found, comm.feedback.nbytes]


def test_residuals_of_a_skipped_step_are_dropped() -> None:
    assert on_ranks(2, skipped) == [[True, True, 0]] * 2


def adapted(rank: int) -> Any:
    comm = make(dp="int4:block=128,hadamard", dp_gather="int8", feedback="int8", adapt=0.05)
    generator = torch.Generator().manual_seed(rank)
    for _ in range(101):
        # Heavy tails in one bucket, none in the other.
        hard = torch.randn(4096, generator=generator) ** 7
        comm.all_reduce(hard, "dp", bucket=Bucket("hard")).wait()
        easy = torch.randint(-1, 2, (4096,), generator=generator).float()
        comm.all_reduce(easy, "dp", bucket=Bucket("easy")).wait()
        comm.step_end()
    widths, group = comm.bit_widths, dist.group.WORLD
    return [widths.codec(group, "hard"), widths.codec(group, "easy")]


def test_bits_follow_the_error_and_are_the_same_on_all_ranks() -> None:
    first, second = on_ranks(2, adapted)
    assert first == second
    order = {"int2": 2, "int4": 4, "int8": 8}
    hard, easy = (order[spec.partition(":")[0]] for spec in first)
    assert hard >= easy
    assert hard == 8


def adapted_and_resumed(rank: int) -> Any:
    """A run is saved between two decisions; one goes on, one is loaded into a new process's communicator, one into a used one."""
    adaptation.DECISION_INTERVAL = 4
    options = {"dp": "int4:block=128,hadamard", "dp_gather": "int8", "feedback": "int8", "adapt": 0.05}
    whole, generator = dist.group.WORLD, torch.Generator()
    halves = dist.new_group([0, 1])  # a group of the same ranks, as frameworks make them

    def step(comm: Any, number: int) -> list[torch.Tensor]:
        found = []
        for name, group in (("hard", whole), ("easy", whole), ("hard of others", halves)):
            generator.manual_seed(10 * number + rank)
            mine = torch.randn(4096, generator=generator)
            # Of the last steps before a decision alone it would have been another.
            mine = mine ** (9 if number % 4 == 0 else 1) if name.startswith("hard") else mine.sign()
            comm.all_reduce(mine, "dp", group, bucket=Bucket(name)).wait()
            found.append(mine)
        comm.step_end()
        return found

    going_on, used = make(**options), make(**options)
    for number in range(6):
        step(going_on, number)
    state = going_on.state_dict()
    for number in range(30, 37):
        step(used, number)
    new = make(**options)
    new.load_state_dict(state)
    used.load_state_dict(state)
    level = going_on.bit_widths.codec(whole, "hard")
    for number in range(6, 14):
        expected = step(going_on, number)
        assert all_equal(step(new, number), expected), number
        assert all_equal(step(used, number), expected), number
    other = make(**{**options, "adapt": 0.06})
    other.load_state_dict(state)
    return level, other.bit_widths.codec(whole, "hard")


def test_chosen_bits_are_kept_with_a_checkpoint_and_what_was_measured_since() -> None:
    for level, of_another_policy in on_ranks(2, adapted_and_resumed):
        assert level == adaptation.LEVELS[2]
        assert of_another_policy == adaptation.LEVELS[1]


@pytest.mark.parametrize("kind", ["fp32", "int8"])
def test_a_residual_follows_the_loss_scale(kind: str) -> None:
    """The same gradients, scaled by 4 from the third step on: what is decoded is 4 times what it is without."""
    results = {}
    for growth in (1.0, 4.0):
        feedback, coder = Feedback(kind), Coder(make_fixed_size_codec("int4"), torch.float32)
        out = torch.empty(coder.nbytes(TensorPiece(torch.empty(1024))), dtype=torch.uint8)
        for step in range(4):
            feedback.scale = growth if step >= 2 else 1.0
            gradient = values(step, 1024) * feedback.scale
            feedback.encode("piece", coder, TensorPiece(gradient), out, Key(0, step))
            feedback.step_end()
        decoded = torch.empty(1024)
        coder.decode(out, TensorPiece(decoded))
        results[growth] = decoded / growth, feedback.residual("piece") / growth
    for one, other in zip(results[1.0], results[4.0], strict=True):
        assert torch.equal(one, other)


def scaled(rank: int) -> Any:
    comm = make(dp="int4", dp_gather="int8", feedback="fp32")
    scale = [1024.0]
    comm.loss_scale = lambda: scale[0]
    for _ in range(2):
        mine = scale[0] * values(rank, 5000)
        comm.all_reduce(mine, "dp", bucket=Bucket("b")).wait()
        comm.step_end()
        scale[0] *= 2
    again = make(dp="int4", dp_gather="int8", feedback="fp32")
    again.load_state_dict(comm.state_dict())
    found = []
    for one in (comm, again):
        one.loss_scale = lambda: 4096.0
        mine = 4096.0 * values(rank, 5000)
        one.all_reduce(mine, "dp", bucket=Bucket("b")).wait()
        found.append(mine)
    assert torch.equal(*found)
    return comm.feedback.scale


def test_the_loss_scale_is_read_each_step_and_kept_with_a_checkpoint() -> None:
    assert on_ranks(2, scaled) == [4096.0, 4096.0]
