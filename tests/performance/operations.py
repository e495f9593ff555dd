"""Counts of bytecode instructions: a deterministic measure of what Python code does on the host."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any, TypeVar

T = TypeVar("T")


def counted(work: Callable[[], T]) -> tuple[int, T]:
    """The bytecode instructions that a call executes in this thread, and what it returns.

    What compiled code does counts as the one instruction that calls it. A count depends on the minor version of Python,
    and on what earlier calls have imported or cached.
    """
    count = 0

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal count
        if event == "opcode":
            count += 1
        else:
            frame.f_trace_lines, frame.f_trace_opcodes = False, True
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        found = work()
    finally:
        sys.settrace(before)
    return count, found
