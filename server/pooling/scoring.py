"""POST /score and /rerank, in all their spellings: how well texts go together."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Annotated, Any, Final

from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import Field, WithJsonSchema

from pagoda.common.errors import RequestError
from pagoda.common.pooling_params import PoolingParams
from pagoda.common.text.chat_template import fault_of_keywords
from pagoda.server.http.body import Int64, parse_body, read_json
from pagoda.server.http.state import server_of
from pagoda.server.outputs import ScoringRequestOutput
from pagoda.server.pooling.answer import PoolingHead, ranking_answer, scores_answer
from pagoda.server.pooling.fields import PoolingFields, check_count, renamed
from pagoda.server.pooling.routes import Asked
from pagoda.server.processing.inputs import PairTemplate
from pagoda.server.processing.scoring import Pairs, ScoreOptions, texts_of

# The bodies of POST /score and /rerank, in all their spellings.

_CONTENT = {"type": "object", "properties": {"content": {"type": "array"}}}
_TEXT = {"anyOf": [{"type": "string"}, _CONTENT]}
_TEXTS = {"anyOf": [{"type": "string"}, _CONTENT, {"type": "array", "items": _TEXT}]}

SPELLINGS: Final = (("text_1", "text_2"), ("queries", "documents"), ("queries", "items"), ("data_1", "data_2"))
"""What the two sides of pairs may be called."""

Texts = Annotated[Any, WithJsonSchema(_TEXTS)]
Limit = Annotated[Int64, Field(ge=0)]


class ScoringFields(PoolingFields):
    """How pairs become prompts. A limit of 0 cuts nothing."""

    max_tokens_per_query: Limit = 0
    max_tokens_per_doc: Limit = 0
    instruction: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def options(self, template: str | None) -> ScoreOptions:
        """`template`: the server's own for pairs. Raises RequestError for words to a template that is not there."""
        keywords = dict(self.chat_template_kwargs or {})
        if self.instruction is not None:
            keywords["instruction"] = self.instruction
        if template is None and keywords:
            field = "chat_template_kwargs" if self.chat_template_kwargs else "instruction"
            raise RequestError(
                field, f"{field} is for a template of pairs, which this server does not have (--chat-template)"
            )
        fault = fault_of_keywords(keywords)
        if fault:
            raise RequestError("chat_template_kwargs", f"chat_template_kwargs {fault}")
        return ScoreOptions(
            text=self.text_options,
            max_query_tokens=self.max_tokens_per_query,
            max_document_tokens=self.max_tokens_per_doc,
            template=None if template is None else PairTemplate(source=template, keywords=keywords),
        )


class ScoreRequest(ScoringFields):
    """Pairs to be scored: one text with one, one with many, or many with as many."""

    text_1: Texts = None
    text_2: Texts = None
    queries: Texts = None
    documents: Texts = None
    items: Texts = None
    data_1: Texts = None
    data_2: Texts = None

    @property
    def fields(self) -> tuple[str, str]:
        """What the two sides are called here. Raises RequestError unless there are two that belong together."""
        names = {name for pair in SPELLINGS for name in pair}
        given = {name for name in names if getattr(self, name) is not None}
        for pair in SPELLINGS:
            if given == set(pair):
                return pair
        known = ", ".join(" and ".join(pair) for pair in SPELLINGS)
        lone = next((other for pair in SPELLINGS for name, other in (pair, pair[::-1]) if given == {name}), None)
        raise RequestError(lone or "text_1", f"give one of these pairs of fields: {known}")

    def sides(self) -> tuple[list[str], list[str]]:
        """Both sides' texts. Raises RequestError."""
        one, two = (texts_of(name, getattr(self, name)) for name in self.fields)
        for name, texts in zip(self.fields, (one, two)):
            check_count(name, texts)
        return one, two

    def in_own_names(self, error: RequestError) -> RequestError:
        """An error about a pair under the name of its longer side."""
        return renamed(error, _longer(self.fields, self.sides()))


class RerankRequest(ScoringFields):
    """Documents to be put in order of how well they suit a query. `top_n`: so many are answered; 0: all."""

    query: Annotated[Any, WithJsonSchema(_TEXT)]
    documents: Texts
    top_n: Limit = 0
    return_documents: bool = True

    def sides(self) -> tuple[list[str], list[str]]:
        """The query, and the documents. Raises RequestError."""
        if isinstance(self.query, list):
            raise RequestError("query", "query must be one text")
        query, documents = texts_of("query", self.query), texts_of("documents", self.documents)
        check_count("documents", documents)
        return query, documents

    def in_own_names(self, error: RequestError) -> RequestError:
        """An error about a pair under the name of its longer side."""
        return renamed(error, _longer(("query", "documents"), self.sides()))


def _longer(fields: tuple[str, str], sides: tuple[list[str], list[str]]) -> str:
    return max(zip(fields, sides), key=lambda side: max(map(len, side[1])))[0]


router = APIRouter(tags=["pooling"])


@router.post("/score", response_model=None)
@router.post("/v1/score", response_model=None)
async def score(request: Request) -> Response:
    """A score for each pair."""
    return await answer_score(request, await read_json(request, server_of(request).config))


@router.post("/rerank", response_model=None)
@router.post("/v1/rerank", response_model=None)
@router.post("/v2/rerank", response_model=None)
async def rerank(request: Request) -> Response:
    """Documents, the best for the query first."""
    return await answer_rerank(request, await read_json(request, server_of(request).config))


async def answer_score(request: Request, raw: bytes) -> Response:
    """The answer to a body of /score."""
    body = parse_body(request, ScoreRequest, raw, server_of(request).config)
    asked = Asked.of(request, body, "score")
    head, scores = await _scores(asked, body, body.sides(), body.fields)
    return asked.json(scores_answer(head, scores))


async def answer_rerank(request: Request, raw: bytes) -> Response:
    """The answer to a body of /rerank."""
    body = parse_body(request, RerankRequest, raw, server_of(request).config)
    asked = Asked.of(request, body, "rerank")
    head, scores = await _scores(asked, body, body.sides(), ("query", "documents"))
    listed = body.documents if isinstance(body.documents, list) else [body.documents]
    return asked.json(ranking_answer(head, scores, listed if body.return_documents else None, body.top_n))


async def _scores(
    asked: Asked, body: ScoreRequest | RerankRequest, sides: tuple[list[str], list[str]], fields: tuple[str, str]
) -> tuple[PoolingHead, Sequence[ScoringRequestOutput]]:
    """What the answer begins with, and a score for each pair. Raises RequestError."""
    pairs = Pairs(asked.inputs, *sides, fields)
    options = body.options(asked.state.chat_template if pairs.task == "score" else None)
    params = PoolingParams(task=pairs.task, use_activation=body.use_activation)
    characters = sum(len(text) for side in sides for text in side)
    outputs = await asked.run(params, lambda: pairs.prompts(options), characters)
    return asked.head(outputs), await asyncio.to_thread(pairs.scores, outputs)
