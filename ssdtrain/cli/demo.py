"""`ssdtrain demo`: the DeepSpeed demo in a process of its own, since this package imports no framework."""

import importlib.util
import subprocess
import sys


def run(arguments: list[str]) -> int:
    """The demo's exit status: 1 where the numbers with SSDTrain are not those without, 2 where it cannot run at all."""
    missing = [name for name in ("deepspeed", "ssdtrain_ds") if importlib.util.find_spec(name) is None]
    if missing:
        print(
            f"ssdtrain demo: {' and '.join(missing)} not found: pip install 'ssdtrain[deepspeed,plot]'",
            file=sys.stderr,
        )
        return 2
    process = subprocess.Popen([sys.executable, "-m", "ssdtrain_ds.demo", *arguments])
    try:
        return process.wait()
    except KeyboardInterrupt:
        # The terminal has sent the same signal to the demo, which ends its own processes first.
        return process.wait()
