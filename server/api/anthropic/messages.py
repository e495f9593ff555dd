"""POST /v1/messages and /v1/messages/count_tokens (Anthropic Messages API)."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic_core import from_json

from pagoda.common.errors import RequestError
from pagoda.common.sampling_params import SamplingParams
from pagoda.server.api.anthropic.request import AnthropicCountTokensRequest, AnthropicMessagesRequest
from pagoda.server.api.chat_prompt import prepare
from pagoda.server.http.body import note_ignored
from pagoda.server.http.errors import (
    LOST,
    REQUEST_ID_HEADER,
    UnavailableError,
    http_error,
    messages_error,
    new_request_id,
)
from pagoda.server.http.generation import Generation, num_prompt_tokens
from pagoda.server.http.preview import PreviewOptions, preview
from pagoda.server.http.response import EventStyle, json_response, named_event, respond
from pagoda.server.http.state import read_for_model
from pagoda.server.outputs import CompletionOutput, RequestOutput
from pagoda.server.parsers.output_parser import DeltaParser
from pagoda.server.parsers.parser import BlockBuilder, BlockDelta, BlockEvent, BlockStart, BlockStop, OutputBlock

UNSIGNED: Final = "unsigned"
"""Signature of thinking blocks. Clients expect one to send back; it is not verified."""

Event = dict[str, Any]


@dataclass(slots=True)
class _ContentBlock:
    block: OutputBlock
    id: str  # Id of a tool_use block.
    signature: str = ""  # Signature of a thinking block, once it is complete.


class MessagesBuilder:
    """Builds one message and its stream events. Implements ResponseBuilder."""

    def __init__(
        self,
        message_id: str,
        model: str,
        parser: DeltaParser,
        thinking: Literal["full", "omitted", "none"] = "full",  # "omitted": thinking blocks have no text.
    ) -> None:
        self._id = message_id
        self._model = model
        self._parser = parser
        self._thinking = thinking
        self._blocks = BlockBuilder()
        self._content: list[_ContentBlock] = []
        self._usage: dict[str, Any] | None = None
        self._stop: dict[str, Any] = {"stop_reason": None, "stop_sequence": None}

    def chunks(self, prompt_index: int, output: RequestOutput) -> Iterator[Event]:
        """Yield the events for an output. Raise UnavailableError if the server aborted the generation."""
        if self._usage is None:
            cached = output.num_cached_tokens or 0
            self._usage = {
                "input_tokens": num_prompt_tokens(output) - cached,
                "cache_creation_input_tokens": 0,
                "cache_read_input_tokens": cached,
                "output_tokens": 0,
                "service_tier": "standard",
            }
            yield {"type": "message_start", "message": self.whole()}
        for completion in output.outputs:
            self._usage["output_tokens"] += len(completion.token_ids)
            for delta in self._parser.feed(completion):
                yield from self._block_events(self._blocks.feed(delta.events))
            if completion.finish_reason is not None:
                yield from self._end(completion)

    def usage_chunk(self) -> Event | None:
        return {"type": "message_stop"}

    def add(self, prompt_index: int, output: RequestOutput) -> None:
        for _ in self.chunks(prompt_index, output):
            pass

    def whole(self) -> dict[str, Any]:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": [self._as_dict(item) for item in self._content],
            **self._stop,
            "usage": dict(self._usage or {}),
        }

    def _end(self, completion: CompletionOutput) -> Iterator[Event]:
        yield from self._block_events(self._blocks.finish())
        if completion.finish_reason not in ("stop", "length"):
            raise UnavailableError("the server ended the response before it was complete")
        stop = completion.stop_reason
        if completion.finish_reason == "length":
            self._stop["stop_reason"] = "max_tokens"
        elif isinstance(stop, str):
            self._stop = {"stop_reason": "stop_sequence", "stop_sequence": stop}
        elif any(item.block.kind == "call" for item in self._content):
            self._stop["stop_reason"] = "tool_use"
        else:
            self._stop["stop_reason"] = "end_turn"
        yield {"type": "message_delta", "delta": dict(self._stop), "usage": dict(self._usage or {})}

    def _block_events(self, events: Iterable[BlockEvent]) -> Iterator[Event]:
        for event in events:
            kind = event.block.kind
            if kind == "reasoning" and self._thinking == "none":
                continue
            match event:
                case BlockStart(block):
                    call_id = block.call_id or f"toolu_{uuid.uuid4().hex}"
                    self._content.append(_ContentBlock(block, call_id))
                    yield self._event("content_block_start", {"content_block": self._as_dict(self._content[-1])})
                case BlockDelta(_, text) if kind != "reasoning" or self._thinking == "full":
                    yield self._event("content_block_delta", {"delta": _delta(kind, text)})
                case BlockStop():
                    if kind == "reasoning":
                        self._content[-1].signature = UNSIGNED
                        delta = {"type": "signature_delta", "signature": UNSIGNED}
                        yield self._event("content_block_delta", {"delta": delta})
                    yield self._event("content_block_stop", {})

    def _event(self, kind: str, payload: dict[str, Any]) -> Event:
        return {"type": kind, "index": len(self._content) - 1} | payload

    def _as_dict(self, content: _ContentBlock) -> dict[str, Any]:
        block = content.block
        match block.kind:
            case "text":
                return {"type": "text", "text": block.text}
            case "reasoning":
                text = block.text if self._thinking == "full" else ""
                return {"type": "thinking", "thinking": text, "signature": content.signature}
            case "call":
                return {"type": "tool_use", "id": content.id, "name": block.name, "input": _arguments(block.text)}


def _delta(kind: str, text: str) -> dict[str, Any]:
    match kind:
        case "call":
            return {"type": "input_json_delta", "partial_json": text}
        case "reasoning":
            return {"type": "thinking_delta", "thinking": text}
        case _:
            return {"type": "text_delta", "text": text}


def _arguments(text: str) -> dict[str, Any]:
    """Parse the arguments of a call; of a truncated call, as much as is valid."""
    try:
        arguments = from_json(text, allow_partial="trailing-strings") if text else {}
    except ValueError:
        return {}
    return arguments if isinstance(arguments, dict) else {}


PING = named_event({"type": "ping"})

router = APIRouter(tags=["messages"])


@router.post("/v1/messages", response_model=None)
async def create_message(request: Request) -> Response:
    """Generate the next message of a conversation, whole or streamed."""
    state, body, model = await read_for_model(request, AnthropicMessagesRequest)
    thinks = state.formats.reasoning is not None
    params = body.params(state.llm().info.sampling_defaults, thinks=thinks)
    budget = body.budget_without_effect(thinks=thinks)
    if budget and state.config.strict_requests:
        raise RequestError(budget[0].path, budget[0].reason)
    request_id = new_request_id()
    try:
        conversation = replace(body.conversation(), cache_salt=body.cache_salt)
        chat = await prepare(state, conversation, params)
        note_ignored(request, (*budget, *chat.ignored), body.own_name)
        user = body.metadata.user_id if body.metadata is not None else None
        message_id = f"msg_{uuid.uuid4().hex}"
        generation = Generation(
            state, message_id, [chat], chat.params, model=model, user=user, cache_hint=body.cache_hint
        )
        parser = DeltaParser(chat.reader(), None, skip_special_tokens=chat.params.skip_special_tokens)
        builder = MessagesBuilder(message_id, model, parser, body.shows_thinking)

        def failure(error: BaseException) -> bytes:
            return named_event(messages_error(http_error(error), request_id))

        style = EventStyle(named_event, failure, done=b"", lost=failure(LOST), keep_alive=PING)
        headers = {REQUEST_ID_HEADER: request_id}
        return await respond(
            request, state, generation, builder, stream=bool(body.stream), style=style, headers=headers
        )
    except RequestError as error:
        raise body.in_own_names(error) from None


@router.post("/v1/messages/render", response_model=None)
async def render_message(request: Request) -> Response:
    """Return the token ids and sampling parameters of a conversation without running it."""
    state, body, model = await read_for_model(request, AnthropicMessagesRequest)
    params = body.params(state.llm().info.sampling_defaults, thinks=state.formats.reasoning is not None)
    try:
        chat = await prepare(state, replace(body.conversation(), cache_salt=body.cache_salt), params)
        note_ignored(request, chat.ignored, body.own_name)
        options = PreviewOptions(stream=bool(body.stream), cache_salt=body.cache_salt, special_tokens=False)
        shown = await preview(state, f"msg_{uuid.uuid4().hex}", model, chat, chat.params, options)
    except RequestError as error:
        raise body.in_own_names(error) from None
    return json_response(shown, headers={REQUEST_ID_HEADER: new_request_id()})


@router.post("/v1/messages/count_tokens", response_model=None)
async def count_tokens(request: Request) -> Response:
    """Count the prompt tokens of a conversation without running it."""
    state, body, _ = await read_for_model(request, AnthropicCountTokensRequest)
    try:
        chat = await prepare(state, body.conversation(), SamplingParams())
        note_ignored(request, chat.ignored, body.own_name)
    except RequestError as error:
        raise body.in_own_names(error) from None
    return json_response({"input_tokens": len(chat.token_ids)}, headers={REQUEST_ID_HEADER: new_request_id()})
