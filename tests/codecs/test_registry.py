"""Codecs by name."""

import pytest

from ssdtrain.codecs import FixedSizeCodec, available, make_codec, make_fixed_size_codec
from ssdtrain.codecs.block import IntBlock
from ssdtrain.codecs.hadamard import Hadamard


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
        ("int8:blocks=64", "it takes block, round"),
        ("raw:block=64", "it takes none"),
        ("int8:block=48", "32, 64, 128, 256"),
        ("int8:block=x", "whole number"),
        ("int8:block", "needs a value"),
        ("int8:block=64,block=32", "twice"),
        ("int8:asymmetric=1", "switch"),
        ("int8:round=up", "nearest or stochastic"),
        ("int8:hadamard=48", "16, 32, 64, 128, 256"),
        ("fp8:format=e3m4", "e4m3 and e5m2"),
    ],
)
def test_a_bad_parameter_says_what_is_possible(spec: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_codec(spec)


def test_an_unknown_backend_is_refused() -> None:
    with pytest.raises(ValueError, match="auto, torch, native, triton"):
        make_codec("int8", backend="cuda")


def test_a_collective_gets_a_fixed_size() -> None:
    assert isinstance(make_fixed_size_codec("int8"), FixedSizeCodec)
