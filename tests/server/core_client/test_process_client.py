"""ProcessClient delivers messages in order and in batches, and loses none."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from pagoda.common.engine.messages import EngineOutput, StepOutputs
from pagoda.server.core_client import process_client
from pagoda.server.core_client.ipc_messages import StepReply
from pagoda.server.core_client.process_client import ProcessClient


def client_with(messages: list[int], delivered: list[int]) -> ProcessClient:
    """Return a client without a process, with these messages in its socket."""
    client: Any = ProcessClient.__new__(ProcessClient)
    client._closed = client._resuming = False
    client._loop = asyncio.get_running_loop()
    client._supervisor = SimpleNamespace(note=lambda message: None)
    client._listener = delivered.append
    client._receive = lambda timeout_ms: messages.pop(0) if messages else None
    return client


async def test_event_loop_runs_between_batches_of_messages() -> None:
    delivered: list[int] = []
    at_once = process_client._MAX_MESSAGES
    client = client_with(list(range(3 * at_once - 2)), delivered)
    for _ in range(3):  # as a readable socket does, again and again
        client._deliver()
    assert len(delivered) == 3 * at_once - 2
    seen = []
    delivered.clear()
    waiting = list(range(5 * at_once))
    client = client_with(waiting, delivered)
    client._deliver()
    while waiting:
        seen.append(len(delivered))
        await asyncio.sleep(0)
    assert seen == [at_once * (1 + turn) for turn in range(4)], "one batch per iteration of the loop"
    assert delivered == list(range(5 * at_once))


async def test_a_backlog_schedules_one_resume_only() -> None:
    delivered: list[int] = []
    waiting = list(range(3 * process_client._MAX_MESSAGES))
    client = client_with(waiting, delivered)
    client._deliver()
    client._deliver()  # the socket is readable, while the rest is due already
    before = len(delivered)
    await asyncio.sleep(0)
    assert len(delivered) - before == process_client._MAX_MESSAGES


async def test_queued_steps_are_delivered_as_one() -> None:
    delivered: list[Any] = []
    steps = [StepReply(StepOutputs(outputs=[EngineOutput(request_id="a", new_token_ids=[n])])) for n in range(3)]
    messages: list[Any] = [*steps]
    client = client_with(messages, delivered)
    client._deliver()
    assert [output.new_token_ids for each in delivered for output in each.outputs.outputs] == [[0, 1, 2]]
    messages += steps[:1]
    client._deliver()
    assert delivered[1:] == steps[:1], "a single step is delivered unchanged"
