"""Ctrl-C between engine steps: a step that is torn in the middle would leave the scheduler without its result."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any, Self


class InterruptBetweenSteps:
    """While entered, the first Ctrl-C waits for `check`; a second one interrupts at once.

    Outside the main thread, where Python delivers no signals, this does nothing.
    """

    def __init__(self) -> None:
        self._usual: Any = None
        self._asked = False

    def check(self) -> None:
        """Let a Ctrl-C that came in take effect: usually KeyboardInterrupt."""
        if self._asked:
            self._restore()
            signal.raise_signal(signal.SIGINT)

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._usual = signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._restore()

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._asked = True
        self._restore()

    def _restore(self) -> None:
        if self._usual is not None:
            signal.signal(signal.SIGINT, self._usual)
            self._usual = None
