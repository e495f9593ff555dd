"""POST /invocations (Amazon SageMaker): dispatches a body to an endpoint by its fields."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection

from fastapi import APIRouter, Request
from fastapi.responses import Response
from starlette.types import Message, Receive

from pagoda.common.errors import RequestError
from pagoda.server.api.admin.tokenize import fields_of
from pagoda.server.api.openai.chat import chat_completions
from pagoda.server.api.openai.completion import completions
from pagoda.server.api.pooling.routes import handle_classify, handle_embeddings, handle_pooling
from pagoda.server.api.pooling.scoring import handle_rerank, handle_score
from pagoda.server.core_client.ipc_messages import PoolingInfo
from pagoda.server.http.body import RequestBody, parse, read_json
from pagoda.server.http.state import server_of

Handler = Callable[[Request, bytes], Awaitable[Response]]


def pooling_handler(fields: Collection[str], model: PoolingInfo) -> Handler:
    """Return the pooling endpoint for a body with these fields.

    `query`: /rerank; fields of /score: /score; `task`: /pooling; else the model's default task decides.
    """
    if "query" in fields:
        return handle_rerank
    if {"text_1", "queries", "data_1"} & set(fields):
        return handle_score
    if "task" not in fields:
        match model.tasks[0]:
            case "embed":
                return handle_embeddings
            case "classify":
                return handle_classify
    return handle_pooling


router = APIRouter(tags=["invocations"])


@router.post("/invocations", response_model=None)
async def invocations(request: Request) -> Response:
    """Dispatch to the endpoint that the fields of the body belong to (SageMaker)."""
    raw = await read_json(request, server_of(request).config)
    fields = fields_of(raw)
    pooling = server_of(request).llm().info.pooling
    if pooling is not None:
        return await pooling_handler(fields, pooling)(request, raw)
    replayed = Request(request.scope, _replay(raw, request.receive))
    if "messages" in fields:
        return await chat_completions(replayed)
    if "prompt" in fields:
        return await completions(replayed)
    if not fields:
        parse(RequestBody, raw)
    raise RequestError("", "the body matches no endpoint of this server: it has neither messages nor prompt")


def _replay(raw: bytes, receive: Receive) -> Receive:
    """Return a receive function that yields the body again, then later messages."""
    pending: list[Message] = [{"type": "http.request", "body": raw, "more_body": False}]

    async def next_message() -> Message:
        return pending.pop() if pending else await receive()

    return next_message
