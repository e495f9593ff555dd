"""Stored responses: GET /v1/responses, GET and DELETE /v1/responses/{id}, their input items, and cancelling."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic_core import from_json
from starlette.datastructures import QueryParams

from pagoda.common.errors import RequestError
from pagoda.server.api.openai.responses.input import ITEMS, shown_item
from pagoda.server.api.openai.responses.pagination import ignored_parameters, page_of
from pagoda.server.http.body import MAX_IGNORED, Ignored, note_ignored
from pagoda.server.http.errors import response_error_event
from pagoda.server.http.response import (
    KEEP_ALIVE,
    LOST_RESPONSE,
    EventStream,
    EventStyle,
    json_response,
    named_event,
    owner_of,
    with_pauses,
)
from pagoda.server.http.state import ServerState, server_of
from pagoda.server.http.stores.responses import StoredResponse

router = APIRouter(tags=["responses"])


@router.get("/v1/responses", response_model=None)
async def list_responses(request: Request) -> Response:
    """Return a page of the stored responses, the latest first."""
    state = server_of(request)
    query = request.query_params
    _note_ignored(request, state, ignored_parameters(query))
    stored = state.responses.of(owner_of(request.scope))
    return json_response(page_of(query, stored, lambda response: response.id, lambda response: _decoded(response.body)))


@router.get("/v1/responses/{response_id}/input_items", response_model=None)
async def list_input_items(request: Request, response_id: str) -> Response:
    """Return a page of the items that a stored response was generated from, the latest first.

    They include those of the responses and the conversation that it continues.
    """
    state = server_of(request)
    query = request.query_params
    _note_ignored(request, state, ignored_parameters(query))
    stored = state.responses.get(response_id, owner_of(request.scope))
    if not stored.items:
        raise RequestError(
            "response_id", f"response {response_id[:200]!r} is {stored.status or 'not ready'}; try later"
        )
    items = ITEMS.validate_json(stored.items)[: stored.num_input_items]
    return json_response(page_of(query, items, lambda item: item.id or "", shown_item))


@router.get("/v1/responses/{response_id}", response_model=None)
async def retrieve_response(request: Request, response_id: str) -> Response:
    """Return a stored response; with `stream=true`, its events after number `starting_after`."""
    state = server_of(request)
    query = request.query_params
    _note_ignored(request, state, _ignored_parameters(query))
    after = query.get("starting_after", "-1")
    if not (after == "-1" or (after.isdecimal() and len(after) < 10)):
        raise RequestError("starting_after", "starting_after must be the number of an event")
    if query.get("stream", "false") not in ("true", "false"):
        raise RequestError("stream", "stream must be true or false")
    stored = state.responses.get(response_id, owner_of(request.scope))
    if query.get("stream") == "true":
        if stored.events is None:
            raise RequestError("stream", "only responses created with background and stream true can be streamed again")
        return event_stream(state, stored, int(after) + 1)
    if "starting_after" in query:
        raise RequestError("starting_after", "starting_after needs stream=true")
    return encoded_json(stored.body)


@router.post("/v1/responses/{response_id}/cancel", response_model=None)
async def cancel_response(request: Request, response_id: str) -> Response:
    """Cancel a background response. A response that has ended is returned unchanged."""
    stored = server_of(request).responses.get(response_id, owner_of(request.scope))
    if stored.task is None:
        raise RequestError("response_id", "only responses created with background true can be cancelled")
    stored.task.cancel()
    await asyncio.wait({stored.task})
    return encoded_json(stored.body)


@router.delete("/v1/responses/{response_id}", response_model=None)
async def delete_response(request: Request, response_id: str) -> Response:
    """Delete a stored response; a running one is cancelled."""
    server_of(request).responses.delete(response_id, owner_of(request.scope))
    return json_response({"id": response_id, "object": "response", "deleted": True})


def _note_ignored(request: Request, state: ServerState, ignored: list[Ignored]) -> None:
    """Note query parameters without effect. Raise RequestError if the server is strict."""
    if ignored and state.config.strict_requests:
        raise RequestError(ignored[0].path, ignored[0].reason)
    note_ignored(request, ignored)


def _ignored_parameters(query: QueryParams) -> list[Ignored]:
    """Return the query parameters of a retrieval that have no effect."""
    names = [name[:100] for name in query if name not in ("stream", "starting_after")]
    no_padding = query.get("include_obfuscation") == "false"
    return [
        Ignored(name, "unknown", f"{name} is not supported here; leave it out")
        for name in names[:MAX_IGNORED]
        if not (name == "include_obfuscation" and no_padding)
    ]


def _decoded(body: bytes) -> dict[str, Any]:
    response: dict[str, Any] = from_json(body)
    return response


def event_stream(state: ServerState, stored: StoredResponse, first: int) -> Response:
    """Stream the past and future events of a background response from number `first` on."""

    async def events() -> AsyncGenerator[bytes, None]:
        async with aclosing(with_pauses(stored.follow(first), state.config.sse_keep_alive_interval)) as stream:
            async for event in stream:
                yield KEEP_ALIVE if event is None else event

    def failure(error: BaseException) -> bytes:
        return named_event(response_error_event(error) | {"sequence_number": len(stored.events or ())})

    return EventStream(
        b"", events(), state.stopping, {}, EventStyle(named_event, failure, done=b"", lost=LOST_RESPONSE)
    )


def encoded_json(body: bytes) -> Response:
    """Return a response whose body is JSON already."""
    return Response(body, media_type="application/json")
