"""Messages of the package's log, on a rank where pytest captures none."""

from __future__ import annotations

import logging


def heard_warnings() -> list[str]:
    """A list that gets the warnings from now on."""
    said: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("ssdtrain").addHandler(handler)
    return said
