"""Formatting of bytes and seconds: three significant digits and a suitable unit."""

from ssdtrain.config.units import GiB, KiB, MiB, TiB

YEAR_SECONDS = 365.0 * 86400

_SIZES = {"TiB": TiB, "GiB": GiB, "MiB": MiB, "KiB": KiB}
_DURATIONS = {
    "years": YEAR_SECONDS,
    "days": 86400.0,
    "h": 3600.0,
    "min": 60.0,
    "s": 1.0,
    "ms": 1e-3,
    "us": 1e-6,
}


def _digits(number: float) -> str:
    """Three significant digits, without exponent: 1.23, 12.3, 123, 1234."""
    if number >= 99.95:
        return f"{number:.0f}"
    return f"{number:.1f}" if number >= 9.995 else f"{number:.2f}"


def size_text(size: float) -> str:
    """`size` in bytes: 1288490189 is "1.20 GiB", 512 is "512 B"."""
    for unit, scale in _SIZES.items():
        if abs(size) >= scale:
            return f"{'-' if size < 0 else ''}{_digits(abs(size) / scale)} {unit}"
    return f"{size:.0f} B"


def duration_text(seconds: float) -> str:
    """`seconds`: 0.0021 is "2.10 ms", 1e8 is "3.17 years". Not finite is "unlimited"."""
    if seconds != seconds or seconds in (float("inf"), float("-inf")):
        return "unlimited"
    for unit, scale in _DURATIONS.items():
        if abs(seconds) >= scale:
            return f"{'-' if seconds < 0 else ''}{_digits(abs(seconds) / scale)} {unit}"
    return "0 s" if seconds == 0 else f"{seconds:.1e} s"


def rate_text(rate: float) -> str:
    """`rate` in bytes a second, as data sheets of drives have it: 9.1e8 is "0.91 GB/s"."""
    return f"{_digits(rate / 1e9)} GB/s"


def gain_text(peak: float, whole: float, waited: float) -> str:
    """What offloading brought: "saved 22.0 MiB of 77.3 MiB (x0.72 left), waited 0.4% of the step".

    Args:
        peak: the most bytes of activations in memory.
        whole: the same had nothing left memory.
        waited: part of the step that training waited for tiers, 0 to 1.
    """
    saved = (
        f"saved {size_text(max(0.0, whole - peak))} of {size_text(whole)} ({ratio_text(peak, whole)} left)"
    )
    if peak >= whole:
        saved = f"saved nothing: activations peak at {size_text(peak)}, and at {size_text(whole)} without it"
    return f"{saved}, waited {100 * waited:.1f}% of the step"


def with_cause(limit: str, waited: float) -> str:
    """Say what keeps offloading from bringing more: as a limit of the run where it was waited for `LEAST_WAIT` or more, else as
    the reason why more was not offloaded; "" where there is none.

    Args:
        limit: what it is, such as "drive writes 0.91 GB/s, forward saves 3.10 GB/s"; "": nothing.
        waited: as in `gain_text`.
    """
    return f"{'why not more' if waited < LEAST_WAIT else 'limited by'}: {limit}" if limit else ""


LEAST_WAIT = 0.01
"""Part of the step below which a wait is no limit."""


def ratio_text(value: float, base: float) -> str:
    """`value` relative to `base`: "x0.30"; "" if `base` is 0."""
    return f"x{value / base:.2f}" if base > 0 else ""
