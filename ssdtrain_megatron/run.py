"""Runs a training script of Megatron-LM, unchanged, with the --ssdtrain-* flags.

```
torchrun --nproc-per-node 8 -m ssdtrain_megatron.run pretrain_gpt.py --tensor-model-parallel-size 2 ... \\
    --ssdtrain-offload-directories /nvme{local_rank}/{user}
```
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from ssdtrain_megatron.flags import unused_flags
from ssdtrain_megatron.pretrain import install_pretrain

__all__ = ["main"]


def main(arguments: list[str] | None = None) -> None:
    """Run the script that `arguments` (by default the command line) begins with; the rest is its own.

    Raises:
        SystemExit: no script is named, or it does not exist; or a flag of ours is misspelled or has an invalid value.
        ConfigError: the script ended well and left flags of ours unused.
        ImportError: see `install_pretrain`.
    """
    given = sys.argv[1:] if arguments is None else arguments
    if not given or given[0].startswith("-"):
        raise SystemExit(
            "usage: python -m ssdtrain_megatron.run SCRIPT [its arguments and --ssdtrain-* flags]"
        )
    script = Path(given[0]).resolve()
    if not script.is_file():
        raise SystemExit(
            f"{given[0]} is not a file (looked for {script}): name a script of a Megatron-LM checkout"
        )
    # As `python SCRIPT` does it: the script's directory, which has megatron.training, comes first.
    sys.path.insert(0, str(script.parent))
    sys.argv = list(given)
    install_pretrain()
    why = "the script has ended, and nothing was attached to a model"
    try:
        runpy.run_path(str(script), run_name="__main__")
    except SystemExit as end:
        if not end.code:
            unused_flags.check(why)
        raise
    unused_flags.check(why)


if __name__ == "__main__":
    main()
