"""docs/troubleshooting.md has every warning and every exception class of the packages, and none that they no longer have."""

from __future__ import annotations

import difflib
import re

import pytest

from tests.docs.messages import GAP, ROOT, exceptions, warnings

PAGE = (ROOT / "docs" / "troubleshooting.md").read_text().split("\n## Mistakes")[0]  # those: test_mistakes.py
ROWS = [re.split(r" \| ", line.strip("| ")) for line in PAGE.splitlines() if line.startswith("| ")]
MESSAGES = [code for row in ROWS for code in re.findall(r"`([^`]+)`", row[0])]

# A text may be reworded a little without its row: what counts is that each warning has one.
ALIKE = 0.75


def alike(one: str, other: str) -> float:
    return difflib.SequenceMatcher(None, one.replace("`", ""), other, autojunk=False).ratio()


@pytest.fixture(scope="module")
def written() -> dict[str, str]:
    found = {text: file for text, file in warnings().items() if len(text.replace(GAP, "")) > 10}
    assert len(found) > 20
    return found


def test_every_warning_has_a_row(written: dict[str, str]) -> None:
    missing = {
        text: file for text, file in written.items() if max(alike(text, row) for row in MESSAGES) < ALIKE
    }
    assert not missing, f"add to docs/troubleshooting.md, with cause and fix: {missing}"


def test_every_row_is_a_warning_or_an_exception(written: dict[str, str]) -> None:
    quoted = [message for message in MESSAGES if " " in message and "has no attribute" not in message]
    stale = [row for row in quoted if max(alike(text, row) for text in written) < ALIKE]
    assert not stale, f"no code writes these any more: {stale}"


def test_every_exception_class_is_named() -> None:
    missing = {name: file for name, file in exceptions().items() if f"`{name}`" not in PAGE}
    assert not missing, f"add to docs/troubleshooting.md: {missing}"
    gone = {m for m in MESSAGES if re.fullmatch(r"[A-Z]\w+", m)} - set(exceptions())
    assert not gone, f"no such exception any more: {gone}"


def test_every_row_has_a_cause_and_a_fix() -> None:
    for row in ROWS:
        assert len(row) == 3 and all(row), row
