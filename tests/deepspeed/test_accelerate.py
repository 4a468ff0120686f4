"""The value "auto" inside of the block, which accelerate knows nothing of."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

import ssdtrain_ds
from ssdtrain.config import load_config
from tests.deepspeed.conftest import environment
from tests.support.processes import ROOT, ran

dataclasses = pytest.importorskip("accelerate.utils.dataclasses", reason="it is among requirements-dev.txt")


def processed(directory: Path) -> dict[str, Any]:
    """What accelerate makes of a config in `prepare`."""
    block = {
        "offload": {"directories": str(directory), "min_bytes": "auto", "buffer": "auto"},
        "report": {"interval": "auto"},
    }
    config = {"zero_optimization": {"stage": 1}, "train_micro_batch_size_per_gpu": "auto", "ssdtrain": block}
    plugin = dataclasses.DeepSpeedPlugin(hf_ds_config=config)
    plugin.deepspeed_config_process(must_match=False, train_micro_batch_size_per_gpu=4)
    found: dict[str, Any] = plugin.deepspeed_config
    return found


def test_accelerate_leaves_auto_to_the_block(installed: None, tmp_path: Path) -> None:
    found = processed(tmp_path)
    assert found["train_micro_batch_size_per_gpu"] == 4
    config = load_config(found["ssdtrain"], path="ssdtrain")
    assert config == load_config({"offload": {"directories": str(tmp_path)}})


def test_accelerate_is_as_it_was_without_the_plugin(tmp_path: Path) -> None:
    plain = dataclasses.DeepSpeedPlugin.deepspeed_config_process
    ssdtrain_ds.install()
    ssdtrain_ds.install()
    assert dataclasses.DeepSpeedPlugin.deepspeed_config_process is not plain
    ssdtrain_ds.uninstall()
    assert dataclasses.DeepSpeedPlugin.deepspeed_config_process is plain
    with pytest.raises(ValueError, match=r"ssdtrain\.offload\.min_bytes"):
        processed(tmp_path)


@pytest.mark.slow
@pytest.mark.distributed
def test_accelerate_may_be_imported_after_install() -> None:
    look = (
        "import sys, ssdtrain_ds; ssdtrain_ds.install(); before = 'accelerate.utils.dataclasses' in sys.modules; "
        "import accelerate; from accelerate.utils import DeepSpeedPlugin; "
        "from ssdtrain.integration.patching import is_patched; "
        "print(before, is_patched(DeepSpeedPlugin, 'deepspeed_config_process'))"
    )
    done = ran([sys.executable, "-c", look], cwd=ROOT, env=environment(), timeout=200)
    assert done.stdout.strip().endswith("True"), done.stdout
