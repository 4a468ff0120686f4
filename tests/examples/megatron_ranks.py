"""One rank of the trainer on megatron-core and of its demo: several runs one after the other, since to import megatron takes
seconds. `tests.support.processes.forked` calls `main`.
"""

from __future__ import annotations

import json
import os
import warnings

warnings.filterwarnings("ignore")

from tests.megatron import cpu  # noqa: E402

cpu.arrange()

import megatron.core  # noqa: E402, F401

cpu.finish()

import torch  # noqa: E402

from examples.megatron_gpt import demo, text, trainer  # noqa: E402

PROGRAMS = {"trainer": trainer.main, "demo": demo.main}

# Enough documents for each of the three splits.
text.LIMIT_BYTES = 4 << 20


def main(runs: str) -> None:
    """Run programs, and print what begins before each.

    Args:
        runs: JSON of a list of [name, "trainer" or "demo", port, flags].
    """
    torch.set_num_threads(1)
    for name, program, port, flags in json.loads(runs):
        # The store of the run before may still be open.
        os.environ["MASTER_PORT"] = str(port)
        print(f"=== {name}", flush=True)
        status = PROGRAMS[program](flags)
        assert status == 0, f"{program} ended with {status}"
