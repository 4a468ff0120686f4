import json
from dataclasses import replace
from typing import Any

import pytest

from ssdtrain.tools.cli.main import main
from ssdtrain.tools.cli.plan import alternatives
from ssdtrain.tools.whatif import cluster
from ssdtrain.tools.whatif.cluster_job import ClusterJob
from ssdtrain.tools.whatif.cluster_plan import ClusterPlan
from ssdtrain.tools.whatif.cluster_state import placements
from ssdtrain.tools.whatif.hardware import find_gpu
from ssdtrain.tools.whatif.models import ParallelLayout, Transformer

SMALL = ["plan", "--model", "gpt", "--hidden", "4096", "--layers", "8", "--seq", "2048", "--gpu", "a100-40gb"]
MANY = [
    *SMALL,
    *["--batch", "4", "--microbatch", "4", "--gpus-per-node", "1", "--ssd"],
    "4 x 7GB/s, 3.84TB, 1 DWPD",
]


def test_the_table_says_what_each_block_does_and_why(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(MANY) == 0
    shown = capsys.readouterr().out
    words = ("step time", "pipeline bubble", "ssd", "writing", "life of the drives", "years", "next best")
    assert all(word in shown for word in (*words, "drives twice"))


def test_what_drives_bring_and_how_long_they_last_is_said_in_words(
    capsys: pytest.CaptureFixture[str],
) -> None:
    few = [*SMALL, "--gpus-per-node", "1", "--ssd", "4 x 7GB/s"]
    assert main([*few, "--batch", "4", "--microbatch", "4"]) == 0
    shown = capsys.readouterr().out
    assert "life of the drives, if of 3.84TB, 1 DWPD" in shown
    assert "bring nothing" not in " ".join(shown.split())
    assert main([*few, "--microbatch", "1", "--tp", "2"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "at this microbatch the drives bring nothing" in shown
    assert "2 tensor-parallel ranks are on 2 nodes of 1 GPUs" in shown


def test_json_holds_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*MANY, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["microbatch"] == 4
    assert found["ssd_life_years"] > 0
    assert 0 < found["share_of_ideal"] <= 1
    [stage] = found["stages"]
    assert stage["activation_peak_bytes"] <= stage["activation_budget_bytes"]
    assert {row["action"] for row in stage["blocks"]} >= {"ssd"}
    assert [entry["what"] for entry in found["alternatives"]] == [
        "1 GB more device memory",
        "drives twice as fast",
        "no drives",
    ]


def test_a_job_that_cannot_fit_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL[:-1], "rtx4090", "--microbatch", "1"]) == 1
    assert "model state" in capsys.readouterr().err


def found(capsys: pytest.CaptureFixture[str], *more: str) -> dict[str, Any]:
    assert main([*MANY, "--json", "--no-alternatives", *more]) == 0
    return dict(json.loads(capsys.readouterr().out))


def test_the_least_memory_takes_no_longer_than_allowed(capsys: pytest.CaptureFixture[str]) -> None:
    one = ["--microbatch", "1"]
    fastest = found(capsys, *one)["stages"][0]
    for slowdown in (0.02, 0.3):
        goal = ["--objective", "memory", "--max-slowdown", str(slowdown)]
        least = found(capsys, *one, *goal)["stages"][0]
        assert least["activation_peak_bytes"] < fastest["activation_peak_bytes"]
        assert least["microbatch_seconds"] <= (1 + slowdown) * fastest["microbatch_seconds"] * 1.001


def test_the_largest_microbatch_is_planned_for(capsys: pytest.CaptureFixture[str]) -> None:
    without = [*SMALL, "--batch", "64", "--gpus-per-node", "1", "--json", "--no-alternatives"]
    assert main([*without, "--objective", "microbatch"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["microbatch"] == plan["largest_microbatch"]
    assert main([*without, "--microbatch", str(2 * plan["microbatch"])]) == 1


def test_the_cheapest_run_writes_less_where_drives_cost_more(capsys: pytest.CaptureFixture[str]) -> None:
    cost = ["--objective", "cost", "--gpu-hour", "2"]
    cheap = found(capsys, *cost)
    dear = found(capsys, *cost, "--drive-price", "1e6")
    assert cheap["ssd_bytes_per_step"] > dear["ssd_bytes_per_step"]
    step = cheap["step_seconds"] * 2 / 3600
    assert cheap["dollars_per_step"] == pytest.approx(step)
    assert cheap["dollars_per_billion_tokens"] == pytest.approx(step / (4 * 2048) * 1e9)
    assert dear["dollars_per_step"] < step + cheap["ssd_bytes_per_step"] * 1e6 / (1825 * 3.84e12)
    assert main([*MANY, "--objective", "cost"]) == 1
    assert "--gpu-hour" in capsys.readouterr().err
    unrated = [*MANY[:-1], "4 x 7GB/s", *cost, "--drive-price", "400"]
    assert main(unrated) == 1
    assert "no endurance" in capsys.readouterr().err
    assert main([*MANY, "--no-alternatives", *cost, "--drive-price", "400"]) == 0
    assert "dollars per step" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("option", "value", "why"),
    [
        ("--drive-price", "-5", "is negative; allowed: dollars of one drive"),
        ("--drive-price", "inf", "is not finite"),
        ("--drive-price", "$5", "is not a number"),
        ("--gpu-hour", "0", "is 0; allowed: dollars above 0, such as 2.5"),
        ("--gpu-hour", "-1", "is negative"),
        ("--gpu-hour", "nan", "is not finite"),
        ("--network", "0Gbit/s", "is 0; allowed: above 0"),
        ("--network", "-1GB/s", "is negative"),
        ("--network", "50GB", "is not a rate"),
        ("--network", "50GBps/s", "has the unknown unit"),
        ("--ssd", "4 x -7GB/s", "is negative"),
        ("--ssd", "4 x 0GB/s", "rate 0"),
        ("--ssd", "fast", "is not a rate"),
        ("--host", "-1GB", "is negative"),
        ("--reserve", "4GX", "has the unknown unit"),
        ("--efficiency", "0", "is 0; allowed: above 0, at most 1"),
        ("--efficiency", "1.5", "is above 1"),
        ("--max-slowdown", "-0.1", "is negative"),
        ("--hidden", "0", "is 0; allowed: a whole number above 0"),
        ("--layers", "1.5", "is not a whole number"),
        ("--layers", "99999999", "is above 1000; allowed: a whole number from 1 to 1000"),
        ("--gpu", "h10", 'did you mean "h100"'),
        ("--microbatch", "-1", "is negative"),
        ("--batch", "-4", "is negative"),
        ("--gpus-per-node", "0", "is 0"),
        ("--gradient-bytes", "-2", "is negative; allowed: bytes"),
        ("--optimizer-bytes", "x", "is not a whole number"),
        ("--cpu-optimizer", "0GB/s", "is 0; allowed: above 0"),
    ],
)
def test_a_value_that_cannot_be_is_an_error_that_names_option_value_and_remedy(
    option: str, value: str, why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main([*MANY, f"{option}={value}"])
    assert caught.value.code == 2
    shown = " ".join(capsys.readouterr().err.split())
    assert f'argument {option}: "{value}" ' in shown
    assert why in shown
    assert "allowed: " in shown


def test_a_price_of_drives_needs_drives(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, "--gpu-hour", "2", "--drive-price", "400"]) == 1
    assert "--ssd" in capsys.readouterr().err


def test_model_state_in_host_memory_is_in_the_table_and_the_json(capsys: pytest.CaptureFixture[str]) -> None:
    host = [*SMALL[:-1], "rtx4090", "--microbatch", "1", "--no-alternatives", "--gpus-per-node", "1"]
    host += ["--batch", "2", "--state", "host", "--host", "100GB", "--cpu-optimizer", "200GB/s"]
    assert main(host) == 0
    shown = capsys.readouterr().out
    assert "model state in host memory per node" in shown
    assert "wait for the optimizer" in shown
    assert main([*host, "--json"]) == 0
    [stage] = json.loads(capsys.readouterr().out)["stages"]
    assert stage["model_state_bytes_away"] > 0
    assert stage["persistent_blocks"] <= 8


@pytest.mark.parametrize(
    ("where", "names"),
    [
        (["ssd", "--ssd", "4 x 7GB/s"], ["1 GB more device memory", "drives twice as fast"]),
        (["host", "--host", "100GB"], ["1 GB more device memory"]),
    ],
)
def test_model_state_off_the_device_has_alternatives_that_leave_it_there(
    where: list[str], names: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    small = ["plan", "--model", "gpt", "--hidden", "1024", "--layers", "4", "--seq", "512", "--gpu", "h100"]
    assert main([*small, "--microbatch", "1", "--state", *where, "--json"]) == 0
    better = json.loads(capsys.readouterr().out)["alternatives"]
    assert [entry["what"] for entry in better] == names
    assert all(entry["step_seconds"] for entry in better)


def test_a_batch_that_data_parallel_ranks_cannot_share_is_an_error(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main([*SMALL, "--dp", "8", "--batch", "7"]) == 1
    shown = capsys.readouterr().err
    assert "a batch of 7 sequences on 8 data-parallel ranks; allowed: a multiple of dp" in shown


def test_alternatives_leave_model_state_where_the_plan_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Transformer.of("gpt", hidden=4096, layers=8, sequence=1024)
    job = ClusterJob(
        model,
        ParallelLayout(),
        find_gpu("rtx4090"),
        host=10**11,
        node=1,
        batch=1,
        recompute=False,
        state="host",
    )
    least = placements(job, False)[0]
    plan = cluster.plan_job(job, 1)
    assert plan.stages[0].placement.persistent > least.persistent
    plan = replace(plan, stages=[replace(plan.stages[0], placement=least)])
    tried: list[int] = []

    def counted(*given: Any) -> ClusterPlan:
        found = cluster.replanned(*given)
        tried.extend(stage.placement.persistent for stage in found.stages)
        return found

    monkeypatch.setattr("ssdtrain.tools.cli.plan.replanned", counted)
    assert [entry["what"] for entry in alternatives(plan)] == ["1 GB more device memory"]
    assert tried == [least.persistent]
