"""POST /v1/responses, /v1/responses/input_tokens and /v1/responses/render."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response
from starlette.types import Message

from pagoda.common.errors import PagodaError, PromptTooLongError, RequestError
from pagoda.server.api.chat_prompt import ChatPrompt, PlainReader, prepare, prepare_fitting
from pagoda.server.api.openai.responses.input import (
    ITEMS,
    Item,
    ItemReference,
    McpApprovalRequestItem,
    approved_calls,
    dumped_item,
    items_of,
    output_items,
    with_ids,
)
from pagoda.server.api.openai.responses.output import ResponsesBuilder, ResponseView
from pagoda.server.api.openai.responses.request import ResponsesRequest
from pagoda.server.api.openai.responses.retrieval import encoded_json, event_stream
from pagoda.server.api.openai.responses.tool_loop import ToolLoop
from pagoda.server.api.openai.responses.tool_servers import ToolServerError, ToolSessions
from pagoda.server.api.openai.responses.tools import McpTool
from pagoda.server.http.body import Ignored, note_ignored
from pagoda.server.http.errors import HttpError
from pagoda.server.http.fields import TokenNames
from pagoda.server.http.generation import Generation
from pagoda.server.http.preview import PreviewOptions, preview
from pagoda.server.http.response import (
    LOST_RESPONSE,
    EventStream,
    EventStyle,
    cancel_on_disconnect,
    encode_json,
    id_header,
    json_response,
    named_event,
    owner_of,
    respond,
)
from pagoda.server.http.state import ServerState, read_for_model
from pagoda.server.http.stores.conversations import StoredConversation
from pagoda.server.http.stores.responses import StoredResponse
from pagoda.server.parsers.output_parser import DeltaParser

logger = logging.getLogger(__name__)
router = APIRouter(tags=["responses"])


@router.post("/v1/responses", response_model=None)
async def create_response(request: Request) -> Response:
    """Create a response: whole, streamed, or in the background."""
    state, body, model = await read_for_model(request, ResponsesRequest)
    stores = _stores(state, body)
    owner = owner_of(request.scope)
    response_id = _new_id(state, body, owner)
    context = _context_of(state, body, owner)
    turn = _Turn(
        request=request,
        state=state,
        body=body,
        context=context,
        id=response_id,
        model=model,
        began=asyncio.get_running_loop().time(),
    )
    sessions = await _opened_sessions(request, state, body)
    try:
        approved = approved_calls(context.items, context.num_earlier)
        first: Generation | None = None
        parser: DeltaParser | None = None
        if not approved:
            first, parser = await turn.generation(context.items)
        builder = turn.builder(parser, stores=stores)
        source = first if not sessions.listings else turn.tool_loop(builder, sessions, first, approved)
        if source is None:
            raise _unknown_servers(approved)
        stored = StoredResponse(
            response_id,
            lambda: encode_json(builder.response),
            owner=owner,
            keeps_events=bool(body.background and body.stream),
        )
        builder.on_end = lambda: _end(state, stored if stores else None, builder, context)
        if body.background:
            await _start_in_background(state, source, builder, stored)
            return event_stream(state, stored, 0) if body.stream else encoded_json(stored.body)
        style = EventStyle(named_event, partial(_failure, builder), done=b"", lost=LOST_RESPONSE)
        return await respond(request, state, source, builder, stream=bool(body.stream), style=style)
    except RequestError as error:
        await sessions.close()
        own_error = body.in_own_names(error)
        if body.stream and isinstance(own_error, PromptTooLongError):
            return _failed_stream(turn, own_error)
        raise own_error from None
    except BaseException:
        await sessions.close()
        raise


@router.post("/v1/responses/input_tokens", response_model=None)
async def count_input_tokens(request: Request) -> Response:
    """Count the prompt tokens of a response without generating it."""
    state, body, _ = await read_for_model(request, ResponsesRequest)
    context = _context_of(state, body, owner_of(request.scope))
    await (await _opened_sessions(request, state, body)).close()
    try:
        chat = await _prepared(request, state, body, context)
    except RequestError as error:
        raise body.in_own_names(error) from None
    return json_response({"object": "response.input_tokens", "input_tokens": len(chat.token_ids)})


@router.post("/v1/responses/render", response_model=None)
async def render_response(request: Request) -> Response:
    """Return the token ids and sampling parameters of a response without generating it."""
    state, body, model = await read_for_model(request, ResponsesRequest)
    owner = owner_of(request.scope)
    context = _context_of(state, body, owner)
    await (await _opened_sessions(request, state, body)).close()
    try:
        chat = await _prepared(request, state, body, context)
        options = PreviewOptions(
            stream=bool(body.stream), cache_salt=body.cache_salt, priority=body.priority, special_tokens=False
        )
        return json_response(await preview(state, _new_id(state, body, owner), model, chat, chat.params, options))
    except RequestError as error:
        raise body.in_own_names(error) from None


# The items that a response continues.


@dataclass(frozen=True, slots=True)
class _Context:
    """The items that a response is generated from. The first `num_earlier` are of earlier requests."""

    items: list[Item]
    num_earlier: int
    conversation: StoredConversation | None = None


def _context_of(state: ServerState, body: ResponsesRequest, owner: bytes) -> _Context:
    """Return the request's items after those that it continues. Raise HttpError (404) or RequestError."""
    conversation = None
    if body.conversation_id is not None:
        conversation = state.conversations.get(body.conversation_id, owner)
        earlier = ITEMS.validate_json(b"[%b]" % b",".join(conversation.items.values()))
    else:
        earlier = _earlier_items(state, body.previous_response_id, owner)
    items = _without_references(state, items_of(body.input), owner)
    return _Context([*earlier, *with_ids(items)], len(earlier), conversation)


def _without_references(state: ServerState, items: list[Item], owner: bytes) -> list[Item]:
    """Replace references by the items of stored responses. Raise RequestError for an unknown one."""
    resolved: dict[str, Item] = {}
    for number, item in enumerate(items):
        if not isinstance(item, ItemReference) or item.id in resolved:
            continue
        stored = state.responses.with_item(item.id, owner)
        if stored is None:
            raise RequestError(
                f"input[{number}]",
                f"input[{number}]: there is no stored item {item.id[:200]!r}; send the item itself, for example with "
                "store false",
            )
        resolved |= {item.id: item for item in ITEMS.validate_json(stored.items) if item.id}
    return [resolved[item.id] if isinstance(item, ItemReference) else item for item in items]


async def _prepared(request: Request, state: ServerState, body: ResponsesRequest, context: _Context) -> ChatPrompt:
    """Render the conversation and note its ignored parts. Raise RequestError."""
    params = body.params(state.llm().info.sampling_defaults)
    conversation = body.conversation_of(context.items, context.num_earlier)
    chat = await (prepare_fitting if body.truncation == "auto" else prepare)(state, conversation, params)
    note_ignored(request, chat.ignored, body.own_name)
    return chat


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


def _failure(builder: ResponsesBuilder, error: BaseException) -> bytes:
    """Return the events that end the stream of a response which failed."""
    return b"".join(map(named_event, builder.fail(error)))


def _failed_stream(turn: _Turn, error: PromptTooLongError) -> Response:
    """Return the stream of a response whose prompt is too long. It is not stored.

    Clients shorten the conversation when the response of a stream fails with this code, not when its status is 400.
    """
    state = turn.state
    builder = turn.builder(None, stores=False)
    style = EventStyle(named_event, partial(_failure, builder), done=b"", lost=LOST_RESPONSE)
    events = [*(builder.queued() if turn.body.background else ()), *builder.fail(error)]
    headers = id_header(turn.id) if state.config.enable_request_id_headers else {}
    return EventStream(b"".join(map(named_event, events)), _no_events(), state.stopping, headers, style)


async def _no_events() -> AsyncGenerator[bytes, None]:
    nothing: tuple[bytes, ...] = ()
    for event in nothing:
        yield event


@dataclass(frozen=True, slots=True, kw_only=True)
class _Turn:
    """One response: what its generations and its builder are made of."""

    request: Request
    state: ServerState
    body: ResponsesRequest
    context: _Context
    id: str
    model: str
    began: float  # Time of the event loop, from which --request-timeout counts.

    async def generation(self, items: Sequence[Item], used: int = 0) -> tuple[Generation, DeltaParser]:
        """Return the generation of a conversation, and what reads its outputs. Raise RequestError.

        `used`: tokens that the model generated for this response before, which its limit counts, too.
        """
        state = self.state
        body = self.body
        if used and body.max_output_tokens is not None:
            body = body.model_copy(update={"max_output_tokens": max(body.max_output_tokens - used, 1)})
        chat = await _prepared(self.request, state, body, replace(self.context, items=list(items)))
        generation = Generation(
            state,
            self.id,
            [chat],
            chat.params,
            model=self.model,
            priority=body.priority,
            user=body.safety_identifier or body.user,
            cache_hint=body.cache_hint,
            began=self.began,
        )
        parser = DeltaParser(
            chat.reader(),
            state.tokenizer() if body.shows_logprobs else None,
            skip_special_tokens=chat.params.skip_special_tokens,
        )
        return generation, parser

    def builder(self, parser: DeltaParser | None, *, stores: bool) -> ResponsesBuilder:
        """Return the builder. `parser`: of the first generation; None: the tool loop sets one."""
        state = self.state
        body = self.body
        fixed = {
            "id": self.id,
            "object": "response",
            "created_at": int(time.time()),
            "model": self.model,
            "store": stores,
        }
        tools, _ = body.offered(self.context.items, self.context.num_earlier)
        view = ResponseView(
            reasoning=body.include_reasoning,
            encrypted_content=body.includes_encrypted_reasoning,
            logprobs=(body.top_logprobs or 0) if body.shows_logprobs else None,
            names=TokenNames(state.tokenizer(), as_ids=state.config.return_tokens_as_token_ids),
            tools={tool.function_name: tool for tool in tools},
        )
        params = body.params(state.llm().info.sampling_defaults)
        return ResponsesBuilder(
            fixed | body.shown(params), parser or DeltaParser(PlainReader(), None, skip_special_tokens=True), view
        )

    def tool_loop(
        self,
        builder: ResponsesBuilder,
        sessions: ToolSessions,
        first: Generation | None,
        approved: Sequence[McpApprovalRequestItem],
    ) -> ToolLoop:
        """Return the source of a response that may call tools of servers."""
        return ToolLoop(
            self.id,
            builder,
            sessions,
            replace(self, body=self.body.after_calls()).generation,
            first=first,
            items=self.context.items,
            approved=approved,
            max_rounds=self.state.config.max_tool_rounds,
            max_calls=self.body.max_tool_calls,
            seconds=self.state.config.request_timeout,
        )


async def _opened_sessions(request: Request, state: ServerState, body: ResponsesRequest) -> ToolSessions:
    """Return sessions with the servers of the request's tools, which are asked for their tools.

    Without --tool-server the tools are ignored, and noted. Raise RequestError, or HttpError (424) for a server that
    fails.
    """
    sessions = ToolSessions()
    tools = [(index, tool) for index, tool in enumerate(body.tools or ()) if isinstance(tool, McpTool)]
    if tools and not state.config.tool_server:
        reason = "type 'mcp' needs a server that calls tools (--tool-server)"
        ignored = [Ignored(f"tools[{index}]", "tool", f"tools[{index}]: {reason}", "mcp") for index, _ in tools]
        if state.config.strict_requests:
            raise RequestError(ignored[0].path, ignored[0].reason)
        note_ignored(request, ignored)
        return sessions
    try:
        await sessions.open(state.config, body.tools or ())
    except ToolServerError as error:
        await sessions.close()
        raise HttpError(424, str(error), "tools") from None
    except BaseException:
        await sessions.close()
        raise
    return sessions


def _unknown_servers(approved: Sequence[McpApprovalRequestItem]) -> RequestError:
    label = approved[0].server_label[:64]
    return RequestError("tools", f"tools has no server {label!r}, whose call the input approves; send it again")


def _end(state: ServerState, stored: StoredResponse | None, builder: ResponsesBuilder, context: _Context) -> None:
    """Store a response that has ended, with all its items, and add the new ones to its conversation."""
    output = output_items(builder.response["output"])
    conversation = context.conversation
    if conversation is not None and builder.status in ("completed", "incomplete"):
        added = {item.id or "": dumped_item(item) for item in (*context.items[context.num_earlier :], *output)}
        state.conversations.add(conversation, added)
    if stored is None:
        return
    items = [*context.items, *output]
    stored.end(
        builder.status,
        ITEMS.dump_json(items, exclude_unset=True),
        item_ids=[item.id for item in items if item.id],
        num_input_items=len(context.items),
    )
    if stored.task is None:
        state.responses.put(stored)
    else:
        state.responses.resize(stored)


async def _start_in_background(
    state: ServerState, generation: Generation | ToolLoop, builder: ResponsesBuilder, stored: StoredResponse
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

    async def run(self, generation: Generation | ToolLoop) -> None:
        """Run until the response ends or the server stops. Raise only errors from before the engine accepted it."""
        try:
            await cancel_on_disconnect(_never_disconnects, self._state.stopping, self._read(generation))
        except asyncio.CancelledError:
            self._builder.cancel()  # The client cancelled the response, or the store evicted it.
        except Exception as error:
            if not generation.accepted.is_set():
                raise
            if not isinstance(error, PagodaError):
                logger.exception("request %s failed", generation.id)
            self.add_events(self._builder.fail(error))

    def add_events(self, events: Iterable[dict[str, Any]]) -> None:
        for event in events:
            self._stored.add_event(named_event(event))
        self._state.responses.resize(self._stored)

    async def _read(self, generation: Generation | ToolLoop) -> None:
        async with aclosing(generation.outputs()) as outputs:
            async for index, output in outputs:
                self.add_events(self._builder.chunks(index, output))


async def _never_disconnects() -> Message:
    """ASGI receive function of a connection that stays open."""
    return await asyncio.get_running_loop().create_future()
