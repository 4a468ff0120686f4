"""The order in which backward will ask for what a forward saved."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from ssdtrain.offload.tape import Tape


def tape_of(*operators: int) -> Tape:
    """Regions of these operators, in the order in which they were saved."""
    tape = Tape()
    for operator in operators:
        region: Any = SimpleNamespace(nbytes=1, operator=operator, last_pass=-1, pending_unpacks=1)
        tape.append(region)
    return tape


def coming(tape: Tape) -> list[int]:
    return [region.index for region in tape.coming()]


def take(tape: Tape, index: int) -> None:
    """Backward asks for a region, and gets it."""
    tape.reached(index, again=False)
    region: Any = tape.regions[index]
    region.last_pass, region.pending_unpacks = tape.pass_number, 0


def test_operators_come_in_reverse_and_what_each_saved_in_its_order() -> None:
    tape = tape_of(0, 0, 1, 2, 2, 2)
    assert coming(tape) == [3, 4, 5, 2, 0, 1]


def test_the_rest_of_an_operator_comes_before_what_lies_below() -> None:
    """Else the buffers go to what is needed later, and what is needed now waits for them."""
    tape = tape_of(0, 0, 1, 1, 1)
    take(tape, 2)
    assert coming(tape) == [3, 4, 0, 1] and tape.end == 5
    take(tape, 3)
    take(tape, 4)
    assert coming(tape) == [0, 1]


def test_what_backward_has_passed_without_asking_does_not_come() -> None:
    """The loss of another head."""
    tape = tape_of(0, 1, 1, 2)
    take(tape, 0)
    assert coming(tape) == [] and tape.end == 1


@pytest.mark.parametrize("removed", [1, 2])
def test_what_was_released_is_left_out(removed: int) -> None:
    tape = tape_of(0, 1, 1, 1)
    region: Any = tape.regions[removed]
    tape.remove(region)
    assert coming(tape) == [index for index in (1, 2, 3, 0) if index != removed]
