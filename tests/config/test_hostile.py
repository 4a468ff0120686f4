"""Whatever a config holds, reading it ends with a config, or with an error that names the key."""

import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from ssdtrain.config import Config, ConfigError, ConfigIssue, load_config
from ssdtrain.config.errors import ConflictingValues
from ssdtrain.config.files import LARGEST_FILE, read_block
from ssdtrain.config.flags import flags


def outcome(source: Any) -> Config | ConfigError:
    """What `load_config` returns or raises; anything but a config and a ConfigError fails."""
    try:
        return load_config(source)
    except ConfigError as error:
        str(error).encode()  # a stream can write it
        return error


def message(source: Any) -> str:
    found = outcome(source)
    assert isinstance(found, ConfigError)
    return str(found)


def write(folder: Path, text: str, name: str = "c.yaml") -> Path:
    file = folder / name
    file.write_text(text, encoding="utf-8")
    return file


def test_merges_keep_their_meaning(tmp_path: Path) -> None:
    text = "one: &one {host: 1GiB, threads: 2}\nssdtrain:\n  offload:\n    <<: *one\n    threads: 7\n"
    assert read_block(write(tmp_path, text))["offload"] == {"host": "1GiB", "threads": 7}
    inline = "ssdtrain:\n  offload: {<<: &m {<<: {host: 1GiB}, host: 2GiB}}\n  report: *m\n"
    assert "several values" not in message(write(tmp_path, inline))
    assert "expected a mapping" in message(write(tmp_path, "a: {<<: [x]}\n"))


@pytest.mark.parametrize("count", [20, 21, 22])
def test_many_unknown_keys_are_counted(count: int) -> None:
    found = outcome({f"key{n}": n for n in range(count)})
    assert isinstance(found, ConfigError)
    assert len(found.problems) == min(count, 21)
    more = count - 21
    assert ("more are set" in str(found)) == (count > 20)
    assert count <= 20 or f"ssdtrain: 'key20' and {more} more are set" in str(found)
    assert len(str(found)) < 10_000


def test_a_large_file_is_rejected(tmp_path: Path) -> None:
    assert "64 KiB" in message(write(tmp_path, "#" * (LARGEST_FILE + 1)))
    assert "64 KiB" not in message(write(tmp_path, "#" * LARGEST_FILE))


@pytest.mark.parametrize(
    "text", ["[" * 5_000, "{" * 5_000, "- " * 30_000, "a: [" * 10_000], ids=lambda t: t[:4]
)
@pytest.mark.parametrize("name", ["c.yaml", "c.json"])
def test_deep_nesting_is_rejected(tmp_path: Path, text: str, name: str) -> None:
    assert f"not readable as {name[2:]}" in message(write(tmp_path, text, name))


def test_what_is_no_regular_file_is_rejected(tmp_path: Path) -> None:
    pipe = tmp_path / "c.yaml"
    os.mkfifo(pipe)  # nobody writes into it: opening it would wait for ever
    assert "not a regular file" in message(pipe)
    (tmp_path / "d.yaml").mkdir()
    assert "not a regular file" in message(tmp_path / "d.yaml")


@pytest.mark.parametrize(
    "name",
    [
        "~nosuchuser/c.yaml",
        "a\0b.yaml",
        "x" * 300 + ".yaml",
        "a/" * 3000 + "c.yaml",
        "\ud800.yaml",
        "\udc80.json",
    ],
    ids=["home", "NUL", "long name", "long path", "surrogate", "escaped byte"],
)
def test_a_name_that_no_file_can_have_is_rejected(name: str) -> None:
    assert "cannot be read" in message(name)


@pytest.mark.parametrize(
    ("directory", "why"),
    [
        ("x" * 256, "too long"),
        ("/" + "é" * 128, "too long"),
        ("a/" * 2048, "too long"),
        ("~" + "x" * 10**6, "too long"),
        ("~nosuchuser/x", "no home directory"),
        ("/a\0b", "names no directory"),
        ("/a\ud800", "UTF-8 cannot encode"),
        ("/a\udc80", "UTF-8 cannot encode"),
    ],
    ids=["name", "bytes", "path", "home", "user", "NUL", "surrogate", "escaped byte"],
)
@pytest.mark.parametrize("key", ["offload.directories", "report.path"])
def test_a_directory_that_no_system_can_have_is_rejected(directory: str, why: str, key: str) -> None:
    section, name = key.split(".")
    text = message({section: {name: directory}})
    assert f"ssdtrain.{key}: " in text and why in text


def test_keys_are_shown_so_that_every_stream_can_write_them() -> None:
    assert "ssdtrain.'\\ud800'" in message({"\ud800": 1})
    assert "ssdtrain.'a\\nb'" in message({"a\nb": 1})


@pytest.mark.parametrize("flag", list(flags()), ids=lambda flag: flag.path)
@pytest.mark.parametrize(
    "value",
    [
        1 << 10_000_000,
        -(1 << 10_000_000),
        "9" * 10**6,
        "1" + "0" * 10**5 + "GiB",
        "0e999999",
        "x" * 10**6,
        [[]] * 10**6,
    ],
    ids=["huge", "negative", "digits", "sized digits", "exponent", "text", "list"],
)
def test_a_huge_value_is_judged_at_once(flag: Any, value: Any) -> None:
    block: dict[str, Any] = {}
    place = block
    for key in flag.keys[:-1]:
        place = place.setdefault(key, {})
    place[flag.keys[-1]] = value
    found = outcome(block)
    assert isinstance(found, Config) or len(str(found)) < 2_000


words = (
    st.sampled_from(
        [key for flag in flags() for key in flag.keys] + ["ssdtrain", "ssdtrian", "<<", "=", "auto", "off"]
    )
    | st.text(max_size=8)
    | st.text(st.characters(codec=None, categories=["Cs", "Cc", "Lo", "Nd"]), max_size=4)
)
scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-(10**6000), 10**6000)
    | st.floats(allow_nan=True)
    | st.sampled_from(
        [
            "1GiB",
            "60%",
            "0e99999",
            "int8:block=64",
            "lossless",
            "int8/off@1KiB",
            "/a/{rank}",
            "~nouser/x",
            "a\0b",
        ]
    )
    | words
)
structures = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(words | st.integers() | st.booleans(), inner, max_size=4)
    ),
    max_leaves=25,
)
blocks = st.dictionaries(words, structures, max_size=5) | st.fixed_dictionaries(
    {},
    optional={
        flag.keys[0]: structures
        if len(flag.keys) == 1
        else st.dictionaries(
            st.sampled_from([f.keys[1] for f in flags() if f.keys[0] == flag.keys[0]]) | words, structures
        )
        for flag in flags()
    },
)
FUZZ = settings(
    deadline=None,
    max_examples=50,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)


@pytest.mark.slow
@FUZZ
@given(blocks)
def test_any_block_is_a_config_or_rejected(block: dict[Any, Any]) -> None:
    outcome(block)


MARKS = (
    "ssdtrain:|offload:|directories|host| |\n|\n  |- |? |: |&a |*a|<<: |{|}|[|]|, |!!int |!!set |!!omap |!!binary |!!timestamp "
    "|!!python/name:os.system |0x_|1:60:60|'|\"|\\ud800|# |---\n|%YAML 1.1\n|=|~|null|\ufeff|\u2028|\x85"
)
pieces = st.sampled_from([*MARKS.split("|"), "|\n"]) | st.text(max_size=3)


@FUZZ
@given(st.lists(pieces, max_size=60).map("".join), st.sampled_from(["c.yaml", "c.json"]))
@example("a: &a {<<: *a}", "c.yaml")
@example('{"a": NaN, "offload": {"host": Infinity, "deadline": -Infinity}}', "c.json")
@example("offload: {deadline: .nan, host: 1:60:60, threads: 0o17}", "c.yaml")
def test_any_text_is_a_config_or_rejected(tmp_path: Path, text: str, name: str) -> None:
    file = tmp_path / name
    file.write_bytes(text.encode("utf-8", "surrogatepass"))
    outcome(file)


LONG = "x" * 20_000


@pytest.mark.parametrize(
    ("block", "key"),
    [
        ({"compact": {"ratio": {LONG: "bad"}}}, "ssdtrain.compact.ratio"),
        ({"offload": {"directories": ["/a/" + "b/" * 1900] * 2}}, "ssdtrain.offload.directories"),
        ({"offload": {LONG: 1}}, "ssdtrain.offload.'xxx"),
        ({"comm": {f"{number}{LONG}": LONG for number in range(99)}}, "ssdtrain.comm.'0xxx"),
        ({f"{section}{LONG}": {} for section in range(99)}, "ssdtrain.'0xxx"),
    ],
    ids=["pattern", "directory", "key", "dimensions", "sections"],
)
def test_long_values_are_shortened_and_key_start_and_remedy_stay(block: dict[str, Any], key: str) -> None:
    text = message(block)
    assert len(text) < 10_000 and max(map(len, text.splitlines())) < 1300
    assert key in text and "; allowed: " in text


def test_of_many_errors_the_first_are_listed_with_how_many_there_are() -> None:
    problems = [
        ConfigIssue(f"ssdtrain.offload.directories[{i}]", LONG, f"is {LONG}", LONG) for i in range(500)
    ]
    text = str(ConfigError(problems, source=f"/{LONG}.json"))
    assert (
        "(500 errors)" in text
        and "directories[20]" in text
        and text.endswith("and 479 more, shown once these are right")
    )
    assert len(text) < 30_000
    assert len(str(ConflictingValues([("offload.codec", LONG, LONG, "none")]))) < 1000
