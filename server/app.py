"""The HTTP application: routes, keys, cross-origin rules, and errors in one shape.

Knows FastAPI. Does not know how the engine was started or where the server listens.
"""

from __future__ import annotations

import inspect
import logging

from fastapi import FastAPI, Request
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import Response
from starlette._utils import get_route_path
from starlette.exceptions import HTTPException
from starlette.middleware.base import BaseHTTPMiddleware

import pagoda
from pagoda.common.config.server import ServerConfig
from pagoda.common.errors import ConfigError, PagodaError
from pagoda.common.observe.metrics import Metrics
from pagoda.server.http.auth import ApiKeyMiddleware
from pagoda.server.http.ignored import IGNORED_HEADER, IgnoredParts
from pagoda.server.http.openapi import described
from pagoda.server.http.request_ids import RequestIds
from pagoda.server.http.state import ServerState
from pagoda.server.http.stream import ClientLeftError, StraightParts, encode_json
from pagoda.server.plugins import load as load_plugin
from pagoda.server.protocol.errors import HttpError, http_error
from pagoda.server.protocol.messages_errors import error_answer
from pagoda.server.routes import (
    absent,
    chat,
    chat_page,
    cohere,
    completion,
    dev,
    generative_scoring,
    health,
    invocations,
    load,
    messages,
    metrics,
    models,
    pooling,
    render,
    responses,
    scoring,
    server_info,
    tokenize,
    tokenizer_info,
)

CLIENT_LEFT = 499
"""Status of an answer that nobody is there to read."""

logger = logging.getLogger(__name__)


def create_app(state: ServerState) -> FastAPI:
    """The application around `state`. The engine may still be loading: requests are answered 503 until it is warm."""
    config = state.config
    docs = not config.disable_fastapi_docs
    app = FastAPI(
        title="pagoda",
        version=pagoda.__version__,
        docs_url="/docs" if docs else None,
        redoc_url="/redoc" if docs else None,
        openapi_url="/openapi.json" if docs else None,
        redirect_slashes=False,
    )
    app.state.server = state
    app.openapi = lambda: described(app)  # type: ignore[method-assign]
    _include_routes(app, config)
    for kind in (PagodaError, HttpError, ClientLeftError, HTTPException, Exception):
        app.add_exception_handler(kind, _answer_error)
    _add_middlewares(app, config, state.metrics)
    return app


def _include_routes(app: FastAPI, config: ServerConfig) -> None:
    """Those that every server has, and those that it was started with."""
    spoken = (chat, completion, responses, messages, render, generative_scoring)
    pooled = (pooling, scoring, cohere)
    for module in (*spoken, *pooled, tokenize, invocations, models, health, metrics, absent):
        app.include_router(module.router)
    if not config.disable_chat_page:
        app.include_router(chat_page.router)
    if config.enable_server_load_tracking:
        app.include_router(load.router)
    if config.enable_tokenizer_info_endpoint:
        app.include_router(tokenizer_info.router)
    if config.server_dev_mode:
        for router in (dev.router, server_info.router, absent.development):
            app.include_router(router)


def _add_middlewares(app: FastAPI, config: ServerConfig, metrics: Metrics) -> None:
    """What is added later is further out. Raises ConfigError for a middleware that cannot be had."""
    app.add_middleware(IgnoredParts, metrics=metrics)
    if config.api_key:
        app.add_middleware(ApiKeyMiddleware, keys=config.api_key)
    app.add_middleware(  # added after the keys, so outside of them: preflights carry no key, and refusals can be read
        CORSMiddleware,
        allow_origins=config.allowed_origins,
        allow_methods=config.allowed_methods,
        allow_headers=config.allowed_headers,
        allow_credentials=config.allow_credentials,
        expose_headers=[IGNORED_HEADER],
    )
    if config.enable_request_id_headers:
        app.add_middleware(RequestIds)
    app.add_middleware(StraightParts)
    for name in config.middleware:  # outside of all that, so that they see every part
        _add_middleware(app, name)


def _add_middleware(app: FastAPI, name: str) -> None:
    """An ASGI middleware class, or a function of request and next handler, around all that is there already."""
    found = load_plugin("--middleware", name)
    is_class, is_function = inspect.isclass(found), inspect.iscoroutinefunction(found)
    if is_class:
        app.add_middleware(found)
    elif is_function:
        app.add_middleware(BaseHTTPMiddleware, dispatch=found)
    else:
        raise ConfigError("--middleware", f"{name} is neither a class nor an async function")


async def _answer_error(request: Request, error: Exception) -> Response:
    """The client's view of an exception; ours alone keep their text."""
    if isinstance(error, ClientLeftError):
        return Response(status_code=CLIENT_LEFT)
    if request.app.state.server.config.log_error_stack:
        logger.error("%s %s failed", request.method, request.url.path, exc_info=error)
    headers: dict[str, str] = {}
    if isinstance(error, HTTPException):
        headers = dict(error.headers or {})
        error = HttpError(error.status_code, _routing_message(request, error))
    told = http_error(error)
    if told.status in (429, 503):
        headers["retry-after"] = "1"
    body, own_headers = error_answer(get_route_path(request.scope), told)
    return Response(encode_json(body), told.status, headers | own_headers, media_type="application/json")


def _routing_message(request: Request, error: HTTPException) -> str:
    path = request.url.path[:200]
    match error.status_code:
        case 404:
            return f"there is nothing at {path}"
        case 405:
            return f"{path} does not take {request.method}"
        case _:
            return str(error.detail)
