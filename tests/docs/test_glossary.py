"""docs/glossary.md has every word that is ours, and none that no page uses."""

from __future__ import annotations

import re

from tests.docs.blocks import PAGES, TOP
from tests.docs.messages import ROOT

GLOSSARY = ROOT / "docs" / "glossary.md"

OURS = {
    *("action", "adapter", "admission", "arena", "block", "chunk", "codec", "device limit"),
    *("dimension", "drive write a day", "error feedback", "fallback", "feature", "forwarded", "handle"),
    *(
        "host tier",
        "in flight",
        "journal",
        "keep",
        "live",
        "microbatch",
        "offload",
        "payload",
        "piece",
        "plan",
    ),
    *("policy", "pool", "prefetch", "preset", "probe", "raw bytes", "recompute", "region", "residual"),
    *("saved tensor", "slab", "slot", "staging buffer", "stall", "step", "store", "load", "tape", "tier"),
    *("topology", "two hops", "wire bytes", "write budget"),
    *("bounce block", "owner", "part", "projected SSD life", "ring", "ROK curve", "shard", "virtual time"),
}
"""Words of pages, config keys, metrics and traces that have a meaning of their own here."""


def defined() -> list[str]:
    rows = [line for line in GLOSSARY.read_text().splitlines() if line.startswith("| ")][1:]
    return [word for row in rows for word in row.split(" | ")[0].strip("| ").split(", ")]


def test_every_word_of_ours_is_defined_once_in_order() -> None:
    words = defined()
    assert len(words) == len(set(words))
    assert set(words) >= OURS, OURS - set(words)
    firsts = [row.split(" | ")[0] for row in GLOSSARY.read_text().splitlines() if row.startswith("| ")][1:]
    assert firsts == sorted(firsts, key=str.lower)


def test_every_word_that_is_defined_is_used() -> None:
    text = " ".join(page.read_text().lower() for page in [*TOP, *PAGES] if page != GLOSSARY)
    text = re.sub(r"[\s_-]+", " ", text)
    unused = [word for word in defined() if not re.search(rf"\b{re.escape(word.lower())}", text)]
    assert not unused, unused
