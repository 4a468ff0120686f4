"""What hooks nested inside a forward take is counted, by who installed them."""

from __future__ import annotations

import logging
import threading
from pathlib import Path

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from ssdtrain.config import load_config
from ssdtrain.features import FIRST_STEPS
from ssdtrain.integration.inner_hooks import InnerHooks
from ssdtrain.runtime import Runtime


class Copies(saved_tensors_hooks):
    def __init__(self) -> None:
        super().__init__(torch.clone, lambda tensor: tensor)


def test_each_forward_counts_its_own_in_the_first_steps(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "ssdtrain")
    plain_enter = saved_tensors_hooks.__enter__
    config = load_config({"offload": {"directories": str(tmp_path), "min_bytes": 0}})
    x = torch.randn(8, 8, requires_grad=True)

    def elsewhere() -> None:
        with Copies():
            (x * x).sum()

    with Runtime(config) as one, Runtime(config) as other:
        outer, inner = InnerHooks(512), InnerHooks(128)
        one.features.append(outer)
        other.features.append(inner)
        for _ in range(FIRST_STEPS + 1):
            one.step_begin()
            other.step_begin()
            with one.forward():
                thread = threading.Thread(target=elsewhere)
                thread.start()
                thread.join()
                checkpoint(lambda: (x * x).sum(), use_reentrant=False).backward()
                with other.forward(), Copies():
                    y = x * x
                y.sum().backward()
            one.step_end()
            other.step_end()
    assert saved_tensors_hooks.__enter__ is plain_enter
    assert outer.taken == {}
    ((name, nbytes),) = inner.taken.items()
    assert "Copies" in name and nbytes == FIRST_STEPS * 2 * x.nbytes
    (found,) = [record.getMessage() for record in caplog.records if "take precedence" in record.getMessage()]
    assert f"{name} takes {2 * x.nbytes} bytes a step" in found
