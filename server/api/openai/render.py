"""POST /v1/completions/render and /v1/chat/completions/render: the engine's input, without running it."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request

from pagoda.common.errors import RequestError
from pagoda.server.api.chat_prompt import prepare
from pagoda.server.api.openai.chat import ChatCompletionRequest
from pagoda.server.api.openai.completion import CompletionRequest, prompt_of
from pagoda.server.http.body import note_ignored
from pagoda.server.http.fields import SamplingFields
from pagoda.server.http.preview import PreviewOptions, preview
from pagoda.server.http.state import read_for_model, request_id_of

router = APIRouter(tags=["render"])


@router.post("/v1/completions/render")
async def render_completions(request: Request) -> list[dict[str, Any]]:
    """Return the token ids and sampling parameters of a completion's prompts."""
    state, body, model = await read_for_model(request, CompletionRequest)
    if body.embeds:
        raise RequestError("prompt_embeds", "prompt_embeds have no tokens to render; leave it out")
    try:
        params = body.params(state.llm().info.sampling_defaults)
        name = request_id_of(request, body, "cmpl")
        prompts = [await prompt_of(state, body, prompt, params) for prompt in body.prompts]
        options = _options_of(body, special_tokens=body.add_special_tokens is not False)
        names = [name] if len(prompts) == 1 else [f"{name}-{index}" for index in range(len(prompts))]
        return [
            await preview(state, prompt_name, model, prompt, params, options)
            for prompt_name, prompt in zip(names, prompts)
        ]
    except RequestError as error:
        raise body.in_own_names(error) from None


@router.post("/v1/chat/completions/render")
async def render_chat(request: Request) -> dict[str, Any]:
    """Return the token ids and sampling parameters of a conversation."""
    state, body, model = await read_for_model(request, ChatCompletionRequest)
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


def _options_of(body: SamplingFields, *, special_tokens: bool) -> PreviewOptions:
    return PreviewOptions(
        stream=bool(body.stream),
        stream_options=None if body.stream_options is None else body.stream_options.model_dump(),
        cache_salt=body.cache_salt,
        priority=body.priority or 0,
        offsets=bool(body.return_token_offsets),
        special_tokens=special_tokens,
    )
