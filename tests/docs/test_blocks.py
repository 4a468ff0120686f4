"""What the pages show works as it is pasted: every block is run by a test, or listed with what this machine lacks."""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ssdtrain.integration.intercept import Interception
from ssdtrain.integration.patching import Patches
from ssdtrain.integration.traffic import Traffic
from ssdtrain.tools.cli import main
from tests.docs.blocks import NOT_RUN, RUN_BY, Block, block, blocks
from tests.docs.messages import ROOT
from tests.support.processes import ran
from tests.support.ranks import on_ranks


def keys_of(one: Block) -> list[tuple[str, str]]:
    return [key for key in (*RUN_BY, *NOT_RUN) if key[0] == one.page and one.text.strip().startswith(key[1])]


@pytest.mark.parametrize("one", list(blocks()), ids=lambda one: f"{one.page}: {one.first[:40]}")
def test_every_block_is_run_or_says_why_not(one: Block) -> None:
    keys = keys_of(one)
    assert len(keys) == 1, f"run it in a test and name that in tests/docs/blocks.py: {one.text}"
    for key in keys:
        if key not in NOT_RUN:
            file, _, function = RUN_BY[key].test.partition("::")
            assert f"\ndef {function}(" in (ROOT / file).read_text(), key


def test_the_list_has_nothing_that_is_gone() -> None:
    used = {key for one in blocks() for key in keys_of(one)}
    assert used == {*RUN_BY, *NOT_RUN}


@pytest.fixture(autouse=True)
def in_a_directory_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    path = list(sys.path)
    yield
    sys.path[:] = path


def run(
    page: str, beginning: str, *, change: dict[str, str] | None = None, **names: object
) -> dict[str, object]:
    source = block(page, beginning).text
    for old, new in (change or {}).items():
        assert old in source
        source = source.replace(old, new)
    exec(compile(source, page, "exec"), names)
    return names


def commands(page: str, beginning: str) -> list[list[str]]:
    lines = block(page, beginning).text.replace("\\\n", " ").splitlines()
    return [shlex.split(line, comments=True) for line in lines if line.strip()]


class Stack(nn.Module):
    """With blocks that a plan finds."""

    def __init__(self, width: int = 128, count: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def small_model() -> nn.Sequential:
    return nn.Sequential(*[nn.Sequential(nn.Linear(256, 256), nn.GELU()) for _ in range(3)])


def test_codecs() -> None:
    x = torch.randn(1024, generator=torch.Generator().manual_seed(0))
    names = run(
        "docs/codecs.md", "from", torch=torch, x=x, out=torch.zeros(1024), seed=0, step=1, tensor=2, rank=0
    )
    error = torch.linalg.vector_norm(names["out"] - x) / torch.linalg.vector_norm(x)  # type: ignore[operator]
    assert 0 < error < 0.2
    names = run("docs/codecs.md", "exact =", torch=torch, make_codec=names["make_codec"], x=x)
    assert torch.equal(names["exact"].decode(names["payload"], torch.empty_like(x)), x)  # type: ignore[attr-defined]
    assert names["flag"] == 0


def test_a_policy_of_ones_own(tmp_path: Path) -> None:
    import ssdtrain

    plain, model = small_model(), small_model()
    model.load_state_dict(plain.state_dict())
    config = {"offload": {"directories": str(tmp_path), "min_bytes": 1024}}
    names = run(
        "docs/policy.md",
        "from ssdtrain.offload.policy",
        change={"1 << 28": "1 << 14", "ssdtrain.attach": "runtime = ssdtrain.attach"},
        ssdtrain=ssdtrain,
        model=model,
        config=config,
    )
    x = torch.randn(64, 256)
    for one in (plain, model):
        one(x).sum().backward()
    pairs = zip(plain.parameters(), model.parameters(), strict=True)
    assert all(torch.equal(p.grad, q.grad) for p, q in pairs if p.grad is not None and q.grad is not None)
    found = names["runtime"].statistics().offload  # type: ignore[attr-defined]
    assert found.kept_bytes == found.saved_bytes // 2 > 0
    names["runtime"].close()  # type: ignore[attr-defined]


def test_compact() -> None:
    import ssdtrain

    model = small_model()
    names = run("docs/compact.md", "runtime", ssdtrain=ssdtrain, model=model)
    model(torch.randn(64, 256)).sum().backward()
    names["runtime"].close()  # type: ignore[attr-defined]
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.distributed
def test_lowrank(tmp_path: Path) -> None:
    import ssdtrain

    model, x = small_model(), torch.randn(64, 256)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/ranks", rank=0, world_size=1)
    try:
        names: dict[str, Any] = run(
            "docs/compact.md",
            "optimizer",
            torch=torch,
            ssdtrain=ssdtrain,
            model=model,
            DistributedDataParallel=nn.parallel.DistributedDataParallel,
        )
        before = {name: value.clone() for name, value in model.state_dict().items()}
        for _ in range(2):
            names["model"](x).square().mean().backward()
            names["optimizer"].step()
        assert any(not torch.equal(value, before[name]) for name, value in model.state_dict().items())
        names["runtime"].close()
    finally:
        dist.destroy_process_group()


def _train_compressed(rank: int) -> tuple[int, int, int]:
    """(calls, bytes sent, bytes that plain DDP sends) by the page's lines."""
    import ssdtrain

    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(nn.Linear(1024, 1024))
    names = run("docs/collectives.md", "runtime", ssdtrain=ssdtrain, model=model)
    model(torch.randn(8, 1024)).sum().backward()
    sent = names["runtime"].statistics().comm["dp"]
    names["runtime"].close()
    return sent.calls, sent.wire_bytes, sent.raw_bytes


@pytest.mark.slow
@pytest.mark.distributed
def test_collectives() -> None:
    for calls, sent, plain in on_ranks(2, _train_compressed):
        assert calls > 0 and 0 < sent <= plain  # the probe may find that plain is faster on this machine


def test_an_adapter(monkeypatch: pytest.MonkeyPatch) -> None:
    reduced: list[torch.Tensor] = []

    class Comm:
        def all_reduce(self, tensor: torch.Tensor, *_: object) -> SimpleNamespace:
            reduced.append(tensor)
            return SimpleNamespace(wait=lambda: None)

    plain: list[torch.Tensor] = []
    monkeypatch.setattr(
        dist, "all_reduce", lambda tensor, op=None, group=None, async_op=False: plain.append(tensor)
    )
    original, group, matrix, vector = dist.all_reduce, object(), torch.zeros(2, 2), torch.zeros(2)
    run(
        "docs/collectives.md",
        "def classify",
        change={"...\n": "for x in tensors: torch.distributed.all_reduce(x, group=tensor_parallel_group)\n"},
        torch=torch,
        Traffic=Traffic,
        Interception=Interception,
        Patches=Patches,
        comm=Comm(),
        tensor_parallel_group=group,
        tensors=[matrix, vector],
    )
    assert reduced == [matrix] and plain == [vector]
    assert dist.all_reduce is original


def test_automatic_plans(tmp_path: Path) -> None:
    """Each line by itself: they are alternatives."""
    import ssdtrain

    lines = block("docs/plan-auto.md", "runtime = ssdtrain.attach").text.splitlines()
    assert len(lines) == 2
    for line in lines:
        model = Stack()
        names: dict[str, Any] = {"ssdtrain": ssdtrain, "model": model}
        exec(line.replace('"/nvme"', repr(str(tmp_path))), names)
        model(torch.randn(64, 128)).sum().backward()
        names["runtime"].close()


def state(directory: Path, beginning: str, model: nn.Module, **names: Any) -> Any:
    import ssdtrain

    change = {'"/nvme"': repr(str(directory)), '"8GiB"': '"4MiB"'}
    return run("docs/state.md", beginning, change=change, ssdtrain=ssdtrain, model=model, **names)


def test_model_state(tmp_path: Path) -> None:
    model = Stack(256, 6)
    before = model.layers[2][0].weight.clone()
    state(tmp_path, "optimizer", model, torch=torch, batches=[torch.randn(4, 256) for _ in range(2)])
    assert not torch.equal(model.layers[2][0].weight, before)


def test_model_state_on_the_cpu(tmp_path: Path) -> None:
    model = Stack(256, 6)
    before = model.layers[2][0].weight.clone()
    names: dict[str, Any] = {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=1e-3)}
    runtime = state(tmp_path, 'config = {"directories"', **names)["runtime"]
    microbatches = [torch.randn(4, 256) for _ in range(8)]
    found: Any = run("docs/state.md", "losses", runtime=runtime, microbatches=microbatches, **names)
    assert len(found["losses"]) == 8
    runtime.close()
    assert not torch.equal(model.layers[2][0].weight, before)


def test_model_state_with_a_plan(tmp_path: Path) -> None:
    model = Stack(256, 6)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    found = state(tmp_path, "planned", model, optimizer=optimizer)
    for _ in range(11):  # eight are profiled on a CPU
        model(torch.randn(4, 256)).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    found["runtime"].close()  # also before an assertion: what stays attached fails others of this process
    assert found["runtime"].statistics().values()["plan/plans"] == 1


def test_storage(tmp_path: Path) -> None:
    change = {'["/nvme0", "/nvme1"]': repr([str(tmp_path / "0"), str(tmp_path / "1")])}
    change |= {"100 << 30": "64 << 20", "4 << 30": "32 << 20", "256 << 20": "32 << 20"}
    for name in ("0", "1"):
        (tmp_path / name).mkdir()
    run("docs/storage.md", "from", change=change)


def test_trace() -> None:
    import ssdtrain

    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = [torch.randn(512, 256) for _ in range(3)]
    run("docs/trace.md", "runtime", ssdtrain=ssdtrain, model=model, optimizer=optimizer, batches=batches)
    (words,) = commands("docs/trace.md", "ssdtrain")
    assert words[0] == "ssdtrain" and main(words[1:]) == 0
    events = json.loads(Path("out/report/trace.json").read_text())["traceEvents"]
    assert [event["name"] for event in events if event.get("cat") == "step"] == ["step 2"]


def test_bench(capsys: pytest.CaptureFixture[str]) -> None:
    Path("spill-drive").mkdir()
    Path("train.py").write_text(block("docs/bench.md", "import torch").text)
    seen = []
    for words in commands("docs/bench.md", "ssdtrain"):
        assert words[:2] == ["ssdtrain", "bench"]
        seen.append(words[2])
        if words[2] != "collective":  # the next test
            assert main(words[1:]) == 0, capsys.readouterr()
    assert seen == ["io", "codec", "collective", "script"]
    assert "equal, bit for bit" in capsys.readouterr().out


@pytest.mark.long
@pytest.mark.distributed
def test_bench_between_processes() -> None:
    (words,) = [words for words in commands("docs/bench.md", "ssdtrain") if words[2] == "collective"]
    told = pasted(["-m", "ssdtrain", *words[1:]], Path.cwd())
    assert "all-reduce of float32 by 2 ranks" in told and "balanced" in told


@pytest.mark.long
def test_planner(capsys: pytest.CaptureFixture[str]) -> None:
    (plan,), (apply,), (estimate,), (training,) = (
        commands("docs/planner.md", "ssdtrain plan"),
        commands("docs/plan-apply.md", "ssdtrain plan"),
        commands("docs/estimate.md", "ssdtrain estimate my_package"),
        commands("docs/estimate.md", "ssdtrain estimate --gpu"),
    )
    assert main(plan[1:]) == 0
    assert "step time" in capsys.readouterr().out
    assert apply[-2:] == [">", "plan.json"] and main(apply[1:-2]) == 0
    assert json.loads(capsys.readouterr().out) and "offload_optimizer" in Path("ds.json").read_text()
    Path("my_package").mkdir()
    Path("my_package/model.py").write_text(
        "import torch\n"
        "def build(batch):\n"
        "    model = torch.nn.Module()\n"
        "    model.layers = torch.nn.ModuleList(torch.nn.Linear(256, 256) for _ in range(3))\n"
        "    def step():\n"
        "        x = torch.randn(batch, 256)\n"
        "        for layer in model.layers:\n"
        "            x = layer(x).relu()\n"
        "        return x.sum()\n"
        "    return model, step\n"
    )
    assert main(estimate[1:]) == 0
    assert "largest microbatch" in capsys.readouterr().out
    assert main(training[1:]) == 0
    assert "22.1B parameters on 64 x h100" in capsys.readouterr().out


def test_a_plan_of_blocks_is_followed() -> None:
    import ssdtrain

    model, x = Stack(), torch.randn(64, 128)
    config = {"offload": {"directories": "spill", "min_bytes": "4KiB"}}
    names = run(
        "docs/plan-apply.md",
        "from ssdtrain.planner.execute",
        ssdtrain=ssdtrain,
        model=model,
        step=lambda: model(x).sum(),
        config=config,
    )
    model(x).sum().backward()
    names["runtime"].close()  # type: ignore[attr-defined]


@pytest.mark.slow
def test_the_line_of_the_demo() -> None:
    import ssdtrain_ds

    config: dict[str, object] = {}
    try:
        run("docs/demo.md", "import ssdtrain_ds", config=config)
        assert config["ssdtrain"]
    finally:
        ssdtrain_ds.uninstall()


ACCELERATE = """
import torch
from accelerate import Accelerator
from ssdtrain.hf import SSDTrainPlugin

accelerator = Accelerator(cpu=True)
model = torch.nn.Linear(1024, 1024)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = torch.utils.data.DataLoader(torch.randn(1024, 1024), batch_size=512)
{block}
for x in loader:
    accelerator.backward(model(x.requires_grad_()).square().mean())
    optimizer.step()
assert plugin.runtime.statistics().offload.saved_bytes > 0  # of one layer none may have left before backward asks
accelerator.end_training()
"""


def pasted(command: list[str], directory: Path) -> str:
    """What a command prints in a directory that has what was pasted, and nothing else."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "ACCELERATE_USE_CPU": "true"}
    done = ran([sys.executable, *command], cwd=directory, env=environment, timeout=240)
    return done.stdout + done.stderr


@pytest.mark.long
def test_the_page_for_the_trainer(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(block("docs/huggingface.md", "import torch").text)
    told = pasted(["train.py"], tmp_path)
    assert "train_loss" in told and "summary of 8 steps" in told and re.search(r"to SSD, a step +[1-9]", told)


@pytest.mark.long
def test_the_lines_for_accelerate(tmp_path: Path) -> None:
    pasted(["-c", ACCELERATE.format(block=block("docs/huggingface.md", "plugin =").text)], tmp_path)


LIGHTNING = """
import lightning, torch
from ssdtrain.lightning import SSDTrainLightningCallback
class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.body = torch.nn.Sequential(*[torch.nn.Linear(512, 512) for _ in range(4)])
    def training_step(self, rows):
        return self.body(rows).square().mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)
module, loader = Module(), torch.utils.data.DataLoader(torch.randn(512, 512), batch_size=256)
{block}
print("saved bytes", callback.runtime.statistics().offload.saved_bytes)
"""


@pytest.mark.slow
def test_the_lines_for_lightning(tmp_path: Path) -> None:
    told = pasted(["-c", LIGHTNING.format(block=block("docs/huggingface.md", "callback =").text)], tmp_path)
    assert re.search(r"saved bytes [1-9]", told)


WITHOUT_COMPILING = """
import runpy, deepspeed
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # a minute at its first start
runpy.run_module("ssdtrain_ds", run_name="__main__", alter_sys=True)
"""


@pytest.mark.long
@pytest.mark.distributed
def test_the_page_for_deepspeed(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(block("docs/index.md", "import argparse, deepspeed").text)
    (tmp_path / "ds.json").write_text(block("docs/index.md", "{").text)
    lines = [line for one in blocks() if one.page == "docs/index.md" for line in one.text.splitlines()]
    (words,) = [shlex.split(line, comments=True) for line in lines if "ssdtrain_ds train.py" in line]
    assert words[:5] == ["torchrun", "--nproc_per_node", "1", "-m", "ssdtrain_ds"]
    (tmp_path / "start.py").write_text(WITHOUT_COMPILING)
    told = pasted(
        ["-m", "torch.distributed.run", "--standalone", *words[1:3], "start.py", *words[5:]], tmp_path
    )
    assert "step 9: loss" in told and re.search(r"to SSD, a step +[1-9]", told)


@pytest.mark.long
@pytest.mark.distributed
def test_the_doctor_in_ranks() -> None:
    (words,) = commands("docs/clusters.md", "torchrun")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", *words[1:]]
    done = ran(command, timeout=240)
    assert "rank 0 to 1" in " ".join(done.stdout.split())
