"""Returns freed memory to the system: glibc keeps what threads have freed, often hundreds of megabytes."""

from __future__ import annotations

import asyncio
import ctypes
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

MIN_GROWTH: Final = 64 << 20
"""Bytes above the lowest level so far from which a trim is tried."""

MIN_FREED: Final = 16 << 20
"""Bytes that a trim returns if it was worth it."""

MIN_SECONDS: Final = 10.0
"""Between two trims, each of which takes milliseconds. Doubled, up to MAX_SECONDS, after one that was not worth it."""

MAX_SECONDS: Final = 640.0

_STATUS: Final = Path("/proc/self/status")


class MemoryTrimmer:
    """Trims the allocator when the process's memory has grown. Has no effect without glibc or Linux.

    `resident`: returns the bytes of resident memory that are no file's; None if unknown. `trim`: returns free memory.
    """

    def __init__(
        self, resident: Callable[[], int | None] | None = None, trim: Callable[[], None] | None = None
    ) -> None:
        self._resident = resident or resident_bytes
        self._trim = trim or _glibc_trim()
        self._lowest = self._resident()
        self._next = 0.0
        self._pause = MIN_SECONDS

    def check(self) -> None:
        """Trim if memory has grown, unless a trim was tried not long ago."""
        now = time.monotonic()
        before = self._resident()
        if self._trim is None or self._lowest is None or before is None:
            return
        self._lowest = min(self._lowest, before)
        if before - self._lowest < MIN_GROWTH or now < self._next:
            return
        self._trim()
        freed = before - (self._resident() or 0)
        self._pause = MIN_SECONDS if freed >= MIN_FREED else min(2 * self._pause, MAX_SECONDS)
        self._next = now + self._pause


async def trim_memory(seconds: float = 2.0) -> None:
    """Check every `seconds` s, for ever; trims run in a thread."""
    trimmer = MemoryTrimmer()
    while True:
        await asyncio.sleep(seconds)
        await asyncio.to_thread(trimmer.check)


def resident_bytes() -> int | None:
    """Return the resident memory of this process that is no file's; None where Linux does not tell."""
    try:
        status = _STATUS.read_text()
    except OSError:
        return None
    _, separator, rest = status.partition("RssAnon:")
    return int(rest.split(maxsplit=1)[0]) * 1024 if separator else None


def _glibc_trim() -> Callable[[], None] | None:
    try:
        malloc_trim = ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):
        return None
    return lambda: malloc_trim(0)
