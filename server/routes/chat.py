"""POST /v1/chat/completions, and its batch."""

from __future__ import annotations

from collections.abc import Sequence

from fastapi import APIRouter, Request
from fastapi.responses import Response

from pagoda.common.errors import RequestError
from pagoda.server.conversation.conversation import Conversation
from pagoda.server.http.answer import respond
from pagoda.server.http.body import read_body
from pagoda.server.http.ignored import note_ignored
from pagoda.server.http.state import ServerState
from pagoda.server.http.turn import prepare
from pagoda.server.protocol.batch_chat import BatchChatCompletionRequest
from pagoda.server.protocol.chat import ChatCompletionRequest, ChatFields
from pagoda.server.protocol.chat_answer import ChatAnswer, beginning
from pagoda.server.routes.shared import answer_head, answer_id, best_of, model_of, server_of, work_of

router = APIRouter(tags=["chat"])


@router.post("/v1/chat/completions", response_model=None)
async def chat_completions(request: Request) -> Response:
    """Answer a conversation, streamed or whole."""
    state = server_of(request)
    body = await read_body(request, ChatCompletionRequest, state.config)
    model = model_of(state, body)
    return await _answer(request, state, body, model, [body.conversation()])


@router.post("/v1/chat/completions/batch", response_model=None)
async def chat_completions_batch(request: Request) -> Response:
    """Answer several conversations."""
    state = server_of(request)
    body = await read_body(request, BatchChatCompletionRequest, state.config)
    model = model_of(state, body)
    return await _answer(request, state, body, model, list(body.conversations()))


async def _answer(
    request: Request, state: ServerState, body: ChatFields, model: str, conversations: Sequence[Conversation]
) -> Response:
    params = body.params(state.llm().info.sampling_defaults)
    try:
        turns = [await prepare(state, conversation, params) for conversation in conversations]
        note_ignored(request, turns[0].ignored, body.own_name)
        prompts = [turn.prompt | {"cache_salt": body.cache_salt} for turn in turns]
        request_id = answer_id(request, body, "chatcmpl")
        work = work_of(state, body, request_id, prompts, turns[0].params)
        beginnings = [
            beginning(body, conversation.messages, state.config.response_role, turn.reader)
            for conversation, turn in zip(conversations, turns)
        ]
        head = answer_head(state, body, request_id, model)
        answer = best_of(ChatAnswer(head, body, *beginnings), body, head)
        return await respond(request, state, work, answer, stream=bool(body.stream))
    except RequestError as error:
        raise body.in_own_names(error) from None
