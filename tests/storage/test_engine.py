"""Which engine runs: C where it was built, else Python with one line that says so; and that C workers need no interpreter."""

import logging
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from ssdtrain.storage import Arena, SpillStore, pool
from tests.storage.conftest import filled


@pytest.fixture
def no_extension(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> object:
        raise ImportError("No module named '_iopool'")

    monkeypatch.setattr(pool, "load_extension", missing)
    monkeypatch.setattr(pool._Warned, "fallback", False)


@pytest.mark.usefixtures("no_extension")
def test_without_the_extension_the_python_engine_runs_and_says_so_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            with SpillStore([tmp_path], capacity=1 << 20) as store:
                assert store.metrics.engine == "python"
    assert len(caplog.records) == 1 and "Python engine" in caplog.text


@pytest.mark.usefixtures("no_extension")
def test_demanding_the_c_engine_where_it_is_not_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ImportError, match="compiler"):
        SpillStore([tmp_path], engine="c")


def test_workers_have_a_name_and_no_signals(
    make_store: Callable[..., SpillStore], engine: str, arena: Arena
) -> None:
    before = set(os.listdir("/proc/self/task"))
    store = make_store(2, threads=3, host_bytes=1 << 20)
    source = filled(arena, 1)
    slot = store.reserve(1)
    assert store.write(slot, source.address).wait(30)
    workers = set(os.listdir("/proc/self/task")) - before
    # For each drive and the host tier three that write, and one more for reads (of the Python engine, three more).
    assert len(workers) == (12 if engine == "c" else 18)
    for worker in workers:
        status = Path(f"/proc/self/task/{worker}/status").read_text()
        fields = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
        if engine == "c":
            assert fields["Name"] == "ssdtrain-io"
            blocked = int(fields["SigBlk"], 16)
            # The C library keeps two real-time signals for itself, and SIGKILL and SIGSTOP cannot be blocked.
            assert all(blocked >> (number - 1) & 1 for number in (1, 2, 10, 13, 14, 15, 17, 40))
