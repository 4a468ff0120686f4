"""Codecs by name."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ssdtrain.codecs import FixedSizeCodec, available, make_codec, make_fixed_size_codec
from ssdtrain.codecs.block import IntBlock
from ssdtrain.codecs.fp8 import Float8Block
from ssdtrain.codecs.hadamard import Hadamard
from ssdtrain.codecs.lossless import Lossless
from ssdtrain.codecs.zfp import Zfp
from ssdtrain.config.codecs import CODEC_KINDS, parse_codec
from ssdtrain.config.errors import InvalidValue


def test_a_spec_with_parameters() -> None:
    codec = make_codec("int4:block=64,round=stochastic,hadamard")
    assert codec == Hadamard(IntBlock(4, 64, "stochastic"), 64)
    assert codec.spec == "int4:block=64,round=stochastic,hadamard=64"
    assert codec.unbiased


def test_every_listed_name_makes_a_codec() -> None:
    assert {make_codec(name).spec.partition(":")[0] for name in available()} == set(available())


def test_an_unknown_name_lists_what_exists() -> None:
    with pytest.raises(ValueError, match="int3") as error:
        make_codec("int3")
    assert all(name in str(error.value) for name in available())


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("int8:", "empty parameter"),
        ("lossless:", "empty parameter"),
        ("int8:block=64,", "empty parameter"),
        ("int8:block=64:block=64", "block=64:block=64"),
        ("lossless:level=23", "from 1 to 22"),
        ("zfp:rate=1e400", "2.25 to 32"),
        ("zfp:rate=nan", "2.25 to 32"),
        ("int8:blocks=64", "takes block, round"),
        ("raw:block=64", "raw takes no parameters"),
        ("int8:block=48", "32, 64, 128, 256"),
        ("int8:block=x", "32, 64, 128, 256"),
        ("int8:block", "block without a value"),
        ("int8:block=64,block=32", "twice"),
        ("int8:asymmetric=1", "asymmetric takes no value"),
        ("int8:round=up", "nearest, stochastic"),
        ("int8:hadamard=48", "16, 32, 64, 128, 256"),
        ("fp8:format=e3m4", "e4m3, e5m2"),
    ],
)
def test_a_bad_parameter_says_what_is_possible(spec: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_codec(spec)


VALUES = "0 1 2 8 16 22 23 32 48 64 96 128 256 512 2.25 2.0 8.1 1e400 nan e4m3 e5m2 e3m4 nearest stochastic up -1 ٣"
values = st.sampled_from(["", " 8", *VALUES.split()])
keys = sorted({key for kind in CODEC_KINDS.values() for key in kind.parameters})


@given(
    st.sampled_from(sorted(CODEC_KINDS)),
    st.dictionaries(st.sampled_from(keys), st.none() | values, max_size=3),
)
@settings(deadline=None, max_examples=400)
def test_the_config_accepts_what_can_be_made(name: str, given_values: dict[str, str | None]) -> None:
    """What `parse_codec` accepts the classes accept, and the reverse for every value of a parameter they have."""
    parts = [key if value is None else f"{key}={value}" for key, value in given_values.items()]
    spec = ":".join([name, ",".join(parts)]) if parts else name
    try:
        asked = parse_codec(spec)
    except InvalidValue:
        assert not all(_class_accepts(name, key, value) for key, value in given_values.items()), spec
        return
    codec = make_codec(spec)
    assert make_codec(codec.spec) == codec
    assert CODEC_KINDS[asked.name].fixed_size == isinstance(codec, FixedSizeCodec) or "sparse" in given_values
    assert CODEC_KINDS[asked.name].floats == (torch.float32 in codec.inputs)


def _class_accepts(name: str, key: str, text: str | None) -> bool:
    """Whether the codec's class takes the value, asked of the class and not of the config's table."""
    if text is None or key in ("asymmetric", "sparse"):
        return (
            text is None and key in CODEC_KINDS[name].parameters and CODEC_KINDS[name].parameters[key].switch
        )
    makers: dict[str, Callable[[], object]] = {
        "block": lambda: IntBlock(8, int(text)),
        "round": lambda: IntBlock(8, 64, text),
        "hadamard": lambda: Hadamard(IntBlock(8), int(text)),
        "format": lambda: Float8Block(text),
        "rate": lambda: Zfp(float(text)),
        "level": lambda: Lossless(int(text)),
    }
    if key not in CODEC_KINDS[name].parameters or not text.isascii() or text != text.strip():
        return False
    try:
        makers[key]()
    except ValueError:
        return False
    return True


def test_an_unknown_backend_is_rejected() -> None:
    with pytest.raises(ValueError, match="auto, torch, native, triton"):
        make_codec("int8", backend="cuda")


def test_a_collective_gets_a_fixed_size() -> None:
    assert isinstance(make_fixed_size_codec("int8"), FixedSizeCodec)
