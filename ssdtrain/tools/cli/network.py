"""`ssdtrain doctor` in every rank of a launcher: interfaces of each node, where the ranks are, and what passes between them."""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from datetime import timedelta
from typing import Any

import psutil
import torch
import torch.distributed as dist

from ssdtrain import ranks
from ssdtrain.comm.topology import grid_of
from ssdtrain.config.units import MiB
from ssdtrain.text import duration_text, size_text
from ssdtrain.tools.cli.finding import BROKEN, GOOD, NOTE, WARNING, Finding
from ssdtrain.tools.cli.versions import TESTED

RANK_TIMEOUT = timedelta(seconds=60)
"""Timeout for connecting ranks and for one message."""
_PATIENCE = timedelta(hours=2)
"""Timeout for the rank that examines its node, for which the others wait: it may measure drives."""
_MEASURED = 64 * MiB
"""Bytes that a rank sends to the next one."""
MOST_PAIRS = 32
SLOW_BETWEEN = 1.25e9
"""Bytes per second, 10 Gbit/s: training that communicates at less waits for the network."""
MUST_AGREE = ("ssdtrain", "python", *TESTED)
BY_NCCL = "all ranks, by NCCL"
CHOICES = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "NCCL_IB_HCA")


def by_torchrun() -> bool:
    """Whether torchrun has started this process. Others set RANK and MASTER_PORT too, in every shell of a job's container, where
    they name the rendezvous of the job that runs."""
    return "RANK" in os.environ and "TORCHELASTIC_RUN_ID" in os.environ


def launched(*, trusting: bool = False) -> bool:
    """Whether this process is one of several.

    Args:
        trusting: rely on WORLD_SIZE and RANK even where torchrun did not set them.
    """
    several = int(os.environ.get("WORLD_SIZE", "1")) > 1 and "RANK" in os.environ
    return several and (trusting or by_torchrun())


def interfaces() -> Iterator[Finding]:
    """The network interfaces of this node that are up, and those that the environment selects for collectives."""
    state, addresses = psutil.net_if_stats(), psutil.net_if_addrs()
    found = []
    for name, known in sorted(state.items()):
        own = [a.address for a in addresses.get(name, ()) if a.family == socket.AF_INET]
        if not known.isup or not own or own[0].startswith("127."):
            continue
        speed = f", {known.speed / 1000:g} Gbit/s" if known.speed > 0 else ""
        found.append(f"{name} {own[0]}{speed}, MTU {known.mtu}")
    named = {name: os.environ[name] for name in CHOICES if os.environ.get(name)}
    chosen = ", ".join(f"{name}={value}" for name, value in named.items())
    remedy = ""
    if len(found) > 1 and not named:
        remedy = "name the fast one on every node: NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME"
    yield Finding.judged("interfaces", "; ".join(found) or "none but loopback", remedy)
    if chosen:
        yield Finding("interfaces chosen", chosen, GOOD)


class Group:
    """The ranks of the launcher, connected over TCP. All ranks enter it together.

    Raises:
        RuntimeError: they cannot be reached.
    """

    def __init__(self) -> None:
        self.broken = False
        """Communication has failed on a rank, or hangs there."""

    def __enter__(self) -> Group:
        try:
            dist.init_process_group("gloo", timeout=RANK_TIMEOUT)
            self._patient = dist.new_group(backend="gloo", timeout=_PATIENCE)
        except (RuntimeError, ValueError) as error:  # torch's own errors derive from RuntimeError
            address = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
            raise RuntimeError(
                f"the ranks of this job cannot be reached by {address} ({error}): open that port between the nodes, and name "
                "the interface that connects them in GLOO_SOCKET_IFNAME"
            ) from error
        return self

    def gather(self, own: Any) -> list[Any]:
        """`own` of every rank, when all have come here.

        Raises:
            RuntimeError: a rank has ended before.
        """
        found: list[Any] = [None] * dist.get_world_size()
        try:
            dist.all_gather_object(found, own, group=self._patient)
        except RuntimeError as error:
            raise RuntimeError(
                f"a rank has ended while this one waited for it, whose own message says why ({error})"
            ) from error
        return found

    def limited(self, call: Callable[[], float]) -> float:
        """What `call` returns, on a thread of its own.

        Raises:
            TimeoutError: it takes longer than `RANK_TIMEOUT`. What it holds is left to the end of the process.
            Exception: its own.
        """
        answer: Future[float] = Future()

        def work() -> None:
            try:
                answer.set_result(call())
            except BaseException as error:  # noqa: BLE001 - raised where it is waited for
                answer.set_exception(error)

        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        if not wait([answer], timeout=RANK_TIMEOUT.total_seconds()).done:
            raise TimeoutError(f"no end in {RANK_TIMEOUT.total_seconds():g} s")
        thread.join()  # else it may still be ending when the process does
        return answer.result()

    def end(self, status: int) -> int:
        """`status`; where communication has failed or hangs, the process ends here, since its end might wait for it."""
        if self.broken:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
        return status

    def __exit__(self, *_: object) -> None:
        if not self.broken:
            dist.destroy_process_group()


def between_nodes(group: Group, hosts: Sequence[str], gpus: Sequence[bool]) -> list[Finding]:
    """How the ranks are spread, and the bandwidth and latency from each rank to the next. All ranks call it together; rank 0's
    result counts.

    Args:
        hosts: the node of each rank.
        gpus: of each rank, whether it sees the GPU that it would train on. NCCL is measured where all of them do.
    """
    found = [_layout(hosts)]
    error = ""
    try:
        found += _by_tcp(hosts)
    except RuntimeError as raised:
        error = str(raised).partition("\n")[0]
    failed = [
        f"rank {rank} on {hosts[rank]}: {text}" for rank, text in enumerate(group.gather(error)) if text
    ]
    if failed:
        group.broken = True
        remedy = "check the ports and the routes between the nodes, and GLOO_SOCKET_IFNAME"
        return [*found, Finding("between ranks", "; ".join(failed[:4]), BROKEN, remedy)]
    if all(gpus):
        found.append(_nccl(group, hosts))
    elif any(gpus):
        without = [
            f"{rank} on {host}" for rank, (host, sees) in enumerate(zip(hosts, gpus, strict=True)) if not sees
        ]
        text = f"not measured: {len(without)} of {len(hosts)} ranks see no GPU of their own: {', '.join(without[:8])}"
        remedy = "check nvidia-smi and CUDA_VISIBLE_DEVICES there, and that no more ranks are started than the node has GPUs"
        found.append(Finding(BY_NCCL, text, BROKEN, remedy))
    return found


def _by_tcp(hosts: Sequence[str]) -> Iterator[Finding]:
    tensor = torch.empty(_MEASURED, dtype=torch.uint8)
    for sender, receiver in _pairs(hosts):
        seconds, latency = _pass(tensor, sender, receiver)
        rate = _MEASURED / seconds
        apart = hosts[sender] != hosts[receiver]
        where = "between nodes" if apart else "inside of a node"
        slow = apart and rate < SLOW_BETWEEN
        remedy = (
            "slow: check which interface is used (NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME), and compress what is sent: "
            'comm {"preset": "balanced"}'
        )
        found = f"{size_text(rate)}/s, {duration_text(latency)} one way, over TCP"
        yield Finding.judged(f"rank {sender} to {receiver}, {where}", found, remedy if slow else "")


def sees_gpu() -> bool:
    """Whether this rank sees the GPU that it would train on."""
    try:
        return torch.cuda.device_count() > ranks.local_rank()
    except RuntimeError:  # of a driver
        return False


def _layout(hosts: Sequence[str]) -> Finding:
    counts = Counter(hosts)
    text = f"{len(hosts)} ranks on {len(counts)} {'node' if len(counts) == 1 else 'nodes'}: "
    text += ", ".join(f"{count} on {host}" for host, count in counts.items())
    if len(counts) == 1 or max(counts.values()) == 1:
        return Finding("topology", text, GOOD)
    if grid_of(hosts, True) is not None:
        return Finding("topology", f"{text}; collectives can take two hops", GOOD)
    remedy = (
        "collectives take one hop: two hops need the same number of ranks on each node, in the same order"
    )
    return Finding("topology", text, WARNING, remedy)


def _pairs(hosts: Sequence[str]) -> list[tuple[int, int]]:
    """Each rank and the next one, of many only those between nodes."""
    count = len(hosts)
    pairs = [(rank, (rank + 1) % count) for rank in range(count)]
    if count == 2:
        return pairs
    if count > MOST_PAIRS:
        pairs = [pair for pair in pairs if hosts[pair[0]] != hosts[pair[1]]]
    return pairs[:MOST_PAIRS]


def _pass(tensor: torch.Tensor, sender: int, receiver: int) -> tuple[float, float]:
    """(seconds for `tensor`, seconds for one byte) from one rank to another; the same on all ranks."""
    rank = dist.get_rank()
    little = tensor[:1]
    taken = torch.zeros(2, dtype=torch.float64)

    def trip(values: torch.Tensor) -> None:
        if rank == sender:
            dist.send(values, receiver)
            dist.recv(little, receiver)
        else:
            dist.recv(values, sender)
            dist.send(little, sender)

    if rank in (sender, receiver):
        trip(little)  # makes the connection
        trip(tensor)
        trips = []
        for values in [little] * 10 + [tensor] * 2:
            began = time.perf_counter()
            trip(values)
            trips.append(time.perf_counter() - began)
        if rank == sender:
            back = min(trips[:10]) / 2
            taken = torch.tensor([max(1e-9, min(trips[10:]) - back), back], dtype=torch.float64)
    dist.all_reduce(taken)  # of the others it is 0
    return float(taken[0]), float(taken[1])


def _nccl(group: Group, hosts: Sequence[str]) -> Finding:
    """The bandwidth of all ranks together, over the network that training uses. What fails on any rank is the finding of all."""
    error, seconds = "", 0.0
    for part in (_gpu, _all_reduce):  # no rank waits in NCCL for one that has failed before
        try:
            seconds = group.limited(part)
        except Exception as raised:  # noqa: BLE001 - reported as a finding
            error = f"{type(raised).__name__}: {raised}".partition("\n")[0]
        results = group.gather((error, seconds))
        failed = [f"rank {rank} on {hosts[rank]}: {text}" for rank, (text, _) in enumerate(results) if text]
        if failed:
            group.broken = True
            remedy = (
                "NCCL_DEBUG=INFO says more; check the driver (nvidia-smi), NCCL_IB_HCA and NCCL_SOCKET_IFNAME"
            )
            return Finding(BY_NCCL, "; ".join(failed[:4]), BROKEN, remedy)
    rate = 2 * (len(hosts) - 1) / len(hosts) * _MEASURED / max(taken for _, taken in results)
    slow = len(set(hosts)) > 1 and rate < SLOW_BETWEEN
    remedy = (
        "slow: NCCL_DEBUG=INFO says which network NCCL has found; check NCCL_IB_HCA and NCCL_SOCKET_IFNAME"
    )
    found = f"{size_text(rate)}/s per GPU in an all-reduce of {size_text(_MEASURED)}"
    return Finding.judged(BY_NCCL, found, remedy if slow else "")


def _gpu() -> float:
    """Allocate on this rank's GPU."""
    torch.zeros(_MEASURED // 4, device=f"cuda:{ranks.local_rank()}")
    return 0.0


def _all_reduce() -> float:
    """Seconds of an all-reduce of all GPUs."""
    torch.cuda.set_device(ranks.local_rank())  # of this thread
    group = dist.new_group(backend="nccl", timeout=_PATIENCE)  # at its own timeout NCCL would end the process
    tensor = torch.zeros(_MEASURED // 4, device="cuda")
    dist.all_reduce(tensor, group=group)
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(5):
        dist.all_reduce(tensor, group=group)
    torch.cuda.synchronize()
    return (time.perf_counter() - began) / 5


def same_everywhere(of_nodes: dict[str, list[Finding]]) -> list[tuple[str, Finding]]:
    """The findings of all nodes in one list: (which nodes, finding), a finding that all nodes have once.

    Versions that differ are one more finding.
    """
    nodes: dict[Finding, list[str]] = {}
    order: list[Finding] = []
    for node, findings in of_nodes.items():
        for finding in findings:
            if finding not in nodes:
                order.append(finding)
            nodes.setdefault(finding, []).append(node)
    subjects = list(dict.fromkeys(finding.subject for finding in order))
    order.sort(key=lambda finding: subjects.index(finding.subject))
    found = [
        ("all" if len(nodes[finding]) == len(of_nodes) else ", ".join(nodes[finding]), finding)
        for finding in order
    ]
    for subject in MUST_AGREE:
        versions = {finding.found for finding in order if finding.subject == subject}
        if len(versions) > 1:
            needed = subject in ("ssdtrain", "torch")
            remedy = "install the same version on all nodes"
            text = " and ".join(sorted(versions))
            found.append(("all", Finding(f"{subject}: versions", text, BROKEN if needed else NOTE, remedy)))
    return found
