"""POST /generative_scoring: probability of a label token after a query and each of several items."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Annotated, Final

from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import Field

from pagoda.common.errors import RequestError
from pagoda.common.sampling_params import MAX_LOGPROB_IDS, RequestOutputKind, SamplingParams
from pagoda.common.text.tokenizer import Tokenizer
from pagoda.server.http.body import Int64, RequestBody, read_body
from pagoda.server.http.generation import Generation
from pagoda.server.http.response import Usage, cancel_on_disconnect, encode_json
from pagoda.server.http.state import answer_id, server_of
from pagoda.server.outputs import RequestOutput

MAX_ITEMS: Final = 4_096
MAX_TOKENS: Final = 1 << 24
"""Maximum number of tokens in all prompts of a request; each prompt includes the query."""


class GenerativeScoringRequest(RequestBody):
    """A query, items appended to it (prepended with `item_first`), and the label tokens to score."""

    model: str | None = None
    query: str | list[Int64]
    items: (
        Annotated[list[str], Field(min_length=1, max_length=MAX_ITEMS)]
        | Annotated[list[list[Int64]], Field(min_length=1, max_length=MAX_ITEMS)]
    )
    label_token_ids: list[Int64] = Field(min_length=1, max_length=MAX_LOGPROB_IDS)
    apply_softmax: bool = Field(True, description="Normalize over the labels; false: over the whole vocabulary.")
    item_first: bool = False
    add_special_tokens: bool = True
    cache_salt: Annotated[str, Field(min_length=1, max_length=1024)] | None = None
    priority: Int64 = 0
    request_id: Annotated[str, Field(min_length=1, max_length=256)] | None = None

    def own_name(self, field: str) -> str:
        """Return this request's name for a SamplingParams field."""
        return {"logprob_token_ids": "label_token_ids", "prompt": "items"}.get(field, field)


router = APIRouter(tags=["scoring"])


@router.post("/generative_scoring", response_model=None)
async def generative_scoring(request: Request) -> Response:
    """Return the probability of the first label as the next token, per item."""
    state = server_of(request)
    body = await read_body(request, GenerativeScoringRequest, state.config)
    model = state.model_name(body.model)
    state.llm()
    request_id = answer_id(request, body, "generative-scoring")
    prompt_ids = await asyncio.to_thread(_prompts, state.tokenizer(), body)
    params = SamplingParams(
        max_tokens=1,
        temperature=0.0,
        logprob_token_ids=body.label_token_ids,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
    prompts = [{"prompt_token_ids": ids, "cache_salt": body.cache_salt} for ids in prompt_ids]
    generation = Generation(state, request_id, prompts, params, priority=body.priority)
    try:
        running = _collect(generation.outputs(), len(prompts))
        outputs = await cancel_on_disconnect(request.receive, state.stopping, running)
    except RequestError as error:
        raise body.in_own_names(error) from None
    usage = Usage(details=state.config.enable_prompt_tokens_details)
    for index, output in enumerate(outputs):
        usage.count(index, output)
    scores = [_score(output, body.label_token_ids, body.apply_softmax) for output in outputs]
    content = {
        "id": request_id,
        "object": "list",
        "created": int(time.time()),
        "model": model,
        "data": [{"index": index, "object": "score", "score": score} for index, score in enumerate(scores)],
        "usage": usage.as_dict(),
    }
    return Response(encode_json(content), media_type="application/json")


async def _collect(outputs: AsyncGenerator[tuple[int, RequestOutput], None], count: int) -> list[RequestOutput]:
    by_index: dict[int, RequestOutput] = {}
    async with aclosing(outputs) as stream:
        async for index, output in stream:
            by_index[index] = output
    return [by_index[index] for index in range(count)]


def _prompts(tokenizer: Tokenizer | None, body: GenerativeScoringRequest) -> list[list[int]]:
    """Return a prompt per item. Query and item are tokenized separately; only the first gets special tokens."""

    def ids(field: str, part: str | list[int], first: bool) -> list[int]:
        if not isinstance(part, str):
            return part
        if tokenizer is None:
            raise RequestError(field, f"{field} needs a tokenizer, which is disabled; send token ids")
        return tokenizer.encode(part, first and body.add_special_tokens)

    query = ids("query", body.query, not body.item_first)
    items = [ids("items", item, body.item_first) for item in body.items]
    total = len(query) * len(items) + sum(map(len, items))
    if total > MAX_TOKENS:
        raise RequestError("items", f"query and items have {total} tokens in all; at most {MAX_TOKENS} are allowed")
    return [[*item, *query] if body.item_first else [*query, *item] for item in items]


def _score(output: RequestOutput, labels: list[int], apply_softmax: bool) -> float:
    """Return the first label's probability, normalized over the labels or over all tokens."""
    positions = output.outputs[0].logprobs
    if not positions:
        raise RequestError("items", "the scoring was aborted")
    probabilities = [math.exp(positions[0][label].logprob) for label in labels]
    total = math.fsum(probabilities)
    if not apply_softmax:
        return probabilities[0]
    return probabilities[0] / total if total else 1 / len(labels)
