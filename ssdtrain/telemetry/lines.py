"""JSON lines: one object per line, readable while the run that writes them still goes on."""

import json
from collections.abc import Iterable, Iterator
from typing import Any, TextIO


def write_line(stream: TextIO, record: dict[str, Any]) -> None:
    """Appends `record` as one line and flushes it. NaN and infinity are rejected: no JSON reader has to accept them.

    Raises:
        ValueError: A number is not finite.
        TypeError: A value is not of a JSON type.
    """
    stream.write(json.dumps(record, allow_nan=False) + "\n")
    stream.flush()


def read_lines(lines: Iterable[str]) -> Iterator[dict[str, Any]]:
    """The records of `lines`, blank lines left out.

    Raises:
        ValueError: A line is not a JSON object; the message has its number and its beginning.
    """
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except (
            ValueError,
            RecursionError,
        ) as error:  # also a number of too many digits, and brackets in brackets
            raise ValueError(f"line {number} is not JSON ({error}): {line.strip()[:80]!r}") from error
        if not isinstance(record, dict):
            raise ValueError(
                f"line {number} is a {type(record).__name__}, not an object: {line.strip()[:80]!r}"
            )
        yield record
