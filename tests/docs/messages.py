"""The warnings that the packages can write, read from their sources."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ("ssdtrain", "ssdtrain_ds", "ssdtrain_megatron")
GAP = "..."


def warnings() -> dict[str, str]:
    """Text -> file. What is filled in at run time is "..."; warnings that are made of nothing else are left out."""
    found = {}
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            for text in _of(ast.parse(path.read_text())):
                if re.search(r"\w{3}", text):
                    found[text] = str(path.relative_to(ROOT))
    return found


def exceptions() -> dict[str, str]:
    """Public exception class -> file."""
    found = {}
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            for match in re.finditer(
                r"^class ([A-Z]\w+)\((?:\w*Error|IOFailure|Exception)\):", path.read_text(), re.M
            ):
                found[match[1]] = str(path.relative_to(ROOT))
    return found


def _of(tree: ast.Module) -> Iterator[str]:
    named = {
        target.id: node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args:
            first = {"warning": 0, "warn": 0, "add": 1}.get(node.func.attr)
            if first is None or len(node.args) <= first or not _is_ours(node.func):
                continue
            argument = node.args[first]
            if isinstance(argument, ast.Name):
                argument = named.get(argument.id, argument)
            yield from _texts(argument)
    for name, value in named.items():  # passed on as an argument: offload/pacing/starter.py
        if name.isupper() and len(name) > 3:
            yield from (text for text in _texts(value) if "stays in memory" in text)


def _is_ours(function: ast.Attribute) -> bool:
    holder = ast.unparse(function.value)
    return holder == "logger" or holder.endswith("notices")


def _texts(node: ast.expr) -> Iterator[str]:
    if isinstance(node, ast.IfExp):
        yield from _texts(node.body)
        yield from _texts(node.orelse)
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield " ".join(re.sub(r"%\.?\d*[sdgrf]", GAP, node.value).split())
    elif isinstance(node, ast.JoinedStr):
        parts = (str(p.value) if isinstance(p, ast.Constant) else GAP for p in node.values)
        yield " ".join("".join(parts).split())
