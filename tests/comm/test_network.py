"""Nodes on one machine: they exchange bytes, the interfaces count them, and nothing of them is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.two_nodes.network import Network, network, why_not
from benchmarks.two_nodes.ranks import CHANNEL, ROOT, RankFailed, Ranks

NAMESPACES = Path("/run/netns")
SENT = 4_000_000

ANSWERING = f"""
import json, os, sys
channel = os.fdopen(int(os.environ[{CHANNEL!r}]), "w")
def answer(**found):
    print(json.dumps(found), file=channel, flush=True)
"""
# Rank 1 sends to rank 0, which answers with what it has received.
EXCHANGE = f"""{ANSWERING}
import socket
own = int(os.environ["RANK"])
address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
server = socket.create_server(address) if own == 0 else None
for line in sys.stdin:
    command = json.loads(line)["command"]
    if command == "finish":
        answer(node=os.environ["SSDTRAIN_NODE"], interface=os.environ["GLOO_SOCKET_IFNAME"])
        break
    if command == "ready":
        answer()
    elif own == 1:
        with socket.create_connection(address) as connection:
            connection.sendall(bytes({SENT}))
        answer(received=0)
    else:
        connection, _ = server.accept()
        received = 0
        while part := connection.recv(1 << 16):
            received += len(part)
        answer(received=received)
"""
ECHO = f"""{ANSWERING}
for line in sys.stdin:
    answer(rank=os.environ["RANK"])
"""


@pytest.fixture(scope="module")
def nodes() -> Iterator[Network]:
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    with network(2, "1gbit") as made:
        yield made


def of_process(pid: int) -> list[str]:
    return [path.name for path in NAMESPACES.glob(f"ssdtrain-{pid}-*")] if NAMESPACES.is_dir() else []


def test_the_interfaces_count_what_ranks_on_two_nodes_exchange(nodes: Network) -> None:
    with Ranks(["-c", EXCHANGE], 2, nodes, timeout=60) as ranks:
        ranks.tell("ready")
        before = nodes.counters()
        answers = ranks.tell("exchange")
        after = nodes.counters()
        results = ranks.finish()
    assert [answer["received"] for answer in answers] == [SENT, 0]
    assert [result["node"] for result in results] == [node.namespace for node in nodes.nodes]
    assert {result["interface"] for result in results} == {"eth0"}
    assert after[1]["sent"] - before[1]["sent"] == pytest.approx(SENT, rel=0.02)
    assert after[0]["received"] - before[0]["received"] == pytest.approx(SENT, rel=0.02)
    assert after[0]["sent"] - before[0]["sent"] < 0.02 * SENT  # acknowledgements


def test_a_byte_comes_back_and_the_thread_that_asked_left_this_process_where_it_was(nodes: Network) -> None:
    here = os.readlink("/proc/self/ns/net")
    assert nodes.round_trip_seconds(5) > 0
    assert os.readlink("/proc/self/ns/net") == here


# Makes a network of its own, says so, and waits.
WAITING = """
import signal, time
# A job in the background may have been started with Ctrl-C ignored.
signal.signal(signal.SIGINT, signal.default_int_handler)
from benchmarks.two_nodes.network import network
with network(2):
    print("ready", flush=True)
    time.sleep(60)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
def test_no_namespace_outlives_a_run_that_is_told_to_stop(nodes: Network, number: signal.Signals) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", WAITING], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, cwd=ROOT
    )
    with process:
        assert process.stdout.readline() == b"ready\n"
        assert len(of_process(process.pid)) == 3
        process.send_signal(number)
        process.wait(30)
    assert process.returncode != 0
    assert of_process(process.pid) == []


def test_what_a_killed_run_left_is_swept_by_the_next(nodes: Network) -> None:
    process = subprocess.Popen([sys.executable, "-c", WAITING], stdout=subprocess.PIPE, cwd=ROOT)
    with process:
        process.stdout.readline()
        process.kill()
    assert len(of_process(process.pid)) == 3
    own = subprocess.run(
        [sys.executable, "-c", WAITING.replace("time.sleep(60)", "pass")],
        cwd=ROOT,
        capture_output=True,
        check=False,
    )
    assert own.returncode == 0, own.stderr
    assert of_process(process.pid) == []
    assert len(of_process(os.getpid())) == 3, "those of a process that lives stay"


def test_a_killed_rank_takes_the_run_down_and_all_are_reaped() -> None:
    with Ranks(["-c", ECHO], 3, timeout=60) as ranks:
        assert [answer["rank"] for answer in ranks.tell("step")] == ["0", "1", "2"]
        os.kill(ranks.pids[1], signal.SIGKILL)
        with pytest.raises(RankFailed, match="rank 1 of 3 ended with status -9"):
            ranks.tell("step")
        for pid in ranks.pids:
            with pytest.raises(ProcessLookupError):
                os.kill(pid, 0)


def test_a_rank_that_fails_shows_what_it_printed() -> None:
    failing = "import sys; print('the reason'); sys.stdin.readline(); sys.exit(3)"
    with Ranks(["-c", failing], 2, timeout=60) as ranks:
        with pytest.raises(RankFailed, match=r"(?s)ended with status 3.*the reason"):
            ranks.tell("step")


def test_a_silent_rank_is_an_error_and_no_hang() -> None:
    with Ranks(["-c", "import sys; sys.stdin.read()"], 2, timeout=0.5) as ranks:
        with pytest.raises(RankFailed, match=r"rank 0 of 2 was silent for 0\.5 s"):
            ranks.tell("step")


def test_without_root_or_tools_the_reason_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert why_not() == "network namespaces need root"
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setenv("PATH", "")
    assert why_not() == "ip and tc not found: apt-get install iproute2"
