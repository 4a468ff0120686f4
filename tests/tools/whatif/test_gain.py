"""The sentence that says what a user gains holds what the plans say."""

from dataclasses import replace
from typing import Any

import pytest

from ssdtrain.config.errors import InvalidValue
from ssdtrain.planner.plans import NoPlan, Plan
from ssdtrain.tools.cli.main import main
from ssdtrain.tools.whatif import cluster, gain
from ssdtrain.tools.whatif.cluster import plan_job, searched, uniform_plan
from ssdtrain.tools.whatif.cluster_job import ClusterJob
from ssdtrain.tools.whatif.cluster_plan import ClusterPlan
from ssdtrain.tools.whatif.gain import RECOMPUTATION, SAME_SPEED, Gain, Largest, gain_of, largest
from ssdtrain.tools.whatif.hardware import Ssds, find_gpu, parse_ssds
from ssdtrain.tools.whatif.models import ParallelLayout, Transformer


def job(ssds: str | None, gpu: str = "a100-40gb") -> ClusterJob:
    model = Transformer.of("gpt", hidden=4096, layers=8, sequence=2048)
    drives = None if ssds is None else parse_ssds(ssds)
    return ClusterJob(model, ParallelLayout(), find_gpu(gpu), drives, node=1, batch=16)


def fits(given: ClusterJob, size: int) -> bool:
    try:
        plan_job(replace(given, batch=0), size, slowdown=SAME_SPEED)
    except (NoPlan, InvalidValue):
        return False
    return True


def kept(given: ClusterJob, size: int) -> bool:
    try:
        uniform_plan(replace(given, batch=0), size, "keep")
    except (NoPlan, InvalidValue):
        return False
    return True


def test_the_largest_that_fits_is_found_to_a_sixteenth() -> None:
    for most in (0, 1, 2, 7, 63, 64, 1000):
        found = largest(lambda size, most=most: 2.0 / size if size <= most else None)  # type: ignore[misc]
        assert most - most // 16 <= found.size <= most
        assert found.seconds == (2.0 / found.size if most else 0.0)


def test_drives_that_keep_up_gain_the_batch_that_plans_with_them_have() -> None:
    given = job("4 x 7GB/s")
    gain = gain_of(given)
    assert gain.pays
    assert kept(given, gain.kept.size) and not kept(given, gain.kept.size + 1)
    assert fits(given, gain.ours.size) and not fits(given, gain.ours.size + 1)
    plain = uniform_plan(replace(given, batch=0), gain.kept.size, "keep").microbatch_seconds / gain.kept.size
    time = gain.ours.seconds / plain
    assert 1 <= time <= 1 + SAME_SPEED
    batch = gain.ours.size / gain.kept.size
    assert gain.sentence().startswith(
        f"{batch:.2f} x the batch at {time:.2f} x the time of keeping everything; "
    )
    assert list(gain.others) == [RECOMPUTATION]


@pytest.mark.slow
def test_places_of_model_state_that_failed_are_not_tried_again_and_gain_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    searches = []

    def counted(*given: Any, **named: Any) -> list[Plan]:
        searches[-1] += 1
        return searched(*given, **named)

    def everywhere(*given: Any, failed: Any, **named: Any) -> ClusterPlan:
        return plan_job(*given, **named)

    monkeypatch.setattr(cluster, "searched", counted)
    given = replace(job("4 x 7GB/s"), host=100 * 10**9, state="host")
    searches.append(0)
    found = gain_of(given)
    monkeypatch.setattr(gain, "plan_job", everywhere)
    searches.append(0)
    assert gain_of(given) == found
    assert searches[0] < searches[1]


def test_drives_that_do_not_keep_up_gain_nothing_and_what_would_is_said() -> None:
    model = Transformer.of("gpt", hidden=2560, layers=40, sequence=4096)
    given = ClusterJob(model, ParallelLayout(dp=8), find_gpu("h100"), parse_ssds("4 x 7GB/s"), node=8)
    gain = gain_of(given)
    assert not gain.pays
    carried = 4 * 7e9 / 8 / given.bandwidth_for_all(1)
    assert gain.carried == pytest.approx(carried)
    named, hosted, again = gain.others.values()
    four = replace(given, ssds=Ssds(16, 7e9, 7e9))
    assert (named.size > gain.kept.size) == fits(four, gain.kept.size + 1)
    assert fits(replace(given, ssds=None, host=1 << 50), hosted.size)
    recomputed = uniform_plan(given, again.size, "recompute")
    assert again.seconds == recomputed.microbatch_seconds / again.size
    sentence = gain.sentence()
    assert sentence.startswith(
        f"nothing: your drives carry {carried:.0%} of what a step saves; 16 drives of "
    )
    assert f"recomputation would give {again.size / gain.kept.size:.2f} x the batch at 1.3" in sentence


def test_means_that_bring_nothing_are_named_together() -> None:
    trials = {
        name: (lambda _, most=most: lambda size: 1.0 if size <= most else None)
        for name, most in {"8 drives": 4, "host memory": 4, RECOMPUTATION: 8}.items()
    }
    gain = Gain.of(
        kept=lambda size: 1.0 if size <= 4 else None,
        ours=lambda _: lambda size: 1.0 if size <= 4 else None,
        alone=1.0,
        carried=0.05,
        others=trials,
    )
    assert gain.sentence() == (
        "nothing: your drives carry 5% of what a step saves; 8 drives and host memory would not give more, "
        "recomputation would give 2.00 x the batch at 1.00 x the time"
    )


def test_without_drives_usual_ones_are_named() -> None:
    gain = gain_of(job(None))
    assert gain.sentence().startswith("nothing: there are no drives and there is no host memory")
    assert next(iter(gain.others)) == "4 drives of 5 GB/s"


def test_where_not_one_sequence_fits_without_the_gain_is_that_it_does() -> None:
    gain = gain_of(replace(job("8 x 7GB/s"), reserve=10 << 30))
    assert gain.kept == Largest(0, 0.0)
    assert gain.sentence().startswith(f"a batch of {gain.ours.size} at ")
    assert "where not one sequence fits with everything kept" in gain.sentence()


def test_the_first_line_of_a_plan_is_the_gain(capsys: pytest.CaptureFixture[str]) -> None:
    small = "plan --model gpt --hidden 4096 --layers 8 --seq 2048 --gpu a100-40gb --gpus-per-node 1 --microbatch 1"
    assert main([*small.split(), "--ssd", "4 x 7GB/s"]) == 0
    first, *_ = capsys.readouterr().out.splitlines()
    assert first == f"gain: {gain_of(job('4 x 7GB/s')).sentence()}"
