from pathlib import Path

import pytest

from examples.deepspeed_gpt.settings import Settings


def test_only_the_ssdtrain_mode_has_the_block_and_it_is_all_that_differs() -> None:
    settings = Settings(directory=Path("/nvme"))
    keep, spill = (settings.deepspeed_config(mode, bf16=False) for mode in ("keep", "ssdtrain"))
    assert spill.pop("ssdtrain") == {"offload": {"directories": ["/nvme"], "amount": "all"}}
    assert keep == spill == settings.deepspeed_config("recompute", bf16=False)


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"steps": 3}, "give at least 4"),
        ({"layers": 0}, "layers is 0"),
        ({"memory_steps": 1}, "at least 2"),
        ({"hidden": 100}, "not a multiple of heads"),
    ],
)
def test_settings_that_cannot_be_run_are_refused(fields: dict[str, int], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        Settings(**fields)
