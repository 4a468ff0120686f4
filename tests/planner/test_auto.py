"""`offload.amount: "auto"` in a real run on the CPU: gradients to the bit, a plan after the first steps, what is said."""

import logging
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import ssdtrain
from ssdtrain.config import load_config
from ssdtrain.config.units import MiB
from ssdtrain.planner.controller import PlanController
from ssdtrain.planner.derating import ArenaCost
from ssdtrain.planner.explain import Outcome, plan_table
from ssdtrain.planner.model.types import KEPT, Block, Machine, Tier, one_after_the_other
from ssdtrain.planner.profile import Profile, regions_problem
from ssdtrain.planner.regions import AdaptivePolicy
from ssdtrain.runtime import Runtime
from ssdtrain.steps import UNENDED_FORWARDS
from tests.offload.conftest import settled, stored_forward
from tests.planner.offloads import choose_offloads
from tests.support.filesystems import eventually


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(4)))


WRITTEN = 3
"""Steps in which backward waits for the drive: nothing is planned while no store was written, and a slow one may write none."""


def gradients(model: nn.Module, runtime: Runtime | None, seed: int, rows: int = 256) -> list[torch.Tensor]:
    x = torch.randn(rows, 64, generator=torch.Generator().manual_seed(seed))
    model.zero_grad()
    if runtime is None:
        model(x).square().sum().backward()
    else:
        with runtime.step():
            with runtime.forward() if seed >= WRITTEN else stored_forward(runtime):
                loss = model(x).square().sum()
            with runtime.backward():
                loss.backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def set_times(profile: Profile) -> None:
    """In place of those that were measured: hooks of so small a model take more time than it may lose, on some machines."""
    times = {"forward": 0.001, "backward": 0.002, "storing": 0.0, "loading": 0.0}
    profile.blocks = [[replace(block, **times) for block in blocks] for blocks in profile.blocks]


def config(directory: Path, **more: str) -> dict[str, dict[str, str]]:
    offload = {"directories": str(directory), "amount": "auto", "min_bytes": "4KiB", **more}
    return {"offload": offload}


@pytest.mark.parametrize("host", ["0", "128KiB"])
def test_gradients_are_those_without_and_a_plan_is_followed(tmp_path: Path, host: str) -> None:
    model = make_model()
    runtime = Runtime(load_config(config(tmp_path, host=host)), logs=False)
    runtime.register(model)
    try:
        assert isinstance(runtime.engine.policy, AdaptivePolicy)
        for step in range(12):
            # The size changes in between; what was planned for another tape still gives the same bits.
            rows = 256 if step < 3 else 512
            found = gradients(model, runtime, step, rows)
            assert all(map(torch.equal, found, gradients(model, None, step, rows)))
            if runtime.engine.policy.plans and step >= 4:
                break
        assert runtime.engine.policy.plans
        found_metrics = dict(runtime.offload.metrics() if runtime.offload else [])
        assert found_metrics
    finally:
        runtime.close()


@pytest.mark.parametrize("optimizers", [1, 2])
def test_a_loop_that_announces_no_steps_gets_a_plan_and_keeps_no_records(
    tmp_path: Path, optimizers: int
) -> None:
    model = make_model()
    runtime = ssdtrain.attach(model, config(tmp_path))
    of_parts = [torch.optim.SGD(model[part::optimizers].parameters(), lr=0.01) for part in range(optimizers)]
    engine = runtime.engine
    assert isinstance(engine.policy, AdaptivePolicy)
    for step in range(12):
        loss = model(torch.randn(512, 64, generator=torch.Generator().manual_seed(step))).square().sum()
        if step < WRITTEN:
            settled(runtime)
        loss.backward()
        record = engine.recorder._records.get("plan")
        assert record is None or len(record.order) <= 4  # of two steps at most, each a forward and a backward
        for optimizer in of_parts:
            optimizer.step()
            optimizer.zero_grad()
    assert engine.policy.plans
    runtime.close()


def stepping_in_backward(model: nn.Module) -> None:
    for parameter in model.parameters():
        optimizer = torch.optim.SGD([parameter], lr=0.001)

        def run(_: torch.Tensor, optimizer: torch.optim.Optimizer = optimizer) -> None:
            optimizer.step()
            optimizer.zero_grad()

        parameter.register_post_accumulate_grad_hook(run)


@pytest.mark.parametrize("planned", [False, True])
def test_an_optimizer_inside_of_backward_ends_the_step_before_the_next_forward(
    tmp_path: Path, planned: bool
) -> None:
    model, plain = make_model(), make_model()
    sections = config(tmp_path) | ({"plan": {"mode": "auto"}} if planned else {})
    runtime = ssdtrain.attach(model, sections)
    for one in (model, plain):
        stepping_in_backward(one)
    for step in range(20):
        x = torch.randn(512, 64, generator=torch.Generator().manual_seed(step))
        for one in (model, plain):
            one(x).square().mean().backward()
    assert all(map(torch.equal, model.parameters(), plain.parameters()))
    (controller,) = [one for one in runtime.features if isinstance(one, PlanController)]
    assert controller.plan is not None
    if not planned:
        assert controller.steps == 19  # the last one ends when the next forward begins
    runtime.close()


def test_the_optimizer_of_another_model_ends_no_step(tmp_path: Path) -> None:
    model, other = make_model(), nn.Linear(64, 1)
    runtime = ssdtrain.attach(model, config(tmp_path))
    ours, theirs = (torch.optim.SGD(one.parameters(), lr=0.01) for one in (model, other))
    (controller,) = [one for one in runtime.features if isinstance(one, PlanController)]
    for step in range(12):
        made = model(torch.randn(512, 64, generator=torch.Generator().manual_seed(step)))
        if step < WRITTEN:
            settled(runtime)
        other(made.detach()).sum().backward()
        theirs.step()
        made.square().sum().backward()
        ours.step()
    # Until the first step of our optimizer the other one may have been ours.
    assert controller.steps == 11
    assert controller.plan is not None
    runtime.close()


def test_without_the_end_of_a_step_records_do_not_grow(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = make_model()
    runtime = ssdtrain.attach(model, config(tmp_path))
    for _ in range(UNENDED_FORWARDS + 10):
        model(torch.randn(1, 64)).sum().backward()
        for parameter in model.parameters():
            parameter.grad = None
    assert not runtime.engine.recorder.active
    said = [
        record.getMessage() for record in caplog.records if "without the end of a step" in record.getMessage()
    ]
    assert len(said) == 1
    runtime.step_end()
    assert runtime.engine.recorder.active
    runtime.close()


def test_a_loop_that_announces_its_steps_has_no_others(tmp_path: Path) -> None:
    model = make_model()
    runtime = Runtime(load_config(config(tmp_path)), logs=False)
    runtime.register(model)
    (controller,) = [one for one in runtime.features if isinstance(one, PlanController)]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(6):
        gradients(model, runtime, step)
        optimizer.step()
    assert controller.steps == 6
    runtime.close()


def profile_of(directory: Path, **more: str) -> Profile:
    model = make_model()
    runtime = Runtime(load_config(config(directory, **more)), logs=False)
    runtime.register(model)
    try:
        runtime.engine.recorder.take()
        with runtime.forward():
            loss = model(torch.randn(256, 64)).sum()
        with runtime.backward():
            loss.backward()
        return Profile(runtime.engine.recorder.take())
    finally:
        runtime.close()


def test_what_the_filter_keeps_is_fixed_in_the_plan(tmp_path: Path) -> None:
    everything = profile_of(tmp_path / "all").blocks[0]
    filtered = profile_of(tmp_path / "some", exclude="GELU").blocks[0]
    assert sum(block.fixed for block in everything) == 0
    assert [block.saved + block.fixed for block in filtered] == [block.saved for block in everything]
    # Of each pair a linear layer saves its input, which may go, and the activation function its own.
    assert 0 < sum(block.fixed for block in filtered) < sum(block.saved for block in everything)
    fast = Machine((Tier("ssd", 1e12, 1e12),), prefetch=1)
    chosen = choose_offloads([filtered], one_after_the_other(), fast)
    for block, choice in zip(filtered, chosen.choices[0], strict=True):
        assert block.saved or choice == KEPT


def test_what_one_operator_saves_begins_its_stores_together(tmp_path: Path) -> None:
    runtime = Runtime(load_config(config(tmp_path)), logs=False)
    with runtime:
        runtime.engine.recorder.take()
        with runtime.forward():
            heads = [torch.randn(2, 4, 256, 64, requires_grad=True) * 2 for _ in range(3)]
            loss = torch.nn.functional.scaled_dot_product_attention(*heads).exp().sum()
        with runtime.backward():
            loss.backward()
        (blocks,) = Profile(runtime.engine.recorder.take()).blocks
    # Attention saves q, k, v, its sums (small) and its result, exp its own.
    assert [block.continues for block in blocks if block.saved > 65536] == [True, True, True, False, False]


def test_a_policy_of_ones_own_takes_the_place_of_the_amount(tmp_path: Path) -> None:
    policy = AdaptivePolicy()
    runtime = Runtime(load_config(config(tmp_path)), policy=policy, logs=False)
    assert runtime.engine.policy is policy
    assert not runtime.engine.recorder.active  # nobody plans for it
    runtime.close()


def test_what_was_decided_is_a_table_with_reasons(tmp_path: Path) -> None:
    model = make_model()
    runtime = Runtime(load_config(config(tmp_path)), logs=False)
    runtime.register(model)
    runtime.engine.recorder.take()
    with runtime.forward():
        loss = model(torch.randn(256, 64)).sum()
    with runtime.backward():
        loss.backward()
    profile = Profile(runtime.engine.recorder.take())
    runtime.close()
    set_times(profile)
    problem = regions_problem(
        profile.blocks, profile.order, Machine((Tier("tiers", 1e12, 1e12),), prefetch=1)
    )
    chosen = choose_offloads(problem.chunks, problem.order, problem.machine)
    outcome = Outcome(5 << 20, 10 << 20, 0.1, 0.01, {"layers.1": 0.02})
    text = plan_table("auto", problem, [chosen.plan], chosen.kept, outcome=outcome)
    assert "offload" in text and "hidden" in text
    assert "\n  0-2.0: offload, 3 x 64.0 KiB, hidden\n" in text and "region" not in text
    assert "saved 5.00 MiB of 10.0 MiB (x0.50 left), waited 10.0% of the step" in text
    assert "waited 20.0 ms for layers.1" in text


@pytest.mark.parametrize(
    ("outcome", "said"),
    [
        (Outcome(100, 100, 1.0, 0.0, {}), "saved nothing"),
        (Outcome(90, 100, 1.0, 0.5, {}), "costs more than it gives: 50% of a step is waiting, for 10%"),
        (Outcome(50, 100, 1.0, 0.01, {}), None),
        (Outcome(100, 100, 1.0, 0.0, {}, limited=True), None),  # as much may stay
    ],
)
def test_a_loud_line_where_offload_gives_nothing(outcome: Outcome, said: str | None) -> None:
    found = list(outcome.warnings())
    assert found == [] if said is None else said in found[0]


def test_a_model_whose_arena_takes_more_than_it_saves_has_none_and_the_peak_of_keeping(
    tmp_path: Path,
) -> None:
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))  # saves 4 tensors of 1 MiB
    with Runtime(load_config(config(tmp_path)), logs=False) as runtime:
        runtime.register(model)
        engine = runtime.engine
        assert isinstance(engine.policy, AdaptivePolicy)
        for step in range(12):
            gradients(model, runtime, step, rows=4096)
            if engine.policy.plans:
                break
        engine.reset_peak()
        for step in range(4):
            found = gradients(model, runtime, step, rows=4096)
            assert all(map(torch.equal, found, gradients(model, None, step, rows=4096)))
        after = engine.snapshot()
        assert after.activation_peak_bytes == after.unoffloaded_peak_bytes and not after.buffer_bytes


def test_where_everything_is_kept_one_tensor_is_written_by_which_a_faster_drive_is_seen(
    tmp_path: Path,
) -> None:
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))  # saves less than an arena takes
    with Runtime(load_config(config(tmp_path)), logs=False) as runtime:
        runtime.register(model)
        engine, offload = runtime.engine, runtime.offload
        assert engine is not None and offload is not None and isinstance(engine.policy, AdaptivePolicy)
        for step in range(12):
            gradients(model, runtime, step)
            if engine.policy.plans:
                break
        [drive] = offload.store.metrics.drives
        before = drive.bytes_written
        with runtime.forward():
            loss = model(torch.randn(256, 64)).square().sum()
        # Looking asks for nothing to begin.
        written = eventually(lambda: offload.store.metrics.drives[0].bytes_written > before)
        assert written, "it waits for others"
        loss.backward()


def test_without_an_arena_tensors_come_back_into_memory_of_their_own(tmp_path: Path) -> None:
    model = make_model()
    with Runtime(load_config(config(tmp_path, amount="all")), logs=False) as runtime:
        runtime.register(model)
        engine = runtime.engine
        want = gradients(model, None, 0)
        engine.buffers.fit(MiB)
        engine.set_arena_in_use(False)
        x = torch.randn(256, 64, generator=torch.Generator().manual_seed(0))
        model.zero_grad()
        before = engine.snapshot().loaded_bytes
        with stored_forward(runtime):
            loss = model(x).square().sum()
        loss.backward()
        found = [p.grad for p in model.parameters() if p.grad is not None]
        assert all(map(torch.equal, found, want))
        del loss
        after = engine.snapshot()
        assert after.loaded_bytes > before and not after.buffer_bytes
        assert after.activation_bytes == x.nbytes


def test_without_an_arena_it_is_known_what_one_takes(tmp_path: Path) -> None:
    with Runtime(load_config(config(tmp_path)), logs=False) as runtime:
        cost, machine, buffers = ArenaCost(runtime.engine), Machine(), runtime.engine.buffers
        buffers.fit(MiB)
        assert cost.counted(machine, [[Block("b", 1.0, 1.0, 8 * MiB)]]).buffers == MiB
        cost.planned(used=False)
        buffers.fit(MiB)
        assert not buffers.counted_bytes and buffers.acquire(1) is None
        found = cost.counted(machine, [[Block("b", 1.0, 1.0, 16 * MiB)]])
        assert found.buffers == 2 * MiB and not found.buffers_stay
        cost.planned(used=True)
        buffers.fit(MiB)
        assert buffers.counted_bytes == MiB


def test_an_arena_whose_size_is_given_stays(tmp_path: Path) -> None:
    with Runtime(load_config(config(tmp_path, buffer="4MiB")), logs=False) as runtime:
        cost, machine = ArenaCost(runtime.engine), Machine(buffers=4 * MiB)
        assert cost.counted(machine, [[Block("b", 1.0, 1.0, MiB)]]) == machine
        cost.planned(used=False)
        assert runtime.engine.buffers.counted_bytes == 4 * MiB


def test_evaluation_leaves_no_record_behind(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "ssdtrain")
    model = make_model()
    with Runtime(load_config(config(tmp_path)), logs=False) as runtime:
        runtime.register(model)
        assert isinstance(runtime.engine.policy, AdaptivePolicy)
        for step in range(12):
            gradients(model, runtime, step)
            with runtime.forward():
                model(torch.randn(64, 64)).sum()  # its backward never comes
            if runtime.engine.policy.plans and step >= 2:
                break
        assert runtime.engine.policy.plans
