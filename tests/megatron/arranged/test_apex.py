"""apex is found by its extension modules, and the other package of that name is not taken for it."""

from __future__ import annotations

import importlib
import sys
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import pytest

from ssdtrain_megatron import attachment


def test_its_parts_are_found_one_by_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder of that name is another package, and a Python file of an extension's name a stub."""
    (tmp_path / "apex").mkdir()
    (tmp_path / "apex" / "__init__.py").write_text("")
    for module in attachment.APEX_PARTS.values():
        monkeypatch.delitem(sys.modules, module, raising=False)  # a stand-in
        (tmp_path / f"{module}.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert attachment.apex_parts() == ()
    expected: list[str] = []
    for part, module in attachment.APEX_PARTS.items():
        (tmp_path / f"{module}.py").unlink()
        (tmp_path / f"{module}{EXTENSION_SUFFIXES[0]}").write_bytes(b"cannot be imported")
        importlib.invalidate_caches()
        expected.append(part)
        assert attachment.apex_parts() == tuple(expected)
