import io

import pytest

from ssdtrain.telemetry.lines import read_lines, write_line
from ssdtrain.text import duration_text, ratio_text, size_text


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (1288490189, "1.20 GiB"),
        (875 * 2**20, "875 MiB"),
        (1023.99 * 2**20, "1024 MiB"),
        (-3 * 2**20, "-3.00 MiB"),
        (5000 * 2**40, "5000 TiB"),
    ],
)
def test_sizes_have_three_digits_and_the_unit_that_fits(size: float, text: str) -> None:
    assert size_text(size) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (0.00344, "3.44 ms"),
        (9.999, "10.0 s"),
        (99.96, "1.67 min"),
        (27.6 * 86400, "27.6 days"),
        (1e8, "3.17 years"),
        (2e-9, "2.0e-09 s"),
        (float("inf"), "unlimited"),
    ],
)
def test_durations_have_three_digits_and_the_unit_that_fits(seconds: float, text: str) -> None:
    assert duration_text(seconds) == text


def test_a_ratio_needs_a_base() -> None:
    assert ratio_text(3, 10) == "x0.30"
    assert ratio_text(3, 0) == ""


def test_lines_come_back_as_they_were_written() -> None:
    stream = io.StringIO()
    records = [{"step": 1, "loss": 0.1}, {"text": "a\nb"}]
    for record in records:
        write_line(stream, record)
    assert list(read_lines(stream.getvalue().splitlines())) == records


def test_a_line_is_there_as_soon_as_it_is_written(tmp_path) -> None:
    with (tmp_path / "lines").open("w") as stream:
        write_line(stream, {"step": 1})
        assert (tmp_path / "lines").read_text() == '{"step": 1}\n'


def test_numbers_that_json_does_not_have_are_rejected() -> None:
    with pytest.raises(ValueError):
        write_line(io.StringIO(), {"loss": float("nan")})


@pytest.mark.parametrize(("line", "why"), [("{'a': 1}", "line 2 is not JSON"), ("[1]", "line 2 is a list")])
def test_a_line_that_is_no_object_is_named(line: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        list(read_lines(["{}", line]))
