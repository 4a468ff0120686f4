"""A port for ranks to meet at, which nobody else takes before the first of them listens."""

from __future__ import annotations

import errno
import os
import random
import socket
from pathlib import Path

# Of each worker of pytest, so that two that ask at once get different ones.
_EACH = 2000
_chosen: int | None = None


def free_port() -> int:
    """A port below those that the system gives to connections and to sockets that ask for any.

    A port that was bound to 0, read and closed again is one that the system may give to somebody else meanwhile.
    """
    global _chosen
    above = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % 5
    first = above - (worker + 1) * _EACH
    if _chosen is None:
        _chosen = first + random.SystemRandom().randrange(_EACH)  # two runs at once on one machine
    for _ in range(_EACH):
        _chosen = first + (_chosen + 1 - first) % _EACH
        with socket.socket() as probe:
            try:
                probe.bind(("", _chosen))
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
            else:
                return _chosen
    raise OSError(errno.EADDRINUSE, f"no port between {first} and {first + _EACH - 1} is free")
