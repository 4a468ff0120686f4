"""Which rows of a parametrised test `make test` runs."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest


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
