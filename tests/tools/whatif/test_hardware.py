import pytest

from ssdtrain.config.errors import InvalidValue
from ssdtrain.tools.whatif.hardware import GPUS, Ssds, find_gpu, parse_rate, parse_ssds


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("h100", "h100"),
        ("H100 SXM", "h100"),
        ("A100-80GB", "a100"),
        ("4090", "rtx4090"),
        ("NVIDIA GB200", "gb200"),
    ],
)
def test_gpus_are_found_as_people_write_them(written: str, name: str) -> None:
    assert find_gpu(written) is GPUS[name]


def test_an_unknown_gpu_is_an_error_that_names_the_known_ones() -> None:
    with pytest.raises(InvalidValue, match=r'did you mean "h100".*gb200'):
        find_gpu("h10")


def test_every_gpu_is_plausible() -> None:
    for gpu in GPUS.values():
        assert 50e12 < gpu.flops < 5e15
        assert gpu.memory_rate > gpu.host_rate >= 16e9
        assert gpu.source


@pytest.mark.parametrize(
    ("written", "drives"),
    [
        ("7GB/s", Ssds(1, 7e9, 7e9)),
        ("4 x 7GB/s", Ssds(4, 7e9, 7e9)),
        ("4x7GB/s, write 5GB/s", Ssds(4, 7e9, 5e9)),
        ("2 x 14GB/s, 1TB, 1 DWPD", Ssds(2, 14e9, 14e9, 10**12, 1825e12)),
        ("8 x 7GB/s, 7PB written", Ssds(8, 7e9, 7e9, 0, 7e15)),
    ],
)
def test_drives_are_read(written: str, drives: Ssds) -> None:
    assert parse_ssds(written) == drives


@pytest.mark.parametrize(
    ("written", "why"),
    [
        ("7GB", "/s"),
        ("0 x 7GB/s", "no drive"),
        ("4 x 0GB/s", "rate 0"),
        ("7GB/s, 1 DWPD", "no capacity"),
        ("7GB/s, fast", "fast"),
        ("7Gb/s", "unit"),
    ],
)
def test_drives_that_cannot_be_read_say_why(written: str, why: str) -> None:
    with pytest.raises(InvalidValue, match=why):
        parse_ssds(written)


def test_rates_of_networks_may_be_in_bits() -> None:
    assert parse_rate("400 Gbit/s") == 50e9
    assert parse_rate("50GB/s") == 50e9
