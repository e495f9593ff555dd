"""POST /v1/completions/render and /v1/chat/completions/render: what would go to the engine, which does nothing."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any, Final

from fastapi import APIRouter, Request

from pagoda.common.errors import RequestError
from pagoda.common.sampling_params import SamplingParams
from pagoda.server.chat.prompt import prepare
from pagoda.server.http.body import read_body
from pagoda.server.http.fields.sampling import SamplingFields
from pagoda.server.http.ignored import note_ignored
from pagoda.server.http.request_context import answer_id, model_of, server_of
from pagoda.server.http.state import ServerState
from pagoda.server.openai.chat_request import ChatCompletionRequest
from pagoda.server.openai.completion import CompletionRequest, prompt_of
from pagoda.server.processing.inputs import Prompt, PromptType

router = APIRouter(tags=["render"])

_USUAL: Final = SamplingParams()


@router.post("/v1/completions/render")
async def render_completions(request: Request) -> list[dict[str, Any]]:
    """The prompts of a completion as tokens, and how they would be continued."""
    state = server_of(request)
    body = await read_body(request, CompletionRequest, state.config)
    model = model_of(state, body)
    if body.embeds:
        raise RequestError("prompt_embeds", "prompt_embeds have no tokens to show; leave it out")
    try:
        params = body.params(state.llm().info.sampling_defaults)
        name = answer_id(request, body, "cmpl")
        prompts = [await prompt_of(state, body, each, params) for each in body.prompts]
        special = body.add_special_tokens is not False
        return [await _preview(state, body, f"{name}-{i}", model, p, params, special) for i, p in enumerate(prompts)]
    except RequestError as error:
        raise body.in_own_names(error) from None


@router.post("/v1/chat/completions/render")
async def render_chat(request: Request) -> dict[str, Any]:
    """The prompt of a conversation as tokens, and how it would be answered."""
    state = server_of(request)
    body = await read_body(request, ChatCompletionRequest, state.config)
    model = model_of(state, body)
    params = body.params(state.llm().info.sampling_defaults)
    try:
        turn = await prepare(state, body.conversation(), params)
        note_ignored(request, turn.ignored, body.own_name)
        name = answer_id(request, body, "chatcmpl")
        special = bool(body.add_special_tokens)
        shown = await _preview(state, body, name, model, turn.prompt, turn.params, special)
        return shown | {"prompt_text": turn.prompt["prompt"]} if body.return_prompt_text else shown
    except RequestError as error:
        raise body.in_own_names(error) from None


async def _preview(
    state: ServerState,
    body: SamplingFields,
    request_id: str,
    model: str,
    prompt: PromptType,
    params: SamplingParams,
    special: bool,
) -> dict[str, Any]:
    """One prompt. `special`: it was tokenised with the tokens that surround a text."""
    ready = await state.llm().preview(prompt, params)
    shown = {
        "request_id": request_id,
        "model": model,
        "token_ids": ready.token_ids,
        "sampling_params": _said(params),
        "stream": bool(body.stream),
        "stream_options": None if body.stream_options is None else body.stream_options.model_dump(),
        "cache_salt": body.cache_salt,
        "priority": body.priority or 0,
    }
    if body.return_token_offsets:
        shown["token_offsets"] = await asyncio.to_thread(_offsets, state, ready, params, special)
    return shown


def _said(params: SamplingParams) -> dict[str, Any]:
    """The params that are not the usual ones, as JSON has them."""
    values = {field.name: getattr(params, field.name) for field in dataclasses.fields(params)}
    values["output_kind"] = params.output_kind.value
    for name in ("structured_outputs", "repetition_detection"):
        values[name] = None if values[name] is None else dataclasses.asdict(values[name])
    return {name: value for name, value in values.items() if value != getattr(_USUAL, name)}


def _offsets(state: ServerState, prompt: Prompt, params: SamplingParams, special: bool) -> list[tuple[int, int]] | None:
    """Where each token stands in the text, in characters. None for a prompt of token ids."""
    tokenizer, text, kept = state.tokenizer(), prompt.text, len(prompt.token_ids)
    if tokenizer is None or text is None:
        return None
    if params.truncate_prompt_tokens is None:
        return tokenizer.offsets(text, special)
    first = params.truncation_side == "right"
    end = tokenizer.pre_truncate(text, kept, "right" if first else "left")
    offsets = tokenizer.offsets(end, special)
    if first:
        return offsets[:kept]
    before = len(text) - len(end)
    return [(before + begin, before + stop) for begin, stop in offsets[len(offsets) - kept :]]
