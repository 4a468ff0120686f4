"""The value "auto" is a key left out, and misspelled keys and flags say which was probably meant."""

import argparse
import json
from pathlib import Path
from typing import Any

import psutil
import pytest

from ssdtrain.config import ConfigError, load_config
from ssdtrain.config.flags import Flag, add_flags, check_unknown_flags, config_from_namespace, flags
from ssdtrain.config.similar import resembles

MINIMUM: dict[str, Any] = {
    "offload": {"directories": ["/nvme0"], "host": "1GiB"},
    "comm": {},
    "compact": {},
    "state": {"directories": ["/nvme1"], "host": "1GiB"},
}


AUTO_IS_DEFAULT = [flag for flag in flags() if not flag.kind.accepts_auto]


def parser(**options: Any) -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(**options)
    add_flags(made.add_argument_group("ssdtrain"))
    check_unknown_flags(made)
    return made


def test_auto_is_an_amount_and_the_default() -> None:
    assert load_config({"offload": {"directories": "/nvme0"}}).offload.amount.kind == "auto"
    assert load_config({"offload": {"directories": "/nvme0", "amount": "auto"}}).offload.amount.kind == "auto"


def test_with_a_lossy_codec_all_is_offloaded_unless_an_amount_is_given() -> None:
    def amount(**more: str) -> str:
        offload = load_config({"offload": {"directories": "/nvme0", **more}}).offload
        return offload.amount.kind

    assert amount(codec="int8") == "all"
    assert amount(codec="lossless") == "auto"
    assert amount(codec="int8", amount="auto") == "auto"
    assert amount(codec="int8", device_budget="1GiB") == "auto"


@pytest.mark.parametrize("flag", AUTO_IS_DEFAULT, ids=lambda flag: flag.path)
def test_auto_is_a_key_left_out(flag: Flag) -> None:
    with_auto: dict[str, Any] = {key: dict(section) for key, section in MINIMUM.items()}
    without: dict[str, Any] = {key: dict(section) for key, section in MINIMUM.items()}
    place, other = with_auto, without
    for key in flag.keys[:-1]:
        place, other = place.setdefault(key, {}), other.setdefault(key, {})
    place[flag.keys[-1]] = "auto"
    other.pop(flag.keys[-1], None)
    assert load_config(with_auto) == load_config(without)


@pytest.mark.parametrize(
    "flag", [flag for flag in AUTO_IS_DEFAULT if not flag.boolean], ids=lambda flag: flag.path
)
def test_a_flag_of_auto_wins_over_the_file(flag: Flag, tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    wear = "endurance" in flag.keys  # which a plan does not keep to
    file.write_text(
        f"offload: {{directories: [/a], host: 1GiB, threads: 9{', endurance: {years: 3}' if wear else ''}}}\n"
        f"comm: {{preset: safe, seed: 4}}\ncompact: {{seed: 3}}\n"
        f"state: {{directories: [/b], host: 1GiB}}\n{'' if wear else 'plan: {device_limit: 1GiB}'}\n"
    )
    given = config_from_namespace(parser().parse_args(["--ssdtrain-config", str(file), flag.name, "auto"]))
    expected = load_config(file).to_dict()
    place = expected
    for key in flag.keys[:-1]:
        place = place.get(key, {})
    place.pop(flag.keys[-1], None)
    assert given == load_config(expected)


@pytest.mark.parametrize(
    ("block", "message"),
    [
        ({"offload": {"directories": "/a", "preset": "safe"}}, r"did you mean ssdtrain\.comm\.preset\?"),
        (
            {"offload": {"directories": "/a", "device_budget": 30}},
            "has no unit, and would be 30 bytes.*30GiB",
        ),
        ({"plan": {"device_limit": "80"}}, "has no unit, and would be 80 bytes"),
        (
            {"offload": {"directories": "/a", "amount": "all", "device_budget": "1GiB"}},
            r'device_budget.*needs amount: "auto"',
        ),
        ({"offload": {"directory": "/a", "host": "1GiB"}}, r"did you mean ssdtrain\.offload\.directories\?"),
        (
            {"ssdtrain": {"offload": {"directories": "/a"}}},
            r"ssdtrain\.ssdtrain: .*did you mean ssdtrain, which is one level up",
        ),
        ({"offload": {"directories": "auto"}}, "no place to offload to"),
        ({"compact": "auto"}, r"ssdtrain\.compact: 'auto' is not a block of keys"),
    ],
)
def test_a_mistake_is_named_with_what_was_meant(block: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(block)


def test_a_block_inside_of_another_section_blames_no_other_key(tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    inner = {"stage": 1, "ssdtrain": {"offload": {"directories": "/a"}}}
    file.write_text(
        json.dumps({"train_batch_size": 8, "bf16": {"enabled": True}, "zero_optimization": inner})
    )
    with pytest.raises(ConfigError, match=r"zero_optimization\.ssdtrain.*at the top level") as error:
        load_config(file)
    assert len(error.value.problems) == 1


def test_offload_auto_is_a_share_of_free_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    offload = load_config({"offload": "auto"}).offload
    assert not offload.directories
    assert 0 < 7 * offload.host < psutil.virtual_memory().total


def test_offload_auto_leaves_room_for_model_state_in_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    free = psutil.virtual_memory()._replace(available=100 << 30)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: free)
    for state, offload in (("20GiB", 25), ("80GiB", 10), ("200GiB", 0)):
        config = load_config({"offload": "auto", "state": {"host": state}})
        assert config.offload is not None and config.offload.host >> 30 == offload


def test_of_a_list_given_twice_the_last_is_taken_and_a_warning_names_both(
    caplog: pytest.LogCaptureFixture,
) -> None:
    name = "--ssdtrain-offload-directories"
    config = config_from_namespace(parser().parse_args([name, "/a", "/b", name, "/c", name, "/c"]))
    assert config.offload.directories == ("/c",)
    (line,) = caplog.messages
    assert f"{name} is given more than once" in line and "'/a', '/b'" in line and "'/c'" in line


@pytest.mark.parametrize(
    ("argument", "meant"),
    [
        ("--ssdtrain-offload-directory", "--ssdtrain-offload-directories"),
        ("--ssdtrian-offload-codec=int8", "--ssdtrain-offload-codec"),
        ("--ssdtrain_offload_codec", "--ssdtrain-offload-codec"),
        ("--ssdtrain-ofload-host=1GiB", "--ssdtrain-offload-host"),
        ("--no-ssdtrain-comm-prob", "--no-ssdtrain-comm-probe"),
        ("-ssdtrain-offload-codec", "--ssdtrain-offload-codec"),
        ("--sdtrain-config", "--ssdtrain-config"),
        ("--ssdtrain-zzzzzz", ""),
    ],
)
@pytest.mark.parametrize("method", ["parse_args", "parse_known_args"])
def test_a_misspelled_flag_says_which_was_probably_meant(
    argument: str, meant: str, method: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        getattr(parser(allow_abbrev=False), method)([argument])
    said = capsys.readouterr().err
    assert f"unrecognized arguments: {argument.partition('=')[0]}" in said
    assert f"did you mean {meant}?" in said or not meant


def test_unknown_flags_of_others_stay_unknown() -> None:
    arguments = ["--train-iters", "5", "--seed=3", "ssdtrian", "-x"]
    assert parser().parse_known_args(arguments)[1] == arguments


@pytest.mark.parametrize("word", ["ssdtrian", "sdtrain", "SSDTrain", "ssd_train", "ssdtrain_config"])
def test_a_file_with_a_misspelled_block_says_so(word: str, tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(f"train_batch_size: 4\n{word}: {{offload: {{directories: /a}}}}\n")
    with pytest.raises(ConfigError, match=f"{word}: .* did you mean ssdtrain".replace(" did", r" \(did")):
        load_config(file)
    assert resembles(word, "ssdtrain") and not resembles("train", "ssdtrain")
