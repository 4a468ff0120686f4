"""The --ssdtrain-* flags beside a framework's own, parsed by a real argparse parser."""

import argparse
import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from ssdtrain.config import Amount, Config, ConfigError, load_config
from ssdtrain.config.flags import flags
from ssdtrain_megatron import add_arguments, config_from_args
from ssdtrain_megatron.flags import keys_without_effect


def parser() -> argparse.ArgumentParser:
    """A parser as Megatron-LM makes it: no abbreviations, and flags of its own before ours."""
    made = argparse.ArgumentParser(allow_abbrev=False)
    made.add_argument_group(title="checkpointing").add_argument("--save")
    made.add_argument("--bf16", action="store_true")
    assert add_arguments(made) is made
    return made


def test_all_flags_together_make_one_config() -> None:
    args = parser().parse_args(
        shlex.split(
            """
            --bf16 --ssdtrain-enabled --ssdtrain-offload-directories '/nvme0/{user}' /nvme1 --save out
            --ssdtrain-offload-capacity 0.5TB --ssdtrain-offload-host 4GiB --ssdtrain-offload-amount 60%
            --ssdtrain-offload-min-bytes 1MiB --ssdtrain-offload-buffer 2GiB --ssdtrain-offload-in-flight 1e9
            --ssdtrain-offload-prefetch 0 --ssdtrain-offload-deadline 500ms --ssdtrain-offload-threads 8
            --ssdtrain-offload-engine python --ssdtrain-offload-direct off --ssdtrain-offload-on-full raise
            --no-ssdtrain-checkpoint-use-reentrant --no-ssdtrain-checkpoint-preserve-rng-state
            --ssdtrain-checkpoint-determinism-check none --no-ssdtrain-checkpoint-early-stop
            --ssdtrain-report-interval 10 --ssdtrain-report-path runs
            """
        )
    )
    assert (args.bf16, args.save) == (True, "out")
    config = config_from_args(args)
    assert config == load_config(
        {
            "offload": {
                "directories": ["/nvme0/{user}", "/nvme1"],
                "capacity": 500 * 10**9,
                "host": 4 * 2**30,
                "amount": Amount("fraction", 0.6),
                "min_bytes": 2**20,
                "buffer": 2**31,
                "in_flight": 10**9,
                "prefetch": 0,
                "deadline": 0.5,
                "threads": 8,
                "engine": "python",
                "direct": "off",
                "on_full": "raise",
            },
            "checkpoint": {"preserve_rng_state": False, "determinism_check": "none", "early_stop": False},
            "report": {"interval": 10, "path": "runs"},
        }
    )


def test_without_a_flag_there_is_no_config() -> None:
    assert config_from_args(parser().parse_args(["--bf16"])) is None


def test_a_namespace_from_before_the_flags_counts_as_not_given() -> None:
    assert config_from_args(argparse.Namespace(save="out")) is None


def test_a_given_flag_wins_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("offload: {directories: [/a, /b], host: 1GiB, threads: 2}\nreport: {interval: 5}\n")
    arguments = ["--ssdtrain-config", str(file)]
    config = config_from_args(parser().parse_args(arguments))
    assert config == load_config(file)
    given = ["--ssdtrain-offload-directories", "/c", "--ssdtrain-offload-host", "0", "--no-ssdtrain-enabled"]
    config = config_from_args(parser().parse_args(arguments + given))
    assert config == load_config(
        {"enabled": False, "offload": {"directories": "/c", "threads": 2}, "report": {"interval": 5}}
    )


def test_a_flag_does_not_hide_what_is_wrong_with_the_file(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    arguments = ["--ssdtrain-config", str(file), "--ssdtrain-offload-threads", "8"]
    for text, path in [
        ("offload:\n", "ssdtrain.offload"),
        ("offload: {directories: /a, treads: 4}\n", "ssdtrain.offload.treads"),
        ("offload: {directories: /a, threads: 1, threads: 2}\n", "ssdtrain.offload.threads"),
        ("planner: {}\n", "ssdtrain.planner"),
        ("comm: {dq: int8}\n", "ssdtrain.comm.dq"),
    ]:
        file.write_text(text)
        with pytest.raises(ConfigError) as error:
            config_from_args(parser().parse_args(arguments))
        assert path in [problem.path for problem in error.value.problems]
        assert str(file) in str(error.value)


def test_what_flags_ask_for_together_is_checked() -> None:
    args = parser().parse_args(["--ssdtrain-offload-threads", "8"])
    with pytest.raises(ConfigError, match=r"ssdtrain\.offload\.directories: \[\] leaves no place"):
        config_from_args(args)
    args = parser().parse_args(["--ssdtrain-report-interval", "-1"])
    with pytest.raises(
        ConfigError, match=r"ssdtrain\.report\.interval: -1 .* allowed: a whole number from 0"
    ):
        config_from_args(args)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("--ssdtrain-offload-host 4G", "unknown unit"),
        ("--ssdtrain-offload-amount 60", "has no unit"),
        ("--ssdtrain-offload-threads four", "allowed: a whole number from 1 to 64"),
        ("--ssdtrain-offload-engine rust", "'auto', 'c', 'python'"),
        ("--ssdtrain-offload-directories /x/{gpu}", "unknown placeholder"),
        ("--ssdtrain-offload-directories", "expected at least one argument"),
        ("--ssdtrain-offload-deadline soon", "allowed: seconds"),
    ],
)
def test_a_rejected_value_names_its_flag_and_what_is_allowed(
    arguments: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parser().parse_args(arguments.split())
    error = capsys.readouterr().err.replace(
        "choose from auto, c, python", "choose from 'auto', 'c', 'python'"
    )
    assert f"argument {arguments.split()[0]}: " in error
    assert said in error


@pytest.mark.parametrize(
    "flag", ["--ssdtrain-offload-treads", "--ssdtrain-offload", "--no-ssdtrain-offload-host"]
)
def test_an_unknown_flag_is_rejected(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parser().parse_args([flag, "1"])
    assert "unrecognized arguments" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("--ssdtrain-offload-direcotries", "--ssdtrain-offload-directories"),
        ("--ssdtrian-offload-directories=/nvme", "--ssdtrain-offload-directories"),
        ("--ssdtrain_offload_host", "--ssdtrain-offload-host"),
        ("--no-ssdtrain-enable", "--no-ssdtrain-enabled"),
        ("-ssdtrain-comm-preset", "--ssdtrain-comm-preset"),
    ],
)
def test_a_misspelled_flag_names_the_one_that_was_meant(
    given: str, meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also where Megatron is told to ignore unknown flags: the run would train without what was asked for."""
    for parse in (parser().parse_args, parser().parse_known_args):
        with pytest.raises(SystemExit):
            parse([given])
        assert f"{given.partition('=')[0]} (did you mean {meant}?)" in capsys.readouterr().err


def test_unknown_flags_of_others_are_left_to_others() -> None:
    unknown = ["--train-offload", "--save-interval", "3", "/nvme/ssdtrain"]
    assert parser().parse_known_args(["--bf16", *unknown])[1] == unknown


def test_a_report_alone_is_a_baseline() -> None:
    def config_of(*more: str) -> Config:
        config = config_from_args(parser().parse_args(["--ssdtrain-report-path", "runs", *more]))
        assert config is not None
        return config

    assert config_of().active and config_of().measures
    assert not config_of("--no-ssdtrain-enabled").active
    assert not config_of("--ssdtrain-offload-directories", "/a").measures


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("--ssdtrain-checkpoint-use-reentrant", "nothing is enabled"),
        ("--ssdtrain-report-interval 5", "ssdtrain.report is without effect"),
        ("--ssdtrain-comm-preset safe --ssdtrain-checkpoint-use-reentrant", "ssdtrain.checkpoint is without"),
        ("--ssdtrain-offload-directories /a --ssdtrain-checkpoint-use-reentrant", ""),
        ("--ssdtrain-plan auto --ssdtrain-checkpoint-use-reentrant", ""),
        ("--ssdtrain-comm-preset safe --ssdtrain-report-interval 5", ""),
        ("--no-ssdtrain-enabled --ssdtrain-report-interval 5", ""),
    ],
)
def test_keys_that_nothing_uses_are_named(given: str, said: str) -> None:
    config = config_from_args(parser().parse_args(given.split()))
    assert config is not None
    found = keys_without_effect(config)
    assert said in found and bool(said) == bool(found)


@pytest.mark.parametrize("given", ["--ssdtrain-comm-feedback int8", "--ssdtrain-comm-preset auto"])
def test_keys_of_comm_without_anything_that_compresses_are_rejected(given: str) -> None:
    with pytest.raises(ConfigError, match=r"ssdtrain\.comm.*compress nothing.*--ssdtrain-comm-preset"):
        config_from_args(parser().parse_args(given.split()))
    for more in ("--no-ssdtrain-enabled", "--ssdtrain-comm-dp off", "--ssdtrain-comm-tp int8"):
        assert config_from_args(parser().parse_args([*given.split(), *more.split()])) is not None


def test_a_limit_of_model_state_is_rejected_as_what_deepspeed_has() -> None:
    given = ["--ssdtrain-plan", "auto", "--ssdtrain-plan-state-limit", "8GiB"]
    with pytest.raises(ConfigError, match=r"--ssdtrain-plan-state-limit.*--print-flags"):
        config_from_args(parser().parse_args(given))


@pytest.mark.parametrize("more", ["", "--ssdtrain-compact-mode quant"])
def test_a_plan_that_compresses_is_rejected_as_what_megatron_cannot_have(more: str) -> None:
    given = ["--ssdtrain-plan", "auto", "--ssdtrain-plan-compress", *more.split()]
    with pytest.raises(ConfigError, match=r"--ssdtrain-plan-compress.*cannot work under Megatron"):
        config_from_args(parser().parse_args(given))


@pytest.mark.parametrize("slowdown", ["0", "1.0", "2.5"])
def test_a_plan_may_allow_any_slowdown(slowdown: str) -> None:
    given = ["--ssdtrain-plan", "auto", "--ssdtrain-plan-max-slowdown", slowdown]
    config = config_from_args(parser().parse_args(given))
    assert config.plan.slowdown == float(slowdown)


def test_the_namespace_holds_only_what_a_framework_can_print_and_save() -> None:
    args = parser().parse_args(
        ["--ssdtrain-offload-directories", "/a", "--ssdtrain-offload-amount", "512MiB"]
    )
    assert json.loads(json.dumps(vars(args))) == vars(args)
    assert all(
        value is None for key, value in vars(parser().parse_args([])).items() if key.startswith("ssdtrain")
    )


def test_help_names_every_flag() -> None:
    text = parser().format_help()
    for flag in flags():
        assert flag.name in text
    assert "60%" in text


@pytest.mark.slow
def test_the_flags_need_no_megatron() -> None:
    program = (
        "import sys; sys.modules['megatron'] = None\n"
        "import argparse, ssdtrain_megatron as s\n"
        "args = s.add_arguments(argparse.ArgumentParser()).parse_args(['--ssdtrain-report-interval', '3'])\n"
        "assert s.config_from_args(args).report.interval == 3\n"
    )
    root = Path(__file__).parents[2]
    subprocess.run([sys.executable, "-c", program], check=True, cwd=root, timeout=120)
