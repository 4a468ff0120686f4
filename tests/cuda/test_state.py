"""The section `state` on the device, whose work comes late: the bits of the same training without chunks."""

from __future__ import annotations

from collections.abc import Iterator

import emulated_cuda
import pytest
import torch

from tests.state import test_equality
from tests.state.conftest import Attach


@pytest.fixture
def later() -> Iterator[None]:
    """As `late`, by less: the host waits for each checksum."""
    with emulated_cuda.settings(delay_ms=1, h2d_gbps=1, d2h_gbps=1):
        yield


RECIPES = [
    "foreach",
    "fused",
    "sgd-momentum",
    "clipping-accumulation-schedule",
    "recompute-reentrant",
    "tied",
    "autocast",
]


@pytest.mark.usefixtures("later")
@pytest.mark.parametrize("name", RECIPES)
def test_equal_to_the_bit(name: str, device: torch.device, attach: Attach) -> None:
    with device:
        test_equality.test_equal_to_the_bit(name, attach)


@pytest.mark.usefixtures("later")
@pytest.mark.parametrize("tier", ["ssd", "host"])
def test_equal_in_every_tier(tier: str, device: torch.device, attach: Attach) -> None:
    with device:
        test_equality.test_equal_in_every_tier_and_way(tier, True, attach)


@pytest.mark.usefixtures("later")
def test_equal_with_activations_offloaded(device: torch.device, attach: Attach) -> None:
    with device:
        test_equality.test_equal_with_activations_offloaded("c", attach)


@pytest.mark.usefixtures("later")
def test_equal_where_only_one_chunk_fits(device: torch.device, attach: Attach) -> None:
    with device:
        test_equality.test_equal_where_only_one_chunk_fits(attach)
