"""What a plan may keep on a device without a budget of the user's."""

import pytest

from benchmarks.adaptive_amount import AutoRun
from benchmarks.simulated_device import GB, Load, gpt
from ssdtrain.config.units import MiB
from ssdtrain.planner.controller import AdaptiveOffload
from ssdtrain.planner.room import DeviceMemory, room


def test_it_is_what_is_free_beside_the_model_and_what_comes_and_goes() -> None:
    # 50 of the model, 20 at most inside of operators beside 10 of activations, 5 of other processes, 5 for fragments.
    assert room(DeviceMemory(100, 5, 50, 80), live=0, peak=10) == 20
    assert room(DeviceMemory(100, 5, 53, 80), live=3, peak=10) == 20
    assert room(DeviceMemory(100, 5, 50, 50), live=0, peak=10) == 40  # somebody has reset the peak
    assert room(DeviceMemory(100, 50, 50, 80), live=0, peak=10) == 0
    assert room(None, live=0, peak=10) is None


@pytest.mark.parametrize("most", [None, 0.6])
def test_a_plan_keeps_no_more_than_fits(most: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a drive on which three quarters would stay."""
    load = Load(gpt(4, MiB, MiB / (10 * GB)), 25 * GB, 3 * GB, 16 * MiB, MiB)
    if most is not None:
        memory = DeviceMemory(int(most * load.kept / 0.95) + 1, 0, 0, 0)
        monkeypatch.setattr(AdaptiveOffload, "_memory", lambda self: memory)
    with AutoRun(load) as run:
        found = [run.step() for _ in range(8)][-1]
        if most is None:
            assert found.peak_over_keep > 0.65
        else:
            assert found.peak_over_keep <= 0.6 and run.predicted_peak_over_keep <= 0.6


def test_a_margin_for_stalls_that_do_not_come_again_is_taken_back() -> None:
    load = Load(gpt(4, MiB, MiB / (10 * GB)), 25 * GB, 6 * GB, 16 * MiB, MiB)
    with AutoRun(load) as run:
        before = [run.step() for _ in range(8)][-1]
        run._controller._margin = 0.2  # as after ten checkpoints that were written to the same drive
        run._controller._request_plan("transfers were waited for")
        slow = [run.step() for _ in range(8)][-1]
        assert slow.stored < before.stored
        after = [run.step() for _ in range(12 * 64)][-1]
    assert after.stored == pytest.approx(before.stored, rel=0.05)
    assert after.total_over_keep <= 1.02
