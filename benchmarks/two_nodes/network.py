"""Network namespaces as nodes: each has one interface, `eth0`, behind a token bucket, and all meet in one bridge.

The bridge has a namespace of its own, so that nothing appears in the machine's own network. Traffic between ranks of one node
stays on that node's loopback interface and is not counted. Needs root and iproute2 (`apt-get install iproute2`).
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import shutil
import signal
import socket
import statistics
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["INTERFACE", "Network", "Node", "network", "why_not"]

INTERFACE = "eth0"
BURST_BYTES = {"1gbit": 256 << 10, "10gbit": 1 << 20}
"""Of the token bucket: what may leave at once. A few milliseconds at the rate, or the bucket itself slows a link down."""
QUEUE = "50ms"
_NETNS = Path("/run/netns")
_OURS = re.compile(r"ssdtrain-(\d+)-")
_CLONE_NEWNET = 0x40000000


@dataclass(frozen=True)
class Node:
    namespace: str
    address: str

    def command(self, command: list[str]) -> list[str]:
        """`command` as it runs inside; it keeps its process id and open files."""
        return ["ip", "netns", "exec", self.namespace, *command]


class Network:
    """Made by `network`."""

    def __init__(self, prefix: str, count: int) -> None:
        self.nodes = tuple(Node(f"{prefix}{index}", f"10.77.0.{index + 1}") for index in range(count))
        self.rate = ""
        self.delay_ms = 0.0

    def shape(self, rate: str, delay_ms: float = 0.0) -> None:
        """Let every node send at `rate`, as tc writes it ("1gbit"), each packet `delay_ms` later.

        Without netem in the kernel there is no delay: `delay_ms` of this object stays 0 then.
        """
        burst = BURST_BYTES.get(rate, 1 << 20)
        self.rate, self.delay_ms = rate, 0.0
        for node in self.nodes:
            on = ["-n", node.namespace, "qdisc"]
            _tool("tc", *on, "replace", "dev", INTERFACE, "root", "handle", "1:", "tbf", "rate", rate, "burst", str(burst),
                  "latency", QUEUE)  # fmt: skip
            if delay_ms:
                late = [
                    "parent",
                    "1:1",
                    "handle",
                    "10:",
                    "netem",
                    "delay",
                    f"{delay_ms}ms",
                    "limit",
                    "100000",
                ]
                try:
                    _tool("tc", *on, "replace", "dev", INTERFACE, *late)
                except NetworkFailed as error:
                    if "qdisc kind is unknown" not in str(error):
                        raise
                    return
        self.delay_ms = delay_ms

    def counters(self) -> list[dict[str, int]]:
        """For each node the bytes that its interface has sent and received, Ethernet, IP and TCP headers included."""
        found = []
        for node in self.nodes:
            shown = _tool("ip", "-n", node.namespace, "-j", "-s", "-s", "link", "show", "dev", INTERFACE)
            counted = json.loads(shown)[0]["stats64"]
            found.append({"sent": counted["tx"]["bytes"], "received": counted["rx"]["bytes"]})
        return found

    def round_trip_seconds(self, count: int = 50) -> float:
        """Median time of one byte over TCP from the first node to the second and back, on an idle link."""
        ready: list[socket.socket] = []
        listening = threading.Event()

        def answer() -> None:
            with _inside(self.nodes[1]), socket.create_server((self.nodes[1].address, 0)) as server:
                ready.append(server)
                listening.set()
                connection, _ = server.accept()
                with connection:
                    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    while byte := connection.recv(1):
                        connection.sendall(byte)

        spent: list[float] = []

        def ask() -> None:
            with _inside(self.nodes[0]), socket.create_connection(ready[0].getsockname(), 5) as connection:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                for _ in range(count):
                    began = time.perf_counter()
                    connection.sendall(b"x")
                    connection.recv(1)
                    spent.append(time.perf_counter() - began)

        # A thread may move to another namespace; the process stays.
        answering = threading.Thread(target=answer, daemon=True)
        answering.start()
        if not listening.wait(5):
            raise NetworkFailed(f"nothing listens in the namespace {self.nodes[1].namespace}")
        asking = threading.Thread(target=ask)
        asking.start()
        asking.join()
        answering.join(5)
        if len(spent) < count:
            raise NetworkFailed(
                f"only {len(spent)} of {count} bytes came back from {self.nodes[1].namespace}"
            )
        return statistics.median(spent)


class NetworkFailed(RuntimeError):
    """ip or tc did not do what was asked; the message has its words."""


def why_not() -> str | None:
    """What is missing for `network` here, or None."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        return f"{' and '.join(missing)} not found: apt-get install iproute2"
    name = f"ssdtrain-{os.getpid()}-try"
    try:
        with _namespaces([name]):
            _tool("ip", "-n", name, "link", "set", "lo", "up")
            _tool("tc", "-n", name, "qdisc", "add", "dev", "lo", "root", "tbf", "rate", "1gbit", "burst", "262144",
                  "latency", QUEUE)  # fmt: skip
    except NetworkFailed as error:
        return f"this machine gives no network namespaces with a token bucket: {error}"
    return None


@contextlib.contextmanager
def network(nodes: int = 2, rate: str = "1gbit", delay_ms: float = 0.0) -> Iterator[Network]:
    """`nodes` nodes at `rate`; gone after the block, however it ends. Ranks have to be ended before.

    SIGTERM inside ends the program as `sys.exit` does, so that the namespaces go then too. What a killed run left is swept
    first.

    Raises:
        NetworkFailed: without root, iproute2 or what the kernel needs; `why_not` says so beforehand.
    """
    _sweep()
    prefix = f"ssdtrain-{os.getpid()}-"
    made = Network(prefix, nodes)
    switch = f"{prefix}switch"
    with _ending_on_sigterm(), _namespaces([switch, *(node.namespace for node in made.nodes)]):
        _tool("ip", "-n", switch, "link", "add", "bridge", "type", "bridge")
        _tool("ip", "-n", switch, "link", "set", "bridge", "up")
        for index, node in enumerate(made.nodes):
            port = f"port{index}"
            _tool("ip", "-n", node.namespace, "link", "set", "lo", "up")
            _tool(
                "ip",
                "-n",
                switch,
                "link",
                "add",
                port,
                "type",
                "veth",
                "peer",
                "name",
                INTERFACE,
                "netns",
                node.namespace,
            )
            _tool("ip", "-n", switch, "link", "set", port, "master", "bridge", "up")
            _tool("ip", "-n", node.namespace, "address", "add", f"{node.address}/24", "dev", INTERFACE)
            _tool("ip", "-n", node.namespace, "link", "set", INTERFACE, "up")
        made.shape(rate, delay_ms)
        yield made


@contextlib.contextmanager
def _namespaces(names: list[str]) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for name in names:
            _tool("ip", "netns", "add", name)
            stack.callback(_tool, "ip", "netns", "delete", name)
        yield


@contextlib.contextmanager
def _ending_on_sigterm() -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield  # Only the main thread may, and gets signals.
        return

    def end(number: int, frame: Any) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _sweep() -> None:
    """Namespaces of processes that are no more."""
    for path in _NETNS.glob("ssdtrain-*") if _NETNS.is_dir() else ():
        owner = _OURS.match(path.name)
        if owner is not None and not Path("/proc", owner[1]).exists():
            _tool("ip", "netns", "delete", path.name)


@contextlib.contextmanager
def _inside(node: Node) -> Iterator[None]:
    """This thread in the namespace of `node`, for good: the thread has to end after it."""
    with open(_NETNS / node.namespace) as handle:
        library = ctypes.CDLL(None, use_errno=True)
        if library.setns(handle.fileno(), _CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f"setns to {node.namespace}")
    yield


def _tool(*command: str) -> str:
    try:
        # Not in the terminal's process group: Ctrl-C is for this process, which then cleans up with the same tools.
        done = subprocess.run(command, capture_output=True, text=True, check=False, start_new_session=True)
    except FileNotFoundError as error:
        raise NetworkFailed(f"{command[0]} not found: apt-get install iproute2") from error
    if done.returncode != 0:
        raise NetworkFailed(f"`{' '.join(command)}` said: {done.stderr.strip() or done.returncode}")
    return done.stdout
