"""What stays on the device, and what is seen of it from outside."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ssdtrain.config import ConfigError
from ssdtrain.state.plan import plan_state
from tests.state.conftest import Attach, LiveBytes
from tests.state.training import Recipe, make_model, plain, run, same


@pytest.mark.slow
@pytest.mark.parametrize(("clip", "recompute"), [(None, None), (0.5, "each")])
def test_a_model_of_four_times_its_limit(clip: float | None, recompute: str | None, attach: Attach) -> None:
    recipe = Recipe(
        clip=clip,
        steps=2,
        microbatches=1 if clip is None else 2,
        model={"layers": 12, "recompute": recompute},
    )
    losses, parameters, state = plain(recipe)
    model = make_model(**recipe.model)
    optimizer = recipe.optimizer(list(model.parameters()))
    total = 4 * sum(parameter.nbytes for parameter in model.parameters())
    limit = total // 4
    live = LiveBytes(model, optimizer)
    runtime = attach(model, optimizer, device_limit=limit)
    live.peak = 0
    with live.watch_step():
        assert run(recipe, model, optimizer, runtime) == losses
    found = runtime.statistics()
    assert limit / 2 < live.peak <= limit
    assert found.values()["state/resident_peak_bytes"] <= limit
    assert same(dict(model.state_dict()), dict(parameters))
    assert same(optimizer.state_dict(), state)
    assert live.peak <= limit


def test_plans() -> None:
    chunks = [10, 10, 10, 10]
    least = plan_state(chunks, 5, None)
    assert (least.limit, least.persistent, least.buffers, least.fixed) == (25, 0, 2, 5)
    some = plan_state(chunks, 5, 36)
    assert (some.persistent, some.buffers, some.fixed) == (1, 2, 15)
    every = plan_state(chunks, 5, 45)
    assert (every.persistent, every.buffers, every.fixed) == (4, 0, 45)
    one = plan_state(chunks, 5, 15)
    assert (one.persistent, one.buffers) == (0, 1)
    with pytest.raises(ConfigError, match=r"state\.device_limit.*at least 15B"):
        plan_state(chunks, 5, 14)


def test_a_limit_for_everything_moves_nothing(attach: Attach) -> None:
    recipe = Recipe(steps=2)
    losses, parameters, _ = plain(recipe)
    model = make_model()
    optimizer = recipe.optimizer(list(model.parameters()))
    runtime = attach(model, optimizer, device_limit="1GiB")
    assert run(recipe, model, optimizer, runtime) == losses
    assert same(dict(model.state_dict()), dict(parameters))
    found = runtime.statistics()
    assert found.values()["state/loaded_bytes"] == 0


@pytest.mark.parametrize("tier", ["ssd", "host"])
def test_host_memory_that_transfers_passed_through_is_given_back_at_close(tier: str, attach: Attach) -> None:
    """That of a GPU is pinned, and several chunks large."""
    recipe = Recipe()
    model = make_model()
    optimizer = recipe.optimizer(list(model.parameters()))
    runtime = attach(model, optimizer, tier=tier, staged=True)
    run(recipe, model, optimizer, runtime)
    arena = runtime.state._arena
    assert arena.mapped
    runtime.close()
    assert not arena.allocated and not arena.mapped


def test_nothing_is_left_of_a_closed_runtime(attach: Attach) -> None:
    model = make_model()
    optimizer = Recipe().optimizer(list(model.parameters()))
    runtime = attach(model, optimizer)
    run(Recipe(steps=2), model, optimizer, runtime)
    runtime.close()
    assert set(vars(optimizer)) == set(vars(Recipe().optimizer(list(make_model().parameters()))))
    hooks = [
        hook
        for module in model.modules()
        for hook in (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
    ]
    assert not hooks
    gc.collect()
    run(Recipe(steps=1), model, optimizer, first=2)


SCRIPT = """
import json, resource, sys
import torch, ssdtrain
from tests.state.training import Model, batches, loss_of

directory, limit = sys.argv[1], sys.argv[2]

def rss():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmRSS"))

torch.manual_seed(0)
model = Model(layers=12, width=512)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
total = 4 * sum(p.nbytes for p in model.parameters())
peak = [0]
def look(*_):
    peak[0] = max(peak[0], rss())
runtime = None
if limit != "none":
    runtime = ssdtrain.attach(
        model, {"state": {"directories": directory, "device_limit": total // 4}, "report": {"interval": 0}}, optimizer=optimizer
    )
base = rss() - sum(p.untyped_storage().nbytes() for p in model.parameters())
for layer in model.layers:
    layer.register_forward_hook(look)
    layer.up.weight.register_post_accumulate_grad_hook(look)
losses = []
for batch in batches(3):
    loss = loss_of(model, batch)
    loss.backward()
    losses.append(loss.item())
    optimizer.step()
    look()
    optimizer.zero_grad()
sums = [float(value.double().sum()) for value in model.state_dict().values()]
print(json.dumps({"losses": losses, "sums": sums, "peak": peak[0] - base, "total": total,
    "counted": runtime.state._metrics.resident_peak_bytes if runtime else None}))
"""


@pytest.mark.long
def test_resident_memory_of_the_process_keeps_to_the_limit(tmp_path: Path) -> None:
    """400 MB of state in 100 MB: what the kernel says of the process, beside what it had before training."""

    def train(limit: str) -> dict[str, object]:
        command = [sys.executable, "-c", SCRIPT, str(tmp_path / "state"), limit]
        # glibc would go on holding most of what is freed.
        env = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
        done = subprocess.run(command, capture_output=True, text=True, timeout=140, check=False, env=env)
        assert done.returncode == 0, done.stderr
        found: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
        return found

    within, without = train("quarter"), train("none")
    assert within["losses"] == without["losses"]
    assert within["sums"] == without["sums"]
    total = within["total"]
    assert isinstance(total, int) and total > 300e6
    assert isinstance(within["counted"], int) and within["counted"] <= total // 4
    assert isinstance(within["peak"], int) and isinstance(without["peak"], int)
    assert without["peak"] > 0.9 * total
    assert within["peak"] < 0.33 * total, within["peak"] / total  # activations and workspaces included
