"""Installed and tested versions of packages, determined without importing them."""

import re
from importlib.metadata import PackageNotFoundError, version

TESTED = {
    "torch": ("2.13.0", "2.14.1", "2.15.0"),
    "deepspeed": ("0.16.9", "0.17.6", "0.18.9", "0.19.8"),
    "megatron-core": ("0.14.0", "0.15.3", "0.16.1"),
    "transformers": ("5.23.0",),
    "accelerate": ("1.15.0",),
    "peft": ("0.21.2",),
    "trl": ("1.16.0",),
    "lightning": ("2.6.6",),
}
"""Versions that the tests were run with; others produce a warning."""

OLDEST = {"torch": (2, 6)}
"""Minimum versions."""


def installed(package: str) -> str | None:
    """The version, without a local part such as "+cpu"; None if the package is not installed."""
    try:
        return version(package).partition("+")[0]
    except PackageNotFoundError:
        return None


def too_old(package: str, found: str) -> bool:
    oldest = OLDEST.get(package)
    # "2.6.0rc1": only the leading numbers are compared.
    return (
        oldest is not None and tuple(int(part) for part in re.findall(r"\d+", found)[: len(oldest)]) < oldest
    )
