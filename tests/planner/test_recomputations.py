"""A block that backward runs again computes what its forward computed, or is an error by name, or is not recomputed any more."""

from __future__ import annotations

import contextlib
import contextvars
import copy
import gc
import itertools
import logging
import threading
import types
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import _CheckpointFrame

import ssdtrain
from ssdtrain.planner.recompute import fingerprints, trials
from ssdtrain.planner.recompute.modules import recompute_blocks
from ssdtrain.planner.recompute.trials import COMPARED_EVERY, COMPARED_FIRST
from tests.planner.test_plan_auto import auto_of, blocks_of, equal
from tests.planner.test_plan_safety import LEAST

WIDTH, BLOCKS = 48, 6
WARM = 7
"""Steps after which a plan is followed and was compared."""

GAIN = [1.0]
LOCAL = threading.local()
VARIABLE = contextvars.ContextVar("gain", default=1.0)


class Block(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.config = config

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gain = self.config.gain * GAIN[0] * getattr(LOCAL, "gain", 1.0) * VARIABLE.get()
        return x + self.down(torch.tanh(self.up(x) * gain))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.config = types.SimpleNamespace(gain=1.0)
        self.blocks = nn.ModuleList(Block(self.config) for _ in range(BLOCKS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


Around = Callable[[Net], "contextlib.AbstractContextManager[None]"]
"""What a loop does around a forward; backward comes after it."""


@contextlib.contextmanager
def hooks_of_the_forward(net: Net) -> Iterator[None]:
    """As PEFT's Activated LoRA."""
    with contextlib.ExitStack() as stack:
        for block in net.blocks:
            double = lambda module, args: tuple(2 * one for one in args)  # noqa: E731
            halve = lambda module, args, output: output / 2  # noqa: E731
            stack.callback(block.up.register_forward_pre_hook(double).remove)  # type: ignore[union-attr, operator]
            stack.callback(block.down.register_forward_hook(halve).remove)  # type: ignore[union-attr, operator]
        yield


@contextlib.contextmanager
def submodules_exchanged(net: Net) -> Iterator[None]:
    before = [block.down for block in net.blocks]
    for block in net.blocks:
        other = nn.Linear(2 * WIDTH, WIDTH)
        nn.init.constant_(other.weight, 0.01)
        nn.init.zeros_(other.bias)
        block.down = other
    yield
    for block, down in zip(net.blocks, before, strict=True):
        block.down = down


@contextlib.contextmanager
def frozen(net: Net) -> Iterator[None]:
    """As a discriminator while the generator's loss is computed."""
    for block in net.blocks:
        block.up.requires_grad_(False)  # type: ignore[union-attr, operator]
    yield
    net.requires_grad_(True)


@contextlib.contextmanager
def frozen_afterwards(net: Net) -> Iterator[None]:
    net.requires_grad_(True)
    yield
    for block in net.blocks:
        block.down.requires_grad_(False)  # type: ignore[union-attr, operator]


@contextlib.contextmanager
def a_class_exchanged(net: Net) -> Iterator[None]:
    """As torch.nn.utils.parametrize."""

    class Doubled(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(2 * x)

    for block in net.blocks:
        block.up.__class__ = Doubled
    yield
    for block in net.blocks:
        block.up.__class__ = nn.Linear


@contextlib.contextmanager
def a_context_variable(net: Net) -> Iterator[None]:
    token = VARIABLE.set(3.0)
    yield
    VARIABLE.reset(token)


@contextlib.contextmanager
def another_precision(net: Net) -> Iterator[None]:
    before = torch.get_default_dtype(), torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    torch.use_deterministic_algorithms(True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        yield
    torch.use_deterministic_algorithms(False)
    torch.set_float32_matmul_precision(before[1])


PUT_BACK: list[Around] = [
    *(hooks_of_the_forward, submodules_exchanged, frozen, frozen_afterwards, a_class_exchanged),
    *(a_context_variable, another_precision),
]


@contextlib.contextmanager
def a_global(net: Net) -> Iterator[None]:
    GAIN[0] = 3.0
    yield
    GAIN[0] = 1.0


@contextlib.contextmanager
def a_shared_flag(net: Net) -> Iterator[None]:
    net.config.gain = 2.0
    yield
    net.config.gain = 1.0


@contextlib.contextmanager
def a_thread_local(net: Net) -> Iterator[None]:
    """As the contexts of some libraries around a forward."""
    LOCAL.gain = 2.0
    yield
    del LOCAL.gain


NOT_KNOWN: list[Around] = [a_global, a_shared_flag, a_thread_local]


class Loop:
    """A training loop that catches errors of backward, and then steps all the same."""

    def __init__(self, net: Net) -> None:
        self.net = net
        self.optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        self.errors: list[str] = []
        torch.manual_seed(1)

    def step(self, around: Around | None = None) -> list[torch.Tensor]:
        """Gradients, and their step; nothing where backward raised."""
        with contextlib.nullcontext() if around is None else around(self.net):
            loss = self.net(torch.randn(64, WIDTH))
        try:
            loss.backward()
        except RuntimeError as error:
            self.errors.append(str(error))
            self.optimizer.zero_grad()
            return []
        gradients = [
            parameter.grad.clone() for parameter in self.net.parameters() if parameter.grad is not None
        ]
        self.optimizer.step()
        self.optimizer.zero_grad()
        return gradients


def with_tiers(config: dict[str, Any], tiers: bool, directory: Path) -> dict[str, Any]:
    return (
        {**config, "offload": {"directories": str(directory), "min_bytes": "1KiB"}} if tiers else dict(config)
    )


@pytest.mark.parametrize("around", PUT_BACK)
@pytest.mark.parametrize("tiers", [False, True], ids=["recompute", "offload and recompute"])
def test_what_a_loop_changes_around_its_forwards_is_put_back_for_the_second_run(
    around: Around, tiers: bool, tmp_path: Path
) -> None:
    plain = Loop(Net())
    expected = [plain.step(around) for _ in range(WARM)]
    planned = Loop(Net())
    with ssdtrain.attach(planned.net, with_tiers(LEAST, tiers, tmp_path)) as runtime:
        for gradients in expected:
            assert equal(gradients, planned.step(around))
        plan = auto_of(runtime).plan
    assert plan.count("recompute")
    assert not planned.errors
    assert all(mine.requires_grad == theirs.requires_grad for mine, theirs in zip(
        planned.net.parameters(), plain.net.parameters(), strict=True
    ))  # fmt: skip
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in planned.net.modules())


@pytest.mark.parametrize("around", NOT_KNOWN)
def test_what_cannot_be_put_back_is_an_error_by_name_before_the_optimizer_moves(around: Around) -> None:
    planned = Loop(Net())
    before = [parameter.detach().clone() for parameter in planned.net.parameters()]
    with ssdtrain.attach(planned.net, LEAST):
        assert planned.step(around) == []
        assert equal(before, list(planned.net.parameters()))
        [error] = planned.errors
        assert "the block 'blocks.4' computed other values when backward ran it again" in error
        assert "saved tensor 3 of 5 differs: float32 [64, 96]" in error


@pytest.mark.parametrize("around", NOT_KNOWN)
def test_a_block_that_differed_is_not_recomputed_any_more(around: Around) -> None:
    """Also where a loop catches the error and goes on: each error takes a block out."""
    planned = Loop(Net())
    with ssdtrain.attach(planned.net, LEAST) as runtime:
        for _ in range(WARM + BLOCKS):
            planned.step(around)
        assert len(planned.errors) == BLOCKS - 1  # the last one is kept while steps are profiled, and tried
        plain = Loop(Net())
        plain.net.load_state_dict(planned.net.state_dict())
        torch.manual_seed(2)
        expected = [plain.step(around) for _ in range(2)]
        torch.manual_seed(2)
        for gradients in expected:
            assert equal(gradients, planned.step(around))
        plan = auto_of(runtime).plan
    assert not plan.count("recompute")


@pytest.mark.parametrize("around", NOT_KNOWN)
def test_where_saved_tensors_leave_memory_a_difference_is_found_without_an_error(
    around: Around, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plain, planned = Loop(Net()), Loop(Net())
    torch.manual_seed(1)
    expected = [plain.step(around) for _ in range(WARM)]
    torch.manual_seed(1)
    with ssdtrain.attach(planned.net, with_tiers(LEAST, True, tmp_path)) as runtime:
        for gradients in expected:
            assert equal(gradients, planned.step(around))
        plan = auto_of(runtime).plan
    assert not planned.errors
    assert not plan.count("recompute")
    assert "the block 'blocks.5' computed other values when it ran again: it is not recomputed" in caplog.text


class Padded(Block):
    """Saves a buffer of which it writes a part, and uses that alone; the rest is never twice the same."""

    unwritten = itertools.count()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        padded = x.new_full((2 * x.shape[0], x.shape[1]), next(self.unwritten) / 1000)
        padded[: x.shape[0]] = x
        return x + self.down(self.up(padded.tanh()[: x.shape[0]]))


class Randomised(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.rrelu(self.up(x), training=True))


class Aligned(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = self.up(x).view(16, 4, -1).log_softmax(-1)
        targets, lengths = torch.ones(4, 3, dtype=torch.long), torch.full((4,), 3)
        loss = nn.functional.ctc_loss(scores, targets, torch.full((4,), 16), lengths)
        return self.down(self.up(x).tanh()) + 1e-3 * loss


class Counts(Block):
    """Computes by something that changes in each run and that nobody puts back."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.box = types.SimpleNamespace(runs=0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.box.runs += 1
        return x + self.down(torch.tanh(self.up(x) * self.box.runs))


class InPlace(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.mul_(2) if x.grad_fn is not None else x
        return x + self.down(torch.tanh(self.up(x)))


@pytest.mark.parametrize("kind", [Padded, Randomised, Aligned, InPlace, Counts])
def test_a_block_that_never_computes_the_same_twice_is_kept_without_an_error(
    kind: type[Block], caplog: pytest.LogCaptureFixture
) -> None:
    """Also without tiers, where all blocks are to be recomputed from the first forward on."""
    loops = []
    for _ in range(2):
        net = Net()
        net.blocks = nn.ModuleList(kind(net.config) for _ in range(BLOCKS))
        net.load_state_dict(loops[0].net.state_dict() if loops else net.state_dict())
        loops.append(Loop(net))
    plain, planned = loops
    # A second run counts too.
    steps = 1 if kind is Counts else WARM
    torch.manual_seed(1)
    expected = [plain.step() for _ in range(steps)]
    torch.manual_seed(1)
    with ssdtrain.attach(planned.net, LEAST) as runtime:
        for gradients in expected:
            assert equal(gradients, planned.step())
        assert not planned.errors
        for _ in range(WARM):
            planned.step()
        plan = auto_of(runtime).plan
    assert not planned.errors
    if kind in (Padded, InPlace, Counts):
        # The first one's input needs no gradient, so all that it saves is determined.
        assert plan is None or plan.count("recompute") <= (kind is not Counts)
        assert "it is not recomputed" in caplog.text


def test_a_trial_keeps_nothing_for_a_graph_that_is_retained(tmp_path: Path) -> None:
    """torch's checkpoint would keep the block's inputs, and what its second run saved."""
    frames = lambda: [one for one in gc.get_objects() if isinstance(one, _CheckpointFrame)]  # noqa: E731
    planned = Loop(Net())
    with ssdtrain.attach(planned.net, with_tiers(LEAST, True, tmp_path)) as runtime:
        while not blocks_of(runtime)._recomputations.settled:
            loss = planned.net(torch.randn(64, WIDTH))
            loss.backward(retain_graph=True)
            if blocks_of(runtime)._recomputations.settled:
                assert not frames()
            planned.optimizer.step()
            del loss


def test_a_difference_that_begins_late_is_found_by_the_steps_that_are_compared_now_and_then() -> None:
    planned = Loop(Net())
    with ssdtrain.attach(planned.net, LEAST) as runtime:
        for _ in range(WARM + COMPARED_FIRST):
            planned.step()
        plan = auto_of(runtime).plan
        assert plan.count("recompute")
        for _ in range(COMPARED_EVERY):
            if not planned.step(a_global):
                break
    [error] = planned.errors
    assert "computed other values when backward ran it again" in error
    assert f"those of up to {COMPARED_EVERY - 1} steps before, which were not compared" in error


def test_steps_that_are_not_compared_take_no_fingerprints(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[torch.Tensor] = []
    plain = fingerprints.fingerprints
    monkeypatch.setattr(trials, "fingerprints", lambda tensor: (taken.append(tensor), plain(tensor))[1])
    planned, by_step = Loop(Net()), list[int]()
    with ssdtrain.attach(planned.net, LEAST) as runtime:
        for _ in range(WARM + COMPARED_EVERY):
            planned.step()
            by_step.append(len(taken))
            taken.clear()
        plan = auto_of(runtime).plan
    assert plan.count("recompute")
    profiled = 5
    assert all(by_step[:COMPARED_FIRST]) and not any(by_step[COMPARED_FIRST:profiled])
    followed = by_step[profiled:]
    assert all(followed[:COMPARED_FIRST]) and followed[COMPARED_EVERY]
    assert sum(map(bool, followed)) == COMPARED_FIRST + 1


def recomputed(block: nn.Module) -> nn.Module:
    model = nn.Module()
    model.block = block
    recompute_blocks(model, {"block": "recompute"})
    return block


def test_a_block_of_which_only_the_output_differs_has_right_gradients() -> None:
    class Shifts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)
            self.box = types.SimpleNamespace(runs=0)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.box.runs += 1
            return self.linear(x).tanh() + self.box.runs

    plain, x = Shifts(), torch.randn(4, 8, requires_grad=True)
    block, again = recomputed(copy.deepcopy(plain)), x.detach().requires_grad_()
    plain(x).sum().backward()
    block(again).sum().backward()
    assert block.box.runs == 2
    assert x.grad is not None and again.grad is not None and torch.equal(x.grad, again.grad)


class Routes(nn.Module):
    """Gives `LOSSES`, a list of the loop's, a tensor by a forward hook, and keeps one as an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.up = nn.Linear(8, 4), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gates = self.router(x).softmax(-1)
        self.load = gates.square().sum()
        return x + self.up(x).tanh() * gates[..., :1]


LOSSES: list[torch.Tensor] = []


@pytest.mark.parametrize("given", [True, False])
def test_a_block_that_gives_a_tensor_to_the_loop_does_not_run_twice_before_its_loss(given: bool) -> None:
    def found(recomputed: bool) -> tuple[list[torch.Tensor], int]:
        torch.manual_seed(0)
        model, runs = nn.Module(), []
        model.block = block = Routes()
        block.up.register_forward_hook(lambda *_: runs.append(1))
        if given:
            block.router.register_forward_hook(lambda _, __, output: LOSSES.append(output.square().sum()))
        if recomputed:
            recompute_blocks(model, {"block": "recompute"})
        LOSSES.clear()
        with torch.autograd.graph.saved_tensors_hooks(lambda one: one, lambda one: one):
            loss = block(torch.ones(4, 8)).sum() + block.load + sum(LOSSES)
        runs_in_forward = len(runs)
        loss.backward()
        LOSSES.clear()
        return [loss, *[one.grad for one in block.parameters() if one.grad is not None]], runs_in_forward

    (plain, _), (recomputed, runs) = found(False), found(True)
    assert equal(plain, recomputed)
    assert runs == (1 if given else 2)


def test_tensors_of_another_threads_graph_keep_no_block_from_a_trial() -> None:
    """Each thread numbers the nodes of its graphs by itself, and another one may be far ahead."""
    made: list[torch.Tensor] = []

    def ahead() -> None:
        x = torch.ones((), requires_grad=True)
        for _ in range(trials._sequence_number() + 100_000):
            y = x * 1
        made.append(y)

    here = trials._sequence_number()
    with ThreadPoolExecutor(1) as pool:
        pool.submit(ahead).result()
        while pool.submit(trials._sequence_number).result() <= here + 10_000:
            pool.submit(ahead).result()
    test_a_block_that_gives_a_tensor_to_the_loop_does_not_run_twice_before_its_loss(given=False)
    assert made


@pytest.mark.parametrize("size", [(), (2,)])
def test_one_or_two_integers_on_a_gpu_prove_nothing(size: tuple[int, ...]) -> None:
    """As the state of a generator that attention saves unwritten where nothing is dropped."""
    state = fingerprints.Fingerprint((torch.int64, size), digest=torch.zeros((), device="meta"))
    other = fingerprints.Fingerprint((torch.int64, size), digest=torch.ones((), device="meta"))
    assert not fingerprints.difference([[state]], [[other]])


@pytest.mark.parametrize("on_gpu", [True, False])
def test_one_or_two_integers_in_host_memory_prove_nothing_where_a_block_computes_on_a_gpu(
    on_gpu: bool,
) -> None:
    """Attention that is efficient in memory keeps that state there."""
    bytes_there = fingerprints.Fingerprint(
        (torch.uint8, (8,)), digest=torch.zeros((), device="meta" if on_gpu else "cpu")
    )
    state, other = (
        fingerprints.Fingerprint((torch.int64, ()), digest=torch.full((), value)) for value in (0, 1)
    )
    found = fingerprints.difference([[bytes_there], [state]], [[bytes_there], [other]])
    assert found == ("" if on_gpu else "saved tensor 2 of 2 differs: int64 []")


def test_a_second_run_ends_at_its_last_saved_tensor_when_it_is_compared() -> None:
    """What comes after it may free what backward has gathered, as hooks of sharded parameters do."""
    ended = []

    class Ends(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.linear(x)
            ended.append(len(ended))
            return y

    block = recomputed(Ends())
    block(torch.randn(4, 8, requires_grad=True)).sum().backward()
    assert ended == [0]


def test_an_index_that_changes_is_an_error() -> None:
    index = [1]

    class Picks(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x[torch.tensor(index)]

    block, x = recomputed(Picks()), torch.randn(4, 8, requires_grad=True)
    y = block(x)
    index[0] = 2
    with pytest.raises(
        RuntimeError, match=r"the block 'block' computed other values.*saved tensor 1 of 1 differs"
    ):
        y.sum().backward()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64, torch.bool])
@pytest.mark.parametrize("size", [1, 7, 1023, 40_001])
def test_a_fingerprint_tells_any_change_of_bits_or_order(dtype: torch.dtype, size: int) -> None:
    torch.manual_seed(0)

    def value(tensor: torch.Tensor) -> int:
        [fingerprint] = fingerprints.fingerprints(tensor)
        assert fingerprint.digest is not None
        return int(fingerprint.digest)

    tensor = (torch.rand(size) > 0.5) if dtype is torch.bool else torch.randn(size, dtype=dtype)
    same = value(tensor)
    assert same == value(tensor.clone())
    padded = torch.zeros(size + 1, dtype=dtype)
    padded[1:] = tensor
    assert same == value(padded[1:])  # another alignment
    for place in {0, size // 2, size - 1}:
        other = tensor.clone().view(torch.uint8)
        other[place * tensor.itemsize] ^= 1
        assert same != value(other.view(dtype))
    if size > 1 and dtype is not torch.bool:
        assert same != value(tensor.flip(0)) and same != value(tensor.roll(1))
        assert same != value(tensor[torch.randperm(size)])
        square = torch.randn(size, 3, dtype=dtype)
        assert value(square.T) == value(square.clone().T)
        assert value(square[:, ::2]) == value(square.clone()[:, ::2])
    if size > 2048 and dtype is not torch.bool:  # rows of equal sums that change places
        rows = tensor[:2048].view(2, 1024)
        rows[0], rows[1] = 0, 0
        rows[0, 3], rows[1, 5] = 1, 1
        ordered = value(tensor)
        tensor[:2048] = rows.flip(0).reshape(-1).clone()
        assert ordered != value(tensor)


def test_a_block_runs_plainly_where_saved_tensor_hooks_are_disabled(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def disabled(net: Net) -> Any:
        return torch.autograd.graph.disable_saved_tensors_hooks("no hooks here, says the user")

    for tiers in (False, True):
        caplog.clear()
        plain, planned = Loop(Net()), Loop(Net())
        torch.manual_seed(1)
        expected = [plain.step(disabled) for _ in range(3)]
        torch.manual_seed(1)
        with ssdtrain.attach(planned.net, with_tiers(LEAST, tiers, tmp_path)):
            for gradients in expected:
                assert equal(gradients, planned.step(disabled))
        assert not planned.errors
        text = "the block 'blocks.0' is not recomputed where saved-tensor hooks are disabled (no hooks here"
        assert caplog.text.count(text) == 1


def test_a_block_that_disables_saved_tensor_hooks_inside_has_its_gradients(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Disables(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.linear = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.linear(x).tanh()
            with torch.autograd.graph.disable_saved_tensors_hooks("says the user"):
                y = y.exp().sin()
            slope = torch.func.grad(lambda one: one.sin().sum())(x.detach())
            return (y + slope).tanh()

    def gradients(block: nn.Module) -> list[torch.Tensor]:
        torch.manual_seed(1)
        for _ in range(COMPARED_FIRST + 1):
            block(torch.randn(4, 8)).sum().backward()
        return [parameter.grad for parameter in block.parameters() if parameter.grad is not None]

    assert equal(gradients(Disables()), gradients(recomputed(Disables())))
    assert "(says the user)" in caplog.text


@pytest.mark.parametrize("tiers", [False, True], ids=["recompute", "offload and recompute"])
def test_an_error_of_a_second_run_leaves_nothing_in_memory(tiers: bool, tmp_path: Path) -> None:
    """Also torch's own, in a step that is not compared."""

    class Fewer(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.up(x).tanh()
            return self.down(x) if GAIN[0] == 1.0 else self.down(x.tanh().exp()).tanh()

    planned = Loop(Net())
    for block in planned.net.blocks:
        block.__class__ = Fewer
    with ssdtrain.attach(planned.net, with_tiers(LEAST, tiers, tmp_path)) as runtime:
        for _ in range(WARM + COMPARED_FIRST):
            planned.step()
        plan = auto_of(runtime).plan
        assert plan.count("recompute")
        assert planned.step(a_global) == []
        gc.collect()
        statistics = runtime.statistics()
        assert statistics.offload.live_regions == 0
    [error] = planned.errors
    assert "the block 'blocks." in error and "different number of tensors" in error


@pytest.mark.parametrize("nested", [False, True], ids=["twice", "inside of the forward"])
def test_gradients_of_gradients_are_compared_too(nested: bool) -> None:
    class Penalised(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.first(x).tanh()
            if nested:
                [slope] = torch.autograd.grad(y.square().sum(), x, create_graph=True)
                y = y + slope
            return self.second(y).tanh()

    def gradients(block: nn.Module) -> list[torch.Tensor]:
        torch.manual_seed(1)
        x = torch.randn(4, 8, requires_grad=True)
        loss = block(x).square().sum()
        if not nested:
            [slope] = torch.autograd.grad(loss, x, create_graph=True)
            loss = slope.square().sum()
            loss.backward(retain_graph=True)
        loss.backward()
        return [parameter.grad for parameter in block.parameters() if parameter.grad is not None]

    assert equal(gradients(Penalised()), gradients(recomputed(Penalised())))


@pytest.fixture(autouse=True)
def _logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "ssdtrain")


@pytest.mark.slow
def test_adapters_that_are_set_between_two_forwards_and_one_backward_have_their_gradients() -> None:
    peft: Any = pytest.importorskip("peft")

    def train(config: dict[str, Any] | None) -> list[torch.Tensor]:
        net = Net()
        lora = lambda: peft.LoraConfig(r=4, target_modules=["up", "down"], init_lora_weights=False)  # noqa: E731
        torch.manual_seed(0)
        model = peft.get_peft_model(net, lora(), adapter_name="a")
        model.add_adapter("b", lora())
        optimizer = torch.optim.SGD([one for name, one in model.named_parameters() if "lora" in name], lr=0.1)
        gradients: list[torch.Tensor] = []
        with contextlib.nullcontext() if config is None else ssdtrain.attach(model, config) as runtime:
            for _ in range(WARM):
                losses = []
                for adapter in "ab":
                    model.set_adapter(adapter)
                    losses.append(model(torch.randn(64, WIDTH)))
                torch.stack(losses).sum().backward()
                gradients += [one.grad.clone() for one in model.parameters() if one.grad is not None]
                optimizer.step()
                optimizer.zero_grad()
            if runtime is not None:
                plan = auto_of(runtime).plan
                assert plan.count("recompute")
        return gradients

    assert equal(train(None), train(LEAST))
