"""How long the parts of a start take."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Phases:
    """Start-up phases and their seconds, in order."""

    def __init__(self) -> None:
        self.seconds: list[tuple[str, float]] = []

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Measure what is done in this context, unless it fails."""
        begin = time.perf_counter()
        yield
        self.seconds.append((name, time.perf_counter() - begin))
