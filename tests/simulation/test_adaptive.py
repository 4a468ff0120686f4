"""`offload.amount: "auto"` on the simulated device: the real engine, policy and controller, in virtual time."""

from dataclasses import replace

import pytest

from benchmarks.adaptive_amount import AutoRun, Found, against_all, on_teraio_hardware
from benchmarks.simulated_device import GB, Load, gpt
from ssdtrain.config.units import MiB
from ssdtrain.storage.slot import Slot
from tests.support.policies import FakeDrive


def small(drive: float, pcie: float = 25.0, layers: int = 4) -> Load:
    """GPT layers that save 10 GB/s, on a drive of `drive` GB/s."""
    return Load(gpt(layers, MiB, MiB / (10 * GB)), pcie * GB, drive * GB, 16 * MiB, MiB)


def rounded(found: Found) -> tuple[float, float, float]:
    return round(found.total_over_keep, 6), found.peak_over_keep, found.stored


@pytest.mark.slow
@pytest.mark.parametrize("drive", [3, 6, 12])
def test_transfers_are_hidden_at_the_lowest_peak_there_is(drive: float) -> None:
    found = against_all(5, drive, 25)
    assert found["total_over_keep"] <= 1.02
    assert found["bits_equal"]
    assert found["peak_over_lowest"] <= 1.05


def test_a_throttled_drive_gets_less_and_everything_again_when_it_recovers() -> None:
    load = small(12)
    with AutoRun(load) as run:
        before = [run.step() for _ in range(6)][-1]
        run.throttle(0.1)
        slow = [run.step() for _ in range(10)]
        run.throttle(1.0)
        after = [run.step() for _ in range(10)][-1]
    assert before.total_over_keep <= 1.02
    assert max(step.total_over_keep for step in slow) > 1.5  # or the test would prove nothing
    assert slow[-1].total_over_keep <= 1.05
    assert slow[-1].stored < before.stored
    assert after.total_over_keep <= 1.02
    assert after.peak_over_keep <= before.peak_over_keep * 1.01


@pytest.mark.parametrize("drive", [3, 12])
def test_a_drive_that_was_slow_in_the_profiled_step_only_is_used_again(drive: float) -> None:
    """The host is so far ahead that backward cancels the stores of the few tensors that such a plan offloads: one of them is
    written all the same, or the drive would not be measured any more."""
    with AutoRun(small(drive)) as run:
        run.step()
        run.throttle(0.05)
        run.step()
        run.throttle(1.0)
        slow, *_, last = [run.step() for _ in range(5)]
    with AutoRun(small(drive)) as run:
        undisturbed = [run.step() for _ in range(5)][-1]
    assert slow.stored < 0.1  # or the test would prove nothing
    assert rounded(last) == rounded(undisturbed)
    assert last.stored > 0.4


@pytest.mark.parametrize("place", [0, 16, 31])
@pytest.mark.parametrize("drive", [3, 6])
def test_a_pause_in_the_profiled_step_is_not_planned_with_for_long(drive: float, place: int) -> None:
    load = small(drive)
    layers = list(load.layers)
    pause = sum(layer.forward + layer.backward for layer in layers)
    layers[place] = replace(layers[place], forward=layers[place].forward + 3 * pause)
    with AutoRun(load) as run:
        run.step()
        run.load = replace(load, layers=tuple(layers))
        run.step()
        run.load = load
        found = [run.step() for _ in range(6)]
    with AutoRun(load) as run:
        undisturbed = [run.step() for _ in range(5)][-1]
    assert rounded(found[0]) != rounded(undisturbed)  # or the test would prove nothing
    assert {rounded(step) for step in found[3:]} == {rounded(undisturbed)}


def test_a_longer_sequence_is_planned_for_again() -> None:
    with AutoRun(small(12)) as run:
        short = [run.step() for _ in range(4)][-1]
        run.load = Load(gpt(4, 2 * MiB, 2 * MiB / (10 * GB)), 25 * GB, 12 * GB, 16 * MiB)
        plans = run.plans
        long = [run.step() for _ in range(12)][-1]
        assert run.plans > plans
    assert short.total_over_keep <= 1.02
    assert long.total_over_keep <= 1.05


def test_an_evaluation_in_between_changes_nothing() -> None:
    with AutoRun(small(12)) as run:
        for _ in range(4):
            before = run.step()
        plans = run.plans
        for _ in range(3):
            run.evaluate()
        after = [run.step() for _ in range(4)][-1]
        assert run.plans == plans
    assert after.peak_over_keep == before.peak_over_keep


def test_shapes_that_change_from_step_to_step_keep_their_bits_and_their_time() -> None:
    short, long = small(12), Load(gpt(4, 2 * MiB, 2 * MiB / (10 * GB)), 25 * GB, 12 * GB, 16 * MiB, MiB)
    with AutoRun(short) as run:
        found = []
        for step in range(24):
            run.load = long if step % 3 == 2 else short
            found.append(run.step())
    assert not any(step.wrong for step in found)
    assert max(step.total_over_keep for step in found[12:]) <= 1.05


def test_a_drive_that_is_full_keeps_the_rest_in_memory_and_costs_no_time() -> None:
    load = small(12)
    with AutoRun(load, capacity=MiB + (MiB >> 1)) as run:
        found = [run.step() for _ in range(8)]
        assert run.snapshot().kept_full_bytes > 0  # or the test would prove nothing
    assert not any(step.wrong for step in found)
    assert found[-1].total_over_keep <= 1.02
    assert 0 < found[-1].stored < 0.5


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.5, 0.2])
def test_a_drive_is_written_at_the_rate_that_it_bears(share: float, caplog: pytest.LogCaptureFixture) -> None:
    with AutoRun(small(12, layers=12)) as run:
        free = [run.step() for _ in range(6)][-1]
        before, began = run.written
        run.step()
        after, ended = run.written
        rate = (after - before) / (ended - began)
    assert "offload.endurance" not in caplog.text
    with AutoRun(small(12, layers=12), endurance=FakeDrive(share * rate)) as run:  # type: ignore[arg-type]
        for _ in range(6):
            run.step()
        before, began = run.written
        found = [run.step() for _ in range(4)][-1]
        after, ended = run.written
        again = (after - before) / (ended - began)
    assert 0 < again <= 1.02 * share * rate
    assert again >= 0.6 * share * rate  # what it bears is used
    assert found.stored < free.stored and found.total_over_keep <= 1.02
    assert caplog.text.count("less is offloaded than could be hidden") == 1


def with_host(run: AutoRun) -> list[str]:
    """The tiers of what one step stores, in forward order."""
    store, tiers = run._machine.store, []
    reserve = store.reserve

    def watched(nbytes: int, tier: str | None = None, **given: int) -> Slot:
        slot = reserve(nbytes, tier, **given)
        tiers.append(slot.tier)
        return slot

    store.reserve = watched  # type: ignore[method-assign]
    run.step()
    store.reserve = reserve  # type: ignore[method-assign]
    return tiers


def test_host_memory_is_for_what_backward_needs_soonest() -> None:
    """And lowers the peak by about as much, at the same time; in the order in which regions come it would wait for the drive."""
    found: dict[int, Found] = {}
    for host_bytes in (0, 2 * MiB):
        with AutoRun(replace(small(4, layers=6), host_bytes=host_bytes)) as run:
            found[host_bytes] = [run.step() for _ in range(5)][-1]
            if not host_bytes:
                continue
            written = with_host(run)[:-3]  # the stores of the last three are cancelled
            assert written.count("host") >= 12 and written.count("ssd") >= 12
            assert written == sorted(written, reverse=True)  # "ssd" and then "host"
            policy = run.regions.policy
            plan = policy.plans[0]
            policy.plans = {0: tuple(action._replace(tier=None) for action in plan)}
            first_come = [run.step() for _ in range(2)][-1]
            policy.plans = {0: plan}
    alone, both = found.values()
    assert both.total_over_keep <= 1.01 and not both.wrong
    assert both.peak_over_keep <= alone.peak_over_keep - 0.1
    assert first_come.total_over_keep >= both.total_over_keep + 0.03


def test_the_predicted_peak_is_the_measured_one() -> None:
    for drive in (3, 12):
        with AutoRun(small(drive, layers=12)) as run:
            found = [run.step() for _ in range(6)][-1]
            assert abs(run.predicted_peak_over_keep - found.peak_over_keep) <= 0.05


@pytest.mark.parametrize("drive", [3, 12])
def test_where_each_saved_tensor_is_a_block_the_predicted_peak_is_exact(drive: float) -> None:
    """A copy begins after the next operator, and what it reads stays until the host has waited for a read."""
    with AutoRun(small(drive)) as run:
        found = [run.step() for _ in range(4)][-1]
        assert found.peak_over_keep == pytest.approx(run.predicted_peak_over_keep, abs=1e-6)
        assert found.total_over_keep <= 1.01
    if drive == 12:
        assert found.peak_over_keep <= 1.001 * 38 / 136  # the lowest of all choices of layers


@pytest.mark.slow
def test_on_the_hardware_of_teraio_a_step_takes_little_more_than_with_unlimited_memory() -> None:
    found = on_teraio_hardware()
    assert found["of_ideal"] >= 0.95 and found["bits_equal"]
    assert found["peak_over_keep"] < 0.95


def test_a_pipeline_stage_with_fewer_microbatches_alive_offloads_no_more_than_its_time_allows() -> None:
    for alive in (1, 3):
        load = Load(
            gpt(3, MiB, MiB / (8 * GB)), 25 * GB, 6 * GB, 16 * MiB, microbatches=6, alive=alive
        )  # twice what the drive takes
        with AutoRun(load) as run:
            found = [run.step() for _ in range(5)][-1]
        assert found.total_over_keep <= 1.02
        assert found.peak_over_keep < 1.0
