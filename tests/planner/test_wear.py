"""`offload.endurance`: the amount sinks, or a line says loudly that the drives wear too fast."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ssdtrain.config import ConfigError, load_config
from ssdtrain.features import Step
from ssdtrain.planner.derating import WearLimit
from ssdtrain.runtime import Runtime
from ssdtrain.storage import Rating, StoreMetrics, TierMetrics
from tests.support.policies import FakeDrive


def store(written: int) -> StoreMetrics:
    drive = TierMetrics("/nvme", 1 << 40, 0, 0, written, 0, 1.0, 1.0)
    return StoreMetrics(drives=(drive,))


def test_the_rate_is_that_of_saved_bytes_of_which_not_all_reach_the_drives() -> None:
    limit = WearLimit(FakeDrive(100.0))  # type: ignore[arg-type]
    limit.observe(store(500), 1000, 10.0)
    assert limit.rate == pytest.approx(200.0)
    assert not limit.exceeded(1)


def test_drives_that_wear_faster_in_two_steps_in_turn_get_less() -> None:
    limit = WearLimit(FakeDrive(100.0))  # type: ignore[arg-type]
    limit.observe(store(2000), 2000, 10.0)
    assert not limit.exceeded(1)
    limit.observe(store(4000), 4000, 10.0)
    before = limit.rate
    assert limit.exceeded(2) and before is not None and limit.rate is not None and limit.rate < before
    limit.observe(store(4500), 4500, 10.0)
    assert not limit.exceeded(3) and limit.rate < 100.0


def test_a_plan_that_is_bound_by_wear_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    limit = WearLimit(FakeDrive(2.0**30, years=3.0))  # type: ignore[arg-type]
    limit.observe(store(0), 0, 1.0)
    for bound in (False, True, True):
        limit.planned(bound=bound)
    [line] = [record.getMessage() for record in caplog.records]
    assert "at most 1.00 GiB/s are written to nvme0n1, for a life of 3 years" in line


def test_a_wear_that_no_plan_lowers_is_searched_for_ever_less_often() -> None:
    limit, searched = WearLimit(FakeDrive(100.0)), []  # type: ignore[arg-type]
    for step in range(1, 200):
        limit.observe(store(2000 * step), 2000 * step, 10.0)
        if limit.exceeded(step):
            searched.append(step)
            limit.cause.searched(step, limit.cause.why, new=False)
    assert 3 < len(searched) < 9


def test_without_a_rating_there_is_no_limit() -> None:
    limit = WearLimit(FakeDrive(None))  # type: ignore[arg-type]
    limit.observe(store(10**12), 10**12, 1.0)
    assert limit.rate is None and not limit.exceeded(1)


@pytest.mark.parametrize(("years", "said"), [(3.0, True), (1e-9, False)])
def test_a_fixed_amount_that_wears_the_drives_too_fast_is_a_loud_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, years: float, said: bool
) -> None:
    section: dict[str, Any] = {"directories": str(tmp_path), "min_bytes": 1024, "amount": "all"}
    section["endurance"] = {"tbw": "10MB", "years": years}
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    with Runtime(load_config({"offload": section}), logs=False) as runtime:
        runtime.register(model)
        assert runtime.offload is not None
        for step in range(5):
            with runtime.forward():
                loss = model(torch.randn(512, 64)).square().sum()
            runtime.engine.drain()  # type: ignore[union-attr]
            while runtime.statistics().offload.in_flight_bytes:  # type: ignore[union-attr]
                pass
            loss.backward()
            runtime.offload.checks.step_ended(Step(step, 1.0))  # seconds of a fake clock
    lines = [r.getMessage() for r in caplog.records if "offload.endurance" in r.getMessage()]
    assert len(lines) == said
    if said:
        assert "it should live 3 years" in lines[0] and 'or use "auto"' in lines[0]


def test_a_drive_has_one_rating() -> None:
    section = {"directories": "/nvme", "endurance": {"dwpd": 1, "tbw": "600TB"}}
    with pytest.raises(ConfigError, match=r"endurance\.dwpd"):
        load_config({"offload": section})
    assert Rating(total=600 * 10**12).rated(1) == 6e14
