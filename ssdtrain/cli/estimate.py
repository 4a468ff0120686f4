"""`ssdtrain estimate`: what your own model takes on a GPU, counted under fake tensors: no GPU and no memory is needed.

    ssdtrain estimate my_package.model:build --batch 8 --gpu h100 --ssd "4 x 7GB/s"

`build(batch)` returns the model and a function without arguments that runs its forward and returns the loss. In its place
the `config.json` of a model of the transformers library may stand, where that is installed:

    ssdtrain estimate ./llama/config.json --seq 4096 --batch 8 --gpu h100
"""

import argparse
import importlib
import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from ssdtrain.cli.plan import given
from ssdtrain.cli.progress import progress
from ssdtrain.config.errors import InvalidValue
from ssdtrain.config.units import GiB, parse_size
from ssdtrain.planner.estimate import Estimate, Hardware, estimate
from ssdtrain.planner.hardware import GPUS, find_gpu, parse_ssds
from ssdtrain.telemetry.text import duration_text, size_text


def run(arguments: list[str]) -> int:
    """0; 1 where nothing fits or there is no such model."""
    chosen = parser().parse_args(arguments)
    hardware = Hardware(
        chosen.gpu, chosen.ssd, chosen.gpus_per_node, chosen.reserve, chosen.state_bytes, chosen.efficiency
    )
    try:
        with progress(f"counting what {chosen.model} saves"):
            named = chosen.model
            made = from_config(Path(named), chosen.seq) if is_config(named) else factory(named)
            found = estimate(made, chosen.batch, hardware, patterns=chosen.blocks)
    except (InvalidValue, ValueError) as error:
        print(f"ssdtrain estimate: the model {error}", file=sys.stderr)
        return 1
    if chosen.json:
        print(json.dumps(figures(found)))
    else:
        show(found, Console())
    return 0 if found.plan is not None else 1


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="ssdtrain estimate", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("model", help="module:function, file.py:function, or the path of a config.json")
    made.add_argument(
        "--seq", type=int, default=2048, help="tokens of a sequence, of a config.json; default: 2048"
    )
    made.add_argument("--batch", type=int, default=1, help="sequences of a microbatch; default: 1")
    made.add_argument(
        "--blocks", nargs="*", default=(), help="patterns of blocks' names; default: the longest ModuleList's"
    )
    made.add_argument("--gpu", type=given(find_gpu), required=True, help=", ".join(GPUS))
    made.add_argument("--ssd", type=given(parse_ssds), help='of a node: "4 x 7GB/s"')
    made.add_argument("--gpus-per-node", type=int, default=8, help="which share the drives; default: 8")
    made.add_argument(
        "--reserve", type=given(parse_size), default=4 * GiB, help="device memory for all else; default: 4GiB"
    )
    made.add_argument(
        "--state-bytes", type=int, default=16, help="per parameter; default: 16 (mixed precision and Adam)"
    )
    made.add_argument(
        "--efficiency", type=float, default=0.5, help="part of the peak FLOP rate; default: 0.5"
    )
    made.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    return made


def factory(name: str) -> Callable[[int], Any]:
    """The function that `module:function` or `file.py:function` names; modules of the working directory are found.

    Raises:
        ValueError: there is none.
    """
    module, colon, function = name.partition(":")
    if not colon or not function:
        raise ValueError(f'is named "{name}"; allowed: module:function, file.py:function')
    if module.endswith(".py"):
        return _from_file(Path(module), function, name)
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        found: Callable[[int], Any] = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise ValueError(f'is named "{name}", which cannot be imported: {error}') from error
    return found


def is_config(name: str) -> bool:
    """Whether a model is named by its configuration."""
    return name.endswith(".json")


def from_config(file: Path, sequence: int) -> Callable[[int], Any]:
    """Builds the model that a `config.json` of the transformers library describes, and a step on tokens and labels.

    The class is the first of its "architectures", else a causal language model; weights are bfloat16.

    Raises:
        ValueError: there is no such file or class, or the library is not installed.
    """
    try:
        library = importlib.import_module("transformers")
    except ImportError as error:
        raise ValueError(f"is {file}, and the transformers library is not installed: {error}") from error
    try:
        config = library.AutoConfig.from_pretrained(file)
    except (OSError, ValueError) as error:
        raise ValueError(f"is {file}, which is no config of the transformers library: {error}") from error
    names = getattr(config, "architectures", None) or ["AutoModelForCausalLM"]
    kind = getattr(library, names[0], None)
    if kind is None:
        raise ValueError(f"is {file}, whose architecture {names[0]} this transformers does not have")
    config.use_cache = False

    def build(batch: int) -> Any:
        default = torch.get_default_dtype()
        torch.set_default_dtype(torch.bfloat16)
        try:
            model = kind.from_config(config) if hasattr(kind, "from_config") else kind(config)
        finally:
            torch.set_default_dtype(default)
        model.train()
        tokens = torch.randint(config.vocab_size, (batch, sequence))
        return model, lambda: model(input_ids=tokens, labels=tokens).loss

    return build


def _from_file(file: Path, function: str, name: str) -> Callable[[int], Any]:
    """Of a script, which is run as a module: not as `__main__`."""
    if not file.is_file():
        raise ValueError(f'is named "{name}", and there is no file {file}')
    sys.path.insert(0, str(file.resolve().parent))
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None and spec.loader is not None
    module = sys.modules[file.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if not hasattr(module, function):
        raise ValueError(f'is named "{name}", and {file} has no {function}')
    found: Callable[[int], Any] = getattr(module, function)
    return found


def figures(found: Estimate) -> dict[str, Any]:
    """Bytes, seconds, and bytes per second."""
    actions = found.plan.actions if found.plan is not None else ("",) * len(found.blocks)
    return {
        "batch": found.batch,
        "largest_batch": found.largest,
        "saved_bytes": found.saved,
        "model_state_bytes": found.state,
        "activation_budget_bytes": found.budget,
        "seconds": found.seconds,
        "bandwidth_for_all": found.bandwidth_for_all,
        "planned_seconds": found.plan.seconds if found.plan is not None else None,
        "activation_peak_bytes": found.plan.peak if found.plan is not None else None,
        "blocks": [
            {"name": block.name, "saved_bytes": block.saved, "input_bytes": block.inputs, "action": action}
            for block, action in zip(found.blocks, actions, strict=True)
        ],
    }


def show(found: Estimate, console: Console) -> None:
    values = figures(found)
    table = Table(title=f"microbatch of {found.batch}")
    for column in ("block", "saved", "inputs", "forward", "action"):
        table.add_column(column)
    for block, row in zip(found.blocks, values["blocks"], strict=True):
        table.add_row(
            block.name,
            size_text(block.saved),
            size_text(block.inputs),
            duration_text(block.forward),
            row["action"],
        )
    console.print(table)
    console.print(f"saved by a microbatch: {size_text(found.saved)}; model state: {size_text(found.state)}")
    console.print(f"bandwidth needed to offload all of it: {found.bandwidth_for_all / 1e9:.2f} GB/s")
    if found.plan is None:
        console.print(f"no plan fits into {size_text(found.budget)}")
    else:
        console.print(
            f"plan: {found.plan.summary()}; activation peak {size_text(found.plan.peak)} of {size_text(found.budget)}; "
            f"{duration_text(found.plan.seconds)}, with everything kept {duration_text(found.seconds)}"
        )
    console.print(f"largest microbatch: {found.largest}")
