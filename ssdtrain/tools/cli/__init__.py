"""The console script `ssdtrain`.

What lives here: `main` (which command), and one module per command: `demo` (runs `examples.deepspeed_gpt`), `doctor` (what is
installed and what the drives are), `bench` (how fast this machine is), `report` (what a run did), `plan` and `estimate` (what a
job will take, on machines that need not be there).

May import all of `ssdtrain`, but no framework or its adapter, so that it works if they are missing or broken.
"""

from ssdtrain.tools.cli.main import main

__all__ = ["main"]
