"""POST /v1/messages and /v1/messages/count_tokens, of the Messages API."""

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
from pagoda.server.anthropic.request import AnthropicCountTokensRequest, AnthropicMessagesRequest
from pagoda.server.chat.prompt import prepare
from pagoda.server.http.body import note_ignored, read_body
from pagoda.server.http.fields.errors import (
    REQUEST_ID_HEADER,
    UnavailableError,
    http_error,
    messages_error,
    new_request_id,
)
from pagoda.server.http.generation import Generation
from pagoda.server.http.response import EventStyle, encode_json, named_event, respond
from pagoda.server.http.state import model_of, server_of
from pagoda.server.outputs import CompletionOutput, RequestOutput
from pagoda.server.parsers.blocks import BlockDelta, BlockStart, BlockStop, Change, Section, Sections
from pagoda.server.parsers.reader import AnswerText

# Answers of POST /v1/messages: a message that grows, and the events that tell of it.

UNSIGNED: Final = "unsigned"
"""Signature of thinking blocks. Clients want one to send back; nothing is proved by it."""

Event = dict[str, Any]


@dataclass(slots=True)
class _Block:
    """A content block that grows. `id`: of a call; `signature`: of thinking, once that is whole."""

    section: Section
    id: str
    signature: str = ""


class MessagesAnswer:
    """One message. Implements ResponseBuilder.

    `thinking`: whether blocks of thinking are shown, without their text, or not at all.
    """

    def __init__(
        self, answer_id: str, model: str, text: AnswerText, thinking: Literal["full", "omitted", "none"] = "full"
    ) -> None:
        self._id = answer_id
        self._model = model
        self._text = text
        self._thinking = thinking
        self._sections = Sections()
        self._blocks: list[_Block] = []
        self._usage: dict[str, Any] | None = None
        self._stop: dict[str, Any] = {"stop_reason": None, "stop_sequence": None}

    def chunks(self, prompt_index: int, output: RequestOutput) -> Iterator[Event]:
        """What an output adds, as events. Raises UnavailableError where the server ended the answer."""
        if self._usage is None:
            cached = output.num_cached_tokens or 0
            self._usage = {
                "input_tokens": len(output.prompt_token_ids or ()) - cached,
                "cache_creation_input_tokens": 0,
                "cache_read_input_tokens": cached,
                "output_tokens": 0,
                "service_tier": "standard",
            }
            yield {"type": "message_start", "message": self.whole()}
        for completion in output.outputs:
            self._usage["output_tokens"] += len(completion.token_ids)
            for said in self._text.take(completion):
                yield from self._change(self._sections.take(said.events))
            if completion.finish_reason is not None:
                yield from self._end(completion)

    def usage_chunk(self) -> Event | None:
        """The last event of all."""
        return {"type": "message_stop"}

    def add(self, prompt_index: int, output: RequestOutput) -> None:
        """Take an output in, for `whole`."""
        for _ in self.chunks(prompt_index, output):
            pass

    def whole(self) -> dict[str, Any]:
        """The answer as it stands."""
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": [self._shown(block) for block in self._blocks],
            **self._stop,
            "usage": dict(self._usage or {}),
        }

    def _end(self, completion: CompletionOutput) -> Iterator[Event]:
        yield from self._change(self._sections.finish())
        if completion.finish_reason not in ("stop", "length"):
            raise UnavailableError("the server ended the answer before it was complete")
        stopped_by = completion.stop_reason
        if completion.finish_reason == "length":
            self._stop["stop_reason"] = "max_tokens"
        elif isinstance(stopped_by, str):
            self._stop = {"stop_reason": "stop_sequence", "stop_sequence": stopped_by}
        elif any(block.section.kind == "call" for block in self._blocks):
            self._stop["stop_reason"] = "tool_use"
        else:
            self._stop["stop_reason"] = "end_turn"
        yield {"type": "message_delta", "delta": dict(self._stop), "usage": dict(self._usage or {})}

    def _change(self, changes: Iterable[Change]) -> Iterator[Event]:
        for change in changes:
            kind = change.section.kind
            if kind == "reasoning" and self._thinking == "none":
                continue
            match change:
                case BlockStart(section):
                    call_id = section.call_id or f"toolu_{uuid.uuid4().hex}"
                    self._blocks.append(_Block(section, call_id))
                    yield self._event("content_block_start", {"content_block": self._shown(self._blocks[-1])})
                case BlockDelta(_, text) if kind != "reasoning" or self._thinking == "full":
                    yield self._event("content_block_delta", {"delta": _delta(kind, text)})
                case BlockStop():
                    if kind == "reasoning":
                        self._blocks[-1].signature = UNSIGNED
                        signed = {"type": "signature_delta", "signature": UNSIGNED}
                        yield self._event("content_block_delta", {"delta": signed})
                    yield self._event("content_block_stop", {})

    def _event(self, kind: str, payload: dict[str, Any]) -> Event:
        return {"type": kind, "index": len(self._blocks) - 1} | payload

    def _shown(self, block: _Block) -> dict[str, Any]:
        """A content block as it stands."""
        section = block.section
        match section.kind:
            case "text":
                return {"type": "text", "text": section.text}
            case "reasoning":
                text = section.text if self._thinking == "full" else ""
                return {"type": "thinking", "thinking": text, "signature": block.signature}
            case "call":
                return {"type": "tool_use", "id": block.id, "name": section.name, "input": _arguments(section.text)}


def _delta(kind: str, text: str) -> dict[str, Any]:
    match kind:
        case "call":
            return {"type": "input_json_delta", "partial_json": text}
        case "reasoning":
            return {"type": "thinking_delta", "thinking": text}
        case _:
            return {"type": "text_delta", "text": text}


def _arguments(text: str) -> dict[str, Any]:
    """The arguments of a call; of one that was cut, as much as can be read."""
    try:
        found = from_json(text, allow_partial="trailing-strings") if text else {}
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


PING = named_event({"type": "ping"})

router = APIRouter(tags=["messages"])


@router.post("/v1/messages", response_model=None)
async def create_message(request: Request) -> Response:
    """Answer a conversation, streamed or whole."""
    state = server_of(request)
    body = await read_body(request, AnthropicMessagesRequest, state.config)
    model = model_of(state, body)
    thinks = state.reasoning_format is not None
    params = body.params(state.llm().info.sampling_defaults, thinks=thinks)
    budget = () if thinks else body.budget_without_effect()
    if budget and state.config.strict_requests:
        raise RequestError(budget[0].path, budget[0].reason)
    request_id = new_request_id()
    try:
        conversation = replace(body.conversation(), cache_salt=body.cache_salt)
        turn = await prepare(state, conversation, params)
        note_ignored(request, (*budget, *turn.ignored), body.own_name)
        user = body.metadata.user_id if body.metadata is not None else None
        answer_id = f"msg_{uuid.uuid4().hex}"
        generation = Generation(state, answer_id, [turn], turn.params, user=user)
        text = AnswerText(turn.reader(), None, skip_special_tokens=turn.params.skip_special_tokens)
        answer = MessagesAnswer(answer_id, model, text, body.shows_thinking)
        style = EventStyle(
            named_event, lambda error: named_event(messages_error(http_error(error), request_id)), b"", PING
        )
        headers = {REQUEST_ID_HEADER: request_id}
        return await respond(request, state, generation, answer, stream=bool(body.stream), style=style, headers=headers)
    except RequestError as error:
        raise body.in_own_names(error) from None


@router.post("/v1/messages/count_tokens", response_model=None)
async def count_tokens(request: Request) -> Response:
    """The length of a conversation's prompt, which is not run."""
    state = server_of(request)
    body = await read_body(request, AnthropicCountTokensRequest, state.config)
    model_of(state, body)
    try:
        turn = await prepare(state, body.conversation(), SamplingParams())
        note_ignored(request, turn.ignored, body.own_name)
    except RequestError as error:
        raise body.in_own_names(error) from None
    counted = {"input_tokens": len(turn.token_ids)}
    headers = {REQUEST_ID_HEADER: new_request_id()}
    return Response(encode_json(counted), media_type="application/json", headers=headers)
