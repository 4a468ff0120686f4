"""`ssdtrain doctor` under a launcher: one table for all nodes, and what passes between the ranks."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from ssdtrain.cli import network
from ssdtrain.cli.finding import BROKEN, GOOD, NOTE, WARNING, Finding


def test_a_finding_that_all_nodes_have_is_told_once() -> None:
    same, here = Finding("torch", "2.13.0", GOOD), Finding("CUDA", "H100", GOOD)
    found = network.same_everywhere({"a": [same, here], "b": [same, Finding("CUDA", "no device", NOTE)]})
    assert [(nodes, finding.subject, finding.found) for nodes, finding in found] == [
        ("all", "torch", "2.13.0"),
        ("a", "CUDA", "H100"),
        ("b", "CUDA", "no device"),
    ]


def test_versions_that_differ_are_broken() -> None:
    nodes = {
        name: [Finding("torch", version, GOOD)] for name, version in {"a": "2.13.0", "b": "2.6.0"}.items()
    }
    *_, (where, finding) = network.same_everywhere(nodes)
    assert (where, finding.verdict) == ("all", BROKEN)
    assert "2.13.0" in finding.found and "same version" in finding.remedy


@pytest.mark.parametrize(
    ("hosts", "verdict", "text"),
    [
        ("aabb", GOOD, "can take two hops"),
        ("aab", WARNING, "2 on a, 1 on b"),
        ("aaaa", GOOD, "4 ranks on 1 node"),
        ("ab", GOOD, "2 ranks on 2 nodes"),
    ],
)
def test_the_layout_of_ranks(hosts: str, verdict: str, text: str) -> None:
    found = network._layout(list(hosts))
    assert found.verdict == verdict and text in found.found


def test_of_many_ranks_those_next_to_another_node_are_measured() -> None:
    assert network._pairs(["a", "b"]) == [(0, 1), (1, 0)]
    hosts = [f"node{rank // 8}" for rank in range(64)]
    pairs = network._pairs(hosts)
    assert len(pairs) == 8 and all(hosts[a] != hosts[b] for a, b in pairs)


def test_several_interfaces_and_no_choice_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    address = [SimpleNamespace(family=socket.AF_INET, address="10.0.0.1")]
    state = SimpleNamespace(isup=True, speed=100000, mtu=9000)
    monkeypatch.setattr(psutil, "net_if_stats", lambda: {"eth0": state, "ib0": state})
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: {"eth0": address, "ib0": address})
    for name in network.CHOICES:
        monkeypatch.delenv(name, raising=False)
    (found,) = network.interfaces()
    assert found.verdict == WARNING and "NCCL_SOCKET_IFNAME" in found.remedy and "100 Gbit/s" in found.found
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "ib0")
    found, chosen = network.interfaces()
    assert found.verdict == GOOD and "ib0" in chosen.found


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@pytest.mark.slow
@pytest.mark.distributed
def test_two_nodes_are_one_table_from_rank_0(tmp_path: Path) -> None:
    port = free_port()
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "LOCAL_RANK": "0"}
    started = [
        subprocess.Popen(
            # The directory of the second node is not there.
            [
                sys.executable,
                "-m",
                "ssdtrain.cli",
                "doctor",
                "--json",
                str(tmp_path if rank == 0 else "/proc/x"),
            ],
            env={**os.environ, **shared, "RANK": str(rank), "SSDTRAIN_NODE": f"node{rank}"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    (told, error), (silent, other) = [process.communicate(timeout=200) for process in started]
    assert silent == "", other
    found = json.loads(told)["findings"]
    assert [process.returncode for process in started] == [1, 1], error  # broken on one node is broken on all
    nodes = {finding["subject"]: finding["nodes"] for finding in found}
    assert nodes["torch"] == "all" and nodes["/proc/x"] == "node1"
    assert nodes[f"{tmp_path}: file system"] == "node0"
    between = {f["subject"]: f["found"] for f in found if f["subject"].startswith("rank ")}
    assert set(between) == {"rank 0 to 1, between nodes", "rank 1 to 0, between nodes"}
    assert all("/s" in text and "one way" in text for text in between.values())
    assert any(finding["subject"] == "topology" for finding in found)
