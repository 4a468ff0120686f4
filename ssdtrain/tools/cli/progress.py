"""What a command is busy with, as a line on stderr that a terminal shows until it is done."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.markup import escape


@contextmanager
def progress(what: str, shown: bool = True) -> Iterator[Callable[[str], None]]:
    """Show `what` while the block runs; the function that it gives adds how far that is. Nothing in a file or a pipe.

    Args:
        shown: false: on this rank nothing.
    """
    console = Console(stderr=True)
    if not shown or not console.is_terminal:
        yield lambda text: None
        return
    with console.status(f"{escape(what)} ...") as status:
        yield lambda text: status.update(f"{escape(what)}: {escape(text)}")
