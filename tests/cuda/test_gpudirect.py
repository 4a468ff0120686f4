"""GPUDirect Storage between device memory and drives, with a stand-in for kvikio, on a device whose work comes late."""

from __future__ import annotations

from pathlib import Path

import emulated_cuda
import pytest
import torch

from ssdtrain.offload.transfer import gpudirect
from tests.cuda.test_training import assert_same_bits, trained
from tests.support.kvikio_stand_in import install


@pytest.mark.usefixtures("late")
@pytest.mark.parametrize("codec", ["off", "bf16"])
def test_device_memory_goes_to_the_drive_and_back(
    codec: str, device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpudirect, "PROBE", 64 << 10)
    host_address = emulated_cuda.runtime().emulated_host_address
    stand_in = install(monkeypatch, tmp_path, host_address=host_address)
    section = {"amount": "all", "min_bytes": 1, "verify": "off", "codec": codec}
    found = trained({"offload": {**section, "gpudirect": "on"}}, tmp_path, device)
    assert stand_in.written > 0 and stand_in.read > 0
    without = None if codec == "off" else {"offload": {**section, "gpudirect": "off"}}
    assert_same_bits(trained(without, tmp_path, device), found)
