"""Generate a response that calls tools of servers: generate, call, and generate again with the results."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from typing import Final

from pagoda.common.errors import PagodaError, RequestTimeoutError
from pagoda.server.api.openai.responses.input import Item, McpApprovalRequestItem, output_items
from pagoda.server.api.openai.responses.output import McpCallOutput, ResponsesBuilder
from pagoda.server.api.openai.responses.tool_servers import ToolResult, ToolSessions
from pagoda.server.http.body import Ignored
from pagoda.server.http.generation import Generation
from pagoda.server.outputs import RequestOutput
from pagoda.server.parsers.output_parser import DeltaParser

NextRound = Callable[[Sequence[Item], int], Awaitable[tuple[Generation, DeltaParser]]]
"""Called with the items of a conversation; returns their generation and what reads its outputs."""

TOO_MANY_ROUNDS: Final = "max_tool_rounds"
"""Reason of a response that ends since its model calls tools again and again."""


class ToolLoop:
    """An OutputSource: the outputs of all generations of a response, and empty ones that let the builder send events.

    `first`: the generation of the first round; None: it needs the results of `approved`, calls that the client
    approved. `items`: what the response is generated from. `seconds`: time of the whole response; 0: any.
    """

    ignored: tuple[Ignored, ...] = ()

    def __init__(
        self,
        id: str,
        builder: ResponsesBuilder,
        sessions: ToolSessions,
        next_round: NextRound,
        *,
        first: Generation | None,
        items: Sequence[Item],
        approved: Sequence[McpApprovalRequestItem],
        max_rounds: int,
        max_calls: int | None,
        seconds: float,
    ) -> None:
        self.id = id
        self.accepted = asyncio.Event() if first is None else first.accepted
        self._builder = builder
        self._sessions = sessions
        self._next_round = next_round
        self._first = first
        self._items = items
        self._approved = approved
        self._max_rounds = max_rounds
        self._calls_left = max_calls
        self._deadline = asyncio.get_running_loop().time() + seconds if seconds else None
        self._seconds = seconds

    async def outputs(self) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        """Yield (0, output). Raises as Generation.outputs does, unless calls were made: then the response has failed,
        so that the client learns of them."""
        try:
            async with aclosing(self._rounds()) as rounds:
                async for output in rounds:
                    yield 0, output
        except PagodaError as error:
            if not self._builder.has_results:
                raise
            self._builder.fail_after_calls(error)
            yield 0, self._nothing()
        finally:
            await self._sessions.close()

    async def _rounds(self) -> AsyncGenerator[RequestOutput, None]:
        for label, tools in self._sessions.listings:
            self._builder.add_listing(label, tools)
        generation = self._first
        if generation is None:
            self.accepted.set()
            for request in self._approved:
                self._builder.add_approved_call(request)
            async with aclosing(self._made_calls()) as made:
                async for output in made:
                    yield output
            generation = await self._continued()
        for number in range(self._max_rounds + 1):
            async with aclosing(generation.outputs()) as outputs:
                async for _, output in outputs:
                    yield output
            if not self._builder.calls_to_make:
                return
            async with aclosing(self._made_calls()) as made:
                async for output in made:
                    yield output
            if self._builder.awaits_client or number == self._max_rounds:
                self._builder.end_after_calls(None if self._builder.awaits_client else TOO_MANY_ROUNDS)
                yield self._nothing()
                return
            generation = await self._continued()

    async def _made_calls(self) -> AsyncGenerator[RequestOutput, None]:
        """Make the calls that have no result, one after the other, and yield an output for each."""
        yield self._nothing()
        for call in self._builder.calls_to_make:
            self._builder.add_result(call, await self._result_of(call))
            yield self._nothing()

    async def _result_of(self, call: McpCallOutput) -> ToolResult:
        """Return the result of a call. Raise RequestTimeoutError if the response takes too long."""
        if self._calls_left is not None:
            self._calls_left -= 1
            if self._calls_left < 0:
                return ToolResult(None, "the response may make no further calls (max_tool_calls)")
        try:
            async with asyncio.timeout_at(self._deadline):
                return await self._sessions.call(call.server_label, call.name, call.arguments)
        except TimeoutError:
            raise RequestTimeoutError(
                f"the request took longer than {self._seconds:g} s (--request-timeout) and was aborted"
            ) from None

    async def _continued(self) -> Generation:
        output = output_items(self._builder.response["output"])
        generation, parser = await self._next_round([*self._items, *output], self._builder.output_tokens)
        self._builder.begin_round(parser)
        return generation

    def _nothing(self) -> RequestOutput:
        return RequestOutput(self.id, None, None)
