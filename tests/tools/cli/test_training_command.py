import json

import pytest

from ssdtrain.tools.cli.main import main
from ssdtrain.tools.cli.training_command import OF_OTHER_MODELS

SHAPE = [
    *("pretrain_gpt.py", "--num-layers", "8", "--hidden-size", "4096", "--num-attention-heads", "32"),
    *("--seq-length", "2048", "--bf16", "--vocab-size", "50304"),
]
ONE = ["estimate", "--gpu", "a100", "--ssd", "4 x 7GB/s, 3.84TB, 1 DWPD", "--gpus-per-node", "1", *SHAPE]


FEW = ["--num-layers", "2"]


def shown(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert main(arguments) == 0
    return " ".join(capsys.readouterr().out.split())


def test_a_command_line_is_answered_by_the_plan_of_its_job(capsys: pytest.CaptureFixture[str]) -> None:
    machine = ["--gpu", "rtx4090", "--ssd", "4 x 7GB/s", "--gpus-per-node", "1"]
    script = (
        "pretrain_gpt.py --num-layers 4 --hidden-size 3072 --num-attention-heads 32 --seq-length 2048 --vocab-size 8192 "
        "--micro-batch-size 16 --global-batch-size 32 --bf16 --use-flash-attn --lr 1e-4"
    )
    assert main(["estimate", *machine, *script.split(), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    [stage] = found["stages"]
    blocks = [row for row in stage["blocks"] if row["blocks"].startswith("block")]
    for row in blocks:
        assert row["saved"] == pytest.approx(34 * 16 * 2048 * 3072, rel=0.005)
    assert "ssd" in {row["action"] for row in blocks}
    assert stage["activation_peak_bytes"] <= stage["activation_budget_bytes"]
    assert (found["microbatch"], found["largest_microbatch"]) == (16, 32)
    assert (found["model"]["layers"], found["gpus"], found["not_counted"]) == (4, 1, [])
    assert "recomputation of blocks" in [each["what"] for each in found["alternatives"]]
    plan = (
        "plan --model gpt --layers 4 --hidden 3072 --heads 32 --seq 2048 --vocab 8192 --microbatch 16 --batch 32 "
        "--gradient-bytes 4 --no-recompute --no-alternatives --json"
    )
    assert main([*plan.split(), *machine]) == 0
    same = json.loads(capsys.readouterr().out)
    for key in ("stages", "ssd_bytes_per_step", "ssd_bandwidth_needed", "step_seconds", "parameters"):
        assert found[key] == same[key]


def test_the_table_has_bytes_bandwidth_peak_and_what_was_assumed(capsys: pytest.CaptureFixture[str]) -> None:
    found = shown([*ONE, *FEW, "--micro-batch-size", "2", "--context-parallel-size", "2"], capsys)
    for words in (
        "B parameters on 1 x a100",
        "largest microbatch that fits",
        "if everything were offloaded",
        "saved by each",
        "activations",
        "assumed: layers of Transformer Engine",
        "not counted: --context-parallel-size 2 (a sequence is counted whole on each rank)",
    ):
        assert words in found


def test_without_drives_the_bandwidth_that_they_would_need_is_said(
    capsys: pytest.CaptureFixture[str],
) -> None:
    given = ["estimate", "--gpu", "a100", *SHAPE, *FEW, "--micro-batch-size", "1"]
    assert "bandwidth per GPU to offload everything" in shown(given, capsys)


def test_options_of_the_command_may_stand_anywhere(capsys: pytest.CaptureFixture[str]) -> None:
    given = [
        "estimate",
        "torchrun",
        "--nproc-per-node=2",
        "--",
        *SHAPE,
        *FEW,
        "--micro-batch-size=1",
        "--gpu=a100",
    ]
    assert "parameters on 2 x a100" in shown(given, capsys)


def test_a_microbatch_that_does_not_fit_says_which_one_does(capsys: pytest.CaptureFixture[str]) -> None:
    given = ["estimate", "--gpu", "a100", *SHAPE, "--micro-batch-size", "64", "--global-batch-size", "64"]
    assert main(given) == 1
    error = " ".join(capsys.readouterr().err.split())
    assert "the smallest peak of activations" in error
    assert "; the largest microbatch that fits is " in error
    assert "assumed: layers of Transformer Engine" in error
    assert main([*given[:2], "rtx4090", *given[3:]]) == 1
    assert "of model state per GPU" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["pretrain_gpt.py", "--gpu", "h100"], "the command line has no --num-layers"),
        ([*SHAPE, "--micro-batch-size", "1"], "the following arguments are required: --gpu"),
        ([*SHAPE, "--micro-batch-size", "0", "--gpu", "h100"], 'argument --micro-batch-size: "0" is 0'),
        ([*SHAPE, "--micro-batch-size", "1", "--gpu", "h10"], 'did you mean "h100"'),
        (
            [*SHAPE, "--micro-batch-size", "1", "--gpu", "h100", "--ssdtrain-offload-prefetch", "1x"],
            "--ssdtrain-offload-prefetch",
        ),
        *(
            ([*SHAPE, "--micro-batch-size", "1", "--gpu", "h100", option, "8"], f"{option} is for a function")
            for option in OF_OTHER_MODELS
        ),
    ],
)
def test_what_cannot_be_read_is_an_error_of_usage(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["estimate", *arguments])
    assert caught.value.code == 2
    assert says in " ".join(capsys.readouterr().err.split())
