"""Who may import whom: tools -> adapters, pytorch -> integration -> runtime -> planner, telemetry -> offload, comm, compact,
state -> profile, storage, codecs, features -> device, metrics, config."""

import ast
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

# A room may import itself and every room on a lower floor, never its neighbours on the same floor or anything above. A module
# with a floor of its own is a room.
FLOOR = {
    room: floor
    for floor, rooms in enumerate(
        (
            {"ranks"},
            {"config", "messages", "versions", "patience", "output_files", "steps"},
            {"text"},
            {"metrics", "device"},
            {"profile", "storage", "codecs", "features"},
            {"offload", "comm", "compact", "state"},
            {"planner", "telemetry", "preflight"},
            {"runtime"},
            {"integration"},
            {"pytorch"},
            {"hf", "lightning"},
            {"__init__", "tools"},
            {"__main__"},
        )
    )
    for room in rooms
}
ADAPTERS = {"ssdtrain_ds", "ssdtrain_megatron"}
FRAMEWORKS = {"deepspeed", "megatron", "transformers", "accelerate", "lightning"}
OF_TRAINERS = {"hf": "transformers", "lightning": "lightning"}
"""Modules of the engine's package that serve a trainer by `ssdtrain.attach`, and the one framework that each may import."""

# Also in strings, comments and C sources of the engine: what works for one framework only belongs to its adapter.
NAMES = re.compile(r"megatron|deepspeed|transformer.?engine|\bapex\b|accelerate|hugging", re.IGNORECASE)
MAY_NAME = {
    "__init__.py": "says where the adapters are",
    "config/document.py": "writes docs/config.md",
    "hf.py": "serves trainers by attach",
}
"""Files that may name frameworks, and why. Nothing in them runs differently for one framework than for another."""


def imports_of(path: Path) -> set[str]:
    """Absolute names of every module that `path` imports, relative imports resolved."""
    package = path.relative_to(ROOT).with_suffix("").parts[:-1]
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = list(package[: len(package) - node.level + 1]) if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            found |= {f"{module}.{alias.name}" for alias in node.names} | {module}
    return found


def room_of(names: Sequence[str]) -> str:
    """The room of a module of the engine, given its names below `ssdtrain`."""
    module = ".".join(names[:2])
    return module if module in FLOOR else names[0] if names else ""


def engine_files() -> list[Path]:
    return sorted((ROOT / "ssdtrain").rglob("*.py"))


@pytest.mark.parametrize("path", engine_files(), ids=lambda p: str(p.relative_to(ROOT)))
def test_the_engine_imports_downwards_and_no_framework(path: Path) -> None:
    room = room_of(path.relative_to(ROOT / "ssdtrain").with_suffix("").parts)
    for name in imports_of(path):
        pieces = name.split(".")
        own = {OF_TRAINERS.get(room)}
        assert room == "tools" or pieces[0] not in (FRAMEWORKS | ADAPTERS) - own, f"{path} imports {name}"
        other = room_of(pieces[1:])
        if pieces[0] != "ssdtrain" or room == "__init__" or other not in FLOOR:
            continue
        assert other == room or FLOOR[other] < FLOOR[room], (
            f"{path} ({room}) imports {name} from the floor above"
        )


def test_the_engine_names_no_framework() -> None:
    sources = {p for ending in ("py", "c", "h") for p in (ROOT / "ssdtrain").rglob(f"*.{ending}")}
    assert len(sources) > 100
    named = {
        str(name)
        for p in sources
        if (name := p.relative_to(ROOT / "ssdtrain")).parts[0] != "tools" and NAMES.search(p.read_text())
    }
    assert named == set(MAY_NAME), "an entry that is not needed any more goes, too"


def test_every_room_has_a_floor() -> None:
    rooms = {p.relative_to(ROOT / "ssdtrain").parts[0].removesuffix(".py") for p in engine_files()}
    assert rooms - {"__init__", "__main__"} <= set(FLOOR)


@pytest.mark.parametrize("package", ["ssdtrain_ds", "ssdtrain_megatron"])
def test_adapters_do_not_know_each_other(package: str) -> None:
    other = {"ssdtrain_ds": "ssdtrain_megatron", "ssdtrain_megatron": "ssdtrain_ds"}[package]
    for path in (ROOT / package).rglob("*.py"):
        assert not any(name.split(".")[0] == other for name in imports_of(path)), path


@pytest.mark.parametrize("package", ["ssdtrain_ds", "ssdtrain_megatron"])
def test_private_names_of_a_framework_are_in_compat_files_only(package: str) -> None:
    for path in (ROOT / package).rglob("*.py"):
        if path.name.startswith("_compat"):
            continue
        nodes = list(ast.walk(ast.parse(path.read_text())))
        own = {"self", "cls"} | {node.name for node in nodes if isinstance(node, ast.ClassDef)}
        for node in nodes:
            if isinstance(node, ast.Attribute) and re.match(r"_[A-Za-z]", node.attr):
                assert ast.unparse(node.value) in own, f"{path}:{node.lineno}: {ast.unparse(node)}"
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in FRAMEWORKS:
                names = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
                assert not any(name.startswith("_") for name in names), f"{path}:{node.lineno}"


def test_the_parts_of_the_engine_are_reached_through_its_methods() -> None:
    """No other room goes through the mover, the prefetcher or the buffers of an engine, or sets an attribute of it."""
    paths = [path for package in ("ssdtrain", *sorted(ADAPTERS)) for path in (ROOT / package).rglob("*.py")]
    found = []
    for path in paths:
        room = "/".join(path.relative_to(ROOT).parts[:2])
        if room == "ssdtrain/offload":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Attribute):
                continue
            chain = ast.unparse(node)
            part = re.search(r"engine\.(mover|prefetcher|buffers)$", chain)
            turned = isinstance(node.ctx, ast.Store) and re.search(r"(engine|runtime\.offload)\.", chain)
            if part or turned:
                found.append(f"{path.relative_to(ROOT)}:{node.lineno}: {chain}")
    assert not found, "\n".join(found)


def test_no_module_of_the_codecs_imports_one_that_imports_it() -> None:
    """Kernels are below the codecs that use them, for type checkers too."""
    files = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
        for path in (ROOT / "ssdtrain" / "codecs").rglob("*.py")
    }
    graph = {name: imports_of(path) & set(files) - {name, "ssdtrain.codecs"} for name, path in files.items()}
    while graph:
        leaves = [name for name, needs in graph.items() if not needs & set(graph)]
        assert leaves, f"a circle of imports among {sorted(graph)}"
        for name in leaves:
            del graph[name]


def test_importing_the_package_imports_nothing_slow() -> None:
    """SymPy and what stands on it take longer than all of the engine; they come when a model needs them."""
    code = "import sys, ssdtrain; print(sorted({'sympy', 'torch.distributed.fsdp', 'torch._dynamo'} & {*sys.modules}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
