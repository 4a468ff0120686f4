import math

import pytest

from examples.support.result import RunResult
from tests.examples.support.runs import result, spilling


def test_missing_and_unknown_keys_are_named() -> None:
    record = result().to_json()
    del record["losses"]
    record["bytes_wrote"] = 3
    with pytest.raises(ValueError, match=r"missing keys \['losses'\], unknown keys \['bytes_wrote'\]"):
        RunResult.from_json(record)


def test_a_difference_in_the_last_bit_of_one_loss_is_found() -> None:
    losses = result().losses
    nudged = [losses[0], math.nextafter(4.25, 5).hex(), losses[2]]
    difference = spilling(losses=nudged).differs_from(result())
    assert difference is not None
    assert "step 2" in difference and nudged[1] in difference and losses[1] in difference


def test_different_weights_after_equal_losses_are_a_difference() -> None:
    difference = spilling(weights_sha256="cd" * 32).differs_from(result())
    assert difference is not None and "weights" in difference


def test_runs_of_different_length_differ() -> None:
    difference = spilling(losses=result().losses[:2]).differs_from(result())
    assert difference == "ssdtrain has 2 steps, keep has 3"
