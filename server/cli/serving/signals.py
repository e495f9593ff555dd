"""SIGTERM and SIGINT: before an event loop runs they raise an exception, within it they set events, and after it they
do nothing, so that a server ends in order and leaves nothing behind whenever one arrives.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Iterator
from types import FrameType
from typing import Final

_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)


class Stopped(BaseException):
    """SIGTERM or SIGINT, before an event loop handles them."""


@contextlib.contextmanager
def stopping_on_signals() -> Iterator[None]:
    """Raise Stopped in the main thread on a signal; only there may it be used. Handlers and mask are as before it
    afterwards.
    """

    def stop(number: int, frame: FrameType | None) -> None:
        ignore_signals()
        raise Stopped

    mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    usual = {number: signal.signal(number, stop) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in usual.items():
            signal.signal(number, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


@contextlib.contextmanager
def deferring_signals() -> Iterator[None]:
    """Signals that arrive in this context take effect at its end: what it makes has an owner by then."""
    arrived: list[int] = []
    usual = {number: signal.signal(number, lambda number, frame: arrived.append(number)) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in usual.items():
            signal.signal(number, handler)
        if arrived:
            signal.raise_signal(arrived[0])


def ignore_signals() -> None:
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_IGN)


@contextlib.contextmanager
def on_signals(stop: asyncio.Event, hurry: asyncio.Event) -> Iterator[None]:
    """Set `stop` on the first signal, `hurry` on the second: requests in progress then end with an error at once.

    Signals stay blocked until the end of `stopping_on_signals`: closing the loop restores handlers that end the process
    at once.
    """

    def handle() -> None:
        if stop.is_set():
            hurry.set()
        stop.set()

    was_stopped = signal.getsignal(signal.SIGTERM) is signal.SIG_IGN  # Stopped was lost, as in a finalizer.
    loop = asyncio.get_running_loop()
    for number in _SIGNALS:
        loop.add_signal_handler(number, handle)
    if was_stopped:
        stop.set()
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
