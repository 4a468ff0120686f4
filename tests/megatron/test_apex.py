"""apex is found by its extension modules, and the other package of that name is not taken for it."""

from __future__ import annotations

import importlib
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import pytest

from ssdtrain_megatron import apex


def test_without_apex_nothing_is_found() -> None:
    assert apex.found() == ()


def test_its_parts_are_found_one_by_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    expected: list[str] = []
    for part, (module, _) in apex.PARTS.items():
        (tmp_path / f"{module}{EXTENSION_SUFFIXES[0]}").write_bytes(b"cannot be imported")
        importlib.invalidate_caches()
        expected.append(part)
        assert apex.found() == tuple(expected)


def test_the_other_package_of_that_name_is_not_apex(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "apex").mkdir()
    (tmp_path / "apex" / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert apex.found() == ()


def test_stubs_in_the_place_of_its_extensions_are_not_apex(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module, _ in apex.PARTS.values():
        (tmp_path / f"{module}.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert apex.found() == ()
