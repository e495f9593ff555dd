"""Work for a client is cancelled when the client disconnects or the server stops, and not after its end."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from pagoda.server.http.errors import ClientDisconnectedError, UnavailableError
from pagoda.server.http.response import cancel_on_disconnect
from pagoda.server.http.state import StopSignal


class Client:
    """A connection that may be closed."""

    def __init__(self) -> None:
        self.left = asyncio.Event()

    async def receive(self) -> dict[str, Any]:
        await self.left.wait()
        return {"type": "http.disconnect"}


class Work:
    """Runs until it is cancelled."""

    def __init__(self) -> None:
        self.began = asyncio.Event()
        self.ended: list[str] = []

    async def run(self) -> None:
        self.began.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.ended.append("cancelled")
            raise


async def soon(value: str) -> str:
    await asyncio.sleep(0)
    return value


async def test_work_is_cancelled_on_disconnect() -> None:
    client, work = Client(), Work()
    task = asyncio.ensure_future(cancel_on_disconnect(client.receive, StopSignal(), work.run()))
    await work.began.wait()
    client.left.set()
    with pytest.raises(ClientDisconnectedError):
        await asyncio.wait_for(task, 60)
    assert work.ended == ["cancelled"]


@pytest.mark.parametrize("before", [True, False], ids=["before it began", "while it ran"])
async def test_work_is_cancelled_when_the_server_stops(before: bool) -> None:
    stopping, work = StopSignal(), Work()
    if before:
        stopping.set()
    task = asyncio.ensure_future(cancel_on_disconnect(Client().receive, stopping, work.run()))
    await asyncio.wait({task}, timeout=0)
    if not before:
        await work.began.wait()
        stopping.set()
    with pytest.raises(UnavailableError, match="shutting down"):
        await asyncio.wait_for(task, 60)


async def test_outside_cancellation_is_not_reported_as_disconnect() -> None:
    client, work = Client(), Work()
    task = asyncio.ensure_future(cancel_on_disconnect(client.receive, StopSignal(), work.run()))
    await work.began.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_outside_cancellation_during_clean_up_is_raised() -> None:
    stopping, work = StopSignal(), Work()
    task = asyncio.ensure_future(cancel_on_disconnect(Client().receive, stopping, work.run()))
    await work.began.wait()
    stopping.set()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(task, 60)


async def test_clean_up_is_not_cancelled_again() -> None:
    client, stopping, ended = Client(), StopSignal(), []
    began, ending, may_end = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def work() -> None:
        try:
            began.set()
            await asyncio.Event().wait()
        finally:
            ending.set()
            await may_end.wait()
            ended.append("in good order")

    task = asyncio.ensure_future(cancel_on_disconnect(client.receive, stopping, work()))
    await began.wait()
    stopping.set()
    await ending.wait()
    client.left.set()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    may_end.set()
    with pytest.raises(UnavailableError):
        await asyncio.wait_for(task, 60)
    assert ended == ["in good order"]


async def test_a_later_disconnect_does_not_affect_the_caller() -> None:
    """The caller goes on in the same task."""
    client, stopping = Client(), StopSignal()
    assert await cancel_on_disconnect(client.receive, stopping, soon("a")) == "a"
    client.left.set()
    stopping.set()
    assert await soon("b") == "b"
    assert await cancel_on_disconnect(Client().receive, StopSignal(), soon("c")) == "c"


async def test_the_caller_continues_after_a_disconnect() -> None:
    client, work = Client(), Work()
    client.left.set()
    with pytest.raises(ClientDisconnectedError):
        await cancel_on_disconnect(client.receive, StopSignal(), work.run())
    task = asyncio.current_task()
    assert task is not None
    assert not task.cancelling()
    assert await soon("a") == "a"


async def test_errors_of_the_work_are_raised() -> None:
    async def fails() -> None:
        await asyncio.sleep(0)
        raise KeyError("x")

    with pytest.raises(KeyError):
        await cancel_on_disconnect(Client().receive, StopSignal(), fails())
