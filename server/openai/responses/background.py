"""Responses in the background: they run on when their client has left, and tell their story to whoever follows.

Knows generations and stored responses. Does not know what a response says.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from contextlib import aclosing
from typing import Any

from starlette.types import Message

from pagoda.common.errors import PagodaError
from pagoda.server.http.generation import Generation
from pagoda.server.http.response import cancel_on_disconnect, named_event
from pagoda.server.http.response_store import StoredResponse
from pagoda.server.http.state import ServerState
from pagoda.server.openai.responses.output import ResponseAnswer

logger = logging.getLogger(__name__)


async def start_in_background(
    state: ServerState, generation: Generation, answer: ResponseAnswer, stored: StoredResponse
) -> None:
    """Run a generation as a task of its own, and store it. Returns when the engine has taken it.

    Raises what the engine refuses it with; nothing is stored then.
    """
    run = _Run(state, answer, stored)
    run.tell(answer.queued())
    task = stored.task = asyncio.ensure_future(run.all_of(generation))
    accepted = asyncio.ensure_future(generation.accepted.wait())
    await asyncio.wait({task, accepted}, return_when=asyncio.FIRST_COMPLETED)
    accepted.cancel()
    if not generation.accepted.is_set():
        task.result()
    state.responses.put(stored)


class _Run:
    """A generation whose events are added to a stored response."""

    def __init__(self, state: ServerState, answer: ResponseAnswer, stored: StoredResponse) -> None:
        self._state = state
        self._answer = answer
        self._stored = stored

    async def all_of(self, generation: Generation) -> None:
        """Run until the end, the server's included. Raises only what the engine refuses the request with."""
        try:
            await cancel_on_disconnect(_nobody_leaves, self._state.stopping, self._read(generation))
        except asyncio.CancelledError:
            self._answer.cancel()  # by the client, or by the store, which needs the room
        except Exception as error:
            if not generation.accepted.is_set():
                raise
            if not isinstance(error, PagodaError):
                logger.exception("request %s failed", generation.request_id)
            self.tell(self._answer.fail(error))

    def tell(self, events: Iterable[dict[str, Any]]) -> None:
        """Add events to the story."""
        for event in events:
            self._stored.add_event(named_event(event))
        self._state.responses.resize(self._stored)

    async def _read(self, generation: Generation) -> None:
        async with aclosing(generation.outputs()) as outputs:
            async for index, output in outputs:
                self.tell(self._answer.chunks(index, output))


async def _nobody_leaves() -> Message:
    """Stands for a connection that is never closed."""
    return await asyncio.get_running_loop().create_future()
