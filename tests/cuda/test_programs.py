"""Random programs over autograd on the device, while its work comes late, against the same programs without the engine."""

from __future__ import annotations

import gc
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import emulated_cuda
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ssdtrain.config import load_config
from ssdtrain.runtime import Runtime
from tests.offload.conftest import holds_nothing, offload_parts, only_slots, settled
from tests.offload.programs import NAMES, Instruction, Machine, same
from tests.offload.test_programs import OPTIONS, WAYS
from tests.support.filesystems import eventually

ON_DEVICE = [name for name in NAMES if name != "numpy"]
"""The instructions that a device has: none writes its memory from the host."""

PROGRAMS = st.lists(
    st.tuples(st.sampled_from(ON_DEVICE), st.integers(0, 50), st.integers(0, 50)), min_size=25, max_size=50
)
VARIANTS: dict[str, dict[str, Any]] = {
    "drive": {},
    "two slots": {"slots": 2},
    "parts": {"part": 0.5},
    "host": {"options": {"host": "2MiB"}},
}


@contextmanager
def make(
    device: torch.device, directory: str, variant: dict[str, Any], options: dict[str, Any]
) -> Iterator[Runtime]:
    options = {**options, **variant.get("options", {})}
    del options["collecting"]
    section = {"directories": directory, "min_bytes": 1024, "buffer": "4MiB", **options}
    with Runtime(load_config({"offload": section}), device) as runtime:
        if "slots" in variant:
            only_slots(runtime, variant["slots"])
        if "part" in variant:
            offload_parts(runtime, variant["part"])
        yield runtime


@pytest.mark.parametrize("name", VARIANTS)
def test_any_program_on_a_late_device(name: str, device: torch.device) -> None:
    went = Counter[str]()

    @settings(deadline=None, suppress_health_check=list(HealthCheck), max_examples=12, derandomize=True)
    @given(program=PROGRAMS, seed=st.integers(0, 5), options=OPTIONS)
    def run(program: list[Instruction], seed: int, options: dict[str, Any]) -> None:
        plain = Machine(nullcontext, seed, device=device).run(program)
        with (
            emulated_cuda.settings(delay_ms=3, h2d_gbps=0.2, d2h_gbps=0.2, seed=seed),
            tempfile.TemporaryDirectory() as directory,
            make(device, directory, VARIANTS[name], options) as runtime,
        ):
            machine = Machine(
                runtime.forward,
                seed,
                lambda: settled(runtime),
                runtime.close,
                torch.cuda.synchronize,
                device=device,
            )
            ours = machine.run(program)
            names = {name for name, *_ in program}
            difference = same(plain, ours, freed="free" in names, closed="close" in names)
            assert difference is None, difference
            gc.collect()
            torch.cuda.synchronize()
            # The thread of the device that ran backward lets go of a failed graph after the caller has its error.
            assert eventually(lambda: not runtime.statistics().offload.live_regions)
            holds_nothing(runtime)
            statistics = runtime.statistics()
            assert statistics is not None
            for way in WAYS:
                went[way] += getattr(statistics.offload, way)

    run()
    assert went["offloaded_bytes"] and went["loaded_bytes"], went
