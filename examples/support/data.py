"""Real text as bytes, and batches of it that depend on the seed and the step alone."""

import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

CORPUS_LIMIT_BYTES = 16 * 1024 * 1024
# Not prose for people: installed packages, the test suite's fixtures, and the build's own record, which differs by machine.
LEFT_OUT = ("site-packages", "dist-packages", "test", "tests", "idle_test")


def library_sources(root: Path | None = None) -> list[Path]:
    """The Python standard library's own .py files below `root`, in the order of their relative POSIX paths."""
    root = root or Path(sysconfig.get_path("stdlib"))
    found = [path for path in root.rglob("*.py") if not path.name.startswith("_sysconfigdata")]
    kept = [path for path in found if not set(path.relative_to(root).parts[:-1]) & set(LEFT_OUT)]
    return sorted(kept, key=lambda path: path.relative_to(root).as_posix())


def corpus(file: Path | None = None) -> Tensor:
    """The text as a one-dimensional uint8 tensor, at most CORPUS_LIMIT_BYTES long.

    Args:
        file: Any file; without it the sources of the standard library are joined.

    Raises:
        ValueError: The text is empty.
    """
    text = bytearray()
    for path in [file] if file else library_sources():
        text += path.read_bytes()
        if len(text) >= CORPUS_LIMIT_BYTES:
            break
    if not text:
        raise ValueError(
            f"no text to train on in {file or sysconfig.get_path('stdlib')}: give a file with --data"
        )
    return torch.frombuffer(text, dtype=torch.uint8)[:CORPUS_LIMIT_BYTES]


def batches(text: Tensor, *, microbatch: int, sequence: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Endless (tokens, targets), both int64 of shape (microbatch, sequence); a target is the byte after its token.

    The windows are drawn with a generator of their own, so training neither disturbs nor is disturbed by it.

    Raises:
        ValueError: The text is shorter than one window of sequence + 1 bytes.
    """
    starts = len(text) - sequence
    if starts < 1:
        raise ValueError(
            f"the text has {len(text)} bytes, one window needs {sequence + 1}: give a longer one"
        )
    generator = torch.Generator().manual_seed(seed)
    reach = torch.arange(sequence + 1)
    while True:
        at = torch.randint(starts, (microbatch, 1), generator=generator)
        window = text[at + reach].long()
        yield window[:, :-1].contiguous(), window[:, 1:].contiguous()
