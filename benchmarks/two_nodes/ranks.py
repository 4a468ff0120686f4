"""The ranks of one run, each an ordinary process, on nodes or on this machine, stepped together from outside.

Several runs may be alive at once and take steps in turn, so that a machine that gets slower or busier in between slows all of
them alike.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from benchmarks.two_nodes.network import INTERFACE, Network
from benchmarks.two_nodes.ports import free_port

__all__ = ["RankFailed", "Ranks"]

ROOT = Path(__file__).parents[2]
CHANNEL = "SSDTRAIN_BENCHMARK_CHANNEL"
"""Environment variable: the file descriptor that a rank writes its lines to; its output goes to a log."""
_next_port = 29500


class RankFailed(RuntimeError):
    """A rank ended, or did not answer in time; the others were ended. The message has the end of its log."""


class Ranks:
    """`world` processes of `python COMMAND` with the environment that torchrun gives.

    Args:
        command: what follows the interpreter; the program talks through `benchmarks.two_nodes.rank.serve`.
        world: how many ranks; on a network they fill one node after the other.
        network: None starts all of them here, over loopback; each still counts as a node of its own.
        environment: more variables for all ranks.
        timeout: seconds that a rank may take to answer.
    """

    def __init__(
        self,
        command: Sequence[str],
        world: int,
        network: Network | None = None,
        *,
        environment: Mapping[str, str] | None = None,
        timeout: float = 300.0,
    ) -> None:
        self.world = world
        self.timeout = timeout
        self._processes: list[subprocess.Popen[bytes]] = []
        self._logs: list[IO[str]] = []
        self._lines: list[IO[bytes]] = []
        per_node = world if network is None else -(-world // len(network.nodes))
        common = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
            "MASTER_ADDR": "127.0.0.1" if network is None else network.nodes[0].address,
            "MASTER_PORT": str(_port(network)),
            "WORLD_SIZE": str(world),
            "LOCAL_WORLD_SIZE": str(per_node),
            "GLOO_SOCKET_IFNAME": "lo" if network is None else INTERFACE,
            **(environment or {}),
        }
        try:
            for rank in range(world):
                node = None if network is None else network.nodes[rank // per_node]
                own = {"RANK": str(rank), "LOCAL_RANK": str(rank % per_node)}
                # On one host the name of the host does not tell nodes apart.
                own["SSDTRAIN_NODE"] = node.namespace if node is not None else f"node{rank}"
                whole = [sys.executable, *command]
                self._start(whole if node is None else node.command(whole), {**common, **own})
        except BaseException:
            self.close()
            raise

    def _start(self, command: list[str], environment: dict[str, str]) -> None:
        receive, send = os.pipe()
        self._lines.append(os.fdopen(receive, "rb"))
        self._logs.append(tempfile.TemporaryFile("w+", errors="replace"))  # noqa: SIM115 (closed in close)
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=self._logs[-1],
                stderr=subprocess.STDOUT,
                env={**environment, CHANNEL: str(send)},
                pass_fds=[send],
                cwd=ROOT,
                start_new_session=True,  # Ctrl-C is for the parent, which ends them.
            )
        finally:
            os.close(send)  # The child's copy is the last: where it ends, the lines end.
        self._processes.append(process)

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes]

    def tell(self, command: str, **arguments: Any) -> list[dict[str, Any]]:
        """Send a command to every rank and return their answers, rank by rank.

        Raises:
            RankFailed: a rank ended or was silent for `timeout` seconds.
        """
        line = json.dumps({"command": command, **arguments}).encode() + b"\n"
        for rank, process in enumerate(self._processes):
            assert process.stdin is not None
            try:
                process.stdin.write(line)
                process.stdin.flush()
            except BrokenPipeError:
                raise self._failure(rank) from None
        return self._answers()

    def _answers(self) -> list[dict[str, Any]]:
        """One line of each rank. Whoever ends first is noticed first: the others would wait for it."""
        answers: dict[int, dict[str, Any]] = {}
        deadline = time.monotonic() + self.timeout
        with selectors.DefaultSelector() as selector:
            for rank, stream in enumerate(self._lines):
                selector.register(stream, selectors.EVENT_READ, rank)
            while len(answers) < self.world:
                ready = selector.select(max(0.0, deadline - time.monotonic()))
                if not ready:
                    silent = min(set(range(self.world)) - set(answers))
                    raise self._failure(silent, f"was silent for {self.timeout:g} s")
                for key, _ in ready:
                    line = self._lines[key.data].readline()
                    if not line:
                        raise self._failure(key.data)
                    answers[key.data] = json.loads(line)
                    selector.unregister(key.fileobj)
        return [answers[rank] for rank in range(self.world)]

    def finish(self) -> list[dict[str, Any]]:
        """The result of every rank; all of them have ended after it.

        Raises:
            RankFailed: as `tell`, and where a rank's exit status is not 0.
        """
        results = self.tell("finish")
        for rank, process in enumerate(self._processes):
            try:
                status = process.wait(self.timeout)
            except subprocess.TimeoutExpired:
                raise self._failure(rank, f"did not end within {self.timeout:g} s") from None
            if status != 0:
                raise self._failure(rank)
        return results

    def _failure(self, rank: int, what: str = "") -> RankFailed:
        process = self._processes[rank]
        if not what:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(5)  # Its lines end a moment before it does.
            what = f"ended with status {process.poll()}"
        self._kill()
        log = self._logs[rank]
        log.seek(0)
        tail = "".join(log.readlines()[-25:])
        return RankFailed(f"rank {rank} of {self.world} {what}; the end of what it printed:\n{tail}")

    def _kill(self) -> None:
        """End every rank and what it started, and reap it."""
        for process in self._processes:
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
        for process in self._processes:
            process.wait()

    def close(self) -> None:
        """Nothing of the run is left after it; may be called again."""
        self._kill()
        for process in self._processes:
            assert process.stdin is not None
            with contextlib.suppress(
                BrokenPipeError
            ):  # What was buffered for a process that has ended is of no use.
                process.stdin.close()
        for lines, log in zip(self._lines, self._logs, strict=True):
            lines.close()
            log.close()

    def __enter__(self) -> Ranks:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _port(network: Network | None) -> int:
    """Free on the first node: a namespace is new, so that counting is enough there."""
    global _next_port
    if network is not None:
        _next_port += 1
        return _next_port
    return free_port()
