"""`benchmarks.front`: ways, the front among points, and a run of it with a tiny model."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from benchmarks.front import front, ways, with_limit
from tests.support.processes import ran


def test_limits_of_plans_are_shares_of_the_peak_of_keeping_everything() -> None:
    found = {"keep": {"peak_bytes": 40 << 30}}
    assert [with_limit(way, found) for way in ("plan:0.5", "plan_exact:0.25", "recompute:3")] == [
        "plan:20.000000",
        "plan_exact:10.000000",
        "recompute:3",
    ]
    assert ways(6)[0] == "keep" and {"recompute:1", "recompute:3", "recompute:5"} < set(ways(6))


def test_the_front_has_what_no_other_way_beats_in_both() -> None:
    points = {
        "keep": {"peak": 1.0, "time": 1.0},
        "worse": {"peak": 0.8, "time": 1.4},
        "better": {"peak": 0.7, "time": 1.1},
        "least": {"peak": 0.4, "time": 1.4},
    }
    assert front(points) == ["least", "better", "keep"]


@pytest.mark.slow
def test_a_dry_run_trains_every_kind_of_way_and_draws_it(tmp_path: Path) -> None:
    plot = tmp_path / "front.png"
    words = "-m benchmarks.front --device cpu --dry-run --json --ways keep,recompute:1,host_auto,plan:0.5,host,save_on_cpu"
    run = ran([sys.executable, *words.split(), "--plot", str(plot)])
    result = json.loads(run.stdout.splitlines()[-1])
    assert result["bits_equal"] and not result["failed"] and not result["left_out"]
    # Which of the two the plan chooses depends on what this machine's memory moves in a second.
    assert (
        re.search("recompute|host", result["points"]["plan:0.5"]["plan"]) and len(result["peak_errors"]) == 2
    )
    assert plot.stat().st_size > 10_000
