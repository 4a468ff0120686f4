"""Plan searches beside a profiler that records every Python call of the thread that trains."""

from __future__ import annotations

import sys
import threading
from typing import Any

import pytest
from torch.profiler import ProfilerActivity, profile

from ssdtrain.planner.model.types import Block, Machine, Tier, one_after_the_other
from ssdtrain.planner.plans import Limits, NoPlan, SearchProblem, actions_for
from ssdtrain.planner.search import search
from tests.planner.offloads import choose_offloads

BLOCKS = [Block(f"block {number}", 0.01, 0.02, 100, recompute=0.01, inputs=10) for number in range(8)]
MACHINE = Machine((Tier("ssd", 1e4, 1e4),))


def problem() -> SearchProblem:
    return SearchProblem([BLOCKS], one_after_the_other(), MACHINE, actions_for(MACHINE))


@pytest.mark.slow
def test_a_torch_profiler_with_stacks_does_not_record_the_search() -> None:
    with profile(activities=[ProfilerActivity.CPU], with_stack=True) as profiler:
        found = search(problem(), Limits(500), exact=100)
        chosen = choose_offloads([BLOCKS], one_after_the_other(), MACHINE)
    assert len(profiler.events()) < 2000  # a search calls some hundred thousand functions
    assert found[0] == search(problem(), Limits(500), exact=100)[0]
    assert chosen.choices == choose_offloads([BLOCKS], one_after_the_other(), MACHINE).choices


def test_a_profiled_thread_waits_for_the_search_and_gets_its_errors() -> None:
    calls: list[str] = []

    def record(frame: Any, event: str, _: Any) -> None:
        if threading.current_thread() is threading.main_thread() and event == "call":
            calls.append(frame.f_code.co_name)

    sys.setprofile(record)
    try:
        with pytest.raises(NoPlan, match="the smallest peak"):
            search(problem(), Limits(1), exact=100)
    finally:
        sys.setprofile(None)
    assert "simulate" not in calls
