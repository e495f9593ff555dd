"""POST /v1/chat/completions."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from pagoda.common.config.server import ServerConfig
from pagoda.common.errors import RequestError
from pagoda.common.text.chat_template import render_chat
from pagoda.common.text.tokenizer import Tokenizer
from pagoda.server.answer import respond
from pagoda.server.body import read_body
from pagoda.server.generation import Generation
from pagoda.server.protocol.chat import ChatCompletionRequest
from pagoda.server.protocol.chat_answer import ChatAnswer
from pagoda.server.routes.shared import answer_head, answer_id, server_of
from pagoda.server.state import ServerState

router = APIRouter(tags=["chat"])

LONG_CONVERSATION = 16_384
"""Bytes of body from which rendering and tokenising run in a thread, so that other requests keep streaming."""


@router.post("/v1/chat/completions", response_model=None)
async def chat_completions(request: Request) -> Response:
    """Answer a conversation, streamed or whole."""
    state = server_of(request)
    body = await read_body(request, ChatCompletionRequest, state.config.max_body_bytes)
    model = state.model_name(body.model)
    llm = state.llm()
    body.check()
    params = body.params(llm.info.sampling_defaults)
    try:
        prompt = await _prompt(state, body)
        request_id = answer_id(request, body, "chatcmpl")
        generation = Generation(state, request_id, [prompt], params, priority=body.priority or 0, user=body.user)
        answer = ChatAnswer(answer_head(state, body, request_id, model), body, state.config.response_role)
        return await respond(request, state, generation, answer, stream=bool(body.stream))
    except RequestError as error:
        raise body.in_own_names(error) from None


async def _prompt(state: ServerState, body: ChatCompletionRequest) -> dict[str, Any]:
    tokenizer = state.tokenizer()
    if tokenizer is None:
        raise RequestError(
            "messages", "chat needs a tokenizer, which is switched off; use /v1/completions with token ids"
        )
    if body.chat_template is not None and not state.config.trust_request_chat_template:
        raise RequestError(
            "chat_template", "this server takes no templates from requests (--trust-request-chat-template)"
        )
    template = body.chat_template if body.chat_template is not None else state.chat_template
    size = sum(len(str(message.get("content"))) for message in body.messages)
    if size < LONG_CONVERSATION:
        return _rendered(tokenizer, body, template, state.config)
    return await asyncio.to_thread(_rendered, tokenizer, body, template, state.config)


def _rendered(
    tokenizer: Tokenizer, body: ChatCompletionRequest, template: str | None, config: ServerConfig
) -> dict[str, Any]:
    text = render_chat(
        tokenizer,
        body.messages,
        template=template,
        add_generation_prompt=body.opens_answer,
        continue_final_message=bool(body.continue_final_message),
        documents=body.documents,
        content_format=config.chat_template_content_format,
        **{**config.default_chat_template_kwargs, **(body.chat_template_kwargs or {})},
    )
    ids = tokenizer.encode(text, add_special_tokens=bool(body.add_special_tokens))
    return {"prompt": text, "prompt_token_ids": ids, "cache_salt": body.cache_salt}
