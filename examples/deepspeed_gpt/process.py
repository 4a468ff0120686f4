"""One mode of the demo in a process of its own, so that no run inherits the memory of another."""

import os
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Any

from examples.deepspeed_gpt.settings import Settings
from examples.support.result import RunResult
from ssdtrain.telemetry.lines import read_lines

ROOT = Path(__file__).parents[2]


class ModeFailed(RuntimeError):
    """The process of a mode ended without a result."""


class ModeProcess:
    """A mode that trains one step on request.

    The parent asks the modes in turn, so that the steps of all are spread over the same minutes and a machine that gets slower
    or busier in between slows all of them.

    Args:
        log: Where the process's output goes, with all that DeepSpeed prints; its lines come through a pipe of their own.
    """

    def __init__(self, mode: str, settings: Settings, log: Path) -> None:
        self.mode = mode
        self._log = log
        receive, send = os.pipe()
        command = [
            sys.executable,
            "-m",
            "examples.deepspeed_gpt.train",
            "--mode",
            mode,
            "--settings",
            settings.to_json(),
        ]
        command += ["--channel", str(send), "--lockstep"]
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        self._stream = os.fdopen(receive)
        self._lines = read_lines(self._stream)
        try:
            with log.open("w") as output:
                self._process = subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    pass_fds=[send],
                    env={**os.environ, "PYTHONPATH": path},
                )
        finally:
            os.close(send)  # The child's copy is the last: where it ends, the lines end.

    @property
    def pid(self) -> int:
        return self._process.pid

    def step(self) -> dict[str, Any]:
        """Trains one step and returns its line (keys step, loss, seconds).

        Raises:
            ModeFailed: with the exit status and the end of the log.
        """
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._failure() from None
        return self._next("step")

    def result(self) -> RunResult:
        """What the run left, after its last step. Raises ModeFailed as `step` does."""
        found = RunResult.from_json(self._next("result")["result"])
        if self._process.wait() != 0:
            raise self._failure()
        return found

    def _next(self, event: str) -> dict[str, Any]:
        record = next(self._lines, None)
        if record is None or record["event"] != event:
            raise self._failure()
        return record

    def _failure(self) -> ModeFailed:
        self._process.kill()
        status = self._process.wait()
        tail = "\n".join(self._log.read_text(errors="replace").splitlines()[-15:])
        return ModeFailed(f"the run {self.mode} ended with status {status}; the end of {self._log}:\n{tail}")

    def __enter__(self) -> "ModeProcess":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """An exception or Ctrl-C in the parent must not leave the training behind."""
        self._process.kill()
        self._process.wait()
        self._stream.close()
        assert self._process.stdin is not None
        try:
            self._process.stdin.close()
        except BrokenPipeError:
            return  # What was buffered for a process that has ended is of no use.
