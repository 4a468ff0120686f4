"""Made-up results of runs, for what is made from them."""

from typing import Any

from examples.support.result import RunResult

MiB = 1024 * 1024


def result(name: str = "keep", **changes: Any) -> RunResult:
    fields: dict[str, Any] = {
        "name": name,
        "losses": [(5.5).hex(), (4.25).hex(), (3.125).hex()],
        "weights_sha256": "ab" * 32,
        "step_seconds": [2.0, 2.5, 9.0],
        "activation_peak_bytes": 800 * MiB,
        "activation_timeline": [(0.0, 0), (0.5, 400 * MiB), (1.0, 800 * MiB), (2.0, 0)],
        "backward_began": 1.0,
        "resident_peak_bytes": 2000 * MiB,
        "resident_peak_covers": "since reset",
    }
    return RunResult(**{**fields, **changes})


def spilling(**changes: Any) -> RunResult:
    fields: dict[str, Any] = {
        "activation_peak_bytes": 200 * MiB,
        "bytes_written": 3 * 700 * MiB,
        "bytes_read": 3 * 600 * MiB,
        "bytes_cancelled": 3 * 100 * MiB,
        "stall_seconds": 0.3,
    }
    return result("ssdtrain", **{**fields, **changes})
