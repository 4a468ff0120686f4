"""What is rejected is rejected by name: the full key, the value and what is allowed, all problems at once."""

import ast
import json
import pickle
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from pydantic import ValidationError

from ssdtrain import config as package
from ssdtrain.config import Config, ConfigError, OffloadConfig, kinds, load_config
from ssdtrain.config.flags import flags
from ssdtrain.storage.memory import ALIGNMENT

ROOT = Path(__file__).parents[2]
MINIMUM: dict[str, Any] = {"offload": {"directories": ["/nvme0"]}}


def rejected(source: Any, **arguments: Any) -> ConfigError:
    with pytest.raises(ConfigError) as error:
        load_config(source, **arguments)
    return error.value


def nested(keys: tuple[str, ...], value: Any) -> dict[str, Any]:
    """A block that holds `value` at `keys`, with an offload section that is otherwise complete."""
    block: dict[str, Any] = {"offload": dict(MINIMUM["offload"])}
    place = block
    for key in keys[:-1]:
        place = place.setdefault(key, {})
    place[keys[-1]] = value
    return block


@pytest.mark.parametrize("flag", list(flags()), ids=lambda flag: flag.path)
@pytest.mark.parametrize("value", [{"a": [1]}, b"64MiB", 1j], ids=repr)
def test_every_key_rejects_a_value_of_the_wrong_kind(flag: Any, value: Any) -> None:
    (problem,) = rejected(nested(flag.keys, value)).problems
    assert problem.path == flag.path
    assert problem.value == value
    assert problem.allowed == flag.kind.allowed
    assert str(problem).startswith(f"{flag.path}: {value!r} ")


@pytest.mark.parametrize(
    ("key", "value", "allowed"),
    [
        ("offload.threads", 0, "a whole number from 1 to 64"),
        ("offload.threads", 65, "a whole number from 1 to 64"),
        ("offload.threads", "4", "a whole number from 1 to 64"),
        ("offload.threads", True, "a whole number from 1 to 64"),
        ("offload.threads", None, "a whole number from 1 to 64"),
        ("offload.engine", "C", '"auto", "c", "python"'),
        ("offload.engine", "rust", '"auto", "c", "python"'),
        ("offload.direct", "yes", '"auto", "on", "off"'),
        ("offload.on_full", "wait", '"keep", "raise"'),
        ("offload.host", "4G", "MiB"),
        ("offload.capacity", 0, "at least 4KiB"),
        ("offload.capacity", 4095, "at least 4KiB"),
        ("offload.deadline", 1e300, "at most 24h"),
        ("offload.buffer", "0MiB", "more than zero"),
        ("offload.in_flight", 0, "more than zero"),
        ("offload.amount", 60, '"60%"'),
        ("offload.amount", 1.2, "a fraction of the saved bytes"),
        ("offload.deadline", "-1s", "500ms"),
        ("enabled", "true", "true or false"),
        ("enabled", 1, "true or false"),
        ("checkpoint.early_stop", "no", "true or false"),
        ("checkpoint.determinism_check", "off", '"default", "none"'),
        ("report.interval", -1, "a whole number from 0"),
        ("report.interval", 1.5, "a whole number from 0"),
    ],
)
def test_a_value_out_of_range_names_key_value_and_range(key: str, value: Any, allowed: str) -> None:
    error = rejected(nested(tuple(key.split(".")), value))
    (problem,) = error.problems
    assert problem.path == f"ssdtrain.{key}"
    assert problem.value == value
    assert allowed in problem.allowed
    assert f"ssdtrain.{key}: {value!r}" in str(error)
    assert f"allowed: {problem.allowed}" in str(error)


@pytest.mark.parametrize(
    ("offload", "key", "value", "why"),
    [
        ({}, "directories", "[]", "no place to offload to"),
        ({"directories": []}, "directories", "[]", "no place to offload to"),
        ({"host": "1GiB", "capacity": "1TB"}, "capacity", "1TB", "directories is empty"),
        ({"host": "1GiB", "direct": "on"}, "direct", "on", "directories is empty"),
        ({"directories": "/a", "prefetch": "2GiB", "buffer": "1GiB"}, "prefetch", "2GiB", "buffer (1GiB)"),
        ({"directories": "/a", "in_flight": "2GiB", "buffer": "1GiB"}, "in_flight", "2GiB", "buffer (1GiB)"),
        ({"directories": "/a", "min_bytes": "2MB", "buffer": "1MB"}, "min_bytes", "2MB", "buffer (1MB)"),
        ({"directories": "/a", "min_bytes": "2MB", "capacity": "1MB"}, "min_bytes", "2MB", "capacity (1MB)"),
        ({"directories": "/a", "min_bytes": "2MB", "host": "1MB"}, "min_bytes", "2MB", "host (1MB)"),
    ],
)
def test_values_that_exclude_each_other_name_both(
    offload: dict[str, Any], key: str, value: str, why: str
) -> None:
    (problem,) = rejected({"offload": offload}).problems
    assert problem.path == f"ssdtrain.offload.{key}"
    assert str(problem.value) == value
    assert why in problem.why
    assert problem.allowed
    with pytest.raises(ValidationError, match=key):
        OffloadConfig(**offload)


def test_a_limit_may_be_used_up() -> None:
    same = dict.fromkeys(["min_bytes", "capacity", "host", "buffer", "prefetch", "in_flight"], "1GiB")
    assert load_config({"offload": {"directories": "/a", **same}}).active


def test_a_reentrant_checkpoint_has_no_determinism_check() -> None:
    (problem,) = rejected({"checkpoint": {"use_reentrant": True, "determinism_check": "none"}}).problems
    assert problem.path == "ssdtrain.checkpoint.determinism_check"


def test_a_small_buffer_does_not_contradict_a_default_that_nobody_wrote() -> None:
    config = load_config({"offload": {"directories": "/a", "buffer": "64MiB"}})
    assert config.offload.in_flight is None


@pytest.mark.parametrize(
    ("keys", "meant"),
    [
        (("ofload",), "ssdtrain.offload"),
        (("offload", "treads"), "ssdtrain.offload.threads"),
        (("offload", "min-bytes"), "ssdtrain.offload.min_bytes"),
        (("offload", "Directories"), "ssdtrain.offload.directories"),
        (("directories",), "ssdtrain.offload.directories"),
        (("report", "early_stop"), "ssdtrain.checkpoint.early_stop"),
    ],
)
def test_an_unknown_key_says_which_was_probably_meant(keys: tuple[str, ...], meant: str) -> None:
    (problem,) = rejected(nested(keys, 1)).problems
    assert problem.path == ".".join(("ssdtrain", *keys))
    assert f"(did you mean {meant}?)" in problem.why


def test_an_unlike_key_lists_the_keys_there_are() -> None:
    (problem,) = rejected(nested(("report", "zzz"), 1)).problems
    assert "did you mean" not in problem.why
    assert problem.allowed == "the keys interval, verbose, path, trace, tensorboard"
    (problem,) = rejected({**MINIMUM, 7: 1}).problems
    assert problem.path == "ssdtrain.7"


@pytest.mark.parametrize("section", ["offload", "checkpoint", "report"])
@pytest.mark.parametrize("value", [None, "on", True, ["directories"]], ids=repr)
def test_a_section_that_is_no_block_is_rejected(section: str, value: Any) -> None:
    (problem,) = rejected({section: value}).problems
    assert (problem.path, problem.value) == (f"ssdtrain.{section}", value)
    auto = ' "auto",' if section == "offload" else ""
    assert problem.allowed == f"a block of keys,{auto} or leaving it out"


def test_all_problems_are_listed_under_the_path_of_the_caller() -> None:
    block = {"offload": {"host": "4G", "treads": 1, "amount": 7}, "planner": {}, "report": {"interval": -1}}
    error = rejected(block, path="zoo.config")
    assert {problem.path for problem in error.problems} == {
        "zoo.config.offload.host",
        "zoo.config.offload.treads",
        "zoo.config.offload.amount",
        "zoo.config.planner",
        "zoo.config.report.interval",
    }
    assert "did you mean zoo.config.offload.threads?" in str(error)
    assert all(str(problem) in str(error) for problem in error.problems)
    assert "(5 errors)" in str(error)


def test_an_error_survives_pickling_between_ranks() -> None:
    error = rejected({"offload": {"host": "4G"}})
    copy = pickle.loads(pickle.dumps(error))
    assert str(copy) == str(error)
    assert copy.problems == error.problems


@pytest.mark.parametrize("key", ["host", "threads", "deadline", "amount", "directories", "x", "codec"])
def test_a_number_of_too_many_digits_is_rejected_and_not_shown(key: str) -> None:
    error = rejected({"offload": {"directories": "/a", key: 10**5000}})
    assert f"ssdtrain.offload.{key}: <a number of 16610 bits>" in str(error)
    assert "[<a number of 16610 bits>]" in str(rejected({"report": {"path": [10**5000]}}))


def test_any_mapping_is_a_block() -> None:
    offload = MappingProxyType({"directories": "/a", "treads": 3})
    (problem,) = rejected(MappingProxyType({"offload": offload})).problems
    assert problem.path == "ssdtrain.offload.treads"
    proxied = MappingProxyType({"offload": MappingProxyType({"directories": "/a", "host": "1GiB"})})
    assert load_config(proxied) == load_config({"offload": {"directories": "/a", "host": "1GiB"}})


def test_a_capacity_holds_one_block_of_the_store() -> None:
    assert kinds.DRIVE_BLOCK == ALIGNMENT
    assert load_config({"offload": {"directories": "/a", "capacity": 4096, "min_bytes": 0}}).active


def test_a_config_cannot_be_changed() -> None:
    config = load_config(MINIMUM)
    with pytest.raises(ValidationError, match="frozen"):
        config.offload.threads = 8
    with pytest.raises(ValidationError, match="frozen"):
        config.enabled = False


def test_nothing_asked_is_nothing_on() -> None:
    assert load_config(None) == Config() == load_config({})
    assert not load_config({}).active
    assert load_config(MINIMUM).active
    assert not load_config({**MINIMUM, "enabled": False}).active
    config = load_config(MINIMUM)
    assert load_config(config) is config
    assert "is a int" in str(rejected(7))


def write(tmp_path: Path, name: str, text: str) -> Path:
    file = tmp_path / name
    file.write_text(text, encoding="utf-8")
    return file


@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("suffix", [".yaml", ".yml", ".json"])
def test_a_file_holds_the_block_or_holds_it_under_its_key(tmp_path: Path, suffix: str, wrapped: bool) -> None:
    block = {"train_batch_size": 4, "checkpoint": {"tag_validation": "Warn"}, "ssdtrain": MINIMUM}
    # JSON is YAML.
    file = write(tmp_path, f"config{suffix}", json.dumps(block if wrapped else MINIMUM))
    assert load_config(file) == load_config(str(file)) == load_config(MINIMUM)


def test_yaml_reads_on_and_off_and_exponents_as_people_mean_them(tmp_path: Path) -> None:
    text = (
        "offload:\n  directories: /nvme0\n  direct: off\n  capacity: 1e9\n  amount: 60%\n  deadline: 500ms\n"
    )
    offload = load_config(write(tmp_path, "c.yaml", text)).offload
    assert (offload.direct, offload.capacity, offload.amount.value, offload.deadline) == (
        "off",
        10**9,
        0.6,
        0.5,
    )


@pytest.mark.parametrize(
    ("name", "text", "key"),
    [
        ("c.yaml", "offload:\n  directories: /a\n  host: 1GiB\n  host: 2GiB\n", ".offload.host"),
        ("c.json", '{"offload": {"directories": "/a", "host": "1GiB", "host": "2GiB"}}', ".offload.host"),
        (
            "c.json",
            '{"a": {"b": 1, "b": 2}, "ssdtrain": {"offload": {"host": "1GiB", "host": "2GiB"}}}',
            ".offload.host",
        ),
        ("c.yaml", "report: {}\nreport: {interval: 3}\n", ".report"),
        ("c.json", '{"report": {}, "report": {"interval": 3}}', ".report"),
        ("c.json", '{"ssdtrain": {"report": {}, "report": {"interval": 3}}}', ".report"),
        ("c.json", '{"ssdtrain": {}, "ssdtrain": {"report": {}}}', ""),
    ],
)
def test_a_key_a_section_or_the_block_written_twice_is_rejected(
    tmp_path: Path, name: str, text: str, key: str
) -> None:
    error = rejected(write(tmp_path, name, text))
    (problem,) = error.problems
    assert (problem.path, problem.allowed) == (f"ssdtrain{key}", "each key once")
    assert problem.value == "2GiB" or key != ".offload.host"
    assert str(tmp_path / name) in str(error)


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("c.yaml", "", "None is all of"),
        ("c.yaml", "- offload", "is all of"),
        ("c.yaml", "ssdtrain: on\n", 'True is the key "ssdtrain" of'),
        ("c.yaml", "offload: [\n", "line 2"),
        ("c.yaml", "? [a]\n: 1\n", "is not readable as yaml"),
        ("c.yaml", "a: !!python/object/apply:os.getcwd []\n", "is not readable as yaml"),
        ("c.yaml", "offload: &x\n  directories: *x\n", "recursive"),
        ("c.yaml", "offload:\n  directories: 2024-99-99\n", "month must be in"),
        ("c.yaml", "offload: {threads: !!int 'x'}\n", "is not readable as yaml"),
        ("c.yaml", "offload: {threads: !!bool 'x'}\n", "is not readable as yaml"),
        ("c.yaml", "offload: {threads: !!timestamp 'x'}\n", "is not readable as yaml"),
        ("c.yaml", "offload: {deadline: !!float 'x'}\n", "is not readable as yaml"),
        ("c.yaml", "offload: {host: 0x_}\n", "is not readable as yaml"),
        pytest.param("c.json", '{"a": ' + "9" * 5000 + "}", "is not readable as json", id="5000 digits"),
        ("c.json", '{"offload": ', "line 1"),
        (
            "c.json",
            '{"ssdtrain": {}, "offload": {}}',
            'beside the key "ssdtrain"; allowed: inside "ssdtrain"',
        ),
        ("c.toml", "", "no known suffix; allowed: a .yaml, .yml or .json file"),
    ],
)
def test_a_file_that_holds_no_block_is_rejected(tmp_path: Path, name: str, text: str, said: str) -> None:
    file = write(tmp_path, name, text)
    message = str(rejected(file))
    assert said in message
    assert "ssdtrain" in message and str(file) in message


def test_a_file_that_is_not_there_or_is_not_text_is_rejected(tmp_path: Path) -> None:
    assert "No such file" in str(rejected(tmp_path / "absent.yaml"))
    binary = tmp_path / "c.yaml"
    binary.write_bytes(b"\xff\xfe\x00")
    assert "cannot be read" in str(rejected(binary))


def test_a_byte_order_mark_is_no_content(tmp_path: Path) -> None:
    file = tmp_path / "c.json"
    file.write_bytes(b"\xef\xbb\xbf" + json.dumps(MINIMUM).encode())
    assert load_config(file) == load_config(MINIMUM)


def test_reading_a_config_needs_no_torch() -> None:
    for file in Path(package.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not any(name.split(".")[0] == "torch" for name in names), file
