"""One name stands for one thing, and docstrings are sentences or noun phrases."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGES = ("ssdtrain", "ssdtrain_ds", "ssdtrain_megatron")

EXEMPT: set[str] = set()
"""Rooms whose words are still to be mended; both tests leave them out. A room that is done leaves the set; empty, it is off."""

FRAGMENT = re.compile(
    r"(Of|That|Those|As|By|From|In|For|With|Without|To|At|On|Whose|Than|Beside|Besides|(In|By|To|For|From|With|At|On|Of) which)\b"
)
"""First words of a docstring that completes a sentence which stands nowhere."""

CONSTANT = re.compile(r"[A-Z]\w+")
"""Constants and aliases of types; a single letter is a type variable. A constant with an underscore belongs to its file alone."""


def room_of(path: Path) -> str:
    package, *names = path.relative_to(ROOT).with_suffix("").parts
    return f"{package}/{names[0]}" if package == "ssdtrain" else package


def trees() -> Iterator[tuple[Path, ast.Module]]:
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            if room_of(path) not in EXEMPT:
                yield path, ast.parse(path.read_text())


def names_in(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """Classes, with or without an underscore in front, and public constants of a module, with their lines."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            yield node.name.lstrip("_"), node.lineno
    for statement in tree.body:
        targets = statement.targets if isinstance(statement, ast.Assign) else []
        if isinstance(statement, ast.AnnAssign):
            targets = [statement.target]
        for name in [node for target in targets for node in ast.walk(target) if isinstance(node, ast.Name)]:
            if CONSTANT.fullmatch(name.id):
                yield name.id, name.lineno


def docstrings_in(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """The docstrings of modules, classes, functions and attributes, with their lines."""
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        for statement in body if isinstance(body, list) else []:  # that of a lambda is an expression
            value = statement.value if isinstance(statement, ast.Expr) else None
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                yield value.value.strip(), value.lineno


def test_one_name_stands_for_one_class_or_constant() -> None:
    places: dict[str, list[str]] = {}
    for path, tree in trees():
        for name, line in names_in(tree):
            places.setdefault(name, []).append(f"{path.relative_to(ROOT)}:{line}")
    homonyms = [f"{name}: {', '.join(found)}" for name, found in sorted(places.items()) if len(found) > 1]
    assert not homonyms, "\n".join(["one name for several things:", *homonyms])


def test_docstrings_are_sentences_or_noun_phrases() -> None:
    fragments = [
        f"{path.relative_to(ROOT)}:{line}: {text.splitlines()[0]}"
        for path, tree in trees()
        for text, line in docstrings_in(tree)
        if FRAGMENT.match(text)
    ]
    assert not fragments, "\n".join(["docstrings that are no sentence and no noun phrase:", *fragments])


def test_rooms_that_are_exempt_exist() -> None:
    rooms = {room_of(path) for package in PACKAGES for path in (ROOT / package).rglob("*.py")}
    assert rooms >= EXEMPT, "an entry that is not needed any more goes"
