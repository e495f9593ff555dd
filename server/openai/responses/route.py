"""POST /v1/responses; GET and DELETE /v1/responses/{id}; POST /v1/responses/{id}/cancel."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response
from starlette.datastructures import QueryParams
from starlette.types import Message

from pagoda.common.errors import PagodaError, RequestError
from pagoda.common.sampling_params import SamplingParams
from pagoda.server.chat_prompt import ChatPrompt, prepare, prepare_fitting
from pagoda.server.http.body import MAX_IGNORED, Ignored, note_ignored, read_body
from pagoda.server.http.errors import HttpError, http_error
from pagoda.server.http.fields import TokenNames
from pagoda.server.http.generation import Generation
from pagoda.server.http.response import (
    KEEP_ALIVE,
    EventStream,
    EventStyle,
    cancel_on_disconnect,
    encode_json,
    json_response,
    named_event,
    respond,
    with_pauses,
)
from pagoda.server.http.response_store import StoredResponse
from pagoda.server.http.server import owner_of
from pagoda.server.http.state import ServerState, model_of, server_of
from pagoda.server.openai.responses.input import ITEMS, Item, items_of, output_items
from pagoda.server.openai.responses.output import ResponsesBuilder, ResponseView
from pagoda.server.openai.responses.request import ResponsesRequest
from pagoda.server.parsers.output_parser import DeltaParser

logger = logging.getLogger(__name__)
router = APIRouter(tags=["responses"])


@router.post("/v1/responses", response_model=None)
async def create_response(request: Request) -> Response:
    """Create a response: whole, streamed, or in the background."""
    state = server_of(request)
    body = await read_body(request, ResponsesRequest, state.config)
    model = model_of(state, body)
    stores, owner = _stores(state, body), owner_of(request.scope)
    params = body.params(state.llm().info.sampling_defaults)
    response_id = _new_id(state, body, owner)
    earlier = _earlier_items(state, body.previous_response_id, owner)
    items = [*earlier, *items_of(body.input)]
    try:
        conversation = body.conversation_of(items, len(earlier))
        chat = await (prepare_fitting if body.truncation == "auto" else prepare)(state, conversation, params)
        note_ignored(request, chat.ignored, body.own_name)
        user = body.safety_identifier or body.user
        generation = Generation(state, response_id, [chat], chat.params, priority=body.priority, user=user)
        builder = _builder(state, body, chat, params, id=response_id, model=model, stores=stores)
        stored = StoredResponse(
            response_id,
            lambda: encode_json(builder.response),
            owner=owner,
            keeps_events=bool(body.background and body.stream),
        )
        if stores:
            builder.on_end = lambda: _store(state, stored, builder, items)
        if body.background:
            await _start_in_background(state, generation, builder, stored)
            return _event_stream(state, stored, 0) if body.stream else _encoded_json(stored.body)
        style = EventStyle(named_event, lambda error: b"".join(map(named_event, builder.fail(error))), done=b"")
        return await respond(request, state, generation, builder, stream=bool(body.stream), style=style)
    except RequestError as error:
        raise body.in_own_names(error) from None


@router.get("/v1/responses/{response_id}", response_model=None)
async def retrieve_response(request: Request, response_id: str) -> Response:
    """Return a stored response; with `stream=true`, its events after number `starting_after`."""
    state = server_of(request)
    query = request.query_params
    ignored = _ignored_parameters(query)
    if ignored and state.config.strict_requests:
        raise RequestError(ignored[0].path, ignored[0].reason)
    note_ignored(request, ignored)
    after = query.get("starting_after", "-1")
    if not (after == "-1" or (after.isdecimal() and len(after) < 10)):
        raise RequestError("starting_after", "starting_after must be the number of an event")
    if query.get("stream", "false") not in ("true", "false"):
        raise RequestError("stream", "stream must be true or false")
    stored = state.responses.get(response_id, owner_of(request.scope))
    if query.get("stream") == "true":
        if stored.events is None:
            raise RequestError("stream", "only responses created with background and stream true can be streamed again")
        return _event_stream(state, stored, int(after) + 1)
    if "starting_after" in query:
        raise RequestError("starting_after", "starting_after needs stream=true")
    return _encoded_json(stored.body)


@router.post("/v1/responses/{response_id}/cancel", response_model=None)
async def cancel_response(request: Request, response_id: str) -> Response:
    """Cancel a background response. A response that has ended is returned unchanged."""
    stored = server_of(request).responses.get(response_id, owner_of(request.scope))
    if stored.task is None:
        raise RequestError("response_id", "only responses created with background true can be cancelled")
    stored.task.cancel()
    await asyncio.wait({stored.task})
    return _encoded_json(stored.body)


@router.delete("/v1/responses/{response_id}", response_model=None)
async def delete_response(request: Request, response_id: str) -> Response:
    """Delete a stored response; a running one is cancelled."""
    server_of(request).responses.delete(response_id, owner_of(request.scope))
    return json_response({"id": response_id, "object": "response", "deleted": True})


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
    """Return whether to store the response. Raise RequestError if it must be stored and the server stores none."""
    if body.store is False or state.responses.keeps:
        return body.store is not False
    field = "background" if body.background else "store" if "store" in body.model_fields_set and body.store else None
    if field is not None:
        raise RequestError(field, f"{field} needs a server that stores responses (--max-stored-responses)")
    return False


def _new_id(state: ServerState, body: ResponsesRequest, owner: bytes) -> str:
    if body.request_id is None:
        return f"resp_{uuid.uuid4().hex}"
    if state.responses.contains(body.request_id, owner):
        raise RequestError("request_id", f"there is a response {body.request_id!r} already; use another id")
    return body.request_id


def _earlier_items(state: ServerState, response_id: str | None, owner: bytes) -> list[Item]:
    """Return the items up to the end of the owner's earlier response. Raise HttpError (404) or RequestError."""
    if response_id is None:
        return []
    field = "previous_response_id"
    if not state.responses.contains(response_id, owner):
        raise HttpError(404, f"{field}: response {response_id[:200]!r} does not exist or was evicted", field)
    stored = state.responses.get(response_id, owner)
    if stored.status not in ("completed", "incomplete"):
        status = stored.status or "not ready"
        raise RequestError(field, f"{field}: response {response_id[:200]!r} is {status}; continue another one")
    return ITEMS.validate_json(stored.items)


def _builder(
    state: ServerState,
    body: ResponsesRequest,
    chat: ChatPrompt,
    params: SamplingParams,
    *,
    id: str,
    model: str,
    stores: bool,
) -> ResponsesBuilder:
    fixed = {"id": id, "object": "response", "created_at": int(time.time()), "model": model, "store": stores}
    parser = DeltaParser(
        chat.reader(),
        state.tokenizer() if body.shows_logprobs else None,
        skip_special_tokens=chat.params.skip_special_tokens,
    )
    view = ResponseView(
        reasoning=body.include_reasoning,
        encrypted_content=body.includes_encrypted_reasoning,
        logprobs=(body.top_logprobs or 0) if body.shows_logprobs else None,
        names=TokenNames(state.tokenizer(), as_ids=state.config.return_tokens_as_token_ids),
    )
    return ResponsesBuilder(fixed | body.shown(params), parser, view)


def _store(state: ServerState, stored: StoredResponse, builder: ResponsesBuilder, items: list[Item]) -> None:
    """Store a response that has ended, with all items of its conversation."""
    conversation = [*items, *output_items(builder.response["output"])]
    stored.end(builder.status, ITEMS.dump_json(conversation, exclude_unset=True))
    if stored.task is None:
        state.responses.put(stored)
    else:
        state.responses.resize(stored)


async def _start_in_background(
    state: ServerState, generation: Generation, builder: ResponsesBuilder, stored: StoredResponse
) -> None:
    """Start a task that runs the generation, and store the response. Return once the engine has accepted it.

    Raise the engine's error if it rejects the request; nothing is stored then.
    """
    run = _BackgroundRun(state, builder, stored)
    run.add_events(builder.queued())
    task = stored.task = asyncio.ensure_future(run.run(generation))
    accepted = asyncio.ensure_future(generation.accepted.wait())
    await asyncio.wait({task, accepted}, return_when=asyncio.FIRST_COMPLETED)
    accepted.cancel()
    if not generation.accepted.is_set():
        task.result()
    state.responses.put(stored)


class _BackgroundRun:
    """Runs a generation without a client connection and adds its events to a stored response."""

    def __init__(self, state: ServerState, builder: ResponsesBuilder, stored: StoredResponse) -> None:
        self._state = state
        self._builder = builder
        self._stored = stored

    async def run(self, generation: Generation) -> None:
        """Run until the response ends or the server stops. Raise only errors from before the engine accepted it."""
        try:
            await cancel_on_disconnect(_never_disconnects, self._state.stopping, self._read(generation))
        except asyncio.CancelledError:
            self._builder.cancel()  # by the client, or evicted from the store
        except Exception as error:
            if not generation.accepted.is_set():
                raise
            if not isinstance(error, PagodaError):
                logger.exception("request %s failed", generation.request_id)
            self.add_events(self._builder.fail(error))

    def add_events(self, events: Iterable[dict[str, Any]]) -> None:
        for event in events:
            self._stored.add_event(named_event(event))
        self._state.responses.resize(self._stored)

    async def _read(self, generation: Generation) -> None:
        async with aclosing(generation.outputs()) as outputs:
            async for index, output in outputs:
                self.add_events(self._builder.chunks(index, output))


async def _never_disconnects() -> Message:
    """ASGI receive function of a connection that stays open."""
    return await asyncio.get_running_loop().create_future()


def _event_stream(state: ServerState, stored: StoredResponse, first: int) -> Response:
    """Stream the past and future events of a background response from number `first` on."""

    async def events() -> AsyncGenerator[bytes, None]:
        async with aclosing(with_pauses(stored.follow(first), state.config.sse_keep_alive_interval)) as stream:
            async for event in stream:
                yield KEEP_ALIVE if event is None else event

    def failure(error: BaseException) -> bytes:
        payload = {"code": "server_error", "message": http_error(error).message, "param": None}
        return named_event({"type": "error", "sequence_number": len(stored.events or ())} | payload)

    return EventStream(b"", events(), state.stopping, {}, EventStyle(named_event, failure, done=b""))


def _encoded_json(body: bytes) -> Response:
    return Response(body, media_type="application/json")
