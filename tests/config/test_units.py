"""Sizes, durations and fractions read what people write, exactly, and reject what has two readings."""

from fractions import Fraction

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ssdtrain.config import (
    Amount,
    InvalidValue,
    exact_size,
    format_duration,
    format_size,
    parse_amount,
    parse_duration,
    parse_fraction,
    parse_size,
)
from ssdtrain.config.units import LARGEST_SIZE, SIZE_UNITS

units = st.sampled_from(sorted(SIZE_UNITS))
quick = settings(deadline=None, max_examples=200)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("64MiB", 64 * 2**20),
        ("0.5TB", 500_000_000_000),
        ("1e9", 10**9),
        (67108864, 67108864),
        (1e9, 10**9),
        ("512", 512),
        (" 2 GiB ", 2**31),
        ("1.5KiB", 1536),
        (".5KB", 500),
        ("64mib", 64 * 2**20),
        ("64MIB", 64 * 2**20),
        ("64mb", 64 * 10**6),
        ("7b", 7),
        ("0", 0),
        ("1PiB", 2**50),
    ],
)
def test_sizes_read_as_written(text: object, size: int) -> None:
    assert parse_size(text) == size
    assert type(parse_size(text)) is int


@pytest.mark.parametrize(
    ("value", "why"),
    [
        ("64M", 'unknown unit "M" (did you mean "MiB" or "MB"?)'),
        ("64Mb", 'unknown unit "Mb"'),
        ("64Kib", 'unknown unit "Kib"'),
        ("3 potatoes", 'unknown unit "potatoes"'),
        ("1EB", 'unknown unit "EB"'),
        ("60%", 'unknown unit "%"'),
        ("MiB", "not a number"),
        ("", "not a number"),
        ("1_000", "not a number"),
        ("0x10", "not a number"),
        ("1 2", "not a number"),
        ("-1MiB", "negative"),
        (-1, "negative"),
        (1.5, "not a whole number of bytes"),
        ("0.5", "not a whole number of bytes"),
        (float("nan"), "not finite"),
        (float("inf"), "not finite"),
        ("nan", "not a number"),
        (True, "is a bool"),
        (None, "is a NoneType"),
        ([1], "is a list"),
        (2**63, "more than 2**63 - 1"),
        ("1e999999", "more than 2**63 - 1"),
        ("9e999999PB", "more than 2**63 - 1"),
        pytest.param(10**400, "more than 2**63 - 1", id="400 digits"),
        pytest.param(10**5000, "more than 2**63 - 1", id="5000 digits"),
        ("99999PiB", "more than 2**63 - 1"),
    ],
)
def test_what_is_no_size_is_rejected_with_the_reason_and_the_units(value: object, why: str) -> None:
    with pytest.raises(InvalidValue) as rejection:
        parse_size(value)
    assert why in rejection.value.why
    assert "64MiB" in rejection.value.allowed
    assert all(unit in rejection.value.allowed for unit in SIZE_UNITS)


@quick
@given(st.integers(0, 10**6), st.integers(0, 999), units)
def test_a_size_is_the_number_times_the_unit_rounded_down(whole: int, thousandths: int, unit: str) -> None:
    text = f"{whole}.{thousandths:03}"
    exact = Fraction(text) * SIZE_UNITS[unit]
    if exact > LARGEST_SIZE:
        with pytest.raises(InvalidValue):
            parse_size(text + unit)
    else:
        assert parse_size(text + unit) == exact.numerator // exact.denominator


@quick
@given(st.integers(0, LARGEST_SIZE) | st.builds(lambda n, u: n * SIZE_UNITS[u], st.integers(0, 4096), units))
@example(LARGEST_SIZE)
def test_exact_size_loses_nothing(size: int) -> None:
    assert parse_size(exact_size(size)) == size


@quick
@given(st.integers(0, 2**62))
@example(1023)
@example(1024**2 - 1)
@example(1024**3 - 1)
def test_format_size_is_within_half_a_percent_and_short(size: int) -> None:
    text = format_size(size)
    assert abs(parse_size(text) - size) <= 0.0051 * size + 1
    assert len(text) <= 7


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0B"), (512, "512B"), (1024, "1KiB"), (1536, "1.5KiB"), (2**20 - 1, "1MiB"), (64 * 2**20, "64MiB")],
)
def test_format_size_reads_well(size: int, text: str) -> None:
    assert format_size(size) == text
    assert size == 0 or format_size(-size) == f"-{text}"


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        (10, 10.0),
        (0.5, 0.5),
        ("10s", 10.0),
        ("500ms", 0.5),
        ("80us", 80e-6),
        ("2min", 120.0),
        ("24h", 86400.0),
    ],
)
def test_durations_read_as_written(value: object, seconds: float) -> None:
    assert parse_duration(value) == seconds
    assert parse_duration(format_duration(seconds)) == seconds


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0s"),
        (80e-6, "80us"),
        (2e-8, "0.02us"),
        (0.0123, "12.3ms"),
        (1, "1s"),
        (90, "1.5min"),
        (-2, "-2s"),
    ],
)
def test_format_duration_reads_well(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text
    assert format_duration(float("inf")) == "inf"


@pytest.mark.parametrize(
    "value",
    ["10 sec", "5m", -1, float("inf"), "1e999", "", None, False, "10%", 86401, "1441min", 1e300, "9e999999h"],
)
def test_what_is_no_duration_is_rejected(value: object) -> None:
    with pytest.raises(InvalidValue) as rejection:
        parse_duration(value)
    assert "500ms" in rejection.value.allowed


@pytest.mark.parametrize(
    ("value", "fraction"), [(0.6, 0.6), ("0.6", 0.6), ("60%", 0.6), (0, 0.0), ("100 %", 1.0)]
)
def test_fractions_read_as_written(value: object, fraction: float) -> None:
    assert parse_fraction(value) == fraction


@pytest.mark.parametrize("value", [1.01, "101%", -0.1, "0.5x", "half", None, True])
def test_what_is_no_fraction_is_rejected(value: object) -> None:
    with pytest.raises(InvalidValue) as rejection:
        parse_fraction(value)
    assert "60%" in rejection.value.allowed


@pytest.mark.parametrize(
    ("value", "amount"),
    [
        ("all", Amount("all")),
        ("ALL", Amount("all")),
        (1, Amount("all")),
        ("100%", Amount("all")),
        (0.6, Amount("fraction", 0.6)),
        ("0.6", Amount("fraction", 0.6)),
        ("60%", Amount("fraction", 0.6)),
        (0, Amount("fraction", 0.0)),
        ("512MiB", Amount("keep", 512 * 2**20)),
        ("0B", Amount("keep", 0)),
        ("auto", Amount("auto")),
        (Amount("keep", 5), Amount("keep", 5)),
    ],
)
def test_an_amount_is_all_a_fraction_or_bytes_to_keep(value: object, amount: Amount) -> None:
    assert parse_amount(value) == amount
    assert parse_amount(amount.plain()) == amount


@pytest.mark.parametrize(
    ("value", "why"),
    [
        (60, "is more than 1 and has no unit"),
        ("512", "is more than 1 and has no unit"),
        ("120%", "is more than 1"),
        ("some", "is not a number with or without a unit"),
        ("5M", 'has the unknown unit "M" (did you mean "MiB" or "MB"?)'),
        ("-1MiB", "is negative"),
        (-0.5, "is negative"),
        (None, "is a NoneType"),
        (True, "is a bool"),
        ("", "is not a number with or without a unit"),
    ],
)
def test_an_unclear_amount_is_rejected(value: object, why: str) -> None:
    with pytest.raises(InvalidValue) as rejection:
        parse_amount(value)
    assert rejection.value.why == why
    assert all(word in rejection.value.allowed for word in ['"all"', "60%", "512MiB"])


@pytest.mark.parametrize(
    ("kind", "value"), [("all", 0.5), ("fraction", 1.0), ("fraction", -0.1), ("keep", -1), ("some", 1)]
)
def test_no_impossible_amount_can_be_made(kind: str, value: float) -> None:
    with pytest.raises(InvalidValue):
        Amount(kind, value)
