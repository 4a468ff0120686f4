"""Fault injection for tests: delays, short transfers, EINTR, EIO, ENOSPC, reordered pieces.

The C engine decides each by a hash of (seed, question, kind of operation, serial number, piece, attempt), so that a seed gives
the same faults independently of thread scheduling. No random generator is used.
"""

import errno
from dataclasses import dataclass, field, replace

HASH_MASK = (1 << 64) - 1

# Questions: second argument of `chance`. Same numbers as in `_iopool_faults.h`.
DELAY, DELAY_LENGTH, SHORT, SHORT_LENGTH, INTERRUPT, FAIL, FAIL_PIECE, SHUFFLE = range(1, 9)


@dataclass(frozen=True)
class Faults:
    """Injected faults and their probabilities, in [0, 1]. Writes and reads are numbered separately from 0.

    Copies to and from the host tier are delayed, shortened and reordered too, but never fail.
    """

    seed: int = 0
    delay: float = 0.0
    """Probability that a piece sleeps before its transfer."""
    max_delay: float = 0.01
    """Longest sleep, seconds."""
    short: float = 0.0
    """Probability that a system call transfers only a part of the request."""
    interrupt: float = 0.0
    """Probability that a system call returns EINTR; below 1."""
    fail_writes: frozenset[int] = field(default_factory=frozenset)
    """Serial numbers of the writes that fail."""
    fail_reads: frozenset[int] = field(default_factory=frozenset)
    write_failure: float = 0.0
    """Probability that a write fails."""
    read_failure: float = 0.0
    error: int = errno.EIO
    """The errno of the failures."""
    torn: bool = False
    """Serve the pieces of one operation in shuffled order."""
    full_after: int | None = None
    """Growing a spill file beyond this many bytes fails with ENOSPC, after a partial allocation."""
    full_drive: int | None = None
    """Index of the drive that `full_after` applies to; None: every drive."""

    @property
    def transfers(self) -> bool:
        """Whether transfers are changed, which only the C engine does, and not the growth of files alone."""
        return replace(self, seed=0, full_after=None, full_drive=None) != Faults()

    def __post_init__(self) -> None:
        for name in ("delay", "short", "interrupt", "write_failure", "read_failure"):
            value = getattr(self, name)
            if not 0 <= value <= 1 or (name == "interrupt" and value == 1):
                raise ValueError(f"Faults.{name} is a probability, got {value}")
        if self.max_delay < 0:
            raise ValueError(f"Faults.max_delay is a time in seconds, got {self.max_delay}")


def mix(x: int) -> int:
    """The finalizer of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014)."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & HASH_MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & HASH_MASK
    return x ^ (x >> 31)


def hashed(seed: int, question: int, kind: int, serial: int, piece: int, attempt: int) -> int:
    x = seed & HASH_MASK
    for value in (question, kind, serial, piece, attempt):
        x = mix((x ^ value) + 0x9E3779B97F4A7C15 & HASH_MASK)
    return x


def chance(seed: int, question: int, kind: int, serial: int, piece: int = 0, attempt: int = 0) -> float:
    """A number in [0, 1), a deterministic function of the arguments."""
    return (hashed(seed, question, kind, serial, piece, attempt) >> 11) * 2.0**-53
