"""One rank: trains every row that it is given, in every mode, and writes what came out.

python -m tests.deepspeed.worker DIRECTORY ROW [ROW ...] with RANK, WORLD_SIZE and MASTER_* in the environment.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from pathlib import Path

import torch

MODES = ("plain", "counted", "offloaded")
RESUMED = ("resumed-without", "resumed-with")
COMM = ("exact", "compressed")


def main(directory: str, *names: str) -> None:
    import deepspeed
    from deepspeed import comm as dist

    import ssdtrain_ds
    from tests.deepspeed import upstream
    from tests.deepspeed.rows import ROWS
    from tests.deepspeed.training import backend, run
    from tests.support.ranks import PATIENCE

    torch.set_num_threads(1)
    upstream.repair()
    ssdtrain_ds.install()
    deepspeed.init_distributed(dist_backend=backend(), timeout=PATIENCE, verbose=False)
    rows = {row.name: row for row in ROWS}
    rank = int(os.environ["RANK"])
    into = Path(directory)
    for name in names:
        row = rows[name]
        modes = [mode for mode in MODES if row.counted or mode != "counted"]
        modes += RESUMED if row.resumes else ()
        modes += COMM if row.ranks > 1 and row.compressed else ()
        found: dict[str, object] = {}
        try:
            for mode in modes:
                found[mode] = run(row, mode, into / f"{name}-{mode}")
        except Exception:  # noqa: BLE001 - written down: the test of this row fails with it
            found = {"error": traceback.format_exc()}
        (into / f"{name}.{rank}.json").write_text(json.dumps(found))
        if "error" in found and row.ranks > 1:
            sys.stdout.flush()
            os._exit(1)  # the others wait in a collective that will not come
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
