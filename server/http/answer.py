"""Answers, streamed and whole, from one source: each output becomes pieces, which are sent or joined.

Knows that an answer is made of pieces. Does not know their shape: ChatAnswer and CompletionAnswer do.
"""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncGenerator, Iterable, Mapping
from contextlib import aclosing
from typing import Any, Final, Protocol

from starlette.requests import Request
from starlette.responses import Response

from pagoda.common.engine.messages import EngineStats
from pagoda.common.errors import PagodaError
from pagoda.server.http.fields.usage import id_header
from pagoda.server.http.state import ServerState
from pagoda.server.http.stream import COMPLETION_STYLE, EventStream, EventStyle, encode_json, until_left, with_pauses
from pagoda.server.outputs import RequestOutput

# The engine's load in an answer's head, for load balancers: Open Request Cost Aggregation, ORCA.
#
# Knows the header's two forms and what vLLM says in it. Asked for by `endpoint-load-metrics-format: TEXT | JSON`.

ASKED: Final = "endpoint-load-metrics-format"
TOLD: Final = "endpoint-load-metrics"


def load_report(form: str | None, stats: EngineStats) -> dict[str, str]:
    """The header with the load, none where no known form is asked for: a balancer's wish never fails a request."""
    named = {"kv_cache_usage_perc": stats.kv_usage, "num_requests_waiting": float(stats.waiting)}
    match (form or "").upper():
        case "TEXT":
            return {TOLD: "TEXT " + ", ".join(f"named_metrics.{name}={value}" for name, value in named.items())}
        case "JSON":
            return {TOLD: "JSON " + json.dumps({"named_metrics": named})}
        case _:
            return {}


logger = logging.getLogger(__name__)


class OutputSource(Protocol):
    """What gives the outputs of one HTTP request: a Generation, or a search made of several."""

    request_id: str

    def outputs(self) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        """(index of the prompt, what is new about it)."""
        ...


class ResponseBuilder(Protocol):
    """One HTTP answer under construction."""

    def chunks(self, prompt_index: int, output: RequestOutput) -> Iterable[dict[str, Any] | bytes]:
        """What an output adds, as the chunks of a stream; bytes are a whole event."""
        ...

    def usage_chunk(self) -> dict[str, Any] | None:
        """The last chunk of a stream that reports its usage."""
        ...

    def add(self, prompt_index: int, output: RequestOutput) -> None:
        """Take an output in, for `whole`."""
        ...

    def whole(self) -> dict[str, Any]:
        """The answer in one piece."""
        ...


async def respond(
    request: Request,
    state: ServerState,
    generation: OutputSource,
    answer: ResponseBuilder,
    *,
    stream: bool,
    style: EventStyle = COMPLETION_STYLE,
    headers: Mapping[str, str] | None = None,
) -> Response:
    """Run a generation and answer with it. Raises what keeps it from giving its first output."""
    config = state.config
    headers = dict(headers or {})
    if config.enable_request_id_headers:
        headers |= id_header(generation.request_id)
    if not stream:
        whole = await until_left(request.receive, state.stopping, _whole(generation, answer))
        headers |= load_report(request.headers.get(ASKED), state.engine.stats)
        return Response(encode_json(whole), media_type="application/json", headers=headers)
    pause, log_errors = config.sse_keep_alive_interval, config.log_error_stack
    events = _events(generation, answer, style, pause=pause, log_errors=log_errors)
    first = await until_left(request.receive, state.stopping, anext(events))
    return EventStream(first, events, state.stopping, headers, style)


async def _whole(generation: OutputSource, answer: ResponseBuilder) -> dict[str, Any]:
    async with aclosing(generation.outputs()) as outputs:
        async for index, output in outputs:
            answer.add(index, output)
    return answer.whole()


async def _events(
    generation: OutputSource, answer: ResponseBuilder, style: EventStyle, *, pause: float, log_errors: bool
) -> AsyncGenerator[bytes, None]:
    """The events of a stream. An error before the first event is raised; a later one becomes an event.

    `pause`: seconds without news after which a comment is sent; 0: never.
    """
    begun = False
    try:
        news_of = generation.outputs()
        async with aclosing(with_pauses(news_of, pause) if pause else news_of) as outputs:
            async for news in outputs:
                data = style.keep_alive if news is None else b"".join(map(style.event, answer.chunks(*news)))
                if data:
                    begun = True
                    yield data
        last = answer.usage_chunk()
        yield style.done if last is None else style.event(last) + style.done
    except Exception as error:
        if not begun:
            raise
        if log_errors or not isinstance(error, PagodaError):
            logger.exception("request %s failed", generation.request_id)
        yield style.failure(error)
