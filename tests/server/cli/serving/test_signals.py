"""A signal at any moment of the start leaves no socket and no engine behind."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import pytest

from pagoda.common.config.engine import EngineConfig
from pagoda.common.config.groups.server import ServerConfig
from pagoda.server.cli.serving import api_servers, serve
from pagoda.server.cli.serving.signals import (
    Stopped,
    deferring_signals,
    ignore_signals,
    on_signals,
    stopping_on_signals,
)

TRACED = (serve.__file__, api_servers.__file__)


@pytest.fixture(autouse=True)
def own_signals() -> Iterator[None]:
    """Handlers and mask are as before after a test."""
    numbers = (signal.SIGTERM, signal.SIGINT)
    handlers = [signal.getsignal(number) for number in numbers]
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    yield
    ignore_signals()  # discards what is pending
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    for number, handler in zip(numbers, handlers):
        signal.signal(number, handler)


def with_signal_at(line: int, work: Callable[[], None]) -> bool:
    """Do the work with SIGTERM before the line of that number of the server's commands; False if there is none.

    The work ends the count by `sys.settrace(None)`, where an event loop takes over the signals.
    """
    left, before = line, sys.gettrace()

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal left
        if frame.f_code.co_filename not in TRACED:
            return None
        if event == "line":
            left -= 1
            if left == 0:
                signal.raise_signal(signal.SIGTERM)
        return trace

    try:
        with stopping_on_signals():
            sys.settrace(trace)
            work()
    except Stopped:
        pass
    finally:
        sys.settrace(before)
    return left <= 0


def untraced_supervisor(*args: Any) -> Any:
    async def run(*args: Any) -> int:
        return 0

    sys.settrace(None)
    return SimpleNamespace(run=run)


def test_a_signal_at_any_line_removes_the_socket(tmp_path: Path) -> None:
    path = tmp_path / "s"

    def listen() -> None:
        with serve._listening(ServerConfig(uds=str(path))):
            sys.settrace(None)
            assert path.exists()

    line = 1
    while with_signal_at(line, listen):
        assert not path.exists(), f"after a signal before line {line} of those that run"
        line += 1
    assert line > 10


@pytest.mark.parametrize("several", [False, True])
def test_a_signal_at_any_line_ends_the_engine(monkeypatch: pytest.MonkeyPatch, several: bool) -> None:
    running: list[object] = []

    def start(config: EngineConfig, **options: Any) -> Any:
        running.append(config)
        return SimpleNamespace(close=running.clear)

    monkeypatch.setattr(serve, "start_engine", start)
    monkeypatch.setattr("pagoda.server.async_llm.AsyncLLM", lambda *args, **options: None)
    monkeypatch.setattr(serve, "_serve", lambda *args: sys.settrace(None))
    monkeypatch.setattr(api_servers, "_Supervisor", untraced_supervisor)
    listener: Any = None

    def run() -> None:
        if several:
            api_servers.run_api_servers(EngineConfig(), ServerConfig(), listener, on_signals, 0.0, start)
        else:
            serve._run_server(EngineConfig(), ServerConfig(), listener, 0.0)

    line = 1
    while with_signal_at(line, run):
        assert not running, f"after a signal before line {line} of those that run"
        line += 1
    assert line > 5


def test_a_signal_is_deferred() -> None:
    done: list[str] = []

    def work() -> None:
        with stopping_on_signals(), deferring_signals():
            signal.raise_signal(signal.SIGTERM)
            done.append("the rest of the context")

    with pytest.raises(Stopped):
        work()
    assert done


async def test_signals_set_the_events_and_are_blocked_afterwards() -> None:
    stop, hurry = asyncio.Event(), asyncio.Event()
    with on_signals(stop, hurry):
        signal.raise_signal(signal.SIGTERM)
        await stop.wait()
        assert not hurry.is_set()
        signal.raise_signal(signal.SIGINT)
        await hurry.wait()
    signal.raise_signal(signal.SIGTERM)
    assert signal.sigpending() == {signal.SIGTERM}


def test_handlers_and_mask_are_restored() -> None:
    handler, mask = signal.getsignal(signal.SIGTERM), signal.pthread_sigmask(signal.SIG_BLOCK, ())

    async def serve() -> None:
        with on_signals(asyncio.Event(), asyncio.Event()):
            pass

    with stopping_on_signals():
        asyncio.run(serve())
        assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == {*mask, signal.SIGTERM, signal.SIGINT}
    assert signal.getsignal(signal.SIGTERM) is handler
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == mask


async def test_a_signal_whose_exception_was_lost_stops_the_server() -> None:
    with stopping_on_signals():
        stop, hurry = asyncio.Event(), asyncio.Event()
        ignore_signals()  # as the handler did that raised it
        with on_signals(stop, hurry):
            assert stop.is_set()
            assert not hurry.is_set()
