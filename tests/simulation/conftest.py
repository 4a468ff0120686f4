"""What tests on the simulated device share."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any, TypeVar

import pytest

from tests.simulation.streams import Streams
from tests.support.simulated.training import LayerTimes

Made = TypeVar("Made", bound=Any)


def until_closed(made: Made) -> Iterator[Made]:
    """Of a fixture: `made`, whose engine and machine are closed after the test."""
    yield made
    made.machine.close()


@pytest.fixture
def streams() -> Iterator[Streams]:
    yield from until_closed(Streams())


def random_layers(generator: random.Random) -> tuple[LayerTimes, ...]:
    """Layers of any times, which save up to four tensors each."""
    return tuple(
        LayerTimes(
            generator.uniform(1e-4, 4e-3),
            generator.uniform(1e-4, 8e-3),
            tuple(generator.choice((4096, 10_000, 65_536, 300_000)) for _ in range(generator.randint(1, 4))),
        )
        for _ in range(generator.randint(4, 14))
    )
