"""POST /v1/embeddings, /classify and /pooling: what a pooling model makes of texts, token ids or conversations."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from fastapi import APIRouter, Request
from fastapi.responses import Response

from pagoda.common.errors import RequestError
from pagoda.common.pooling_params import PoolingParams
from pagoda.server.chat.prompt import rendered
from pagoda.server.http.body import parse_body, read_json
from pagoda.server.http.generation import PoolingBatch
from pagoda.server.http.response import cancel_on_disconnect, encode_json, id_header
from pagoda.server.http.state import Identified, ServerState, answer_id, server_of
from pagoda.server.outputs import RawPoolingOutput
from pagoda.server.pooling.answer import (
    Encoding,
    PoolingHead,
    binary_answer,
    check_binary,
    classes_answer,
    vectors_answer,
)
from pagoda.server.pooling.fields import (
    ChatT,
    ClassificationChatRequest,
    ClassificationCompletionRequest,
    CompletionT,
    ConversationFields,
    EmbeddingChatRequest,
    EmbeddingCompletionRequest,
    InputFields,
    PoolingChatRequest,
    PoolingCompletionRequest,
    holds_conversation,
)
from pagoda.server.processing.inputs import InputProcessor, Prompt

# What the routes of pooling models share: the request's place in the server, its run, the responses.


class PoolingBody(Identified, Protocol):
    """What the bodies have in common."""

    model: str | None
    priority: int | None

    def in_own_names(self, error: RequestError) -> RequestError:
        """An error under the name that the field has in this request."""
        ...


@dataclass(frozen=True, slots=True)
class Asked:
    """A request that a pooling model can answer."""

    request: Request
    body: PoolingBody
    state: ServerState
    id: str
    model: str
    inputs: InputProcessor

    @classmethod
    def of(cls, request: Request, body: PoolingBody, prefix: str) -> Asked:
        """Raises ModelNotFoundError, UnavailableError, or RequestError when the model generates."""
        state = server_of(request)
        model = state.model_name(body.model)
        return cls(request, body, state, answer_id(request, body, prefix), model, state.llm().pooling_inputs)

    async def run(
        self, params: PoolingParams, make: Callable[[], list[Prompt]], characters: int
    ) -> list[RawPoolingOutput]:
        """The outputs of the prompts that `make` makes of so many characters. Raises what PoolingBatch.run raises."""
        body = self.body
        batch = PoolingBatch(self.state, self.id, params, priority=body.priority or 0, user=getattr(body, "user", None))
        try:
            running = batch.run(make, characters)
            return await cancel_on_disconnect(self.request.receive, self.state.stopping, running)
        except RequestError as error:
            raise body.in_own_names(error) from None

    def head(self, outputs: Sequence[RawPoolingOutput]) -> PoolingHead:
        """What the answer begins and ends with."""
        return PoolingHead(self.id, int(time.time()), self.model, count_tokens(outputs))

    def json(self, answer: dict[str, Any]) -> Response:
        """The response."""
        return Response(encode_json(answer), media_type="application/json", headers=self.headers)

    @property
    def headers(self) -> dict[str, str]:
        """Of every response."""
        return id_header(self.id) if self.state.config.enable_request_id_headers else {}


def count_tokens(outputs: Sequence[RawPoolingOutput]) -> int:
    """Tokens of all prompts."""
    return sum(len(output.prompt_token_ids) for output in outputs)


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
) -> list[RawPoolingOutput]:
    """What the model makes of the body's prompts. Raises RequestError."""
    options = body.text_options
    prompts: list[Any]
    if isinstance(body, InputFields):
        prompts = body.prompts
        characters = sum(len(each) for each in prompts)
    else:
        try:
            chats = [await rendered(asked.state, each) for each in body.conversations()]
            prompts = [{"prompt": chat.text, "prompt_token_ids": chat.token_ids} for chat in chats]
        except RequestError as error:
            raise body.in_own_names(error) from None
        characters = 0  # they are tokens by now
    check_binary(encoding, len(prompts))
    return await asked.run(params, lambda: [asked.inputs.parse(each, options) for each in prompts], characters)


def _vectors(asked: Asked, outputs: list[RawPoolingOutput], encoding: Encoding, kind: str, key: str) -> Response:
    """Vectors as they were asked for: in JSON, or as bytes."""
    head = asked.head(outputs)
    if not encoding.is_binary:
        return asked.json(vectors_answer(head, outputs, encoding, kind, key))
    data, told = binary_answer(head, outputs, encoding)
    headers = asked.headers if told is None else asked.headers | {"metadata": encode_json(told).decode()}
    return Response(data, media_type="application/octet-stream", headers=headers)
