"""Something that happens before a chosen bytecode, as on another thread that gets its turn there."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable
from types import FrameType, ModuleType
from typing import Any

__all__ = ["Before", "count_bytecodes"]


class Before:
    """A context manager: before the bytecode of this number that runs in the files of `modules`, `what` is called; 0: never.

    Args:
        modules: or names of their files.
        functions: names of those whose bytecodes count; (): of all.

    Attributes:
        count: of the bytecodes until then, or until the end.
    """

    def __init__(
        self,
        number: int,
        what: Callable[[], object],
        modules: Iterable[ModuleType | str],
        functions: Collection[str] = (),
    ) -> None:
        self.number, self.what, self.count = number, what, 0
        self._functions = functions
        self._files = {module if isinstance(module, str) else module.__file__ for module in modules}

    def __enter__(self) -> Before:
        # Python 3.12 reports opcodes only where some frame asked for them before the trace was set.
        sys._getframe().f_trace_opcodes = True
        sys.settrace(self._call)
        return self

    def __exit__(self, *exception: object) -> None:
        sys.settrace(None)

    def _call(self, frame: FrameType, event: str, argument: Any) -> Any:
        code = frame.f_code
        if code.co_filename not in self._files or (self._functions and code.co_name not in self._functions):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return self._opcode

    def _opcode(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event == "opcode":
            self.count += 1
            if self.count == self.number:
                sys.settrace(None)
                self.what()
        return self._opcode


def count_bytecodes(run: Callable[[], object], modules: Iterable[ModuleType | str]) -> int:
    """How many bytecodes `run` takes in the files of `modules`."""
    for _ in range(2):  # Python 3.13 reports a function's opcodes from its second traced call on
        with Before(0, int, modules) as counted:
            run()
    return counted.count
