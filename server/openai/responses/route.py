"""POST /v1/responses; GET and DELETE /v1/responses/{id}; POST /v1/responses/{id}/cancel."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing

from fastapi import APIRouter, Request
from fastapi.responses import Response
from starlette.datastructures import QueryParams

from pagoda.common.errors import RequestError
from pagoda.common.sampling_params import SamplingParams
from pagoda.server.chat.prompt import ChatPrompt, prepare, prepare_fitting
from pagoda.server.http.body import MAX_IGNORED, Ignored, note_ignored, read_body
from pagoda.server.http.fields.errors import HttpError, http_error
from pagoda.server.http.fields.logprobs import TokenNames
from pagoda.server.http.generation import Generation
from pagoda.server.http.middleware import owner_of
from pagoda.server.http.response import (
    KEEP_ALIVE,
    EventStream,
    EventStyle,
    encode_json,
    named_event,
    respond,
    with_pauses,
)
from pagoda.server.http.response_store import StoredResponse
from pagoda.server.http.state import ServerState, model_of, server_of
from pagoda.server.openai.responses.background import start_in_background
from pagoda.server.openai.responses.input import ITEMS, Item, items_of, output_items
from pagoda.server.openai.responses.output import ResponseAnswer, ResponseView
from pagoda.server.openai.responses.request import ResponsesRequest
from pagoda.server.parsers.reader import AnswerText

router = APIRouter(tags=["responses"])


@router.post("/v1/responses", response_model=None)
async def create_response(request: Request) -> Response:
    """Respond to an input, streamed, whole, or in the background."""
    state = server_of(request)
    body = await read_body(request, ResponsesRequest, state.config)
    model = model_of(state, body)
    stores, owner = _stores(state, body), owner_of(request.scope)
    params = body.params(state.llm().info.sampling_defaults)
    response_id = _new_id(state, body, owner)
    earlier = _earlier(state, body.previous_response_id, owner)
    items = [*earlier, *items_of(body.input)]
    try:
        conversation = body.conversation_of(items, len(earlier))
        turn = await (prepare_fitting if body.truncation == "auto" else prepare)(state, conversation, params)
        note_ignored(request, turn.ignored, body.own_name)
        user = body.safety_identifier or body.user
        generation = Generation(state, response_id, [turn], turn.params, priority=body.priority, user=user)
        answer = _answer(state, body, turn, params, id=response_id, model=model, stores=stores)
        stored = StoredResponse(
            response_id,
            lambda: encode_json(answer.response),
            owner=owner,
            keeps_events=bool(body.background and body.stream),
        )
        if stores:
            answer.on_end = lambda: _keep(state, stored, answer, items)
        if body.background:
            await start_in_background(state, generation, answer, stored)
            return _followed(state, stored, 0) if body.stream else _json(stored.body)
        style = EventStyle(named_event, lambda error: b"".join(map(named_event, answer.fail(error))), done=b"")
        return await respond(request, state, generation, answer, stream=bool(body.stream), style=style)
    except RequestError as error:
        raise body.in_own_names(error) from None


@router.get("/v1/responses/{response_id}", response_model=None)
async def retrieve_response(request: Request, response_id: str) -> Response:
    """A stored response as it stands; `stream=true`: its events after number `starting_after`."""
    state = server_of(request)
    asked = request.query_params
    ignored = _ignored_parameters(asked)
    if ignored and state.config.strict_requests:
        raise RequestError(ignored[0].path, ignored[0].reason)
    note_ignored(request, ignored)
    after = asked.get("starting_after", "-1")
    if not (after == "-1" or (after.isdecimal() and len(after) < 10)):
        raise RequestError("starting_after", "starting_after must be the number of an event")
    if asked.get("stream", "false") not in ("true", "false"):
        raise RequestError("stream", "stream must be true or false")
    stored = state.responses.get(response_id, owner_of(request.scope))
    if asked.get("stream") == "true":
        if stored.events is None:
            raise RequestError("stream", "only responses made with background and stream true can be streamed again")
        return _followed(state, stored, int(after) + 1)
    if "starting_after" in asked:
        raise RequestError("starting_after", "starting_after needs stream=true")
    return _json(stored.body)


@router.post("/v1/responses/{response_id}/cancel", response_model=None)
async def cancel_response(request: Request, response_id: str) -> Response:
    """End a response that runs in the background; one that has ended stays as it is."""
    stored = server_of(request).responses.get(response_id, owner_of(request.scope))
    if stored.task is None:
        raise RequestError("response_id", "only responses made with background true can be cancelled")
    stored.task.cancel()
    await asyncio.wait({stored.task})
    return _json(stored.body)


@router.delete("/v1/responses/{response_id}", response_model=None)
async def delete_response(request: Request, response_id: str) -> Response:
    """Forget a stored response; one that runs is ended."""
    server_of(request).responses.delete(response_id, owner_of(request.scope))
    return _json(encode_json({"id": response_id, "object": "response", "deleted": True}))


def _ignored_parameters(query: QueryParams) -> list[Ignored]:
    """Return the query parameters of a retrieval that have no effect."""
    names = [name[:100] for name in query if name not in ("stream", "starting_after")]
    no_padding = query.get("include_obfuscation") == "false"
    return [
        Ignored(name, "unknown", f"{name} is not supported here; leave it out")
        for name in names[:MAX_IGNORED]
        if not (name == "include_obfuscation" and no_padding)
    ]


def _stores(state: ServerState, body: ResponsesRequest) -> bool:
    """Whether the response is to be stored. Raises RequestError where it must be and cannot."""
    if body.store is False or state.responses.keeps:
        return body.store is not False
    named = "background" if body.background else "store" if "store" in body.model_fields_set and body.store else None
    if named is not None:
        raise RequestError(named, f"{named} needs a server that stores responses (--max-stored-responses)")
    return False


def _new_id(state: ServerState, body: ResponsesRequest, owner: bytes) -> str:
    if body.request_id is None:
        return f"resp_{uuid.uuid4().hex}"
    if state.responses.contains(body.request_id, owner):
        raise RequestError("request_id", f"there is a response {body.request_id!r} already; use another id")
    return body.request_id


def _earlier(state: ServerState, response_id: str | None, owner: bytes) -> list[Item]:
    """What was said up to the end of an earlier response of the same owner. Raises HttpError (404) or RequestError."""
    if response_id is None:
        return []
    field = "previous_response_id"
    if not state.responses.contains(response_id, owner):
        raise HttpError(404, f"previous_response_id: there is no response {response_id[:200]!r}, or no more", field)
    stored = state.responses.get(response_id, owner)
    if stored.status not in ("completed", "incomplete"):
        told = stored.status or "not ready"
        raise RequestError(field, f"previous_response_id: response {response_id[:200]!r} is {told}; go on from another")
    return ITEMS.validate_json(stored.items)


def _answer(
    state: ServerState,
    body: ResponsesRequest,
    turn: ChatPrompt,
    params: SamplingParams,
    *,
    id: str,
    model: str,
    stores: bool,
) -> ResponseAnswer:
    head = {"id": id, "object": "response", "created_at": int(time.time()), "model": model, "store": stores}
    text = AnswerText(
        turn.reader(),
        state.tokenizer() if body.shows_logprobs else None,
        skip_special_tokens=turn.params.skip_special_tokens,
    )
    view = ResponseView(
        reasoning=body.include_reasoning,
        sealed=body.seals_reasoning,
        logprobs=(body.top_logprobs or 0) if body.shows_logprobs else None,
        names=TokenNames(state.tokenizer(), as_ids=state.config.return_tokens_as_token_ids),
    )
    return ResponseAnswer(head | body.shown(params), text, view)


def _keep(state: ServerState, stored: StoredResponse, answer: ResponseAnswer, items: list[Item]) -> None:
    """Store a response that has ended, with all that was said."""
    said = [*items, *output_items(answer.response["output"])]
    stored.end(answer.status, ITEMS.dump_json(said, exclude_unset=True))
    if stored.task is None:
        state.responses.put(stored)
    else:
        state.responses.resize(stored)


def _followed(state: ServerState, stored: StoredResponse, first: int) -> Response:
    """The events of a response in the background, those to come included."""

    async def events() -> AsyncGenerator[bytes, None]:
        async with aclosing(with_pauses(stored.follow(first), state.config.sse_keep_alive_interval)) as news:
            async for event in news:
                yield KEEP_ALIVE if event is None else event

    def failure(error: BaseException) -> bytes:
        told = {"code": "server_error", "message": http_error(error).message, "param": None}
        return named_event({"type": "error", "sequence_number": len(stored.events or ())} | told)

    return EventStream(b"", events(), state.stopping, {}, EventStyle(named_event, failure, done=b""))


def _json(body: bytes) -> Response:
    return Response(body, media_type="application/json")
