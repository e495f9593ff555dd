"""Which cores the engine's threads run on."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from pagoda.common.errors import ConfigError

FLAG: Final = "--cpu-omp-threads-bind"


@contextmanager
def pinned(cores: frozenset[int] | None) -> Iterator[None]:
    """Threads that start meanwhile, and theirs, run on these cores only; None: wherever they may. Raises ConfigError.

    A thread inherits its cores from the one that starts it. This one gets its own back.
    """
    if cores is None:
        yield
        return
    if not hasattr(os, "sched_setaffinity"):
        raise ConfigError(FLAG, "this system does not pin threads to cores; use auto")
    before = os.sched_getaffinity(0)
    if not cores <= before:
        missing = ", ".join(map(str, sorted(cores - before)))
        raise ConfigError(FLAG, f"core {missing} is not this process's to use; choose from {ranges(before)}")
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def ranges(numbers: set[int]) -> str:
    """{0, 1, 2, 5} as 0-2,5."""
    spans: list[list[int]] = []
    for number in sorted(numbers):
        if spans and number == spans[-1][-1] + 1:
            spans[-1][1:] = [number]
        else:
            spans.append([number])
    return ",".join("-".join(map(str, span)) for span in spans)
