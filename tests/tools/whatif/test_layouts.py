"""The layout that `ssdtrain plan --gpus` chooses: against all layouts planned by themselves, and what it is never."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

from ssdtrain.config.errors import InvalidValue
from ssdtrain.planner.plans import NoPlan
from ssdtrain.tools.cli.main import main
from ssdtrain.tools.whatif.cluster import best_plan
from ssdtrain.tools.whatif.cluster_job import ClusterJob
from ssdtrain.tools.whatif.hardware import find_gpu
from ssdtrain.tools.whatif.layouts import choose_layout, layout_text
from ssdtrain.tools.whatif.models import ParallelLayout, Transformer


def job(memory: int, hidden: int = 2048, node: int = 4) -> ClusterJob:
    model = Transformer.of("gpt", hidden=hidden, layers=8, sequence=1024)
    gpu = replace(find_gpu("h100"), memory=memory)
    return ClusterJob(model, ParallelLayout(), gpu, batch=32, node=node, reserve=10**9)


@pytest.mark.parametrize("memory", [7, 12, 60])
def test_the_choice_is_within_three_percent_of_the_best_of_all_layouts(memory: int) -> None:
    one = job(memory * 10**9)
    found: list[float] = []
    for tensor, stages, zero in product((1, 2, 4), (1, 2, 4, 8), range(4)):
        data = 8 // (tensor * stages)
        if tensor * stages * data != 8 or (stages > 1 and zero > 1):
            continue
        layout = ParallelLayout(tensor, stages, data, zero=zero, sequence_parallel=tensor > 1)
        try:
            found.append(best_plan(replace(one, layout=layout))[0].tokens_per_second)
        except (NoPlan, InvalidValue):
            continue
    chosen = choose_layout(one, 8)
    assert best_plan(chosen.job)[0].tokens_per_second >= max(found) / 1.03
    assert chosen.next_best is None or chosen.next_best[1] <= chosen.tokens_per_second


def test_what_is_given_stays_and_tensor_parallelism_stays_in_a_node() -> None:
    one = job(40 * 10**9, node=2)
    assert choose_layout(one, 8, tp=8).job.layout.tp == 8  # as it was asked for
    assert choose_layout(one, 8, pp=2).job.layout.pp == 2
    assert choose_layout(one, 8, dp=4, zero=3).job.layout == ParallelLayout(
        2, 1, 4, zero=3, sequence_parallel=True
    )
    large = job(9 * 10**9, hidden=4096, node=2)
    assert choose_layout(large, 8).job.layout.tp <= 2


def test_what_fits_on_no_layout_is_an_error() -> None:
    with pytest.raises(InvalidValue, match=r"cannot be spread over 7 GPUs"):
        choose_layout(job(60 * 10**9), 7, tp=7)
    with pytest.raises(InvalidValue, match=r"model state per GPU"):
        choose_layout(job(1100 * 10**6), 2)


def test_the_command_says_the_layout_and_the_next_best_in_one_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    question = "plan --model gpt --hidden 2048 --layers 8 --seq 1024 --gpu h100 --gpus 8 --no-alternatives"
    assert main(question.split()) == 0
    line = capsys.readouterr().out.splitlines()[0]
    assert line.startswith("layout: TP ") and "; next best: TP " in line and line.endswith(" x the time")
    assert main([*question.split(), "--tp", "2", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    layout = ParallelLayout(**answer["layout"])
    assert layout.tp == 2 and layout.ranks == answer["gpus"] == 8
    assert answer["chosen_layout"].startswith(layout_text(layout))


@pytest.mark.parametrize(
    ("given", "dp"),
    [
        ("--batch 8 --microbatch 4", {1, 2}),
        ("--experts 8 --expert-parallel 8", {8}),
        ("--apply ds.json", {8}),
    ],
)
def test_a_layout_keeps_to_what_is_given_beside_the_gpus(
    given: str,
    dp: set[int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A microbatch, expert ranks, and a DeepSpeed config, which has data parallelism alone."""
    monkeypatch.chdir(tmp_path)
    question = f"plan --model mixtral --hidden 512 --layers 4 --seq 256 --gpu h100 --gpus 8 --no-alternatives {given} --json"
    assert main(question.split()) == 0
    assert json.loads(capsys.readouterr().out)["layout"]["dp"] in dp
