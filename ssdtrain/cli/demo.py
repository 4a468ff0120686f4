"""`ssdtrain demo`: runs `examples.deepspeed_gpt` in a process of its own, since this package imports no framework."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def run(arguments: list[str]) -> int:
    """The demo's exit status: 1 where the numbers with SSDTrain are not those without, 2 where it cannot run at all."""
    if not (ROOT / "examples" / "deepspeed_gpt").is_dir():
        print(
            "ssdtrain demo: the examples are not part of the installed package: run `make demo` in a checkout of the repository",
            file=sys.stderr,
        )
        return 2
    missing = [name for name in ("deepspeed", "ssdtrain_ds") if importlib.util.find_spec(name) is None]
    if missing:
        print(
            f"ssdtrain demo: {' and '.join(missing)} not found: pip install 'ssdtrain[deepspeed,plot]'",
            file=sys.stderr,
        )
        return 2
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    process = subprocess.Popen(
        [sys.executable, "-m", "examples.deepspeed_gpt", *arguments], env={**os.environ, "PYTHONPATH": path}
    )
    try:
        return process.wait()
    except KeyboardInterrupt:
        # The terminal has sent the same signal to the demo, which ends its own processes first.
        return process.wait()
