"""`"plan": "auto"` where blocks communicate: the ranks of their group recompute the same ones, whatever each of them needs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import ssdtrain
from ssdtrain.config import ConfigError, load_config
from ssdtrain.planner.agreement import Agreement
from ssdtrain.planner.blocks import RECORDED, WARM_UP
from ssdtrain.planner.model.types import Block, Machine, one_after_the_other
from ssdtrain.planner.plan_blocks import PlanBlocks
from ssdtrain.planner.plans import NoPlan, SearchProblem, actions_for
from ssdtrain.planner.search import search
from ssdtrain.runtime import Runtime
from tests.planner.test_plan_auto import QUIET, STEPS, auto_of, blocks_of, equal, gpt, train
from tests.planner.test_plan_safety import LEAST, Sum
from tests.support.ranks import on_ranks

WIDTH, LAYERS = 128, 6


class Sums(nn.Module):
    """A layer of tensor parallelism by hand, with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.dropout = nn.Linear(WIDTH, WIDTH), nn.Dropout(0.2)

    def forward(self, x: torch.Tensor, _: Any = None) -> torch.Tensor:
        return x + self.dropout(Sum.apply(self.linear(x).tanh(), "all_reduce").tanh())


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Sums() for _ in range(LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def _train(model: Layers, runtime: Runtime | None, sizes: list[int]) -> list[torch.Tensor]:
    torch.manual_seed(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    found = []
    for size in sizes:
        x = torch.randn(size, WIDTH)
        if runtime is None:
            loss = model(x).square().mean()
            loss.backward()
        else:
            with runtime.forward():
                loss = model(x).square().mean()
            with runtime.backward():
                loss.backward()
        found += [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
        optimizer.step()
        optimizer.zero_grad()
        if runtime is not None:
            runtime.step_end()
    return [*found, *(p.detach().clone() for p in model.parameters())]


def _planned(model: Layers, plan: dict[str, Any], group: Any) -> Runtime:
    blocks = {f"layers.{n}": layer for n, layer in enumerate(model.layers)}
    runtime = Runtime(load_config({**plan, **QUIET}), plan_blocks=PlanBlocks(blocks, group=group))
    runtime.register(model)
    runtime.step_begin()
    return runtime


def _different_needs(rank: int) -> list[Any]:
    found: list[Any] = []
    # Only rank 1 has a limit that needs recomputation, then only rank 0; the forwards of rank 1 save no less.
    sizes = [256] * STEPS
    for limits in (("64MiB", "2MiB"), ("2MiB", "64MiB")):
        expected = _train(Layers(), None, sizes)
        model = Layers()
        with _planned(model, {"plan": {"device_limit": limits[rank]}}, dist.group.WORLD) as runtime:
            same = equal(expected, _train(model, runtime, sizes))
            plan, chosen = auto_of(runtime).plan, blocks_of(runtime).agreement.recomputed
        found.append((same, plan is not None and plan.count("recompute"), sorted(chosen or ())))
    # Later forwards are larger: ranks profile again, and what is recomputed stays.
    sizes = [256] * STEPS + [512] * (STEPS + 2)
    expected = _train(Layers(), None, sizes)
    model = Layers()
    with _planned(model, LEAST, dist.group.WORLD) as runtime:
        same = equal(expected, _train(model, runtime, sizes))
        found.append((same, sorted(blocks_of(runtime).agreement.recomputed or ())))
    # Another group than the one that communicates does not make it safe.
    alone = [dist.new_group([0]), dist.new_group([1])][rank]
    model = Layers()
    with _planned(model, LEAST, alone) as runtime:
        same = equal(_train(Layers(), None, sizes), _train(model, runtime, sizes))
        found.append((same, sorted(blocks_of(runtime).agreement.recomputed or ())))
    # Names differ: nothing is recomputed before that is known.
    model = Layers()
    model.layers = model.layers[: LAYERS - rank]
    try:
        with _planned(model, {"plan": {"device_limit": "64MiB"}}, dist.group.WORLD) as runtime:
            runtime.features[-1].subject.agreement.exchange({}, False, [])  # type: ignore[attr-defined]
    except RuntimeError as error:
        found.append(str(error))
    return found


class Mask:
    pass


def _objects(rank: int) -> list[Any]:
    """By the step from which on, and the rank on which blocks are called with an object: what came of it."""
    found: list[Any] = []
    for first, ranks in ((0, (0, 1)), (0, (1,)), (STEPS, (1,)), (1, (0, 1)), (1, (1,))):
        model = Layers()
        with _planned(model, LEAST, dist.group.WORLD) as runtime:
            try:
                for step in range(STEPS + 1):
                    given = (Mask(),) if step >= first and rank in ranks else ()
                    if step == STEPS and rank not in ranks:
                        break  # the other one raises before its forward communicates
                    with runtime.forward():
                        x = torch.randn(16, WIDTH)
                        for layer in model.layers:
                            x = layer(x, *given)
                        loss = x.square().mean()
                    with runtime.backward():
                        loss.backward()
                    runtime.step_end()
            except RuntimeError as error:
                found.append(str(error))
            else:
                found.append(sorted(blocks_of(runtime).agreement.recomputed or ()))
    return found


@pytest.mark.slow
@pytest.mark.distributed
def test_a_call_with_an_object_on_one_rank_is_an_error_and_not_a_wait_for_ever() -> None:
    first, second = on_ranks(2, _objects)
    # On all of them, from any step on before the blocks are chosen: no block is recomputed, and training goes on.
    assert first[0] == second[0] == first[3] == second[3] == []
    for found in (first, second):
        for text in (found[1], found[4]):
            assert "'layers.0'" in text and "on ranks [1]" in text and "plan.blocks" in text
    assert first[2] == [f"layers.{n}" for n in range(LAYERS)]
    assert "'layers.0'" in second[2] and "argument 1 (Mask)" in second[2] and "plan.blocks" in second[2]


@pytest.mark.slow
@pytest.mark.distributed
def test_ranks_that_communicate_in_blocks_recompute_the_same_blocks() -> None:
    first, second = on_ranks(2, _different_needs)
    for found in (first, second):
        for same, count, chosen in found[:2]:
            assert same and count == len(chosen)
        assert found[2] == (True, [f"layers.{n}" for n in range(LAYERS)])
        assert found[3] == (True, [])
        assert "have other blocks each" in found[4]
    assert first[:4] == second[:4]
    assert not first[0][2] and first[1][2]  # rank 0 decides, since no forward saves more


def _first_error(rank: int, limits: tuple[str, str], unable: int | None = None) -> str:
    """Of training whose plan has these limits, and where on one rank no block may run again, which it has told nobody."""
    model = Layers()
    plan = {"device_limit": limits[rank], "recompute": "auto" if unable is None else "on"}
    with _planned(model, {"plan": plan}, dist.group.WORLD) as runtime:
        agreement, impure = blocks_of(runtime).agreement, blocks_of(runtime).impure
        exchange = agreement.exchange

        def exchange_and_forget(*state: Any) -> tuple[bool, bool]:
            found = exchange(*state)
            if found[1] and unable == rank:
                impure.update(dict.fromkeys(agreement.blocks, "of this test"))
            return found

        agreement.exchange = exchange_and_forget  # type: ignore[method-assign]
        try:
            _train(model, runtime, [256] * STEPS)
        except (ConfigError, NoPlan) as error:
            return f"{type(error).__name__}: {error}"
        return ""


def _errors(rank: int) -> list[str]:
    """Rank 0 decides, since no forward saves more."""
    found = [_first_error(rank, limits) for limits in (("1KiB", "64MiB"), ("64MiB", "1KiB"))]
    found += [_first_error(rank, ("64MiB", "64MiB"), unable) for unable in (0, 1)]
    agreement = Agreement(dist.group.WORLD, ())
    try:
        agreement.decide(lambda: {}["a bug"])
    except (KeyError, RuntimeError) as error:
        found.append(f"{type(error).__name__}: {error}")
    dist.barrier()  # no rank is ahead of the others
    return found


@pytest.mark.slow
@pytest.mark.distributed
def test_an_error_of_the_rank_that_decides_is_the_same_on_all_and_one_of_another_rank_is_none() -> None:
    first, second = on_ranks(2, _errors)
    assert first[:4] == second[:4]
    assert first[0].startswith("NoPlan: ssdtrain.plan on rank 0: no plan keeps to 1KiB")
    assert "smallest peak" in first[0]
    assert "recompute no block on rank 0: layers.0: of this test" in first[2]
    assert first[1] == first[3] == ""
    assert first[4] == "KeyError: 'a bug'" and second[4].startswith("RuntimeError: ssdtrain.plan on rank 0")


def test_without_a_group_nothing_is_sent_or_decided() -> None:
    alone = Agreement(None, ("a",))
    alone.decide(lambda: pytest.fail("nobody is asked"))
    assert alone.recomputed is None and not alone.covers(object())
    assert alone.exchange({}, True, []) == (True, False)


class Routes(nn.Module):
    """Small forwards run a layer that large ones do not."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers if len(x) < 256 else self.layers[:3]:
            x = layer(x)
        return x.square().mean()


def test_agreed_blocks_that_the_largest_forward_does_not_run_are_recomputed_too() -> None:
    model = Routes()
    with ssdtrain.attach(model, LEAST) as runtime:
        auto, blocks = auto_of(runtime), blocks_of(runtime)
        # As from another rank.
        blocks.agreement.recomputed = frozenset(f"layers.{n}" for n in range(4))
        for _ in range(STEPS):
            for size in (256, 128):
                model(torch.randn(size, 64)).backward()
            runtime.step_end()
        assert auto.plan is not None and auto.problem is not None
        names = {block.name for block in auto.problem.blocks}
        assert {name for name in names if name.startswith("layers")} == {f"layers.{n}" for n in range(3)}
        assert all("forward" in layer.__dict__ for layer in model.layers)


def test_where_the_agreed_blocks_do_not_suffice_for_larger_forwards_a_warning_says_what_to_do(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = gpt()
    with ssdtrain.attach(model, {"plan": {"device_limit": "4MiB"}, **QUIET}) as runtime:
        auto = auto_of(runtime)
        train(model)
        blocks, before = auto.problem.blocks, [block.saved for block in auto.problem.blocks]
        recomputed = frozenset(
            block.name
            for block, action in zip(blocks, auto.plan.actions, strict=True)
            if action == "recompute"
        )
        assert recomputed
        # Every one: none is left that is measured as it is kept.
        agreement = blocks_of(runtime).agreement
        agreement.recomputed = frozenset(agreement.blocks)
        for _ in range(2 * STEPS):
            tokens = torch.randint(256, (32, 64))
            model(tokens, tokens).backward()
            runtime.step_end()
        after = [block.saved for block in auto.problem.blocks]
        assert [old.name for old in blocks] == [new.name for new in auto.problem.blocks]
    assert all(6 * old < new < 10 * old for old, new in zip(before, after, strict=True) if old)
    [line] = [r.getMessage() for r in caplog.records if "forwards have become larger" in r.getMessage()]
    assert (
        "plan.device_limit is not kept to" in line and "by the framework" in line and "smallest peak" in line
    )


def test_while_other_ranks_measure_no_timestamps_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    model = gpt()
    with ssdtrain.attach(model, {"plan": "auto", **QUIET}) as runtime:
        auto = auto_of(runtime)
        monkeypatch.setattr(blocks_of(runtime).agreement, "exchange", lambda *_: (False, False))
        train(model, WARM_UP + 3 * RECORDED)
        # Two microbatches a step; the last one ends when the next forward begins.
        assert len(blocks_of(runtime)._found) == 2 * (RECORDED + 1)
        monkeypatch.undo()
        train(model, 1)
        assert auto.plan is not None


def test_blocks_that_are_recomputed_in_any_case_are_in_every_plan() -> None:
    blocks = [Block(f"block {i}", 1.0, 2.0, 100, recompute=1.0, inputs=10) for i in range(6)]
    never, always = frozenset({0, 2, 3, 5}), frozenset({1, 4})
    order, actions = one_after_the_other(), actions_for(Machine())
    for exact in (1, 3000):
        problem = SearchProblem([blocks], order, Machine(), actions, impure=never, always=always)
        (best, *others) = search(problem, exact=exact)
        assert not others
        assert best.actions == ("keep", "recompute", "keep", "keep", "recompute", "keep")
