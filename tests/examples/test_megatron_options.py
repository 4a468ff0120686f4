"""What the demo on megatron-core adds to the flags that it is given."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from examples.megatron_gpt.options import offload_by_default, parser


@pytest.mark.parametrize(
    ("flags", "directories", "amount"),
    [
        ("", ["out/ssd"], "all"),
        ("--ssdtrain-offload-amount 0.5", ["out/ssd"], "0.5"),
        ("--ssdtrain-offload-directories /nvme", ["/nvme"], None),
        ("--ssdtrain-config ssdtrain.json", None, None),
    ],
)
def test_an_amount_that_is_given_stays(flags: str, directories: list[str] | None, amount: str | None) -> None:
    options = parser().parse_args(shlex.split(flags))
    offload_by_default(options, Path("out/ssd"))
    assert options.ssdtrain_offload_directories == directories
    found = options.ssdtrain_offload_amount
    assert found == amount or str(found) == amount
