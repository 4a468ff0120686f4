"""`ssdtrain demo`: runs `examples.deepspeed_gpt`, whose modes are processes of their own: this one imports no framework."""

import argparse
import importlib.util
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]


def run(arguments: list[str]) -> int:
    """The demo's exit status: 1 where the numbers with SSDTrain are not those without, 2 where it cannot run at all, 3 where
    a run of it failed."""
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
    status: int = _demo().main(arguments)
    return status


def parser() -> argparse.ArgumentParser:
    """The demo's own, for a shell that completes; without options outside of a checkout."""
    if not (ROOT / "examples" / "deepspeed_gpt").is_dir():
        return argparse.ArgumentParser(prog="ssdtrain demo")
    made: argparse.ArgumentParser = _demo().parser()
    return made


def _demo() -> Any:
    if str(ROOT) not in sys.path:
        sys.path.insert(0, str(ROOT))
    return import_module("examples.deepspeed_gpt.compare")
