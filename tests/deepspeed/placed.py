"""One rank: trains with model state where a config puts it, and writes losses and the section `zero_optimization`.

python -m tests.deepspeed.placed DIRECTORY NAME CONFIG STEPS [RESUME] with RANK, WORLD_SIZE and MASTER_* in the environment: saves
a checkpoint after two steps, goes on from that of RESUME, and with the name "killed" ends by SIGKILL.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import torch

SAVED_AFTER = 2


def main(directory: str, name: str, config: str, steps: str, resume: str = "") -> None:
    import deepspeed
    from deepspeed import comm as dist

    import ssdtrain_ds
    from tests.deepspeed import models, upstream
    from tests.deepspeed.test_planned_state import deep
    from tests.deepspeed.training import backend
    from tests.support.ranks import PATIENCE

    torch.set_num_threads(1)
    upstream.repair()
    ssdtrain_ds.install()
    deepspeed.init_distributed(dist_backend=backend(), timeout=PATIENCE, verbose=False)
    rank, into = int(os.environ["RANK"]), Path(directory)
    model = deep(6)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=json.loads(config))
    done = 0
    if resume:
        engine.load_checkpoint(str(into / resume))
        done = engine.global_steps
    losses = []
    for step, (ids, labels) in enumerate(models.batches(1 + rank, int(steps))):
        if step < done:
            continue
        loss = engine(ids, labels)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item().hex())
        if step + 1 == SAVED_AFTER and not resume:
            engine.save_checkpoint(str(into / name))
            dist.barrier()
    section = engine._config._param_dict["zero_optimization"]
    kept = sum(one.ds_numel for one in engine.module.parameters() if one.ds_persist)
    found = {
        "losses": losses,
        "section": section,
        "kept": kept,
        "planned": ssdtrain_ds.runtime_of(engine) is not None,
    }
    (into / f"{name}.{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    if name == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    engine.destroy()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
