"""CoreClientAsync: replies are matched to calls, and an engine's death is reported once."""

from __future__ import annotations

import asyncio

import pytest

from pagoda.common.errors import EngineDeadError
from pagoda.server.core_client.client import CoreClientAsync, Listener
from pagoda.server.core_client.ipc_messages import (
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
    """Implements EngineClient without an engine. `dead`: send() raises EngineDeadError."""

    def __init__(self) -> None:
        self.sent: list[ToEngine] = []
        self.dead = False
        self.deliver: Listener = lambda message: None

    def wait_ready(self) -> EngineInfo:
        raise NotImplementedError

    def listen(self, loop: asyncio.AbstractEventLoop, listener: Listener) -> None:
        self.deliver = listener

    def send(self, command: ToEngine) -> None:
        if self.dead:
            raise EngineDeadError("the engine is gone")
        self.sent.append(command)

    def check(self) -> None:
        """Do nothing: the engine is alive."""

    def close(self, timeout: float = 2.0) -> None:
        """Do nothing."""


class Fixture:
    """A CoreClientAsync, the messages to its listener, and the deaths reported."""

    def __init__(self) -> None:
        self.client = Client()
        self.messages: list[FromEngine] = []
        self.deaths: list[str] = []
        self.core = CoreClientAsync(self.client, self.messages.append, lambda error: self.deaths.append(str(error)))


async def test_replies_are_matched_to_calls_by_ticket() -> None:
    fixture = Fixture()
    reset = asyncio.ensure_future(fixture.core.call(ResetPrefixCache))
    sleep = asyncio.ensure_future(fixture.core.call(lambda ticket: Sleep(ticket, 1)))
    await asyncio.sleep(0)
    first, second = fixture.client.sent
    assert isinstance(first, ResetPrefixCache)
    assert isinstance(second, Sleep)
    answers = SleepState(second.ticket, ("weights",)), ResetDone(first.ticket)
    for answer in answers:
        fixture.client.deliver(answer)
    assert (await sleep, await reset) == answers
    assert fixture.messages == [*answers], "the listener runs before the callers continue"


async def test_engine_death_is_reported_once_and_fails_all_pending_calls() -> None:
    fixture = Fixture()
    waiting = asyncio.ensure_future(fixture.core.call(ResetPrefixCache))
    await asyncio.sleep(0)
    for text in ("first", "second"):
        fixture.client.deliver(Failed("EngineDeadError", text))
    assert fixture.deaths == ["first"]
    with pytest.raises(EngineDeadError, match="first"):
        await waiting
    with pytest.raises(EngineDeadError, match="first"):
        await fixture.core.call(ResetPrefixCache)
    with pytest.raises(EngineDeadError, match="first"):
        fixture.core.check()
    assert len(fixture.client.sent) == 1


async def test_failed_send_marks_the_engine_dead() -> None:
    fixture = Fixture()
    fixture.client.dead = True
    fixture.core.send_if_alive(Abort(["a"]))
    assert fixture.deaths == ["the engine is gone"]
    fixture.core.send_if_alive(Abort(["b"]))
    with pytest.raises(EngineDeadError, match="the engine is gone"):
        fixture.core.send(Abort(["c"]))
    assert fixture.deaths == ["the engine is gone"]


async def test_failed_call_leaves_no_pending_reply() -> None:
    fixture = Fixture()
    fixture.client.dead = True
    failures: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, failure: failures.append(failure))
    with pytest.raises(EngineDeadError, match="the engine is gone"):
        await fixture.core.call(ResetPrefixCache)
    await asyncio.sleep(0)
    assert (fixture.deaths, failures) == (["the engine is gone"], [])
