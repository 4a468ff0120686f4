"""An unmodified pretrain_gpt.py of Megatron-LM: launcher, patch, resume, exits.

Needs a checkout (MEGATRON_LM_DIR); megatron.training is on no package registry.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from benchmarks.two_nodes.ports import free_port
from ssdtrain.tools.cli.main import main
from tests.support.processes import ROOT, ran, start

CHECKOUT = os.environ.get("MEGATRON_LM_DIR", "")

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.skipif(
        not CHECKOUT,
        reason="MEGATRON_LM_DIR is not set: name a checkout of Megatron-LM (core_v0.14.0 to core_v0.16.1)",
    ),
]

FLAGS = shlex.split("""
    --num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64
    --micro-batch-size 2 --global-batch-size 8 --train-iters 6 --lr 1e-3 --lr-decay-style constant --seed 7
    --attention-dropout 0.1 --hidden-dropout 0.1 --mock-data --tokenizer-type NullTokenizer --vocab-size 4200
    --transformer-impl local --distributed-backend gloo --use-cpu-initialization --log-interval 1
    --eval-iters 1 --eval-interval 3 --no-gradient-accumulation-fusion --no-masked-softmax-fusion
    --no-bias-gelu-fusion --no-bias-dropout-fusion --no-persist-layer-norm --no-rope-fusion --ckpt-format torch
""")
ARRANGED = ["-W", "ignore", "-m", "tests.megatron.cpu"]
LAUNCHER = ["-m", "ssdtrain_megatron.run"]
LOSS = re.compile(r"iteration +(\d+)/.*lm loss: (\S+) .*grad norm: (\S+)")


def script(directory: str | Path = CHECKOUT) -> str:
    return str(Path(directory, "pretrain_gpt.py"))


def losses(output: str) -> dict[int, tuple[str, str]]:
    """(loss, gradient norm) as printed, by iteration."""
    return {int(number): (loss, norm) for number, loss, norm in LOSS.findall(output)}


def weights(directory: Path) -> dict[str, torch.Tensor]:
    """Of the checkpoint after iteration 6, read where Megatron's classes can be unpickled."""
    target = directory / "weights.pt"
    program = (
        "import sys, torch; from tests.megatron import cpu; cpu.arrange(); sys.path.insert(0, sys.argv[1]);"
        "cpu.arrange_training(); import megatron.core;"
        "state = torch.load(sys.argv[2], weights_only=False)['model'];"
        "torch.save({k: v for k, v in state.items() if torch.is_tensor(v)}, sys.argv[3])"
    )
    source = directory / "iter_0000006" / "mp_rank_00" / "model_optim_rng.pt"
    subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program, CHECKOUT, source, target], check=True, cwd=ROOT
    )
    found: dict[str, torch.Tensor] = torch.load(target)
    return found


@pytest.fixture
def offload(tmp_path: Path) -> list[str]:
    directories = ["--ssdtrain-offload-directories", str(tmp_path / "ssd")]
    return [*directories, "--ssdtrain-offload-min-bytes", "1KiB", "--ssdtrain-offload-amount", "all"]


@pytest.fixture
def patched(tmp_path: Path) -> Path:
    """The checkout with copies of its scripts, which the patch is applied to."""
    target = tmp_path / "patched"
    target.mkdir()
    for entry in Path(CHECKOUT).iterdir():
        if entry.suffix == ".py":
            shutil.copy(entry, target)
        elif not entry.name.startswith("."):
            (target / entry.name).symlink_to(entry)
    return target


def apply(*arguments: str) -> str:
    done = ran([sys.executable, "patches/apply.py", *arguments], cwd=ROOT)
    return done.stdout


@pytest.mark.timeout(600)
def test_launcher_then_resume_under_the_patch_are_the_run_without_the_plugin(
    tmp_path: Path, patched: Path, offload: list[str]
) -> None:
    def halves(directory: str) -> tuple[list[str], list[str]]:
        kept = [
            "--save-interval",
            "3",
            "--save",
            str(tmp_path / directory),
            "--load",
            str(tmp_path / directory),
        ]
        return [*FLAGS, *kept, "--exit-interval", "3"], [*FLAGS, *kept]

    plain = [start(1, [*ARRANGED, script(), *flags]) for flags in halves("plain")]
    expected = {**losses(plain[0]), **losses(plain[1])}
    assert sorted(expected) == [1, 2, 3, 4, 5, 6]
    assert len(set(expected.values())) == 6
    assert "[ssdtrain]" not in plain[0]

    to_exit, from_there = halves("offloaded")
    first = start(1, [*ARRANGED, *LAUNCHER, script(), *to_exit, *offload])
    assert first.count("[ssdtrain] iteration") == 3
    assert first.count("| offloaded/step: ") == 3

    assert "fits" in apply(str(patched), "--check")
    assert "applied" in apply(str(patched))
    assert "is applied" in apply(str(patched), "--check")
    second = start(1, [*ARRANGED, script(patched), *from_there, *offload])
    assert second.count("[ssdtrain] iteration") == 3
    assert {**losses(first), **losses(second)} == expected
    assert "taken out" in apply(str(patched), "--reverse")

    one, other = weights(tmp_path / "plain"), weights(tmp_path / "offloaded")
    assert one.keys() == other.keys() and len(one) > 20
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert list((tmp_path / "ssd").iterdir()) == []


@pytest.mark.timeout(600)
@pytest.mark.parametrize("layout", ["tensor", "pipeline"])
def test_two_ranks(offload: list[str], layout: str) -> None:
    flags = [*FLAGS, f"--{layout}-model-parallel-size", "2", "--train-iters", "3"]
    expected = losses(start(2, [*ARRANGED, script(), *flags]))
    offloaded = start(2, [*ARRANGED, *LAUNCHER, script(), *flags, *offload])
    assert losses(offloaded) == expected and len(expected) == 3
    assert offloaded.count("[ssdtrain] iteration") == 3


COMM = shlex.split("""
    --ssdtrain-comm-preset safe --ssdtrain-comm-feedback fp32 --ssdtrain-comm-tp int8 --ssdtrain-comm-min-bytes 0
    --no-ssdtrain-comm-probe --ssdtrain-comm-warmup-steps 0
""")


@pytest.mark.timeout(600)
def test_a_resumed_run_goes_on_with_the_residuals_of_its_checkpoint(tmp_path: Path) -> None:
    still = ["--attention-dropout", "0", "--hidden-dropout", "0", *COMM]
    whole = start(2, [*ARRANGED, *LAUNCHER, script(), *FLAGS, *still])
    kept = ["--save-interval", "3", "--save", str(tmp_path / "saved"), "--load", str(tmp_path / "saved")]
    first = start(2, [*ARRANGED, *LAUNCHER, script(), *FLAGS, *still, *kept, "--exit-interval", "3"])
    files = sorted((tmp_path / "saved" / "iter_0000003" / "ssdtrain_comm").iterdir())
    assert [file.name for file in files] == ["rank_00000.pt", "rank_00001.pt"]
    second = start(2, [*ARRANGED, *LAUNCHER, script(), *FLAGS, *still, *kept])
    expected, found = losses(whole), {**losses(first), **losses(second)}
    assert found.keys() == expected.keys() and len(set(expected.values())) == 6
    assert [norm for _, norm in found.values()] == [norm for _, norm in expected.values()]
    # After the first iteration of a run Megatron prints the mean of two losses.
    assert all(found[iteration] == expected[iteration] for iteration in (1, 2, 3, 4, 6))
    assert "residuals" not in second

    files[1].unlink()
    again = start(2, [*ARRANGED, *LAUNCHER, script(), *FLAGS, *still, *kept, "--ckpt-step", "3"])
    assert "no error-feedback residuals of ranks [1]" in again
    assert losses(again).keys() == losses(second).keys() and losses(again) != losses(second)


@pytest.mark.timeout(600)
def test_compressed_and_offloaded_tensor_parallelism_trains_and_says_what_it_sent(offload: list[str]) -> None:
    flags = [*FLAGS, "--tensor-model-parallel-size", "2", "--train-iters", "3", "--sequence-parallel"]
    plain = losses(start(2, [*ARRANGED, script(), *flags]))
    output = start(2, [*ARRANGED, *LAUNCHER, script(), *flags, *COMM, *offload])
    found = losses(output)
    assert found.keys() == plain.keys() and found != plain
    for iteration, (loss, _) in found.items():
        assert float(loss) == pytest.approx(float(plain[iteration][0]), rel=1e-3)
    assert output.count("[ssdtrain] iteration") == 3
    assert re.search(r"offloaded/step: .* tp sent/step: \S+ \S+ \| tp without compression/step: ", output)


@pytest.mark.timeout(600)
def test_a_signal_ends_the_run_with_a_checkpoint_and_nothing_left(tmp_path: Path, offload: list[str]) -> None:
    log = tmp_path / "log"
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "OMP_NUM_THREADS": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
    }
    endless = "--train-iters 100000 --exit-signal-handler --save-interval 100000 --save"
    flags = [*FLAGS, *endless.split(), str(tmp_path / "saved")]
    with log.open("w") as output:
        process = subprocess.Popen(
            [sys.executable, "-u", *ARRANGED, *LAUNCHER, script(), *flags, *offload],
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=ROOT,
        )
        try:
            while "[ssdtrain] iteration 2 " not in log.read_text() and process.poll() is None:
                time.sleep(0.1)
            process.send_signal(signal.SIGTERM)
            status = process.wait(120)
        finally:
            process.kill()
    assert status == 0, log.read_text()[-5000:]
    assert (tmp_path / "saved" / "latest_checkpointed_iteration.txt").is_file()
    assert list((tmp_path / "ssd").iterdir()) == []


def test_the_flags_of_the_launch_scripts_and_of_a_plan_are_flags_of_this_megatron_lm(
    capsys: pytest.CaptureFixture[str],
) -> None:
    program = (
        "import argparse, sys; from tests.megatron import cpu; cpu.arrange(); sys.path.insert(0, sys.argv[1]);"
        "cpu.arrange_training(); import megatron.core; cpu.finish();"
        "from megatron.training import arguments; import ssdtrain_megatron; ssdtrain_megatron.install_pretrain();"
        "parser = arguments.add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False));"
        "parser.parse_args(sys.argv[2:]); print('all known')"
    )
    lines = (ROOT / "configs" / "megatron" / "gpt_3d.args").read_text().splitlines()
    flags = shlex.split(" ".join(line for line in lines if not line.startswith("#")))
    more = [
        "--data-path",
        "x",
        "--split",
        "99,1,0",
        "--tensorboard-dir",
        "y",
        "--ssdtrain-config",
        "configs/megatron/ssdtrain.yaml",
    ]
    question = (
        "plan --model gpt --hidden 4096 --layers 48 --seq 2048 --gpu h100 --tp 2 --pp 2 --dp 2 --zero 1 --sequence-parallel "
        "--virtual 2 --state host --host 1TB --cpu-optimizer 200GB/s --microbatch 1 --print-flags --no-alternatives"
    )
    assert main(question.split()) == 0
    planned = shlex.split(capsys.readouterr().out)
    assert "--optimizer-cpu-offload" in planned
    more += planned
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program, CHECKOUT, *flags, *more],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert "all known" in done.stdout, done.stderr[-2000:]
