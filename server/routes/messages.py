"""POST /v1/messages and /v1/messages/count_tokens, of the Messages API."""

from __future__ import annotations

import uuid

from fastapi import APIRouter, Request
from fastapi.responses import Response

from pagoda.common.errors import RequestError
from pagoda.common.sampling_params import SamplingParams
from pagoda.server.http.answer import respond
from pagoda.server.http.body import read_body
from pagoda.server.http.generation import Generation
from pagoda.server.http.ignored import note_ignored
from pagoda.server.http.stream import EventStyle, encode_json, named_event
from pagoda.server.http.turn import prepare
from pagoda.server.parsers.attribution import AnswerText
from pagoda.server.protocol.errors import http_error
from pagoda.server.protocol.messages import AnthropicCountTokensRequest, AnthropicMessagesRequest
from pagoda.server.protocol.messages_answer import MessagesAnswer
from pagoda.server.protocol.messages_errors import REQUEST_ID_HEADER, messages_error, new_request_id
from pagoda.server.routes.shared import model_of, server_of

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
        turn = await prepare(state, body.conversation(), params)
        note_ignored(request, (*budget, *turn.ignored), body.own_name)
        prompt = turn.prompt | {"cache_salt": body.cache_salt}
        user = body.metadata.user_id if body.metadata is not None else None
        answer_id = f"msg_{uuid.uuid4().hex}"
        generation = Generation(state, answer_id, [prompt], turn.params, user=user)
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
    counted = {"input_tokens": len(turn.prompt["prompt_token_ids"])}
    headers = {REQUEST_ID_HEADER: new_request_id()}
    return Response(encode_json(counted), media_type="application/json", headers=headers)
