"""Training on drives as they really are: small, full, shared, taken away. Gradients stay equal to the bit."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import ssdtrain
from ssdtrain.config import ConfigError
from ssdtrain.runtime import Runtime
from ssdtrain.storage import ALIGNMENT, StoreMetrics
from tests.offload.conftest import VARIANTS, MakeRuntime, Variant, settled
from tests.support.filesystems import Mounts, free_bytes

MiB = 1 << 20


@pytest.fixture(params=[VARIANTS[0], VARIANTS[1], VARIANTS[2]], ids=["c", "python", "staged"])
def way(request: pytest.FixtureRequest) -> Variant:
    return request.param


def gradient(
    runtime: Runtime | None, count: int, between: Callable[[], object] = lambda: None
) -> torch.Tensor:
    """Of a chain that saves `count` tensors of 1 MiB; `between` runs between forward and backward, when all stores ended."""
    x = torch.randn(512, 512, requires_grad=True, generator=torch.Generator().manual_seed(0))

    def forward() -> torch.Tensor:
        y = x
        for _ in range(count):
            y = y.sin()
        return y.sum()

    if runtime is None:
        loss = forward()
    else:
        with runtime.forward():
            loss = forward()
        settled(runtime)
    between()
    loss.backward()
    return x.grad


def figures(runtime: Runtime) -> tuple[int, int, StoreMetrics]:
    """Bytes kept because no tier had room, bytes that backward loaded, and the store's."""
    found = runtime.statistics()
    return found.offload.kept_full_bytes, found.offload.loaded_bytes, found.store


@pytest.mark.parametrize("kind", ["tmpfs", "ext4"])
def test_a_full_file_system_takes_what_fits_and_gives_it_back(
    kind: str, way: Variant, mounts: Mounts, make_runtime: MakeRuntime
) -> None:
    mount = (mounts.small if kind == "tmpfs" else mounts.drive)(8 * MiB)
    empty = free_bytes(mount)
    runtime = make_runtime(way, directories=str(mount), capacity="1GiB")
    for _ in range(2):
        assert torch.equal(gradient(runtime, 12), gradient(None, 12))
    kept, loaded, _ = figures(runtime)
    assert kept >= 2 * 4 * MiB and loaded >= 2 * 2 * MiB
    runtime.close()
    assert free_bytes(mount) == empty


def test_a_drive_that_somebody_else_fills_takes_no_more(
    way: Variant, mounts: Mounts, make_runtime: MakeRuntime
) -> None:
    """Also between forward and backward: what is stored is ours, whatever becomes of the rest of the drive."""
    mount = mounts.small(24 * MiB)
    runtime = make_runtime(way, directories=str(mount), capacity="1GiB")

    def fill() -> None:
        with (mount / "theirs").open("wb", buffering=0) as file:
            with pytest.raises(OSError, match="No space left"):
                while True:
                    file.write(bytes(MiB))

    assert torch.equal(gradient(runtime, 4, between=fill), gradient(None, 4))
    assert figures(runtime)[0] == 0
    assert torch.equal(gradient(runtime, 12), gradient(None, 12))
    assert figures(runtime)[0] > 0


def test_a_read_only_file_system_is_named_at_start(mounts: Mounts) -> None:
    mount = mounts.small(8 * MiB, ",ro")
    with pytest.raises(ConfigError, match=r"ssdtrain\.offload\.directories\[0\].*read-only") as caught:
        ssdtrain.offload(mount)
    assert str(mount) in str(caught.value)


def test_a_file_system_that_turns_read_only_keeps_what_it_has(
    way: Variant, mounts: Mounts, make_runtime: MakeRuntime, caplog: pytest.LogCaptureFixture
) -> None:
    """As ext4 does after an error: writes fail from then on, reads go on."""
    mount = mounts.drive(64 * MiB)
    runtime = make_runtime(way, directories=str(mount))

    def fail() -> None:
        done = subprocess.run(["mount", "-o", "remount,abort", str(mount)], capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"this kernel cannot abort a file system: {done.stderr.strip()}")

    assert torch.equal(gradient(runtime, 6, between=fail), gradient(None, 6))
    assert figures(runtime)[:2] == (0, 6 * MiB)
    assert torch.equal(gradient(runtime, 40), gradient(None, 40))
    kept, _, store = figures(runtime)
    assert kept > 0 and store.drives[0].retired
    assert sum("stay in memory" in record.getMessage() for record in caplog.records) == 1


def kernel_written() -> int:
    """Bytes that this process has had written to drives, as the kernel counts them; skips where it does not say."""
    try:
        lines = Path("/proc/self/io").read_text().splitlines()
    except OSError as error:
        pytest.skip(f"the kernel does not say what this process writes: {error}")
    return next(int(line.split()[1]) for line in lines if line.startswith("write_bytes:"))


def test_the_bytes_that_wear_is_computed_from_are_those_that_the_kernel_counts(
    way: Variant, make_runtime: MakeRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`offload.endurance` and the projected life of the drives go by `bytes_written` of the drives."""
    monkeypatch.delenv("SSDTRAIN_POISON", raising=False)  # which overwrites freed slots
    runtime = make_runtime(way)
    if not figures(runtime)[2].drives[0].direct:
        pytest.skip(
            "the directory for temporary files does not support O_DIRECT, so the kernel counts when it flushes"
        )
    gradient(runtime, 24)  # the file is grown, which the file system notes on the drive too
    before, began = kernel_written(), figures(runtime)[2].drives[0].bytes_written
    for _ in range(4):
        gradient(runtime, 24)
    counted = figures(runtime)[2].drives[0].bytes_written - began
    written = kernel_written() - before
    assert counted == 4 * 24 * MiB
    # Whole blocks are written: the first and the last one of each store are not full.
    assert counted <= written <= counted + 4 * 24 * 2 * ALIGNMENT + 64 * 1024
