"""POST /v1/embeddings, /classify and /pooling."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from fastapi import APIRouter, Request
from fastapi.responses import Response

from pagoda.common.errors import RequestError
from pagoda.common.pooling_params import PoolingParams
from pagoda.server.api.chat_prompt import in_conversation, render
from pagoda.server.api.pooling.encoding import Encoding
from pagoda.server.api.pooling.fields import (
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
    PoolingMeta,
    binary_response,
    check_binary,
    classes_response,
    is_conversation,
    vectors_response,
)
from pagoda.server.http.body import parse_body, read_json
from pagoda.server.http.generation import PoolingBatch, in_prompt
from pagoda.server.http.response import cancel_on_disconnect, encode_json, id_header, json_response
from pagoda.server.http.state import Identified, ServerState, request_id_of, server_of
from pagoda.server.outputs import RawPoolingOutput
from pagoda.server.processing.inputs import InputProcessor, Prompt


class PoolingBody(Identified, Protocol):
    """What `PoolingCall` needs of a request body."""

    model: str | None
    priority: int | None

    def in_own_names(self, error: RequestError) -> RequestError:
        """Return `error` with this request's field names."""
        ...


@dataclass(frozen=True, slots=True)
class PoolingCall:
    """A pooling request with its server state."""

    request: Request
    body: PoolingBody
    state: ServerState
    id: str
    model: str
    inputs: InputProcessor

    @classmethod
    def of(cls, request: Request, body: PoolingBody, prefix: str) -> PoolingCall:
        """Create a call. Raise ModelNotFoundError, UnavailableError, or RequestError for a generative model."""
        state = server_of(request)
        model = state.model_name(body.model)
        return cls(request, body, state, request_id_of(request, body, prefix), model, state.llm().pooling_inputs)

    async def run(
        self, params: PoolingParams, make: Callable[[], list[Prompt]], characters: int
    ) -> list[RawPoolingOutput]:
        """Run the prompts that `make` returns. Raise what PoolingBatch.run raises.

        `characters`: total length of the texts that `make` tokenizes.
        """
        body = self.body
        batch = PoolingBatch(self.state, self.id, params, priority=body.priority or 0, user=getattr(body, "user", None))
        try:
            running = batch.run(make, characters)
            return await cancel_on_disconnect(self.request.receive, self.state.stopping, running)
        except RequestError as error:
            raise body.in_own_names(error) from None

    def meta(self, outputs: Sequence[RawPoolingOutput]) -> PoolingMeta:
        return PoolingMeta(self.id, int(time.time()), self.model, count_tokens(outputs))

    def json(self, content: dict[str, Any]) -> Response:
        return json_response(content, headers=self.headers)

    @property
    def headers(self) -> dict[str, str]:
        return id_header(self.id) if self.state.config.enable_request_id_headers else {}


def count_tokens(outputs: Sequence[RawPoolingOutput]) -> int:
    """Return the number of tokens of all prompts."""
    return sum(len(output.prompt_token_ids) for output in outputs)


router = APIRouter(tags=["pooling"])


@router.post("/v1/embeddings", response_model=None)
async def embeddings(request: Request) -> Response:
    """Embed inputs (OpenAI Embeddings API)."""
    return await handle_embeddings(request, await read_json(request, server_of(request).config))


@router.post("/classify", response_model=None)
async def classify(request: Request) -> Response:
    """Classify inputs: the most likely label and the probabilities of all labels."""
    return await handle_classify(request, await read_json(request, server_of(request).config))


@router.post("/pooling", response_model=None)
async def pooling(request: Request) -> Response:
    """Return the pooled outputs of a task of the model."""
    return await handle_pooling(request, await read_json(request, server_of(request).config))


async def handle_embeddings(request: Request, raw: bytes) -> Response:
    body = _body(request, EmbeddingChatRequest, EmbeddingCompletionRequest, raw)
    call = PoolingCall.of(request, body, "embd")
    outputs = await _outputs(call, body, body.params("embed"), body.encoding)
    return _vectors(call, outputs, body.encoding, "embedding", "embedding")


async def handle_pooling(request: Request, raw: bytes) -> Response:
    body = _body(request, PoolingChatRequest, PoolingCompletionRequest, raw)
    call = PoolingCall.of(request, body, "pooling")
    outputs = await _outputs(call, body, body.params(body.task), body.encoding)
    return _vectors(call, outputs, body.encoding, "pooling", "data")


async def handle_classify(request: Request, raw: bytes) -> Response:
    body = _body(request, ClassificationChatRequest, ClassificationCompletionRequest, raw)
    call = PoolingCall.of(request, body, "classify")
    outputs = await _outputs(call, body, body.params("classify"), Encoding())
    return call.json(classes_response(call.meta(outputs), outputs, call.inputs.pooling.labels))


def _body(request: Request, chat: type[ChatT], completion: type[CompletionT], raw: bytes) -> ChatT | CompletionT:
    """Return the body parsed as a conversation or as texts and token ids. Raise RequestError."""
    body_type: type[ChatT] | type[CompletionT] = chat if is_conversation(raw) else completion
    return parse_body(request, body_type, raw, server_of(request).config)


async def _outputs(
    call: PoolingCall, body: InputFields | ConversationFields, params: PoolingParams, encoding: Encoding
) -> list[RawPoolingOutput]:
    """Run the prompts of the body. Raise RequestError."""
    options = body.text_options
    prompts: list[Any]
    if isinstance(body, InputFields):
        prompts = body.prompts
        characters = sum(len(prompt) for prompt in prompts)
    else:
        try:
            chats = await _rendered(call.state, body)
            prompts = [{"prompt": chat.text, "prompt_token_ids": chat.token_ids} for chat in chats]
        except RequestError as error:
            raise body.in_own_names(error) from None
        characters = 0  # Chats are tokenised already.
    check_binary(encoding, len(prompts))

    def parse() -> list[Prompt]:
        parsed = []
        for index, prompt in enumerate(prompts):
            try:
                parsed.append(call.inputs.parse(prompt, options))
            except RequestError as error:
                raise error if len(prompts) == 1 else in_prompt(error, f"prompt[{index}]") from None
        return list(map(call.inputs.padded, parsed)) if body.padding == "max_length" else parsed

    return await call.run(params, parse, characters)


async def _rendered(state: ServerState, body: ConversationFields) -> list[Prompt]:
    """Return the conversations as prompts. Raise RequestError."""
    rendered: list[Prompt] = []
    conversations = body.conversations()
    for index, conversation in enumerate(conversations):
        try:
            rendered.append(await render(state, conversation))
        except RequestError as error:
            raise error if len(conversations) == 1 else in_conversation(error, index) from None
    return rendered


def _vectors(call: PoolingCall, outputs: list[RawPoolingOutput], encoding: Encoding, kind: str, key: str) -> Response:
    meta = call.meta(outputs)
    if not encoding.is_binary:
        return call.json(vectors_response(meta, outputs, encoding, kind, key))
    data, metadata = binary_response(meta, outputs, encoding)
    headers = call.headers if metadata is None else call.headers | {"metadata": encode_json(metadata).decode()}
    return Response(data, media_type="application/octet-stream", headers=headers)
