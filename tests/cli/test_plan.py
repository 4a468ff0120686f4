import json

import pytest

from ssdtrain.cli.main import main

SMALL = ["plan", "--model", "gpt", "--hidden", "4096", "--layers", "8", "--seq", "2048", "--gpu", "a100-40gb"]
MANY = [
    *SMALL,
    "--batch",
    "4",
    "--microbatch",
    "4",
    "--gpus-per-node",
    "1",
    "--ssd",
    "4 x 7GB/s, 3.84TB, 1 DWPD",
]


def test_the_table_says_what_each_block_does_and_why(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(MANY) == 0
    shown = capsys.readouterr().out
    for word in (
        "step time",
        "pipeline bubble",
        "ssd",
        "hidden",
        "life of the drives",
        "years",
        "next best",
        "drives twice",
    ):
        assert word in shown


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


def test_an_unknown_gpu_is_an_error_of_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main([*SMALL[:-1], "h10"])
    assert caught.value.code == 2
    assert 'did you mean "h100"' in capsys.readouterr().err
