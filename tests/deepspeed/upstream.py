"""What the DeepSpeed at hand has, and what an old one needs to run here: on a CPU, with the torch of these tests.

The repairs have nothing to do with the plugin: without them the runs without the block fail too.
"""

from __future__ import annotations

import importlib.util
import inspect
from typing import Any

import deepspeed
import pytest
from deepspeed.accelerator import get_accelerator
from deepspeed.comm.torch import TorchBackend
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.tensor_parallel.config import TPTrainingConfig
from packaging.version import Version

__all__ = ["LACKS", "needs", "repair"]

VERSION = Version(deepspeed.__version__)

# What a test may need and this DeepSpeed lacks, and why it cannot run. The newest lacks nothing.
LACKS: dict[str, str] = {}

if importlib.util.find_spec("deepspeed.runtime.pipe.dualpipev") is None:
    LACKS["dualpipev"] = f"DeepSpeed {VERSION} has no DualPipeV"
if "partition_config" not in TPTrainingConfig.model_fields:
    LACKS["partition_config"] = f"AutoTP of DeepSpeed {VERSION} knows models of Hugging Face only"
if "_running_engine_backward" not in inspect.getsource(DeepSpeedEngine.__init__):
    LACKS["loss_backward"] = f"ZeRO of DeepSpeed {VERSION} reduces gradients in engine.backward only"
if "zero_stage = 3' has not been validated" in inspect.getsource(DeepSpeedEngine):
    LACKS["autotp_zero3"] = f"DeepSpeed {VERSION} rejects AutoTP with ZeRO-3"
if "saved_data" not in inspect.getsource(deepspeed.checkpointing.non_reentrant_checkpoint):
    LACKS["non_reentrant_partitions"] = (
        f"non_reentrant_checkpoint of DeepSpeed {VERSION} empties what it partitions before the block has run"
    )


def needs(*features: str) -> list[pytest.MarkDecorator]:
    """Skips a test of something that this DeepSpeed lacks."""
    return [pytest.mark.skip(reason=LACKS[feature]) for feature in features if feature in LACKS]


def repair() -> None:
    """Once in a process, before `init_distributed`.

    Before 0.19, on CPU machines: the checkpoint functions make a stream that they do not use, and the accelerator has no class
    for it; AutoTP makes tensors on the current device, which is called by the rank's number; ZeRO-1 and 2 gather parameters
    into views that autograd knows, which gloo of newer torch rejects. Any version says that a CPU has no float16, which torch's
    has.
    """
    if get_accelerator().device_name() == "cpu":
        type(get_accelerator()).is_fp16_supported = lambda self: True
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # compiled on first use otherwise
    if Version("0.19") <= VERSION:
        return
    if get_accelerator().device_name() == "cpu":
        type(get_accelerator()).Stream = _no_stream
        type(get_accelerator()).current_device = type(get_accelerator()).current_device_name
    if TorchBackend.all_gather_into_tensor.__name__ != _GATHER:
        TorchBackend.all_gather_into_tensor = _gathering_into_detached(TorchBackend.all_gather_into_tensor)


def _no_stream(self: Any, device: Any = None) -> None:
    return None


_GATHER = "gather_into_detached"


def _gathering_into_detached(plain: Any) -> Any:
    def gather_into_detached(
        self: Any, output_tensor: Any, input_tensor: Any, *args: Any, **kwargs: Any
    ) -> Any:
        return plain(self, output_tensor.detach(), input_tensor.detach(), *args, **kwargs)

    return gather_into_detached
