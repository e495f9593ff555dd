"""POST /v1/completions/render and /v1/chat/completions/render: the engine's input, without running it."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from fastapi import APIRouter, Request

from pagoda.common.errors import RequestError
from pagoda.common.sampling_params import SamplingParams
from pagoda.server.chat_prompt import prepare
from pagoda.server.http.body import note_ignored, read_body
from pagoda.server.http.fields import SamplingFields
from pagoda.server.http.state import ServerState, model_of, request_id_of, server_of
from pagoda.server.openai.chat import ChatCompletionRequest
from pagoda.server.openai.completion import CompletionRequest, prompt_of
from pagoda.server.processing.inputs import Prompt, PromptType

router = APIRouter(tags=["render"])

_DEFAULTS: Final = SamplingParams()


@router.post("/v1/completions/render")
async def render_completions(request: Request) -> list[dict[str, Any]]:
    """Return the token ids and sampling parameters of a completion's prompts."""
    state = server_of(request)
    body = await read_body(request, CompletionRequest, state.config)
    model = model_of(state, body)
    if body.embeds:
        raise RequestError("prompt_embeds", "prompt_embeds have no tokens to render; leave it out")
    try:
        params = body.params(state.llm().info.sampling_defaults)
        name = request_id_of(request, body, "cmpl")
        prompts = [await prompt_of(state, body, each, params) for each in body.prompts]
        options = _options_of(body, special_tokens=body.add_special_tokens is not False)
        return [await preview(state, f"{name}-{i}", model, p, params, options) for i, p in enumerate(prompts)]
    except RequestError as error:
        raise body.in_own_names(error) from None


@router.post("/v1/chat/completions/render")
async def render_chat(request: Request) -> dict[str, Any]:
    """Return the token ids and sampling parameters of a conversation."""
    state = server_of(request)
    body = await read_body(request, ChatCompletionRequest, state.config)
    model = model_of(state, body)
    params = body.params(state.llm().info.sampling_defaults)
    try:
        prompt = await prepare(state, body.conversation(), params)
        note_ignored(request, prompt.ignored, body.own_name)
        name = request_id_of(request, body, "chatcmpl")
        options = _options_of(body, special_tokens=bool(body.add_special_tokens))
        shown = await preview(state, name, model, prompt, prompt.params, options)
        return shown | {"prompt_text": prompt.text} if body.return_prompt_text else shown
    except RequestError as error:
        raise body.in_own_names(error) from None


@dataclass(frozen=True, slots=True, kw_only=True)
class PreviewOptions:
    """Fields of a request that its preview repeats or needs."""

    stream: bool = False
    stream_options: Mapping[str, Any] | None = None
    cache_salt: str | None = None
    priority: int = 0
    offsets: bool = False  # report each token's position in the text
    special_tokens: bool  # the prompt was tokenised with the tokenizer's special tokens


def _options_of(body: SamplingFields, *, special_tokens: bool) -> PreviewOptions:
    return PreviewOptions(
        stream=bool(body.stream),
        stream_options=None if body.stream_options is None else body.stream_options.model_dump(),
        cache_salt=body.cache_salt,
        priority=body.priority or 0,
        offsets=bool(body.return_token_offsets),
        special_tokens=special_tokens,
    )


async def preview(
    state: ServerState, request_id: str, model: str, prompt: PromptType, params: SamplingParams, options: PreviewOptions
) -> dict[str, Any]:
    """Return the token ids and sampling parameters of one prompt. Raise RequestError."""
    ready = await state.llm().preview(prompt, params)
    shown = {
        "request_id": request_id,
        "model": model,
        "token_ids": ready.token_ids,
        "sampling_params": _changed(params),
"stream": options.stream,
        "stream_options": options.stream_options,
        "cache_salt": options.cache_salt,
        "priority": options.priority,
        "token_offsets": None,
    }
    if options.offsets:
        shown["token_offsets"] = await asyncio.to_thread(_offsets, state, ready, params, options.special_tokens)
    return shown


def _changed(params: SamplingParams) -> dict[str, Any]:
    """Return the params that are not the default, as JSON values."""
    values = {field.name: getattr(params, field.name) for field in dataclasses.fields(params)}
    values["output_kind"] = params.output_kind.value
    for name in ("structured_outputs", "repetition_detection"):
        values[name] = None if values[name] is None else dataclasses.asdict(values[name])
    return {name: value for name, value in values.items() if value != getattr(_DEFAULTS, name)}


def _offsets(state: ServerState, prompt: Prompt, params: SamplingParams, special: bool) -> list[tuple[int, int]] | None:
    """Return each token's (begin, end) in the text, in characters; None for a prompt of token ids."""
    tokenizer, text, kept = state.tokenizer(), prompt.text, len(prompt.token_ids)
    if tokenizer is None or text is None:
        return None
    if params.truncate_prompt_tokens is None:
        return tokenizer.offsets(text, special)
    keeps_start = params.truncation_side == "right"
    part = tokenizer.pre_truncate(text, kept, "right" if keeps_start else "left")
    offsets = tokenizer.offsets(part, special)
    if keeps_start:
        return offsets[:kept]
    before = len(text) - len(part)
    return [(before + begin, before + end) for begin, end in offsets[len(offsets) - kept :]]
