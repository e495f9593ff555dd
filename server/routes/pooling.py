"""POST /v1/embeddings, /classify and /pooling: what a pooling model makes of texts, token ids or conversations."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from pagoda.common.errors import RequestError
from pagoda.common.pooling_params import PoolingParams
from pagoda.server.http.body import parse_body, read_json
from pagoda.server.http.pooling_work import BaseOutput
from pagoda.server.http.stream import encode_json
from pagoda.server.http.turn import rendered
from pagoda.server.protocol.pooling import (
    ClassificationChatRequest,
    ClassificationCompletionRequest,
    EmbeddingChatRequest,
    EmbeddingCompletionRequest,
    PoolingChatRequest,
    PoolingCompletionRequest,
)
from pagoda.server.protocol.pooling_answer import binary_answer, check_binary, classes_answer, vectors_answer
from pagoda.server.protocol.pooling_fields import (
    ChatT,
    CompletionT,
    ConversationFields,
    InputFields,
    holds_conversation,
)
from pagoda.server.protocol.vectors import Encoding
from pagoda.server.routes.pooling_shared import Asked
from pagoda.server.routes.shared import server_of

router = APIRouter(tags=["pooling"])


@router.post("/v1/embeddings", response_model=None)
async def embeddings(request: Request) -> Response:
    """Vectors, as OpenAI has them."""
    return await answer_embeddings(request, await read_json(request, server_of(request).config))


@router.post("/classify", response_model=None)
async def classify(request: Request) -> Response:
    """The likeliest label, and the probabilities of all."""
    return await answer_classify(request, await read_json(request, server_of(request).config))


@router.post("/pooling", response_model=None)
async def pooling(request: Request) -> Response:
    """The numbers of any of the model's tasks."""
    return await answer_pooling(request, await read_json(request, server_of(request).config))


async def answer_embeddings(request: Request, raw: bytes) -> Response:
    """The answer to a body of /v1/embeddings."""
    body = _body(request, EmbeddingChatRequest, EmbeddingCompletionRequest, raw)
    asked = Asked.of(request, body, "embd")
    outputs = await _outputs(asked, body, body.params("embed"), body.encoding)
    return _vectors(asked, outputs, body.encoding, "embedding", "embedding")


async def answer_pooling(request: Request, raw: bytes) -> Response:
    """The answer to a body of /pooling."""
    body = _body(request, PoolingChatRequest, PoolingCompletionRequest, raw)
    asked = Asked.of(request, body, "pooling")
    outputs = await _outputs(asked, body, body.params(body.task), body.encoding)
    return _vectors(asked, outputs, body.encoding, "pooling", "data")


async def answer_classify(request: Request, raw: bytes) -> Response:
    """The answer to a body of /classify."""
    body = _body(request, ClassificationChatRequest, ClassificationCompletionRequest, raw)
    asked = Asked.of(request, body, "classify")
    outputs = await _outputs(asked, body, body.params("classify"), Encoding())
    return asked.json(classes_answer(asked.head(outputs), outputs, asked.inputs.pooling.labels))


def _body(request: Request, chat: type[ChatT], completion: type[CompletionT], raw: bytes) -> ChatT | CompletionT:
    """Return the parsed body, of the type that it has the fields of. Raises RequestError."""
    body_type: type[ChatT] | type[CompletionT] = chat if holds_conversation(raw) else completion
    return parse_body(request, body_type, raw, server_of(request).config)


async def _outputs(
    asked: Asked, body: InputFields | ConversationFields, params: PoolingParams, encoding: Encoding
) -> list[BaseOutput]:
    """What the model makes of the body's prompts. Raises RequestError."""
    options = body.text_options
    prompts: list[Any]
    if isinstance(body, InputFields):
        prompts = body.prompts
        characters = sum(len(each) for each in prompts)
    else:
        try:
            prompts = [await rendered(asked.state, each) for each in body.conversations()]
        except RequestError as error:
            raise body.in_own_names(error) from None
        characters = 0  # they are tokens by now
    check_binary(encoding, len(prompts))
    return await asked.run(params, lambda: [asked.inputs.parse(each, options) for each in prompts], characters)


def _vectors(asked: Asked, outputs: list[BaseOutput], encoding: Encoding, kind: str, key: str) -> Response:
    """Vectors as they were asked for: in JSON, or as bytes."""
    head = asked.head(outputs)
    if not encoding.is_binary:
        return asked.json(vectors_answer(head, outputs, encoding, kind, key))
    data, told = binary_answer(head, outputs, encoding)
    headers = asked.headers if told is None else asked.headers | {"metadata": encode_json(told).decode()}
    return Response(data, media_type="application/octet-stream", headers=headers)
