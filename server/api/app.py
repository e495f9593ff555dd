"""The FastAPI application: routes, middleware, error responses and the OpenAPI schema."""

from __future__ import annotations

import contextlib
import inspect
import logging
from collections.abc import AsyncGenerator, Sequence
from typing import Any, Final

from fastapi import FastAPI, Request
from fastapi.middleware.cors import CORSMiddleware
from fastapi.openapi.utils import get_openapi
from fastapi.responses import Response
from pydantic.json_schema import models_json_schema
from starlette._utils import get_route_path
from starlette.exceptions import HTTPException
from starlette.middleware.base import BaseHTTPMiddleware

import pagoda
from pagoda.common.config.groups.server import ServerConfig
from pagoda.common.errors import ConfigError, PagodaError
from pagoda.common.observe.metrics import Metrics
from pagoda.server.api.admin import adapters, api_docs, chat_page, dev, health, sagemaker, tokenize, unsupported_routes
from pagoda.server.api.admin.adapters import LoadLoRAAdapterRequest, UnloadLoRAAdapterRequest
from pagoda.server.api.admin.dev import AbortRequest
from pagoda.server.api.admin.tokenize import DetokenizeRequest, TokenizeChatRequest, TokenizeCompletionRequest
from pagoda.server.api.anthropic import messages
from pagoda.server.api.anthropic.request import AnthropicCountTokensRequest, AnthropicMessagesRequest
from pagoda.server.api.cohere import chat as cohere_chat
from pagoda.server.api.cohere import embed
from pagoda.server.api.cohere.chat import CohereChatRequest
from pagoda.server.api.cohere.embed import CohereEmbedRequest
from pagoda.server.api.openai import chat, completion, generate, models, render
from pagoda.server.api.openai.batch import batches, files
from pagoda.server.api.openai.batch.batches import BatchCreateRequest
from pagoda.server.api.openai.batch.runner import BatchRunner
from pagoda.server.api.openai.chat import BatchChatCompletionRequest, ChatCompletionRequest
from pagoda.server.api.openai.completion import CompletionRequest
from pagoda.server.api.openai.generate import GenerateRequest
from pagoda.server.api.openai.responses import conversations, retrieval
from pagoda.server.api.openai.responses import route as responses
from pagoda.server.api.openai.responses.conversations import (
    CreateConversationRequest,
    CreateItemsRequest,
    UpdateConversationRequest,
)
from pagoda.server.api.openai.responses.request import ResponsesRequest
from pagoda.server.api.openai.responses.tool_servers import prepare as prepare_tool_servers
from pagoda.server.api.pooling import routes as embeddings
from pagoda.server.api.pooling import scoring
from pagoda.server.api.pooling.fields import (
    ClassificationChatRequest,
    ClassificationCompletionRequest,
    EmbeddingChatRequest,
    EmbeddingCompletionRequest,
    PoolingChatRequest,
    PoolingCompletionRequest,
)
from pagoda.server.api.pooling.scoring import GenerativeScoringRequest, RerankRequest, ScoreRequest
from pagoda.server.http.body import RequestBody, harmless_values, is_hint, is_unsupported
from pagoda.server.http.connections import PROBES
from pagoda.server.http.errors import ClientDisconnectedError, HttpError, error_response, http_error
from pagoda.server.http.response import (
    CLIENT_DISCONNECTED,
    IGNORED_HEADER,
    ApiKeyMiddleware,
    DirectSendMiddleware,
    DisconnectMiddleware,
    IgnoredPartsMiddleware,
    OverloadMiddleware,
    RequestIdMiddleware,
    RouteSpellingMiddleware,
    TraceContextMiddleware,
    json_response,
)
from pagoda.server.http.state import ServerState
from pagoda.server.settings.plugins import load as load_plugin

BODIES: Final[dict[str, type[RequestBody] | tuple[type[RequestBody], ...]]] = {
    "/v1/chat/completions": ChatCompletionRequest,
    "/v1/chat/completions/batch": BatchChatCompletionRequest,
    "/v1/completions": CompletionRequest,
    "/v1/responses": ResponsesRequest,
    "/v1/responses/input_tokens": ResponsesRequest,
    "/v1/responses/render": ResponsesRequest,
    "/v1/conversations": CreateConversationRequest,
    "/v1/conversations/{conversation_id}": UpdateConversationRequest,
    "/v1/conversations/{conversation_id}/items": CreateItemsRequest,
    "/v1/messages": AnthropicMessagesRequest,
    "/v1/messages/count_tokens": AnthropicCountTokensRequest,
    "/v1/messages/render": AnthropicMessagesRequest,
    "/v1/embeddings": (EmbeddingCompletionRequest, EmbeddingChatRequest),
    "/v2/embed": CohereEmbedRequest,
    "/v2/chat": CohereChatRequest,
    "/v2/chat/render": CohereChatRequest,
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
    "/inference/v1/generate": GenerateRequest,
    "/v1/batches": BatchCreateRequest,
    "/v1/load_lora_adapter": LoadLoRAAdapterRequest,
    "/v1/unload_lora_adapter": UnloadLoRAAdapterRequest,
    "/abort_requests": AbortRequest,
}
"""Path -> request body, or alternatives."""

QUEUED: Final = frozenset(
    (
        *("/v1/chat/completions", "/v1/chat/completions/batch", "/v1/completions", "/v1/responses", "/v1/messages"),
        *("/v2/chat", "/inference/v1/generate", "/invocations", "/generative_scoring", "/v1/embeddings", "/v2/embed"),
        *("/classify", "/pooling", "/score", "/v1/score", "/rerank", "/v1/rerank", "/v2/rerank"),
    )
)
"""Paths of requests that the engine queues."""

logger = logging.getLogger(__name__)


def create_app(state: ServerState) -> FastAPI:
    """Return the application. Requests are answered 503 until the engine of `state` is warm."""
    config = state.config
    prepare_tool_servers(config.tool_server)
    app = FastAPI(
        title="pagoda",
        version=pagoda.__version__,
        docs_url=None,  # FastAPI's pages load scripts from a content delivery network.
        redoc_url=None,
        openapi_url=None if config.disable_fastapi_docs else "/openapi.json",
        redirect_slashes=False,
        lifespan=_lifespan,
    )
    app.state.server = state
    app.state.batches = BatchRunner(state, app)
    app.openapi = lambda: openapi_schema(app)  # type: ignore[method-assign]
    _include_routes(app, config)
    if state.engine.config.extension.profiler is not None:
        app.include_router(dev.profiler_router)
    for kind in (PagodaError, HttpError, ClientDisconnectedError, HTTPException, Exception):
        app.add_exception_handler(kind, _answer_error)
    _add_middlewares(app, config, state.metrics)
    if state.engine.tracer is not None:
        app.add_middleware(TraceContextMiddleware, tracer=state.engine.tracer)
    return app


@contextlib.asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncGenerator[None, None]:
    """Go on with what the earlier server process was doing."""
    app.state.batches.go_on()
    yield


_RESPONSES: Final = (responses.router, retrieval.router, conversations.router)


def _include_routes(app: FastAPI, config: ServerConfig) -> None:
    openai = (chat.router, completion.router, *_RESPONSES, generate.router)
    generating = (*openai, messages.router, render.router)
    pooling = (embeddings.router, scoring.router, embed.router, cohere_chat.router)
    batch = (files.router, batches.router)
    server = (tokenize.router, sagemaker.router, models.router, health.router, health.metrics_router)
    for router in (*generating, *pooling, *batch, *server, adapters.router, unsupported_routes.router):
        app.include_router(router)
    if not config.disable_fastapi_docs:
        app.include_router(api_docs.router)
    if not config.disable_chat_page:
        app.include_router(chat_page.router)
    if config.enable_tokenizer_info_endpoint:
        app.include_router(tokenize.tokenizer_info_router)
    if config.server_dev_mode:
        app.include_router(dev.router)
        app.include_router(unsupported_routes.development)


def _add_middlewares(app: FastAPI, config: ServerConfig, metrics: Metrics) -> None:
    """Add middleware, innermost first. Raise ConfigError for one that cannot be loaded."""
    app.add_middleware(DisconnectMiddleware)
    app.add_middleware(IgnoredPartsMiddleware, metrics=metrics)
    check_overload = app.state.server.engine.check_overload
    app.add_middleware(OverloadMiddleware, check=check_overload, paths=QUEUED, answer=_answer_error)
    if config.api_key:
        app.add_middleware(ApiKeyMiddleware, keys=config.api_key)
    app.add_middleware(  # It is outside of the key check: preflights have no key, and 401 responses need CORS headers.
        CORSMiddleware,
        allow_origins=config.allowed_origins,
        allow_methods=config.allowed_methods,
        allow_headers=config.allowed_headers,
        allow_credentials=config.allow_credentials,
        expose_headers=[IGNORED_HEADER],
    )
    if config.enable_request_id_headers:
        app.add_middleware(RequestIdMiddleware)
    app.add_middleware(DirectSendMiddleware)
    for name in config.middleware:  # They are outside of DirectSendMiddleware, so that they see every chunk.
        _add_middleware(app, name)
    app.add_middleware(RouteSpellingMiddleware)


def _add_middleware(app: FastAPI, name: str) -> None:
    """Add an ASGI middleware class or an async function of (request, call_next)."""
    middleware = load_plugin("--middleware", name)
    is_class = inspect.isclass(middleware)
    is_function = inspect.iscoroutinefunction(middleware)
    if is_class:
        app.add_middleware(middleware)
    elif is_function:
        app.add_middleware(BaseHTTPMiddleware, dispatch=middleware)
    else:
        raise ConfigError("--middleware", f"{name} is neither a class nor an async function")


async def _answer_error(request: Request, error: Exception) -> Response:
    """Return the error response of an exception."""
    if isinstance(error, ClientDisconnectedError):
        return Response(status_code=CLIENT_DISCONNECTED)
    if (
        request.app.state.server.config.log_error_stack and get_route_path(request.scope) not in PROBES
    ):  # A probe's 503 is no error.
        logger.error("%s %s failed", request.method, request.url.path, exc_info=error)
    headers: dict[str, str] = {}
    if isinstance(error, HTTPException):
        headers = dict(error.headers or {})
        error = HttpError(error.status_code, _routing_message(request, error))
    response = http_error(error)
    if response.status in (429, 503):
        headers["retry-after"] = "1"
    body, own_headers = error_response(get_route_path(request.scope), response)
    return json_response(body, response.status, headers | own_headers)


def _routing_message(request: Request, error: HTTPException) -> str:
    path = request.url.path[:200]
    match error.status_code:
        case 404:
            return f"no route {path}"
        case 405:
            return f"{path} does not support {request.method}"
        case _:
            return str(error.detail)


# The OpenAPI schema.


def bodies_of(path: str) -> tuple[type[RequestBody], ...]:
    """Return the alternative request bodies of a path."""
    bodies = BODIES[path]
    return bodies if isinstance(bodies, tuple) else (bodies,)


def openapi_schema(app: FastAPI) -> dict[str, Any]:
    """Return the OpenAPI schema, built once, with the bodies that the routes parse themselves."""
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


def _describe_fields(properties: dict[str, Any], body: type[RequestBody], names: Sequence[str]) -> None:
    """Describe unsupported fields, hints and `model`. `names`: the served model names."""
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
