"""POST /invocations, as SageMaker calls it: one path for all bodies, told apart by their fields."""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import Response
from starlette.types import Message, Receive

from pagoda.common.errors import RequestError
from pagoda.server.http.body import read_json
from pagoda.server.protocol.base import Body, parse
from pagoda.server.routes.chat import chat_completions
from pagoda.server.routes.completion import completions
from pagoda.server.routes.pooling_dispatch import handler_of
from pagoda.server.routes.shared import server_of
from pagoda.server.routes.tokenize import fields_of

router = APIRouter(tags=["invocations"])


@router.post("/invocations", response_model=None)
async def invocations(request: Request) -> Response:
    """The answer of the endpoint that the body is meant for."""
    raw = await read_json(request, server_of(request).config)
    fields = fields_of(raw)
    pooling = server_of(request).llm().info.pooling
    if pooling is not None:
        return await handler_of(fields, pooling)(request, raw)
    again = Request(request.scope, _replayed(raw, request.receive))
    if "messages" in fields:
        return await chat_completions(again)
    if "prompt" in fields:
        return await completions(again)
    if not fields:
        parse(Body, raw)
    raise RequestError("", "the body is for no endpoint of this server: it has neither messages nor prompt")


def _replayed(raw: bytes, receive: Receive) -> Receive:
    """The body once more, then what comes after it."""
    pending: list[Message] = [{"type": "http.request", "body": raw, "more_body": False}]

    async def next_message() -> Message:
        return pending.pop() if pending else await receive()

    return next_message
