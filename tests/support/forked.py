"""Ranks that are forked from one process, which has imported what they use: a framework takes each process seconds to import.

    WORLD_SIZE=... python -m tests.support.forked DIRECTORY IMPORTS MODULE [ARGUMENT ...]

IMPORTS are names of modules with commas between them, imported before MODULE; every rank calls MODULE.main(ARGUMENT ...) and ends
as a process does. What rank N prints goes to DIRECTORY/N. When all have ended, or one has failed and the others were ended, their
exit statuses go to DIRECTORY/statuses, as JSON.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import signal
import sys
from pathlib import Path


def main(directory: str, imports: str, module: str, *arguments: str) -> None:
    sys.argv = [module, *arguments]
    for name in filter(None, imports.split(",")):
        importlib.import_module(name)
    made = importlib.import_module(module)
    gc.collect()
    gc.freeze()
    ranks: dict[int, int] = {}
    for rank in range(int(os.environ["WORLD_SIZE"])):
        pid = os.fork()
        if not pid:
            os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
            with Path(directory, str(rank)).open("w") as output:
                os.dup2(output.fileno(), 1)
                os.dup2(output.fileno(), 2)
            made.main(*arguments)
            return
        ranks[pid] = rank
    statuses: dict[int, int] = {}
    while len(statuses) < len(ranks):
        pid, status = os.wait()
        statuses[ranks[pid]] = os.waitstatus_to_exitcode(status)
        # A rank that failed leaves the others waiting for it.
        if status:
            for other, rank in ranks.items():
                if rank not in statuses:
                    os.kill(other, signal.SIGKILL)
    Path(directory, "statuses").write_text(json.dumps([statuses[rank] for rank in sorted(statuses)]))


if __name__ == "__main__":
    main(*sys.argv[1:])
