"""Drives of unequal speed, in virtual time: together they are as fast as one drive of their summed bandwidth."""

import pytest

from benchmarks.simulated_device import GB, gpt
from ssdtrain.config.units import MiB
from ssdtrain.offload.engine import OffloadEngine
from ssdtrain.offload.options import EngineOptions
from tests.support.simulated.training import Machine, StepRecord, train

LAYERS = gpt(16, MiB, MiB / (10 * GB))
PCIE = 25 * GB


class Run:
    """Steps that offload everything; the drives are slower than the model saves."""

    def __init__(self, *drives: float) -> None:
        self.machine = Machine(PCIE, [(speed * GB, speed * GB) for speed in drives])
        options = EngineOptions(
            min_bytes=1024, in_flight=4 * MiB, buffer=16 * MiB, prefetch=8 * MiB, staged=True
        )
        self.engine: OffloadEngine = self.machine.engine(options)
        self.steps = 0

    def step(self) -> tuple[float, list[int]]:
        """Seconds, and bytes that each drive was written."""
        before = [write.nbytes for write, _ in self.machine.pool.drives]
        self.steps += 1
        record: StepRecord = train(self.machine, self.engine, LAYERS, seed=self.steps)
        assert not record.wrong
        written = [write.nbytes for write, _ in self.machine.pool.drives]
        return record.ended - record.began, [now - then for now, then in zip(written, before, strict=True)]

    def speed(self, drive: int, bandwidth: float) -> None:
        for channel in self.machine.pool.drives[drive]:
            channel.bandwidth = bandwidth * GB


@pytest.mark.parametrize("speeds", [(4.0, 1.0), (2.0, 2.0, 0.5)])
def test_drives_of_unequal_speed_have_the_throughput_of_their_sum(speeds: tuple[float, ...]) -> None:
    together, single = Run(*speeds), Run(sum(speeds))
    with together.machine, single.machine:
        for _ in range(4):
            seconds, written = together.step()
            best, _ = single.step()
    assert seconds <= 1.1 * best
    assert 0.75 * max(speeds) / min(speeds) <= max(written) / min(written) <= 1.25 * max(speeds) / min(speeds)


def test_a_drive_that_slows_down_gets_less_and_its_share_again_when_it_recovers() -> None:
    run = Run(2.5, 2.5)
    with run.machine:
        before = [run.step() for _ in range(3)][-1]
        run.speed(1, 0.25)
        slow = [run.step() for _ in range(4)]
        run.speed(1, 2.5)
        after = [run.step() for _ in range(5)][-1]
    assert 0.9 <= before[1][0] / before[1][1] <= 1.1
    assert slow[-1][1][0] >= 7 * slow[-1][1][1]
    assert slow[-1][0] <= 0.5 * slow[0][0]  # the first step had half of its bytes on it
    assert 0.85 <= after[1][0] / after[1][1] <= 1.2
    assert after[0] <= 1.05 * before[0]
