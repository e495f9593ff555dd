"""POST /score and /rerank, with all path and field aliases."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Annotated, Any, Final

from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import Field, WithJsonSchema

from pagoda.common.errors import RequestError
from pagoda.common.pooling_params import PoolingParams
from pagoda.common.text.chat_template import template_kwargs_error
from pagoda.server.http.body import Int64, parse_body, read_json
from pagoda.server.http.state import server_of
from pagoda.server.outputs import ScoringRequestOutput
from pagoda.server.pooling.fields import PoolingFields, check_count, renamed
from pagoda.server.pooling.response import PoolingMeta, ranking_response, scores_response
from pagoda.server.pooling.routes import PoolingCall
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
        fault = template_kwargs_error(keywords)
        if fault:
            raise RequestError("chat_template_kwargs", f"chat_template_kwargs {fault}")
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
        known = ", ".join(" and ".join(pair) for pair in FIELD_PAIRS)
        lone = next((other for pair in FIELD_PAIRS for name, other in (pair, pair[::-1]) if present == {name}), None)
        raise RequestError(lone or "text_1", f"give one of these pairs of fields: {known}")

    def sides(self) -> tuple[list[str], list[str]]:
        """Return the texts of both sides. Raise RequestError."""
        first, second = (texts_of(name, getattr(self, name)) for name in self.fields)
        for name, texts in zip(self.fields, (first, second)):
            check_count(name, texts)
        return first, second

    def in_own_names(self, error: RequestError) -> RequestError:
        """Return an error about a prompt with the field of the longer texts."""
        return renamed(error, _longer(self.fields, self.sides()))


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
        query, documents = texts_of("query", self.query), texts_of("documents", self.documents)
        check_count("documents", documents)
        return query, documents

    def in_own_names(self, error: RequestError) -> RequestError:
        """Return an error about a prompt with the field of the longer texts."""
        return renamed(error, _longer(("query", "documents"), self.sides()))


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
    """Handle a body of /score."""
    body = parse_body(request, ScoreRequest, raw, server_of(request).config)
    call = PoolingCall.of(request, body, "score")
    meta, scores = await _scores(call, body, body.sides(), body.fields)
    return call.json(scores_response(meta, scores))


async def handle_rerank(request: Request, raw: bytes) -> Response:
    """Handle a body of /rerank."""
    body = parse_body(request, RerankRequest, raw, server_of(request).config)
    call = PoolingCall.of(request, body, "rerank")
    meta, scores = await _scores(call, body, body.sides(), ("query", "documents"))
    listed = body.documents if isinstance(body.documents, list) else [body.documents]
    return call.json(ranking_response(meta, scores, listed if body.return_documents else None, body.top_n))


async def _scores(
    call: PoolingCall, body: ScoreRequest | RerankRequest, sides: tuple[list[str], list[str]], fields: tuple[str, str]
) -> tuple[PoolingMeta, Sequence[ScoringRequestOutput]]:
    """Return the shared response fields and a score per pair. Raise RequestError."""
    pairs = Pairs(call.inputs, *sides, fields)
    options = body.options(call.state.chat_template if pairs.task == "score" else None)
    params = PoolingParams(task=pairs.task, use_activation=body.use_activation)
    characters = sum(len(text) for side in sides for text in side)
    outputs = await call.run(params, lambda: pairs.prompts(options), characters)
    return call.meta(outputs), await asyncio.to_thread(pairs.scores, outputs)
