"""POST /score and /rerank, with all path and field aliases, and POST /generative_scoring."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Sequence
from typing import Annotated, Any, Final

from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import Field, WithJsonSchema

from pagoda.common.errors import RequestError
from pagoda.common.pooling_params import PoolingParams
from pagoda.common.sampling_params import RequestOutputKind, SamplingParams
from pagoda.common.text.tokenizer import Tokenizer
from pagoda.server.api.pooling.fields import (
    PoolingFields,
    PoolingMeta,
    check_count,
    ranking_response,
    renamed,
    scores_response,
)
from pagoda.server.api.pooling.routes import PoolingCall
from pagoda.server.http.body import Int64, RequestBody, parse_body, read_body, read_json, unsupported
from pagoda.server.http.fields import check_template_kwargs
from pagoda.server.http.generation import Generation
from pagoda.server.http.response import Usage, cancel_on_disconnect, json_response
from pagoda.server.http.state import request_id_of, server_of
from pagoda.server.outputs import RequestOutput, ScoringRequestOutput
from pagoda.server.processing.inputs import PairTemplate
from pagoda.server.processing.scoring import Pairs, ScoreOptions, texts_of

_CONTENT = {"type": "object", "properties": {"content": {"type": "array"}}}
_TEXT = {"anyOf": [{"type": "string"}, _CONTENT]}
_TEXTS = {"anyOf": [{"type": "string"}, _CONTENT, {"type": "array", "items": _TEXT}]}

FIELD_PAIRS: Final = (("text_1", "text_2"), ("queries", "documents"), ("queries", "items"), ("data_1", "data_2"))
"""Accepted names of the two fields with the texts."""

Texts = Annotated[Any, WithJsonSchema(_TEXTS)]
Limit = Annotated[Int64, Field(ge=0)]


class ScoringFields(PoolingFields):
    """Options for building prompts from pairs. A limit of 0 truncates nothing."""

    max_tokens_per_query: Limit = 0
    max_tokens_per_doc: Limit = 0
    instruction: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    padding: Any = unsupported(harmless=("do_not_pad",), why="pairs of texts are not padded")

    def options(self, template: str | None) -> ScoreOptions:
        """Return ScoreOptions. `template`: the server's template for pairs.

        Raise RequestError for template variables without a template.
        """
        keywords = dict(self.chat_template_kwargs or {})
        if self.instruction is not None:
            keywords["instruction"] = self.instruction
        if template is None and keywords:
            field = "chat_template_kwargs" if self.chat_template_kwargs else "instruction"
            raise RequestError(
                field, f"{field} needs a score template, which this server does not have (--chat-template)"
            )
        check_template_kwargs(keywords)
        return ScoreOptions(
            text=self.text_options,
            max_query_tokens=self.max_tokens_per_query,
            max_document_tokens=self.max_tokens_per_doc,
            template=None if template is None else PairTemplate(source=template, keywords=keywords),
        )


class ScoreRequest(ScoringFields):
    """Pairs to score: one text with one or several, or two lists of the same length."""

    text_1: Texts = None
    text_2: Texts = None
    queries: Texts = None
    documents: Texts = None
    items: Texts = None
    data_1: Texts = None
    data_2: Texts = None

    @property
    def fields(self) -> tuple[str, str]:
        """The names of the two fields in use. Raise RequestError unless exactly one known pair is set."""
        names = {name for pair in FIELD_PAIRS for name in pair}
        present = {name for name in names if getattr(self, name) is not None}
        for pair in FIELD_PAIRS:
            if present == set(pair):
                return pair
        pairs = ", ".join(" and ".join(pair) for pair in FIELD_PAIRS)
        lone = next((other for pair in FIELD_PAIRS for name, other in (pair, pair[::-1]) if present == {name}), None)
        raise RequestError(lone or "text_1", f"give one of these pairs of fields: {pairs}")

    def sides(self) -> tuple[list[str], list[str]]:
        """Return the texts of both sides. Raise RequestError."""
        first, second = (texts_of(name, getattr(self, name)) for name in self.fields)
        for name, texts in zip(self.fields, (first, second)):
            check_count(name, texts)
        return first, second

    def in_own_names(self, error: RequestError) -> RequestError:
        """Return an error about a prompt with the field of the longer texts."""
        return renamed(error, _longer(self.fields, self.sides()), indexed=False)


class RerankRequest(ScoringFields):
    """Documents to rank by relevance to a query. `top_n`: number of results; 0: all."""

    query: Annotated[Any, WithJsonSchema(_TEXT)]
    documents: Texts
    top_n: Limit = 0
    return_documents: bool = True

    def sides(self) -> tuple[list[str], list[str]]:
        """Return the query and the documents. Raise RequestError."""
        if isinstance(self.query, list):
            raise RequestError("query", "query must be one text")
        query = texts_of("query", self.query)
        documents = texts_of("documents", self.documents)
        check_count("documents", documents)
        return query, documents

    def in_own_names(self, error: RequestError) -> RequestError:
        """Return an error about a prompt with the field of the longer texts."""
        return renamed(error, _longer(("query", "documents"), self.sides()), indexed=False)


def _longer(fields: tuple[str, str], sides: tuple[list[str], list[str]]) -> str:
    return max(zip(fields, sides), key=lambda side: max(map(len, side[1])))[0]


router = APIRouter(tags=["pooling"])


@router.post("/score", response_model=None)
@router.post("/v1/score", response_model=None)
async def score(request: Request) -> Response:
    """Score pairs of texts."""
    return await handle_score(request, await read_json(request, server_of(request).config))


@router.post("/rerank", response_model=None)
@router.post("/v1/rerank", response_model=None)
@router.post("/v2/rerank", response_model=None)
async def rerank(request: Request) -> Response:
    """Rank documents by relevance to a query, best first."""
    return await handle_rerank(request, await read_json(request, server_of(request).config))


async def handle_score(request: Request, raw: bytes) -> Response:
    body = parse_body(request, ScoreRequest, raw, server_of(request).config)
    call = PoolingCall.of(request, body, "score")
    meta, scores = await _scores(call, body, body.sides(), body.fields)
    return call.json(scores_response(meta, scores))


async def handle_rerank(request: Request, raw: bytes) -> Response:
    body = parse_body(request, RerankRequest, raw, server_of(request).config)
    call = PoolingCall.of(request, body, "rerank")
    meta, scores = await _scores(call, body, body.sides(), ("query", "documents"))
    listed = body.documents if isinstance(body.documents, list) else [body.documents]
    return call.json(ranking_response(meta, scores, listed if body.return_documents else None, body.top_n))


async def _scores(
    call: PoolingCall, body: ScoreRequest | RerankRequest, sides: tuple[list[str], list[str]], fields: tuple[str, str]
) -> tuple[PoolingMeta, Sequence[ScoringRequestOutput]]:
    """Return the shared response fields and a score per pair. Raise RequestError."""
    queries, documents = sides
    pairs = Pairs(call.inputs, queries, documents, fields)
    options = body.options(call.state.given_template if pairs.task == "score" else None)
    params = PoolingParams(task=pairs.task, use_activation=body.use_activation)
    characters = sum(len(text) for side in sides for text in side)
    outputs = await call.run(params, lambda: pairs.prompts(options), characters)
    return call.meta(outputs), await asyncio.to_thread(pairs.scores, outputs)


# Generative scoring: the probability of a label token after a query and each of several items.

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
    label_token_ids: list[Int64] = Field(min_length=1)
    apply_softmax: bool = Field(True, description="Normalize over the labels; false: over the whole vocabulary.")
    item_first: bool = False
    add_special_tokens: bool = True
    cache_salt: Annotated[str, Field(min_length=1, max_length=1024)] | None = None
    priority: Int64 = 0
    request_id: Annotated[str, Field(min_length=1, max_length=256)] | None = None

    def own_name(self, field: str) -> str:
        """Return this request's name for a SamplingParams field."""
        return {"logprob_token_ids": "label_token_ids", "prompt": "items"}.get(field, field)


@router.post("/generative_scoring", response_model=None)
async def generative_scoring(request: Request) -> Response:
    """Return the probability of the first label as the next token, per item."""
    state = server_of(request)
    body = await read_body(request, GenerativeScoringRequest, state.config)
    model = state.model_name(body.model)
    state.llm()
    request_id = request_id_of(request, body, "generative-scoring")
    size = len(body.query) + sum(map(len, body.items))
    prompt_ids = await state.engine.text_threads.run(size, _prompts, state.tokenizer(), body)
    params = SamplingParams(
        max_tokens=1,
        temperature=0.0,
        logprob_token_ids=body.label_token_ids,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
    prompts = [{"prompt_token_ids": ids, "cache_salt": body.cache_salt} for ids in prompt_ids]
    generation = Generation(state, request_id, prompts, params, model=model, priority=body.priority)
    try:
        outputs = await cancel_on_disconnect(request.receive, state.stopping, generation.final_outputs())
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
    return json_response(content)


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
