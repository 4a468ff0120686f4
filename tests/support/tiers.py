"""Which rows of a parametrised test `make test` runs."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest
import torch

from tests.support.processes import DEVICE


def tiered(values: Iterable[Any], quick: Collection[Any]) -> list[Any]:
    """`values` for `pytest.mark.parametrize` or a fixture's `params`; those that are not in `quick` are slow. A tuple has the
    values of several arguments."""
    return [
        value
        if value in quick
        else pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=pytest.mark.slow)
        for value in values
    ]


def tier(name: str, quick: Collection[str], slow: Collection[str]) -> list[pytest.MarkDecorator]:
    """The marker of the tier that trains the row."""
    if name in quick:
        return []
    return [pytest.mark.slow if name in slow else pytest.mark.long]


def on_devices(ranks: int) -> list[pytest.MarkDecorator]:
    """Skips a row whose ranks have a CUDA device each, where there are fewer."""
    if DEVICE != "cuda" or torch.cuda.device_count() >= ranks:
        return []
    return [pytest.mark.skip(reason=f"{ranks} ranks on {torch.cuda.device_count()} CUDA devices")]
