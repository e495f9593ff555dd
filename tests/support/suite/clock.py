"""Clocks: one that moves only when a test says so; the processor time of a process, and a loop that calibrates it."""

from __future__ import annotations

import resource
import time
from typing import Final

_LOOP: Final = 60_000
"""Iterations of the calibration loop: about 10 ms."""

LOOPS_PER_UNIT: Final = 100


def calibrate() -> float:
    """Return the processor seconds of one calibration loop, which does what most tests do: objects, dicts, calls."""
    begin = time.process_time()
    table: dict[int, tuple[int, str]] = {}
    for number in range(_LOOP):
        key = number * 7919 % 1024
        table[key] = (number, str(key))
        if table[key][0] % 3 == 0:
            table.pop(key, None)
    return time.process_time() - begin


def processor_seconds() -> float:
    """Return the user and system time of this process and of the children that it has waited for."""
    used = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in used)


class Clock:
    """Called, it returns the seconds that have passed."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds
