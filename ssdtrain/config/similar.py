"""Suggestions for misspelled names."""

import difflib
import os
from collections.abc import Iterable

_LONGEST = 64  # characters; comparing costs the product of both lengths


def closest(word: str, candidates: Iterable[str]) -> str | None:
    """The candidate most similar to `word`, ignoring case and "-" versus "_"; None if none is similar."""
    if len(word) > _LONGEST:
        return None
    reduced = {_reduced(candidate): candidate for candidate in candidates}
    written = _reduced(word)
    near = difflib.get_close_matches(written, list(reduced))
    if not near:
        return None
    ratios = {found: difflib.SequenceMatcher(None, found, written).ratio() for found in near}
    # "directory" is as much like "direct" as like "directories", and begins as the latter does.
    best = [found for found in near if ratios[found] > max(ratios.values()) - 0.03]
    return reduced[max(best, key=lambda found: len(os.path.commonprefix([found, written])))]  # noqa: RUF071


def resembles(word: str, name: str) -> bool:
    """Whether `word` is `name` misspelled ("ssdtrian", "ssd-train", "SSDTrain") or with something behind it
    ("ssdtrain_config"); False where it is `name` itself."""
    if word == name or len(word) > _LONGEST:
        return False
    one, other = (text.lower().replace("_", "").replace("-", "") for text in (word, name))
    return one.startswith(other) or difflib.SequenceMatcher(None, one, other).ratio() >= 0.8


def _reduced(word: str) -> str:
    return word.lower().replace("-", "_")
