import json
import math

import pytest

from examples.support.result import RunResult
from tests.examples.support.runs import result, spilling


def test_a_result_survives_json() -> None:
    run = spilling(about={"torch": "2.13.0"})
    assert RunResult.from_json(json.loads(json.dumps(run.to_json()))) == run


def test_missing_and_unknown_keys_are_named() -> None:
    record = result().to_json()
    del record["losses"]
    record["bytes_wrote"] = 3
    with pytest.raises(ValueError, match=r"missing keys \['losses'\], unknown keys \['bytes_wrote'\]"):
        RunResult.from_json(record)


def test_the_median_step_is_not_moved_by_one_slow_step() -> None:
    assert result(step_seconds=[2.0, 60.0, 2.5]).step_median == 2.5


def test_equal_runs_have_no_difference() -> None:
    assert spilling().differs_from(result()) is None


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
