"""Leaving a key out is its default, and dict, YAML, JSON and flags ask for the same thing."""

import argparse
import copy
import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from ssdtrain.config import Config, load_config
from ssdtrain.config.flags import Flag, add_flags, config_from_namespace, flags, to_arguments
from ssdtrain.config.units import GiB, KiB, MiB

MINIMUM: dict[str, Any] = {
    "offload": {"directories": ["/nvme0"]},
    "comm": {},
    "compact": {},
    "plan": {"mode": "auto"},
    "state": {"directories": ["/nvme1"]},
}


def minimum_of(flag: Flag) -> dict[str, Any]:
    """The sections that the flag's key needs. A plan does not keep to the endurance of the drives, and rejects it."""
    return {"offload": {"directories": ["/nvme0"], "endurance": {}}} if "endurance" in flag.keys else MINIMUM


def default_of(flag: Flag) -> Any:
    """A key's default where its section is there and says nothing but where to offload to."""
    value: Any = load_config(minimum_of(flag))
    for key in flag.keys:
        value = getattr(value, key)
    return value


@pytest.mark.parametrize(
    "flag", [flag for flag in flags() if flag.keys[-1] != "directories"], ids=lambda flag: flag.path
)
def test_writing_a_default_equals_leaving_the_key_out(flag: Flag) -> None:
    value = default_of(flag)
    minimum = minimum_of(flag)
    block = copy.deepcopy(minimum)
    place = block
    for key in flag.keys[:-1]:
        place = place.setdefault(key, {})
    place[flag.keys[-1]] = None if value is None else flag.kind.plain(value)
    assert load_config(block) == load_config(minimum)
    assert load_config(block).to_dict() == minimum


sizes = st.integers(1 * MiB, 2**50) | st.integers(1, 4096).map(lambda n: f"{n}MiB")
small = st.integers(1, 512 * KiB) | st.sampled_from(["64KiB", "0.5MB", "1e5"])
below_buffer = st.integers(1, GiB) | st.sampled_from(["1MiB", "0.5GiB", "1GB"])
amounts = (
    st.sampled_from(["all", "auto", "60%", "0.25", "512MiB", "0B", 1])
    | st.floats(0, 1, allow_nan=False)
    | st.integers(0, 2**40).map(lambda n: f"{n}B")
)
offloads = st.fixed_dictionaries(
    {"directories": st.sampled_from(["/a", ["/a"], ["/a", "/b/{rank}/{user}"], ["spill", "~/spill"]])},
    optional={
        "capacity": sizes,
        "host": sizes,
        "amount": amounts,
        "min_bytes": small,
        "buffer": st.integers(1, 64).map(lambda n: f"{n}GiB"),
        "in_flight": below_buffer,
        "prefetch": below_buffer,
        "deadline": st.floats(0, 86400, allow_nan=False) | st.sampled_from(["10s", "500ms", 3]),
        "threads": st.integers(1, 64),
        "engine": st.sampled_from(["auto", "c", "python"]),
        "direct": st.sampled_from(["auto", "on", "off", True, False]),
        "on_full": st.sampled_from(["keep", "raise"]),
    },
)
checkpoints = st.fixed_dictionaries(
    {},
    optional={
        "preserve_rng_state": st.booleans(),
        "early_stop": st.booleans(),
        "determinism_check": st.sampled_from(["default", "none"]),
    },
) | st.fixed_dictionaries({"use_reentrant": st.booleans()})
reports = st.fixed_dictionaries(
    {}, optional={"interval": st.integers(0, 10**6), "path": st.sampled_from(["runs", "/runs/{host}"])}
)
rules = st.sampled_from(["int8", "off", False, "off/int8", "int8/int4:block=64,hadamard@64KiB"])
comms = st.fixed_dictionaries(
    {"preset": st.sampled_from(["safe", "balanced", "paper-zhybrid"])},
    optional={
        "dp": rules,
        "pp_backward": rules,
        "min_bytes": sizes,
        "exclude": st.sampled_from(["norm", ["none"], ["bias", "*.router.*"]]),
        "feedback": st.sampled_from(["int8", "fp32"]),
        "adapt": st.floats(0.01, 0.99),
        "two_hop": st.sampled_from(["auto", True]),
        "probe": st.booleans(),
        "warmup_steps": st.integers(0, 1000),
    },
)
plans = st.sampled_from(["auto", "off", False, {}]) | st.fixed_dictionaries(
    {},
    optional={
        "mode": st.sampled_from(["auto", "off"]),
        "device_limit": sizes,
        "objective": st.just("memory"),
        "max_slowdown": st.floats(0.0, 9.0),
        "recompute": st.sampled_from(["auto", "on", "off", True, False]),
        "blocks": st.sampled_from([[], ["layers.*"]]),
    },
)
blocks = st.fixed_dictionaries(
    {},
    optional={
        "enabled": st.booleans(),
        "offload": offloads,
        "checkpoint": checkpoints,
        "report": reports,
        "comm": comms,
    },
) | st.fixed_dictionaries({"plan": plans}, optional={"report": reports})


def parse(arguments: list[str]) -> Config | None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_flags(parser)
    return config_from_namespace(parser.parse_args(arguments))


@settings(deadline=None, max_examples=60)
@given(blocks)
def test_a_config_survives_dict_yaml_json_and_flags(block: dict[str, Any]) -> None:
    config = load_config(block)
    plain = config.to_dict()
    assert load_config(plain) == config
    assert json.loads(json.dumps(plain)) == plain
    with tempfile.TemporaryDirectory() as folder:
        in_yaml, in_json = Path(folder, "c.yaml"), Path(folder, "c.json")
        in_yaml.write_text(yaml.safe_dump(plain))
        in_json.write_text(json.dumps({"zero_optimization": {"stage": 2}, "ssdtrain": plain}))
        assert load_config(in_yaml) == load_config(in_json) == config
        assert parse(["--ssdtrain-config", str(in_yaml)]) == config
    assert (parse(to_arguments(config)) or Config()) == config
    assert hash(config) == hash(load_config(plain))


def test_sections_given_as_objects_are_taken_as_they_are() -> None:
    config = load_config(MINIMUM)
    sections = {
        name: getattr(config, name) for name in ("offload", "comm", "compact", "plan", "state", "report")
    }
    assert load_config(sections) == config


def test_sizes_reach_the_engine_as_plain_ints() -> None:
    offload = load_config({"offload": {"directories": "/a", "host": "1GiB", "capacity": "0.5TB"}}).offload
    assert offload.directories == ("/a",)
    for value in (offload.host, offload.capacity, offload.min_bytes):
        assert type(value) is int
    assert (offload.host, offload.capacity) == (GiB, 500 * 10**9)
