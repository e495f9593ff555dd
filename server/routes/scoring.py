"""POST /score and /rerank, in all their spellings: how well texts go together."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from fastapi import APIRouter, Request
from fastapi.responses import Response

from pagoda.common.pooling_params import PoolingParams
from pagoda.server.http.body import parse_body, read_json
from pagoda.server.protocol.pooling_answer import PoolingHead, ranking_answer, scores_answer
from pagoda.server.protocol.scoring import RerankRequest, ScoreRequest
from pagoda.server.requests.pooling_outputs import ScoringRequestOutput
from pagoda.server.requests.scoring import Pairs
from pagoda.server.routes.pooling_shared import Asked
from pagoda.server.routes.shared import server_of

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
