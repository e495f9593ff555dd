"""The link to an engine: questions get their answers, a death is told once and to all."""

from __future__ import annotations

import asyncio

import pytest

from pagoda.common.errors import EngineDeadError
from pagoda.server.core_client.client import CoreClientAsync, Listener
from pagoda.server.ipc_messages import (
    Abort,
    EngineInfo,
    Failed,
    FromEngine,
    ResetDone,
    ResetPrefixCache,
    Sleep,
    SleepState,
    ToEngine,
)


class Client:
    """Implements EngineClient, without an engine. `dead`: commands find nobody."""

    def __init__(self) -> None:
        self.sent: list[ToEngine] = []
        self.dead = False
        self.hear: Listener = lambda message: None

    def wait_ready(self) -> EngineInfo:
        raise NotImplementedError

    def listen(self, loop: asyncio.AbstractEventLoop, listener: Listener) -> None:
        self.hear = listener

    def send(self, command: ToEngine) -> None:
        if self.dead:
            raise EngineDeadError("nobody there")
        self.sent.append(command)

    def check(self) -> None:
        """The engine lives."""

    def close(self, timeout: float = 2.0) -> None:
        """Nothing to end."""


class Side:
    """A link and what its owner hears."""

    def __init__(self) -> None:
        self.client = Client()
        self.heard: list[FromEngine] = []
        self.deaths: list[str] = []
        self.link = CoreClientAsync(self.client, self.heard.append, lambda error: self.deaths.append(str(error)))


async def test_replies_are_matched_to_calls_by_ticket() -> None:
    side = Side()
    reset = asyncio.ensure_future(side.link.call(ResetPrefixCache))
    sleep = asyncio.ensure_future(side.link.call(lambda ticket: Sleep(ticket, 1)))
    await asyncio.sleep(0)
    first, second = side.client.sent
    assert isinstance(first, ResetPrefixCache)
    assert isinstance(second, Sleep)
    answers = SleepState(second.ticket, ("weights",)), ResetDone(first.ticket)
    for answer in answers:
        side.client.hear(answer)
    assert (await sleep, await reset) == answers
    assert side.heard == [*answers], "the owner knows before those who asked go on"


async def test_engine_death_is_reported_once_and_fails_all_pending_calls() -> None:
    side = Side()
    waiting = asyncio.ensure_future(side.link.call(ResetPrefixCache))
    await asyncio.sleep(0)
    for text in ("first", "second"):
        side.client.hear(Failed("EngineDeadError", text))
    assert side.deaths == ["first"]
    with pytest.raises(EngineDeadError, match="first"):
        await waiting
    with pytest.raises(EngineDeadError, match="first"):
        await side.link.call(ResetPrefixCache)
    with pytest.raises(EngineDeadError, match="first"):
        side.link.check()
    assert len(side.client.sent) == 1


async def test_failed_send_marks_the_engine_dead() -> None:
    side = Side()
    side.client.dead = True
    side.link.send_if_alive(Abort(["a"]))
    assert side.deaths == ["nobody there"]
    side.link.send_if_alive(Abort(["b"]))
    with pytest.raises(EngineDeadError, match="nobody there"):
        side.link.send(Abort(["c"]))
    assert side.deaths == ["nobody there"]


async def test_failed_call_leaves_no_pending_reply() -> None:
    side = Side()
    side.client.dead = True
    failures: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, failure: failures.append(failure))
    with pytest.raises(EngineDeadError, match="nobody there"):
        await side.link.call(ResetPrefixCache)
    await asyncio.sleep(0)
    assert (side.deaths, failures) == (["nobody there"], [])
