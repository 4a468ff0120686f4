"""`ssdtrain doctor` under a launcher: one table for all nodes, and what passes between the ranks."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from benchmarks.two_nodes.ports import free_port
from ssdtrain.tools.cli import main, network
from ssdtrain.tools.cli.finding import BROKEN, GOOD, NOTE, WARNING, Finding


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


def test_nccl_is_measured_where_every_rank_sees_its_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "_pass", lambda *_: (0.01, 1e-4))
    monkeypatch.setattr(network, "_nccl", lambda *_: pytest.fail("a rank would wait for the others"))
    group = network.Group()
    monkeypatch.setattr(group, "gather", lambda own: [own, own])
    *_, found = network.between_nodes(group, ["a", "b"], [True, False])
    assert found.verdict == BROKEN and "1 of 2 ranks" in found.found and "1 on b" in found.found
    assert all("NCCL" not in one.subject for one in network.between_nodes(group, ["a", "b"], [False, False]))


def test_ranks_that_do_not_reach_each_other_are_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks(*_: object) -> tuple[float, float]:
        raise RuntimeError("Connection closed by peer")

    monkeypatch.setattr(network, "_pass", breaks)
    group = network.Group()
    monkeypatch.setattr(group, "gather", lambda own: ["", own])
    layout, found = network.between_nodes(group, ["a", "b"], [True, True])
    assert layout.subject == "topology" and group.broken
    assert found.verdict == BROKEN and found.found == "rank 1 on b: Connection closed by peer"


@pytest.mark.parametrize("failing", ["_gpu", "_all_reduce"])
def test_what_nccl_raises_or_does_not_end_is_a_finding(failing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    group, release = network.Group(), threading.Event()

    def fails() -> float:
        raise RuntimeError("the driver is gone\nand more")

    for name in ("_gpu", "_all_reduce"):
        monkeypatch.setattr(network, name, fails if name == failing else lambda: 0.01)
    monkeypatch.setattr(group, "gather", lambda own: [own, ("", 0.01)])
    found = network._nccl(group, ["a", "b"])
    assert found.verdict == BROKEN and found.found == "rank 0 on a: RuntimeError: the driver is gone"
    monkeypatch.setattr(network, "RANK_TIMEOUT", timedelta(seconds=0.05))
    monkeypatch.setattr(network, failing, lambda: float(release.wait(60)))
    found = network._nccl(group, ["a", "b"])
    release.set()
    assert "rank 0 on a: TimeoutError: no end in 0.05 s" in found.found and group.broken


def test_variables_of_a_job_that_runs_do_not_make_the_doctor_join_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    for name, value in {
        "RANK": "1",
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1",
    }.items():
        monkeypatch.setenv(name, value)
    assert not network.launched() and network.launched(trusting=True)
    main(["doctor", "--json", str(tmp_path)])
    found = {finding["subject"]: finding for finding in json.loads(capsys.readouterr().out)["findings"]}
    assert found["ranks"]["verdict"] == NOTE and "--ranks" in found["ranks"]["remedy"]
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    assert network.launched()


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
                *["-m", "ssdtrain", "doctor", "--ranks", "--json"],
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


SLOW_NODE = """
import sys, time
from datetime import timedelta
import torch
from ssdtrain.tools.cli import doctor, main, network

network.RANK_TIMEOUT = timedelta(seconds=10)
drive = doctor.drive
doctor.drive = lambda *given: [time.sleep(12), *drive(*given)][1:]
torch.cuda.device_count = lambda: 2
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.long
@pytest.mark.distributed
def test_a_drive_takes_its_time_and_a_broken_driver_is_told(tmp_path: Path) -> None:
    """Two ranks of a node: one of them looks at the drive for longer than a message may take, and neither can use its GPU."""
    launcher = [
        sys.executable,
        *["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--no-python"],
    ]
    command = [sys.executable, "-c", SLOW_NODE, "doctor", "--json", str(tmp_path)]
    done = subprocess.run([*launcher, *command], capture_output=True, text=True, timeout=200, check=False)
    assert '"broken": true' in done.stdout, done.stderr
    found = {one["subject"]: one for one in json.loads(done.stdout.splitlines()[0])["findings"]}
    assert found[f"{tmp_path}: file system"]["verdict"] == GOOD and "rank 0 to 1, inside of a node" in found
    assert found[network.BY_NCCL]["verdict"] == BROKEN and "rank 1 on" in found[network.BY_NCCL]["found"]
