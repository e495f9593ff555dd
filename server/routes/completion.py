"""POST /v1/completions."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from pagoda.common.errors import RequestError
from pagoda.common.sampling_params import SamplingParams
from pagoda.server.http.answer import respond
from pagoda.server.http.body import read_body
from pagoda.server.http.state import ServerState
from pagoda.server.outputs import RequestOutput
from pagoda.server.protocol.completion import CompletionRequest
from pagoda.server.protocol.completion_answer import CompletionAnswer
from pagoda.server.requests.inputs import encode_kept
from pagoda.server.requests.prompt_embeds import from_base64
from pagoda.server.routes.shared import answer_head, answer_id, best_of, model_of, server_of, work_of

router = APIRouter(tags=["completions"])


@router.post("/v1/completions", response_model=None)
async def completions(request: Request) -> Response:
    """Continue prompts, streamed or whole."""
    state = server_of(request)
    body = await read_body(request, CompletionRequest, state.config)
    model = model_of(state, body)
    try:
        params = body.params(state.llm().info.sampling_defaults)
        prompts = [await embeds_of(state, body, text) for text in body.embeds]
        prompts += [await prompt_of(state, body, prompt, params) for prompt in body.prompts]
        request_id = answer_id(request, body, "cmpl")
        work = work_of(state, body, request_id, prompts, params)
        head = answer_head(state, body, request_id, model)
        answer = best_of(CompletionAnswer(head, body, _prompt_text(state, body)), body, head)
        return await respond(request, state, work, answer, stream=bool(body.stream))
    except RequestError as error:
        raise body.in_own_names(error) from None


async def embeds_of(state: ServerState, body: CompletionRequest, text: str) -> dict[str, Any]:
    """One prompt of embeddings, for the engine. Raises RequestError."""
    embeds = await asyncio.to_thread(from_base64, text, state.llm().info, body.truncate_prompt_tokens)
    return {"prompt_embeds": embeds, "cache_salt": body.cache_salt}


async def prompt_of(
    state: ServerState, body: CompletionRequest, prompt: str | list[int], params: SamplingParams
) -> dict[str, Any]:
    """One prompt, for the engine. Raises RequestError."""
    salted = {"cache_salt": body.cache_salt}
    if not isinstance(prompt, str):
        return {"prompt_token_ids": prompt} | salted
    if body.add_special_tokens is not False:
        return {"prompt": prompt} | salted
    tokenizer = state.tokenizer()
    if tokenizer is None:
        raise RequestError("prompt", "the tokenizer is switched off; give token ids")
    ids = await asyncio.to_thread(encode_kept, tokenizer, prompt, params, state.llm().max_model_len, False)
    return {"prompt": prompt, "prompt_token_ids": ids} | salted


def _prompt_text(state: ServerState, body: CompletionRequest) -> Any:
    tokenizer = state.tokenizer()

    def text(output: RequestOutput) -> str:
        if output.prompt is not None and body.truncate_prompt_tokens is None:
            return output.prompt
        return "" if tokenizer is None else tokenizer.decode(output.prompt_token_ids or [], skip_special_tokens=False)

    return text
