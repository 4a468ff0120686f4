"""How much Python a call runs: bytecodes and calls of functions, which do not depend on the load of the machine."""

from __future__ import annotations

import sys
from collections import Counter
from types import FrameType
from typing import Any

__all__ = ["PythonCost"]


class PythonCost:
    """A context manager that counts what functions called inside run on this thread. Entered again, it counts on.

    Attributes:
        opcodes: bytecodes by function, as "file:name".
        calls: calls by function; functions in C are not counted.
    """

    def __init__(self) -> None:
        self.opcodes: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()

    def __enter__(self) -> PythonCost:
        # Python 3.12 reports opcodes only where some frame asked for them before the trace was set.
        sys._getframe().f_trace_opcodes = True
        sys.settrace(self._trace)
        return self

    def __exit__(self, *exception: object) -> None:
        sys.settrace(None)

    def _trace(self, frame: FrameType, event: str, argument: Any) -> Any:
        code = frame.f_code
        if code is PythonCost.__exit__.__code__:
            return None
        name = f"{code.co_filename.rpartition('/')[2]}:{code.co_name}"
        if event == "call":
            self.calls[name] += 1
            frame.f_trace_opcodes, frame.f_trace_lines = True, False
        elif event == "opcode":
            self.opcodes[name] += 1
        return self._trace
