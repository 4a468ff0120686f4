"""Chunks that the CPU steps beside the training loop: the bits of the same optimizer of the CPU without chunks."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ssdtrain.config import ConfigError, load_config
from ssdtrain.storage import Faults, IOFailure
from tests.state.conftest import Attach
from tests.state.training import MakeOptimizer, Recipe, batches, loss_of, make_model, plain, run, same


def made(kind: Any, **options: Any) -> MakeOptimizer:
    return lambda parameters: kind(parameters, lr=1e-2, **options)


def two_groups(fused: bool | None) -> MakeOptimizer:
    def make(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        decayed = [parameter for parameter in parameters if parameter.dim() > 1]
        others = [parameter for parameter in parameters if parameter.dim() < 2]
        groups = [{"params": decayed}, {"params": others, "weight_decay": 0.0, "lr": 2e-2}]
        return torch.optim.AdamW(groups, lr=1e-2, fused=fused)

    return make


ADAMW = made(torch.optim.AdamW), made(torch.optim.AdamW, fused=True)
"""As the user makes it, and the same as the CPU steps it."""

OPTIMIZERS = {
    "adamw": ADAMW,
    "adam-amsgrad": (
        made(torch.optim.Adam, amsgrad=True),
        made(torch.optim.Adam, amsgrad=True, fused=True),
    ),
    "sgd-momentum": (
        made(torch.optim.SGD, momentum=0.9),
        made(torch.optim.SGD, momentum=0.9, fused=True),
    ),
    "adagrad": (made(torch.optim.Adagrad), made(torch.optim.Adagrad, fused=True)),
    "foreach": (made(torch.optim.AdamW, foreach=True), made(torch.optim.AdamW, foreach=True)),
    "not-fused": (made(torch.optim.AdamW, fused=False), made(torch.optim.AdamW, fused=False)),
    "rmsprop": (made(torch.optim.RMSprop), made(torch.optim.RMSprop)),
    "two-groups": (two_groups(None), two_groups(True)),
}

PLACES: dict[str, dict[str, Any]] = {
    "ssd": {"tier": "ssd"},
    "staged": {"tier": "ssd", "staged": True},
    "host": {"tier": "host"},
    "host-staged": {"tier": "host", "staged": True},
}

places = pytest.mark.parametrize("place", PLACES)


def check(recipe: Recipe, reference: MakeOptimizer, attach: Attach, **options: Any) -> Any:
    """Train with and without chunks; returns the metrics."""
    losses, parameters, state = plain(Recipe(**{**vars(recipe), "optimizer": reference}))
    model = make_model(**recipe.model)
    optimizer = recipe.optimizer(list(model.parameters()))
    runtime = attach(model, optimizer, optimizer_on="cpu", **options)
    assert run(recipe, model, optimizer, runtime) == losses
    assert same(model.state_dict(), parameters)
    assert same(optimizer.state_dict()["state"], state["state"])
    values = runtime.statistics().values()
    assert values["state/resident_peak_bytes"] <= values["state/limit_bytes"]
    runtime.close()
    assert same(dict(model.state_dict()), dict(parameters))
    assert same(optimizer.state_dict()["state"], state["state"])
    return values


@pytest.mark.parametrize("clip", ["exact", "none"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_equal_to_the_bit(name: str, clip: str, attach: Attach) -> None:
    mine, reference = OPTIMIZERS[name]
    check(Recipe(mine, schedule=True), reference, attach, clip=clip)


@places
@pytest.mark.parametrize("clip", ["exact", "none"])
def test_equal_in_every_place(clip: str, place: str, attach: Attach) -> None:
    check(Recipe(ADAMW[0]), ADAMW[1], attach, clip=clip, **PLACES[place])


@places
def test_equal_with_exact_clipping_and_accumulation(place: str, attach: Attach) -> None:
    check(Recipe(ADAMW[0], clip=0.5, microbatches=2), ADAMW[1], attach, **PLACES[place])


@places
def test_equal_where_the_last_backward_steps(place: str, attach: Attach) -> None:
    recipe = Recipe(ADAMW[0], microbatches=3, model={"recompute": "each"})
    check(recipe, ADAMW[1], attach, clip="none", microbatches=3, **PLACES[place])


@pytest.mark.parametrize("clip", ["exact", "none"])
def test_parameters_may_stay_while_their_optimizer_state_does_not(clip: str, attach: Attach) -> None:
    """As much memory as parameters take, and the gradients and state of two blocks."""
    limit = sum(parameter.nbytes for parameter in make_model().parameters()) * 2
    values = check(Recipe(ADAMW[0]), ADAMW[1], attach, clip=clip, device_limit=limit)
    assert values["state/stored_bytes"] > 0


def test_nothing_moves_where_host_memory_is_the_device(attach: Attach) -> None:
    """As ZeRO-Offload has it: parameters on the device, gradients and optimizer state in host memory, here the same."""
    limit = sum(parameter.nbytes for parameter in make_model().parameters()) * 3 // 2
    values = check(Recipe(ADAMW[0], clip=0.5), ADAMW[1], attach, device_limit=limit, tier="host")
    assert values["state/loaded_bytes"] == values["state/stored_bytes"] == 0


def test_bytes_that_a_step_moves(attach: Attach) -> None:
    """Parameters for forward and backward and two bytes of state are read, parameters and state are written: of each byte of
    parameters that moves. Chunks that are still in memory at a turn are not read again."""
    model = make_model(layers=24)
    optimizer = ADAMW[0](list(model.parameters()))
    runtime = attach(model, optimizer, optimizer_on="cpu", clip="none")
    moving = sum(chunk.nbytes for chunk in (part.values for part in runtime.state._residency.chunks))
    run(Recipe(steps=2), model, optimizer, runtime)
    before = runtime.statistics().values()
    run(Recipe(steps=4), model, optimizer, runtime, first=2)
    after = runtime.statistics().values()
    reads, writes = (
        (after[f"state/{kind}_bytes"] - before[f"state/{kind}_bytes"]) / 4 / moving
        for kind in ("loaded", "stored")
    )
    assert 3.5 < reads <= 4.0
    assert 2.8 < writes <= 3.1  # one store of a chunk may be counted in the step after


def delayed_by_definition(model: nn.Module, max_norm: float, steps: int) -> list[float]:
    """Train as Note: [Delayed clipping] says; returns losses and norms."""
    optimizer = ADAMW[1](list(model.parameters()))
    seen: list[float] = []
    norm_of_before: torch.Tensor | None = None
    for batch in batches(steps):
        loss = loss_of(model, batch)
        loss.backward()
        gradients = [parameter.grad for parameter in model.parameters()]
        norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(each) for each in gradients]))
        factor = (max_norm / ((norm if norm_of_before is None else norm_of_before) + 1e-6)).clamp(max=1.0)
        for gradient in gradients:
            gradient.mul_(factor)
        norm_of_before = norm
        seen += [loss.item(), norm.item()]
        optimizer.step()
        optimizer.zero_grad()
    return seen


@places
def test_delayed_clipping_is_what_it_is_defined_to_be(place: str, attach: Attach) -> None:
    twin = make_model()
    seen = delayed_by_definition(twin, 0.3, 6)
    model = make_model()
    optimizer = ADAMW[0](list(model.parameters()))
    runtime = attach(model, optimizer, optimizer_on="cpu", clip="delayed", **PLACES[place])
    assert run(Recipe(steps=6, clip=0.3), model, optimizer, runtime) == seen
    assert same(dict(model.state_dict()), dict(twin.state_dict()))


@pytest.mark.parametrize("max_norm", [0.5, None])
def test_delayed_clipping_steps_inside_of_backward_only_where_steps_are_clipped(
    max_norm: float | None, attach: Attach
) -> None:
    model = make_model()
    optimizer = ADAMW[0](list(model.parameters()))
    runtime = attach(model, optimizer, optimizer_on="cpu", clip="delayed")
    assert not runtime.state.steps_inside
    run(Recipe(steps=2, clip=max_norm), model, optimizer, runtime)
    assert runtime.state.steps_inside == (max_norm is not None)


def test_delayed_clipping_in_every_step_and_by_the_same_norm(attach: Attach) -> None:
    model = make_model()
    optimizer = ADAMW[0](list(model.parameters()))
    runtime = attach(model, optimizer, optimizer_on="cpu", clip="delayed")
    run(Recipe(steps=1, clip=0.3), model, optimizer, runtime)
    loss_of(model, batches(1)[0]).backward()
    with pytest.raises(RuntimeError, match="order inf"):
        runtime.state.clip_grad_norm_(0.3, float("inf"))
    with pytest.raises(RuntimeError, match="in every step"):
        optimizer.step()
    runtime.state.clip_grad_norm_(0.3)
    optimizer.step()


@pytest.mark.parametrize("clip", ["exact", "none", "delayed"])
def test_a_resumed_run_goes_on_to_the_bit(clip: str, attach: Attach, tmp_path: Path) -> None:
    """Steps that are due are made before a state dict; the factor of delayed clipping is in it."""
    norm = None if clip == "none" else 0.3
    whole = make_model()
    optimizer = ADAMW[0](list(whole.parameters()))
    runtime = attach(whole, optimizer, optimizer_on="cpu", clip=clip)
    expected = run(Recipe(steps=3, clip=norm), whole, optimizer, runtime)
    torch.save({"model": whole.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "saved.pt")
    expected = run(Recipe(steps=3, clip=norm), whole, optimizer, runtime, first=3)

    model = make_model()
    resumed = ADAMW[0](list(model.parameters()))
    again = attach(model, resumed, optimizer_on="cpu", clip=clip)
    run(Recipe(steps=1, clip=norm), model, resumed, again)  # there is state to be replaced
    saved = torch.load(tmp_path / "saved.pt", weights_only=True)
    model.load_state_dict(saved["model"])
    resumed.load_state_dict(saved["optimizer"])
    assert run(Recipe(steps=3, clip=norm), model, resumed, again, first=3) == expected
    assert same(dict(model.state_dict()), dict(whole.state_dict()))
    assert same(resumed.state_dict(), optimizer.state_dict())


def attached(attach: Attach, make: MakeOptimizer = ADAMW[0], **options: Any) -> tuple[Any, Any, Any]:
    model = make_model()
    optimizer = make(list(model.parameters()))
    return model, optimizer, attach(model, optimizer, optimizer_on="cpu", **options)


def test_what_a_loop_must_not_do_is_an_error_that_names_the_remedy(attach: Attach) -> None:
    model, optimizer, runtime = attached(attach, clip="none")
    loss_of(model, batches(1)[0]).backward()
    with pytest.raises(RuntimeError, match='use clip "exact", or "delayed"'):
        runtime.state.clip_grad_norm_(1.0)
    with pytest.raises(RuntimeError, match=r"after 1 backwards \(state\.microbatches\)"):
        loss_of(model, batches(1)[0]).backward()
    optimizer.zero_grad()
    with pytest.raises(RuntimeError, match=r"also where a loop drops the gradients"):
        loss_of(model, batches(1)[0]).backward()
    optimizer.param_groups[0]["lr"] = 0.5
    with pytest.raises(RuntimeError, match="the option lr of AdamW was changed between backward"):
        optimizer.step()
    optimizer.param_groups[0]["lr"] = 1e-2
    optimizer.step()
    loss_of(model, batches(1)[0]).backward()
    optimizer.step()
    with pytest.raises(RuntimeError, match=r"call optimizer\.zero_grad\(\)"):
        loss_of(model, batches(1)[0]).backward()
    optimizer.zero_grad()
    run(Recipe(steps=1), model, optimizer, runtime)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(loss_of(model, batches(1)[0])).backward()
    with pytest.raises(RuntimeError, match="bfloat16 in place of a GradScaler"):
        scaler.step(optimizer)


@pytest.mark.parametrize("staged", [False, True], ids=["in-place", "staged"])
def test_a_write_before_the_step_that_is_due_is_an_error(staged: bool, attach: Attach) -> None:
    """A parameter that is still in memory after `optimizer.step()` looks as it was before."""
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    attach(model, optimizer, tier="host", staged=staged, optimizer_on="cpu")
    loss_of(model, batches(1)[0]).backward()
    optimizer.step()
    seen = [layer.up.weight for layer in model.layers if 0 not in layer.up.weight.stride()]
    assert seen
    with torch.no_grad():
        seen[-1].mul_(0.5)
    with pytest.raises(RuntimeError, match=r"up\.weight was written to after its step fell due"):
        loss_of(model, batches(1)[0])


def test_what_is_refused_at_start(attach: Attach) -> None:
    class Counting(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            for group in self.param_groups:
                group["count"] = group.get("count", 0) + 1
            return super().step(closure)

    class Noisy(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            torch.rand(1)
            return super().step(closure)

    with pytest.raises(RuntimeError, match=r"Counting.*the option count of its groups is changed by a step"):
        attached(attach, made(Counting))
    with pytest.raises(RuntimeError, match=r"Noisy.*draws random numbers"):
        attached(attach, made(Noisy))
    with pytest.raises(ConfigError, match=r"capturable=True.*leaving it out"):
        attached(attach, made(torch.optim.AdamW, capturable=True))
    for config, key in (({"clip": "none"}, "clip"), ({"microbatches": 2}, "microbatches")):
        with pytest.raises(ConfigError, match=rf"state\.{key}"):
            load_config({"state": {"host": "1GiB", **config}})


def test_a_step_that_backward_has_made_in_part_is_finished_by_step(attach: Attach) -> None:
    """The last steps of an epoch may have fewer microbatches."""
    recipe = Recipe(ADAMW[1], steps=3, microbatches=2)
    losses, parameters, _ = plain(recipe)
    model, optimizer, runtime = attached(attach, clip="none", microbatches=4)
    assert run(recipe, model, optimizer, runtime) == losses
    assert same(dict(model.state_dict()), dict(parameters))


def test_the_step_goes_on_beside_the_loop(attach: Attach, monkeypatch: pytest.MonkeyPatch) -> None:
    """1. The optimizer's code is held on its thread. 2. Backward ends all the same. 3. The forward waits for its chunk."""
    begun, may_end = threading.Event(), threading.Event()
    step = torch.optim.AdamW.step.__wrapped__

    def held(optimizer: torch.optim.Optimizer, closure: Any = None) -> Any:
        if threading.current_thread() is not threading.main_thread():
            begun.set()
            assert may_end.wait(60)
        return step(optimizer, closure)

    limit = sum(parameter.nbytes for parameter in make_model().parameters()) * 3 // 2
    model, optimizer, runtime = attached(attach, clip="none", tier="host", device_limit=limit)
    run(Recipe(steps=1), model, optimizer, runtime)
    optimizer.state_dict()  # ends the steps that are due
    monkeypatch.setattr(runtime.state._chunked, "_plain", {**runtime.state._chunked._plain, "step": held})
    loss_of(model, batches(2)[1]).backward()
    assert begun.wait(60)
    timer = threading.Timer(0.2, may_end.set)
    timer.start()
    optimizer.step()
    optimizer.zero_grad()
    before = time.perf_counter()
    model(batches(1)[0])
    assert may_end.is_set() and time.perf_counter() - before < 60
    twin = make_model()
    run(Recipe(ADAMW[1], steps=2), twin, twins := ADAMW[1](list(twin.parameters())))
    assert same(dict(model.state_dict()), dict(twin.state_dict()))
    assert same(optimizer.state_dict()["state"], twins.state_dict()["state"])


@pytest.mark.parametrize("clip", ["exact", "none"])
def test_an_error_of_the_thread_reaches_the_loop(
    clip: str, attach: Attach, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(optimizer: torch.optim.Optimizer) -> Any:
        if threading.current_thread() is threading.main_thread():
            return step(optimizer)
        raise KeyError("in the optimizer")

    model, optimizer, runtime = attached(attach, clip=clip)
    chunked = runtime.state._chunked
    step = chunked._plain["step"]
    monkeypatch.setitem(chunked._plain, "step", fails)
    with pytest.raises(KeyError, match="in the optimizer"):
        run(Recipe(steps=2), model, optimizer, runtime)
    monkeypatch.setitem(chunked._plain, "step", step)
    with contextlib.suppress(KeyError):  # of other chunks
        runtime.close()
    runtime.close()
    assert not any(parameter.isnan().any() for parameter in model.parameters())
    assert not [thread for thread in threading.enumerate() if "ssdtrain-step" in thread.name]


@pytest.mark.parametrize("staged", [False, True], ids=["in-place", "staged"])
@pytest.mark.parametrize("kind", ["reads", "writes"])
@pytest.mark.parametrize("clip", ["exact", "none"])
def test_a_failing_drive_is_an_error(clip: str, kind: str, staged: bool, attach: Attach) -> None:
    some = frozenset(range(20, 4000)) if kind == "reads" else frozenset(range(40, 4000))
    faults = Faults(fail_reads=some) if kind == "reads" else Faults(fail_writes=some)
    model, optimizer, runtime = attached(attach, clip=clip, faults=faults, staged=staged)
    with pytest.raises(IOFailure):
        run(Recipe(steps=5), model, optimizer, runtime)
    with contextlib.suppress(IOFailure):
        runtime.close()
    runtime.close()
    assert not [thread for thread in threading.enumerate() if "ssdtrain-step" in thread.name]


def test_a_backward_that_raises_leaves_the_rest_to_step(attach: Attach) -> None:
    """The blocks that it has come to are stepped, as where the optimizer runs in backward; the others when step is called."""
    model, optimizer, runtime = attached(attach, clip="none")

    def fail(_: torch.Tensor) -> None:
        raise KeyError("in backward")

    handle = model.layers[3].up.weight.register_hook(fail)
    with pytest.raises(KeyError):
        loss_of(model, batches(1)[0]).backward()
    handle.remove()
    optimizer.step()
    optimizer.zero_grad()
    before = dict(model.state_dict())
    run(Recipe(steps=2), model, optimizer, runtime)
    assert not same(before, dict(model.state_dict()))


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_deepspeed_steps_the_chunks(attach: Attach) -> None:
    """The user's optimizer is DeepSpeed's, where it is installed. It is compiled, for minutes, where it was not."""
    found = pytest.importorskip("deepspeed.ops.adam")
    make = made(found.DeepSpeedCPUAdam)
    check(Recipe(make), make, attach, clip="none")


KILLED = """
import os, signal, sys, threading
import torch, ssdtrain
from tests.state.training import Recipe, batches, loss_of, make_model, run

directory, first, steps, kill, clip = sys.argv[1], *map(int, sys.argv[2:5]), sys.argv[5]
torch.set_num_threads(1)
model = make_model()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
config = {"state": {"directories": directory, "min_bytes": 256}, "report": {"interval": 0}}
if clip == "plan":
    config["plan"], config["state"]["device_limit"] = "auto", "600KiB"
else:
    config["state"] |= {"optimizer": "cpu", "clip": clip}
runtime = ssdtrain.attach(model, config, optimizer=optimizer)
norm = None if clip == "none" else 0.3
if first:
    saved = torch.load(f"{directory}/saved.pt")
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
print(run(Recipe(steps=steps, clip=norm), model, optimizer, runtime, first=first))
if kill:
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, f"{directory}/saved.pt")
    for step in range(2):
        loss = loss_of(model, batches(first + steps + 2)[first + steps + step])
        if step:
            threading.Timer(0.002, os.kill, (os.getpid(), signal.SIGKILL)).start()
        loss.backward()
        if norm is not None:
            runtime.state.clip_grad_norm_(norm)
        optimizer.step()
        optimizer.zero_grad()
    signal.pause()
print({name: value.double().sum().item().hex() for name, value in model.state_dict().items()})
"""


@pytest.mark.slow
@pytest.mark.parametrize("clip", ["exact", "none", "delayed", "plan"])
def test_a_killed_process_leaves_nothing_and_is_resumed(clip: str, tmp_path: Path) -> None:
    def train(first: int, steps: int, kill: bool = False) -> list[str]:
        command = [sys.executable, "-c", KILLED, str(tmp_path), str(first), str(steps), str(int(kill)), clip]
        done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
        assert done.returncode == (-signal.SIGKILL if kill else 0), done.stderr
        return done.stdout.splitlines()

    first = 7 if clip == "plan" else 3  # five steps are profiled
    whole = train(0, first + 3)
    begun = train(0, first, kill=True)
    assert [path.name for path in tmp_path.iterdir()] == ["saved.pt"]
    resumed = train(first, 3)
    assert begun[0][:-1] + ", " + resumed[0][1:] == whole[0]
    assert resumed[1] == whole[1]
