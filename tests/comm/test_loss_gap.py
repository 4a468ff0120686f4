"""The arithmetic of the benchmarks of collectives: bounds, limits, what is paired with what."""

from __future__ import annotations

import math
import statistics
from pathlib import Path
from typing import Any

import pytest

from benchmarks.collectives import limit
from benchmarks.loss_gap import Results, figures_of, student_quantile, upper_bound


# From any printed table of Student's t.
@pytest.mark.parametrize(
    ("probability", "freedom", "value"),
    [(0.95, 1, 6.314), (0.95, 2, 2.920), (0.95, 4, 2.132), (0.975, 4, 2.776), (0.95, 30, 1.697)],
)
def test_quantiles_are_those_of_the_table(probability: float, freedom: int, value: float) -> None:
    assert student_quantile(probability, freedom) == pytest.approx(value, abs=1e-3)


def test_the_upper_bound_is_the_mean_and_its_margin() -> None:
    gaps = [0.001, 0.003, -0.002, 0.000, 0.002]
    margin = 2.132 * statistics.stdev(gaps) / math.sqrt(5)
    assert upper_bound(gaps) == pytest.approx(statistics.fmean(gaps) + margin, abs=1e-6)


def test_one_seed_gives_no_bound() -> None:
    assert math.isnan(upper_bound([0.001]))


def test_half_of_a_step_sent_five_times_smaller() -> None:
    assert limit(0.5, 5.0) == pytest.approx(1 / 0.6)
    assert limit(0.5, math.inf) == 2.0
    assert limit(0.0, 5.0) == 1.0


def run_of(layout: str, variant: str, seed: int, held_out: float) -> dict[str, Any]:
    return {"layout": layout, "variant": variant, "seed": seed, "held_out": held_out, "replicas_equal": True}


def test_each_run_is_compared_with_the_uncompressed_one_of_its_seed(tmp_path: Path) -> None:
    results = Results(tmp_path / "runs.json", {"steps": 500})
    for seed, base in enumerate((2.0, 4.0)):
        results.add(run_of("zero2", "uncompressed", seed, base))
        results.add(run_of("zero2", "safe", seed, base * 1.01))
    results.add(run_of("zero2", "safe", 2, 9.0))  # its partner is not there yet
    found = figures_of(results)
    assert found["loss_gap_mean"] == {"zero2/safe": pytest.approx(0.01)}
    assert found["loss_gap_upper95"] == {"zero2/safe": pytest.approx(0.01)}
    assert found["seeds"] == {"zero2/safe": 2}


def test_naive_against_hybrid_is_counted_in_paired_standard_errors(tmp_path: Path) -> None:
    results = Results(tmp_path / "runs.json", {})
    for seed, difference in enumerate((0.1, 0.2, 0.3)):
        results.add(run_of("pp2", "paper-zhybrid", seed, 2.0 + seed))
        results.add(run_of("pp2", "naive", seed, 2.0 + seed + difference))
    expected = 0.2 / (0.1 / math.sqrt(3))
    assert figures_of(results)["naive_worse_than_hybrid_standard_errors"]["pp2"] == pytest.approx(expected)


def test_finished_runs_are_read_again_and_other_settings_rejected(tmp_path: Path) -> None:
    path = tmp_path / "runs.json"
    Results(path, {"steps": 500}).add(run_of("zero2", "safe", 0, 2.0))
    assert Results(path, {"steps": 500}).find("zero2", "safe", 0) is not None
    with pytest.raises(SystemExit, match="give another --results"):
        Results(path, {"steps": 40})
