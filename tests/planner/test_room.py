"""What a plan may keep on a device without a budget of the user's."""

import pytest

from benchmarks.adaptive_amount import AutoRun
from benchmarks.simulated_device import GB, Load, gpt
from ssdtrain.config.units import MiB
from ssdtrain.device import CpuDevice
from ssdtrain.planner.finder import DeviceHeadroom, DeviceMemory


class Engine:
    device = CpuDevice()


def test_it_is_what_is_free_beside_the_model_and_what_comes_and_goes() -> None:
    # 50 of the model, 20 at most inside of operators beside 10 of activations, 5 of other processes, 5 for fragments.
    def left(memory: DeviceMemory, live: int) -> int:
        return DeviceHeadroom(Engine()).left(memory, live, peak=10)  # type: ignore[arg-type]

    assert left(DeviceMemory(100, 5, 50, 80), 0) == 20
    assert left(DeviceMemory(100, 5, 53, 80), 3) == 20
    assert left(DeviceMemory(100, 50, 50, 80), 0) == 0
    room = DeviceHeadroom(Engine())  # type: ignore[arg-type]
    assert room() is None  # no CUDA device
    assert room.left(DeviceMemory(100, 5, 50, 80), 0, 10) == 20
    assert room.left(DeviceMemory(100, 5, 50, 50), 0, 10) == 20  # somebody has reset the peak


@pytest.mark.parametrize("most", [None, 0.6])
def test_a_plan_keeps_no_more_than_fits(most: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a drive on which three quarters would stay."""
    load = Load(gpt(4, MiB, MiB / (10 * GB)), 25 * GB, 3 * GB, 16 * MiB, MiB)
    if most is not None:
        memory = DeviceMemory(int(most * load.kept / 0.95) + 1, 0, 0, 0)
        monkeypatch.setattr(DeviceHeadroom, "memory", lambda self: memory)
    with AutoRun(load) as run:
        found = [run.step() for _ in range(8)][-1]
        if most is None:
            assert found.peak_over_keep > 0.65
        else:
            assert found.peak_over_keep <= 0.6 and run.predicted_peak_over_keep <= 0.6


@pytest.mark.slow
def test_a_margin_for_stalls_that_do_not_come_again_is_taken_back() -> None:
    load = Load(gpt(4, MiB, MiB / (10 * GB)), 25 * GB, 6 * GB, 16 * MiB, MiB)
    with AutoRun(load) as run:
        before = [run.step() for _ in range(8)][-1]
        run.controller.derating.margin.value = (
            0.2  # as after ten checkpoints that were written to the same drive
        )
        run.controller.request("transfers were waited for")
        slow = [run.step() for _ in range(8)][-1]
        assert slow.stored < before.stored
        after = [run.step() for _ in range(12 * 64)][-1]
    assert after.stored == pytest.approx(before.stored, rel=0.05)
    assert after.total_over_keep <= 1.02


def test_a_plan_fits_the_largest_forward_and_not_the_one_that_was_recorded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    load = Load(gpt(4, MiB, MiB / (10 * GB)), 25 * GB, 3 * GB, 16 * MiB, MiB)
    memory = DeviceMemory(int(0.9 * load.kept / 0.95) + 1, 0, 0, 0)
    monkeypatch.setattr(DeviceHeadroom, "memory", lambda self: memory)
    with AutoRun(load) as run:
        found = [run.step() for _ in range(6)][-1]
        assert found.peak_over_keep > 0.65
        policy = run.regions.policy
        policy.largest = {chunk: 2 * nbytes for chunk, nbytes in policy.largest.items()}
        run.controller.request("the size of the tapes changed")
        found = [run.step() for _ in range(6)][-1]
        assert found.peak_over_keep <= 0.46
