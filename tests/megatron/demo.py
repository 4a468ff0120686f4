"""`make demo-megatron`: the demo on 4 processes without a GPU, tensor parallel 2 and pipeline parallel 2.

Flags go on to the demo and win over what is chosen here.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys

from benchmarks.two_nodes.ports import free_port
from tests.support.processes import ROOT

# Little in flight and little read ahead: the whole run's activations are no more than what is useful there on a GPU.
CHOSEN = shlex.split("""
    --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --distributed-backend gloo --train-iters 10
    --ssdtrain-offload-in-flight 16MiB --ssdtrain-offload-prefetch 16MiB
""")


def main(arguments: list[str]) -> int:
    processes = 4
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", str(processes)]
    address = ["--master-addr", "127.0.0.1", "--master-port", str(free_port())]
    program = ["-m", "tests.megatron.cpu", "-m", "examples.megatron_gpt.demo"]
    command = [sys.executable, *launcher, *address, *program, *CHOSEN, *arguments]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONWARNINGS": "ignore",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    return subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
