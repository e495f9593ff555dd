"""POST /tokenize and /detokenize: the model's tokenizer, and its chat template."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
from fastapi import APIRouter, Request

from pagoda.common.errors import RequestError
from pagoda.common.text.tokenizer import Tokenizer
from pagoda.server.http.body import parse_body, read_body, read_json
from pagoda.server.http.state import ServerState
from pagoda.server.http.turn import rendered
from pagoda.server.protocol.tokenize import DetokenizeRequest, TokenizeChatRequest, TokenizeCompletionRequest, tokenized
from pagoda.server.requests.inputs import check_token_ids
from pagoda.server.routes.shared import server_of

router = APIRouter(tags=["tokenizer"])


@router.post("/tokenize")
async def tokenize(request: Request) -> dict[str, Any]:
    """The token ids of a text, or of a conversation."""
    state = server_of(request)
    raw = await read_json(request, state.config)
    is_chat = "messages" in fields_of(raw)
    body_type: type[TokenizeChatRequest | TokenizeCompletionRequest]
    body_type = TokenizeChatRequest if is_chat else TokenizeCompletionRequest
    body = parse_body(request, body_type, raw, state.config)
    state.model_name(body.model)
    tokenizer = _tokenizer(state)
    if isinstance(body, TokenizeChatRequest):
        ids = (await rendered(state, body.conversation()))["prompt_token_ids"]
    else:
        ids = await asyncio.to_thread(tokenizer.encode, body.prompt, body.add_special_tokens is not False)
    spells = tokenizer if body.return_token_strs else None
    return await asyncio.to_thread(tokenized, ids, state.llm().max_model_len, spells)


@router.post("/detokenize")
async def detokenize(request: Request) -> dict[str, Any]:
    """The text of token ids."""
    state = server_of(request)
    body = await read_body(request, DetokenizeRequest, state.config)
    state.model_name(body.model)
    tokenizer, vocab = _tokenizer(state), state.llm().info.vocab_size
    check_token_ids("tokens", body.tokens, vocab)
    return {"prompt": await asyncio.to_thread(tokenizer.decode, body.tokens, False)}


def fields_of(raw: bytes) -> frozenset[str]:
    """The names in a JSON object; none where it is not one, which its parser will say better."""
    try:
        return frozenset(msgspec.json.decode(raw, type=dict[str, msgspec.Raw]))
    except (msgspec.DecodeError, RecursionError):
        return frozenset()


def _tokenizer(state: ServerState) -> Tokenizer:
    state.llm()
    tokenizer = state.tokenizer()
    if tokenizer is None:
        raise RequestError("", "the tokenizer is switched off (--skip-tokenizer-init)")
    return tokenizer
