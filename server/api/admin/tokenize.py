"""POST /tokenize and /detokenize, GET /tokenizer_info."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
from fastapi import APIRouter, Request
from pydantic import Field

from pagoda.common.errors import RequestError
from pagoda.common.text.tokenizer import Tokenizer
from pagoda.server.api.chat_prompt import Conversation, render
from pagoda.server.api.openai.chat import check_messages, ignored_of_tools, offered_tools
from pagoda.server.http.body import Ignored, Int64, RequestBody, hint, parse_body, read_body, read_json
from pagoda.server.http.fields import check_template_kwargs
from pagoda.server.http.state import ServerState, server_of
from pagoda.server.processing.inputs import check_token_ids

MAX_TOKENS = 1 << 20


class TokenizeCompletionRequest(RequestBody):
    """A text to tokenize."""

    model: str | None = None
    prompt: str
    add_special_tokens: bool | None = True
    return_token_strs: bool | None = False


class TokenizeChatRequest(RequestBody):
    """A conversation to render and tokenize."""

    model: str | None = None
    messages: list[dict[str, Any]] = Field(min_length=1)
    add_generation_prompt: bool | None = True
    return_token_strs: bool | None = False
    continue_final_message: bool | None = False
    add_special_tokens: bool | None = False
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    media_io_kwargs: Any = hint(why="this version serves text only")
    mm_processor_kwargs: Any = hint(why="this version serves text only")

    def ignored(self, path: str = "") -> Iterator[Ignored]:
        """Yield the parts that have no effect, tools and fields of tools among them."""
        yield from super().ignored(path)
        yield from ignored_of_tools(self.tools or ())

    def conversation(self) -> Conversation:
        """Return the conversation to render. Raise RequestError."""
        adds_prompt = self.add_generation_prompt is not False
        if self.continue_final_message and adds_prompt and "add_generation_prompt" in self.model_fields_set:
            raise RequestError("continue_final_message", "it excludes add_generation_prompt; set only one of them")
        check_template_kwargs(self.chat_template_kwargs)
        check_messages("messages", self.messages)
        return Conversation(
            messages=self.messages,
            tools=offered_tools(self.tools or ()),
            add_generation_prompt=adds_prompt and not self.continue_final_message,
            continue_final_message=bool(self.continue_final_message),
            add_special_tokens=bool(self.add_special_tokens),
            template=self.chat_template,
            keywords=self.chat_template_kwargs or {},
        )


class DetokenizeRequest(RequestBody):
    """Token ids to decode."""

    model: str | None = None
    tokens: list[Int64] = Field(max_length=MAX_TOKENS)


def tokenized(ids: Sequence[int], max_model_len: int, tokenizer: Tokenizer | None) -> dict[str, Any]:
    """Return the response of /tokenize. `tokenizer`: for token_strs; None: omit them."""
    return {
        "count": len(ids),
        "max_model_len": max_model_len,
        "tokens": list(ids),
        "token_strs": None if tokenizer is None else [tokenizer.token_name(token) for token in ids],
    }


router = APIRouter(tags=["tokenizer"])


@router.post("/tokenize")
async def tokenize(request: Request) -> dict[str, Any]:
    """Return the token ids of a text or a rendered conversation."""
    state = server_of(request)
    raw = await read_json(request, state.config)
    is_chat = "messages" in fields_of(raw)
    body_type: type[TokenizeChatRequest | TokenizeCompletionRequest]
    body_type = TokenizeChatRequest if is_chat else TokenizeCompletionRequest
    body = parse_body(request, body_type, raw, state.config)
    state.model_name(body.model)
    tokenizer = _tokenizer(state)
    if isinstance(body, TokenizeChatRequest):
        ids = (await render(state, body.conversation())).token_ids
    else:
        special = body.add_special_tokens is not False
        ids = await state.engine.text_threads.run(len(body.prompt), tokenizer.encode, body.prompt, special)
    namer = tokenizer if body.return_token_strs else None
    return await asyncio.to_thread(tokenized, ids, state.llm().max_model_len, namer)


@router.post("/detokenize")
async def detokenize(request: Request) -> dict[str, Any]:
    """Return the text of token ids."""
    state = server_of(request)
    body = await read_body(request, DetokenizeRequest, state.config)
    state.model_name(body.model)
    tokenizer = _tokenizer(state)
    vocab = state.llm().info.vocab_size
    check_token_ids("tokens", body.tokens, vocab)
    return {"prompt": await asyncio.to_thread(tokenizer.decode, body.tokens, False)}


def fields_of(raw: bytes) -> frozenset[str]:
    """Return the keys of a JSON object; empty if it is none (the body parser reports that)."""
    try:
        return frozenset(msgspec.json.decode(raw, type=dict[str, msgspec.Raw]))
    except (msgspec.DecodeError, RecursionError):
        return frozenset()


def _tokenizer(state: ServerState) -> Tokenizer:
    state.llm()
    tokenizer = state.tokenizer()
    if tokenizer is None:
        raise RequestError("", "the tokenizer is disabled (--skip-tokenizer-init)")
    return tokenizer


tokenizer_info_router = APIRouter(tags=["tokenizer"])  # Included with --enable-tokenizer-info-endpoint.


@tokenizer_info_router.get("/tokenizer_info")
async def tokenizer_info(request: Request) -> dict[str, Any]:
    """Return the tokenizer and chat template, with the keys of tokenizer_config.json."""
    state = server_of(request)
    tokenizer = _tokenizer(state)
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": state.llm().max_model_len,
        "vocab_size": tokenizer.vocab_size,
        **tokenizer.special_tokens,
        "chat_template": state.given_template if state.given_template is not None else tokenizer.chat_template,
        "added_tokens_decoder": {
            str(token_id): {"content": token.content, "special": token.special}
            for token_id, token in sorted(tokenizer.backend.get_added_tokens_decoder().items())
        },
    }
