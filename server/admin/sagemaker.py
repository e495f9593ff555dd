"""POST /invocations, as SageMaker calls it: one path for all bodies, told apart by their fields."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection

from fastapi import APIRouter, Request
from fastapi.responses import Response
from starlette.types import Message, Receive

from pagoda.common.errors import RequestError
from pagoda.server.admin.tokenize import fields_of
from pagoda.server.http.body import RequestBody, parse, read_json
from pagoda.server.http.state import server_of
from pagoda.server.ipc_messages import PoolingInfo
from pagoda.server.openai.chat import chat_completions
from pagoda.server.openai.completion import completions
from pagoda.server.pooling.routes import answer_classify, answer_embeddings, answer_pooling
from pagoda.server.pooling.scoring import answer_rerank, answer_score

# Which endpoint of a pooling model a JSON body is meant for, where it came without a path that says so.

Handler = Callable[[Request, bytes], Awaitable[Response]]


def handler_of(fields: Collection[str], model: PoolingInfo) -> Handler:
    """What answers a body with these fields: it is called with the request and the raw body.

    A query with documents is to be ranked, two sides are to be scored, a task is for /pooling; else the model's usual
    task decides.
    """
    if "query" in fields:
        return answer_rerank
    if {"text_1", "queries", "data_1"} & set(fields):
        return answer_score
    if "task" not in fields:
        match model.tasks[0]:
            case "embed":
                return answer_embeddings
            case "classify":
                return answer_classify
    return answer_pooling


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
        parse(RequestBody, raw)
    raise RequestError("", "the body is for no endpoint of this server: it has neither messages nor prompt")


def _replayed(raw: bytes, receive: Receive) -> Receive:
    """The body once more, then what comes after it."""
    pending: list[Message] = [{"type": "http.request", "body": raw, "more_body": False}]

    async def next_message() -> Message:
        return pending.pop() if pending else await receive()

    return next_message
