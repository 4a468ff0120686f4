"""Which known name a misspelled one was probably meant to be."""

import difflib
from collections.abc import Iterable

_LONGEST = 64  # characters; comparing costs the product of both lengths


def closest(word: str, candidates: Iterable[str]) -> str | None:
    """The candidate that is most like `word`, where letter case and "-" for "_" do not count; None where none
    is like it."""
    if len(word) > _LONGEST:
        return None
    reduced = {_reduced(candidate): candidate for candidate in candidates}
    near = difflib.get_close_matches(_reduced(word), list(reduced), n=1)
    return reduced[near[0]] if near else None


def resembles(word: str, name: str) -> bool:
    """Whether `word` is `name` misspelled ("ssdtrian", "ssd-train", "SSDTrain") or with something behind it
    ("ssdtrain_config"); False where it is `name` itself."""
    if word == name or len(word) > _LONGEST:
        return False
    one, other = (text.lower().replace("_", "").replace("-", "") for text in (word, name))
    return one.startswith(other) or difflib.SequenceMatcher(None, one, other).ratio() >= 0.8


def _reduced(word: str) -> str:
    return word.lower().replace("-", "_")
