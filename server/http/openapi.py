"""The OpenAPI description: FastAPI's, with the bodies that the routes parse themselves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic.json_schema import models_json_schema

from pagoda.server.protocol.abort import AbortRequest
from pagoda.server.protocol.base import Body, harmless_values, is_hint, is_unsupported
from pagoda.server.protocol.batch_chat import BatchChatCompletionRequest
from pagoda.server.protocol.chat import ChatCompletionRequest
from pagoda.server.protocol.cohere import CohereEmbedRequest
from pagoda.server.protocol.completion import CompletionRequest
from pagoda.server.protocol.generative_scoring import GenerativeScoringRequest
from pagoda.server.protocol.messages import AnthropicCountTokensRequest, AnthropicMessagesRequest
from pagoda.server.protocol.pooling import (
    ClassificationChatRequest,
    ClassificationCompletionRequest,
    EmbeddingChatRequest,
    EmbeddingCompletionRequest,
    PoolingChatRequest,
    PoolingCompletionRequest,
)
from pagoda.server.protocol.responses import ResponsesRequest
from pagoda.server.protocol.scoring import RerankRequest, ScoreRequest
from pagoda.server.protocol.tokenize import DetokenizeRequest, TokenizeChatRequest, TokenizeCompletionRequest

BODIES: Final[dict[str, type[Body] | tuple[type[Body], ...]]] = {
    "/v1/chat/completions": ChatCompletionRequest,
    "/v1/chat/completions/batch": BatchChatCompletionRequest,
    "/v1/completions": CompletionRequest,
    "/v1/responses": ResponsesRequest,
    "/v1/messages": AnthropicMessagesRequest,
    "/v1/messages/count_tokens": AnthropicCountTokensRequest,
    "/v1/embeddings": (EmbeddingCompletionRequest, EmbeddingChatRequest),
    "/v2/embed": CohereEmbedRequest,
    "/classify": (ClassificationCompletionRequest, ClassificationChatRequest),
    "/pooling": (PoolingCompletionRequest, PoolingChatRequest),
    "/score": ScoreRequest,
    "/v1/score": ScoreRequest,
    "/rerank": RerankRequest,
    "/v1/rerank": RerankRequest,
    "/v2/rerank": RerankRequest,
    "/v1/completions/render": CompletionRequest,
    "/v1/chat/completions/render": ChatCompletionRequest,
    "/tokenize": (TokenizeCompletionRequest, TokenizeChatRequest),
    "/detokenize": DetokenizeRequest,
    "/generative_scoring": GenerativeScoringRequest,
    "/invocations": (CompletionRequest, ChatCompletionRequest),
    "/abort_requests": AbortRequest,
}
"""Path -> what is posted there: a body, or one of several."""


def bodies_of(path: str) -> tuple[type[Body], ...]:
    """The bodies that may be posted to a path."""
    found = BODIES[path]
    return found if isinstance(found, tuple) else (found,)


def described(app: FastAPI) -> dict[str, Any]:
    """The description, made once: what a body that is taken looks like, to the values of fields that are refused."""
    if app.openapi_schema is None:
        schema = get_openapi(title=app.title, version=app.version, routes=app.routes)
        bodies = {body.__name__: body for path in BODIES for body in bodies_of(path)}
        models = [(body, "validation") for body in bodies.values()]
        _, definitions = models_json_schema(models, ref_template="#/components/schemas/{model}")  # type: ignore[arg-type]
        for name, body in bodies.items():
            _describe_fields(definitions["$defs"][name]["properties"], body, app.state.server.names)
        schema.setdefault("components", {}).setdefault("schemas", {}).update(definitions["$defs"])
        for path in BODIES.keys() & schema["paths"].keys():
            shapes = [{"$ref": f"#/components/schemas/{body.__name__}"} for body in bodies_of(path)]
            content = {"application/json": {"schema": shapes[0] if len(shapes) == 1 else {"anyOf": shapes}}}
            schema["paths"][path]["post"]["requestBody"] = {"content": content, "required": True}
        app.openapi_schema = schema
    return app.openapi_schema


def _describe_fields(properties: dict[str, Any], body: type[Body], names: Sequence[str]) -> None:
    """`names`: of the model, as it is served."""
    for name, field in body.model_fields.items():
        if is_unsupported(field):
            properties[name] = {
                "enum": harmless_values(field),
                "default": field.get_default(call_default_factory=True),
                "description": f"Refused: {field.description or 'not in this version'}.",
            }
        elif is_hint(field):
            properties[name] = {
                "description": f"Accepted without effect: {field.description or 'not in this version'}."
            }
    model = properties.get("model")
    if model is not None:
        model |= {"enum": [*names] if model.get("type") == "string" else [None, *names]}
