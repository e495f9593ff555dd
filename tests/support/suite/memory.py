"""Memory of a test process, returned between tests: compiled programs, weights in reference cycles, freed heap."""

from __future__ import annotations

import ctypes
import gc
import os
import sys
from pathlib import Path
from typing import Final

from support.suite import budgets

LARGE: Final = 3 << 29
"""Bytes of resident memory from which a process returns memory before the end of a file, too."""

GROWTH: Final = 1 << 27
"""Bytes by which it grows after memory was returned before that is tried again: most of it may be in use."""

NEAR: Final = 1 << 25
"""The same at the end of a file of a large process."""

_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3
_M_ARENA_MAX: Final = -8


def use_small_heap() -> None:
    """Let the C library have one heap, since each thread that compiles or multiplies would else keep what it frees.

    Tensors lie outside the heap, so that their memory is returned when they are freed, whatever lies behind them.
    Engines of the reference backend, which use their memory again and again, ask for the opposite.
    """
    if sys.platform == "linux":
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_ARENA_MAX, 1)
        mallopt(_M_MMAP_THRESHOLD, 1 << 20)
        mallopt(_M_TRIM_THRESHOLD, 1 << 20)


class Shrinker:
    """Returns memory of this process; remembers what was left the last time."""

    def __init__(self) -> None:
        self._between_files, self._within_file = 0, LARGE

    def __call__(self, recorder: budgets.Recorder | None, *, ends_file: bool) -> None:
        """Return memory of this process if it has grown; `recorder` charges the time to a row of its own.

        What is left at the end of a file is in use for good, while within a file most may belong to its tests.
        """
        if ends_file:
            use_small_heap()
        now = resident()
        growth = NEAR if ends_file and now > LARGE else GROWTH
        if now <= growth + (self._between_files if ends_file else self._within_file):
            return
        if recorder is not None:
            recorder.switch(budgets.MEMORY)
        if "jax" in sys.modules:
            sys.modules["jax"].clear_caches()
        if ends_file:
            freeze()  # what is left stays, and would be gone through each time
            trim()
            self._between_files, self._within_file = resident(), LARGE
        else:
            gc.collect()
            trim()
            self._within_file = max(LARGE, resident())


def freeze() -> None:
    """Keep the collector from going through what there is now: hundreds of thousands of objects, which take it long."""
    gc.collect()
    gc.freeze()


def trim() -> None:
    """Return the free memory of the heap to the system."""
    if sys.platform == "linux":
        ctypes.CDLL(None).malloc_trim(0)


def resident() -> int:
    """Return the bytes of resident memory of this process, 0 where the system does not say."""
    pages = Path("/proc/self/statm")
    return int(pages.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if pages.exists() else 0


shrink = Shrinker()
