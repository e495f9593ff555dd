"""/v1/conversations: conversations that responses continue with the field `conversation`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final

from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import Field

from pagoda.common.errors import RequestError
from pagoda.server.api.openai.responses.input import (
    ITEMS,
    Item,
    ItemReference,
    dumped_item,
    items_of,
    shown_item,
    with_ids,
)
from pagoda.server.api.openai.responses.pagination import ignored_parameters, page_of
from pagoda.server.api.openai.responses.request import Metadata
from pagoda.server.http.body import RequestBody, note_ignored, read_body
from pagoda.server.http.errors import HttpError
from pagoda.server.http.response import json_response, owner_of
from pagoda.server.http.state import server_of
from pagoda.server.http.stores.conversations import StoredConversation

MAX_NEW_ITEMS: Final = 20
"""Maximum number of items of a request, as OpenAI's."""

NewItems = Annotated[list[Item], Field(max_length=MAX_NEW_ITEMS)]

router = APIRouter(tags=["conversations"])


class CreateConversationRequest(RequestBody):
    """A new conversation."""

    items: NewItems | None = None
    metadata: Metadata | None = None


class UpdateConversationRequest(RequestBody):
    """The metadata that replaces a conversation's."""

    metadata: Metadata | None


class CreateItemsRequest(RequestBody):
    """Items to add to the end of a conversation."""

    items: NewItems


@router.post("/v1/conversations", response_model=None)
async def create_conversation(request: Request) -> Response:
    """Create a conversation."""
    state = server_of(request)
    body = await read_body(request, CreateConversationRequest, state.config)
    items = _dumped(_new_items(body.items or ()))
    return _as_response(state.conversations.create(owner_of(request.scope), body.metadata or {}, items))


@router.get("/v1/conversations/{conversation_id}", response_model=None)
async def retrieve_conversation(request: Request, conversation_id: str) -> Response:
    """Return a conversation without its items."""
    return _as_response(_conversation(request, conversation_id))


@router.post("/v1/conversations/{conversation_id}", response_model=None)
async def update_conversation(request: Request, conversation_id: str) -> Response:
    """Replace a conversation's metadata."""
    state = server_of(request)
    conversation = _conversation(request, conversation_id)
    body = await read_body(request, UpdateConversationRequest, state.config)
    state.conversations.set_metadata(conversation, body.metadata or {})
    return _as_response(conversation)


@router.delete("/v1/conversations/{conversation_id}", response_model=None)
async def delete_conversation(request: Request, conversation_id: str) -> Response:
    """Delete a conversation with its items."""
    server_of(request).conversations.delete(conversation_id, owner_of(request.scope))
    return json_response({"id": conversation_id, "object": "conversation.deleted", "deleted": True})


@router.get("/v1/conversations/{conversation_id}/items", response_model=None)
async def list_items(request: Request, conversation_id: str) -> Response:
    """Return a page of a conversation's items, the latest first."""
    state = server_of(request)
    query = request.query_params
    ignored = ignored_parameters(query)
    if ignored and state.config.strict_requests:
        raise RequestError(ignored[0].path, ignored[0].reason)
    note_ignored(request, ignored)
    items = _items_of(_conversation(request, conversation_id).items.values())
    return json_response(page_of(query, items, lambda item: item.id or "", shown_item))


@router.post("/v1/conversations/{conversation_id}/items", response_model=None)
async def create_items(request: Request, conversation_id: str) -> Response:
    """Add items to the end of a conversation."""
    state = server_of(request)
    conversation = _conversation(request, conversation_id)
    body = await read_body(request, CreateItemsRequest, state.config)
    items = _new_items(body.items)
    taken = next((item.id for item in items if item.id in conversation.items), None)
    if taken is not None:
        raise RequestError("items", f"items: the conversation has an item {taken[:200]!r} already; leave out the id")
    state.conversations.add(conversation, _dumped(items))
    ids = [item.id for item in items]
    return json_response(
        {
            "object": "list",
            "data": [shown_item(item) for item in items],
            "first_id": ids[0] if ids else None,
            "last_id": ids[-1] if ids else None,
            "has_more": False,
        }
    )


@router.get("/v1/conversations/{conversation_id}/items/{item_id}", response_model=None)
async def retrieve_item(request: Request, conversation_id: str, item_id: str) -> Response:
    """Return an item of a conversation."""
    item = _item(_conversation(request, conversation_id), item_id)
    return json_response(shown_item(_items_of([item])[0]))


@router.delete("/v1/conversations/{conversation_id}/items/{item_id}", response_model=None)
async def delete_item(request: Request, conversation_id: str, item_id: str) -> Response:
    """Delete an item and return the conversation."""
    conversation = _conversation(request, conversation_id)
    _item(conversation, item_id)
    server_of(request).conversations.remove(conversation, [item_id])
    return _as_response(conversation)


def _conversation(request: Request, conversation_id: str) -> StoredConversation:
    """Return the conversation. Raise HttpError (404)."""
    return server_of(request).conversations.get(conversation_id, owner_of(request.scope))


def _item(conversation: StoredConversation, item_id: str) -> bytes:
    """Return an item as JSON. Raise HttpError (404)."""
    item = conversation.items.get(item_id)
    if item is None:
        raise HttpError(404, f"the conversation has no item {item_id[:200]!r}", "item_id")
    return item


def _new_items(new_items: Sequence[Item]) -> list[Item]:
    """Return the items to store, each with an id. Raise RequestError for references."""
    items = items_of(new_items)
    for number, item in enumerate(items):
        if isinstance(item, ItemReference):
            raise RequestError(f"items[{number}]", f"items[{number}]: send the item itself, not a reference")
    return with_ids(items)


def _dumped(items: Sequence[Item]) -> dict[str, bytes]:
    return {item.id or "": dumped_item(item) for item in items}


def _items_of(items: Any) -> list[Item]:
    return ITEMS.validate_json(b"[%b]" % b",".join(items))


def _as_response(conversation: StoredConversation) -> Response:
    metadata: Mapping[str, str] = conversation.metadata
    return json_response(
        {
            "id": conversation.id,
            "object": "conversation",
            "created_at": conversation.created_at,
            "metadata": dict(metadata),
        }
    )
