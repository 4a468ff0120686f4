"""The port at which ranks meet is one that nobody else is given."""

from __future__ import annotations

import socket
from pathlib import Path

from benchmarks.two_nodes.ports import free_port


def test_ports_lie_below_those_that_the_system_gives_out_and_differ() -> None:
    given_out = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    found = [free_port() for _ in range(50)]
    assert len(set(found)) == 50 and max(found) < given_out


def test_a_port_that_somebody_listens_at_is_passed_over() -> None:
    taken = free_port() + 1
    with socket.socket() as other:
        other.bind(("", taken))
        other.listen()
        assert free_port() != taken
