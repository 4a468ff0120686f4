"""One line of `ssdtrain doctor`."""

from dataclasses import dataclass

__all__ = ["BROKEN", "GOOD", "NOTE", "WARNING", "Finding"]

GOOD, NOTE, WARNING, BROKEN = "ok", "-", "warning", "broken"


@dataclass(frozen=True)
class Finding:
    subject: str
    found: str
    verdict: str
    """ok; "-" for what is missing and need not be there; warning: works, worse than it could; broken: SSDTrain will not run."""
    remedy: str = ""
