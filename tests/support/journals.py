"""Journals as a run of several ranks writes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

MiB = 1 << 20


MODULES = [
    {"module": name, "offloaded_bytes": offloaded, "kept_bytes": kept, "load_wait_seconds": waited}
    for name, offloaded, kept, waited in (
        ("layers.0.mlp", 40 * MiB, 0, 0.01),
        ("layers.10.mlp", 20 * MiB, 22 * MiB, 0.0),
        ("layers.2.mlp", 17 * MiB, 1 * MiB, 0.0),
    )
]


NAMES = {
    **{
        "val/loss": 1.0,
        "val loss": 2.0,
        "val_loss": 3.0,
        "9\u00e9\u2603": 4.0,
        'q"\n}\\': 5.0,
        "": 6.0,
        "\ud800": 7.0,
    },
    **{
        "comm/raw_bytes": 1,
        "comm/": 2,
        "comm/a/b/raw_bytes": 3,
        "val/x/saved_bytes": 4,
        "steps_total": 5,
        "a\u00b2": 6,
    },
}
"""Values as a training script may call them; no metric of SSDTrain is among them."""


def line(step: int, rank: int = 0, **more: Any) -> dict[str, Any]:
    """One step: memory grows with the rank, so that the largest rank is the last."""
    return {
        "step": step,
        "step_seconds": 0.5 + 0.1 * rank,
        "saved_bytes": 100 * MiB,
        "ssd_bytes_written": 90 * MiB,
        "ssd_bytes_read": 80 * MiB,
        "avoided_write_bytes": 10 * MiB,
        "activation_peak_bytes": (30 + rank) * MiB,
        "unoffloaded_peak_bytes": 100 * MiB,
        "store_wait_seconds": 0.0,
        "load_wait_seconds": 0.01,
        "ssd_life_seconds": 86400.0 * (30 + rank),
        "comm/dp/calls": 4,
        "comm/dp/compressed": 4,
        "comm/dp/raw_bytes": 40 * MiB,
        "comm/dp/wire_bytes": 10 * MiB,
        "comm/dp/codec_seconds": 0.02,
        "comm/dp/wait_seconds": 0.03,
        "load_waits": [{"module": "layers.0.mlp", "seconds": 0.01}],
        **({"modules": MODULES} if step in (2, 4) else {}),
        **more,
    }


def write(directory: Path, ranks: int = 2, steps: int = 5, **more: Any) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    for rank in range(ranks):
        lines = [json.dumps(line(step, rank, **more)) for step in range(1, steps + 1)]
        (directory / f"rank-{rank}.jsonl").write_text("\n".join(lines) + "\n")
    return directory
