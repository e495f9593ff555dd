"""A clock that moves only when a test says so."""

from __future__ import annotations


class Clock:
    """Called, it returns the seconds that have passed."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds
