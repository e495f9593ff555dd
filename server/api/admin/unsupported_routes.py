"""Routes of vLLM and OpenAI without a pagoda equivalent. Each answers 501 with an alternative."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final

from fastapi import APIRouter, Request
from fastapi.responses import Response

from pagoda.server.http.errors import HttpError

_NO_TRANSFER: Final = "weights are read from the checkpoint; restart the server, or use /sleep level 2 and /wake_up"
_NO_ELASTIC: Final = "the number of replicas is fixed; restart the server with another --data-parallel-size"
_NO_DERENDER: Final = (
    "use /inference/v1/generate with output_mode text, which returns the text of its tokens, or /v1/chat/completions, "
    "which parses reasoning and tool calls"
)
_NO_AUDIO: Final = "this version serves text only, no audio; use a speech server beside it"
_NO_IMAGES: Final = "this version serves text only and makes no images; use an image server beside it"

UNSUPPORTED: Final[dict[tuple[str, str], str]] = {
    ("POST", "/v1/systemone"): "use /v1/chat/completions",
    ("POST", "/v1/completions/derender"): _NO_DERENDER,
    ("POST", "/v1/chat/completions/derender"): _NO_DERENDER,
    ("POST", "/v1/audio/transcriptions"): _NO_AUDIO,
    ("POST", "/v1/audio/translations"): _NO_AUDIO,
    ("POST", "/v1/audio/speech"): _NO_AUDIO,
    ("POST", "/v1/images/generations"): _NO_IMAGES,
    ("POST", "/v1/images/edits"): _NO_IMAGES,
    ("POST", "/v1/images/variations"): _NO_IMAGES,
}
"""(method, path) -> reason and alternative."""

UNSUPPORTED_DEV: Final[dict[tuple[str, str], str]] = {
    ("POST", "/collective_rpc"): "workers take no calls by name; use the other routes",
    ("POST", "/init_weight_transfer_engine"): _NO_TRANSFER,
    ("POST", "/shutdown_weight_transfer_engine"): _NO_TRANSFER,
    ("POST", "/start_weight_update"): _NO_TRANSFER,
    ("POST", "/start_draft_weight_update"): _NO_TRANSFER,
    ("POST", "/finish_weight_update"): _NO_TRANSFER,
    ("POST", "/update_weights"): _NO_TRANSFER,
    ("POST", "/update_weight_version"): _NO_TRANSFER,
    ("GET", "/weight_info"): _NO_TRANSFER,
    ("POST", "/weight_checker"): _NO_TRANSFER,
    ("POST", "/release_kv_cache_memory"): "use /sleep (--enable-sleep-mode), which frees the cache memory",
    ("GET", "/kv_event_sources"): "the cache publishes no events; read /metrics",
    ("POST", "/scale_elastic_ep"): _NO_ELASTIC,
    ("POST", "/is_scaling_elastic_ep"): _NO_ELASTIC,
}
"""Likewise, for --server-dev-mode."""


def _refusal(path: str, why: str) -> Callable[[Request], Awaitable[Response]]:
    async def refuse(request: Request) -> Response:
        raise HttpError(501, f"{path} is not supported: {why}")

    refuse.__doc__ = f"501: {why}."
    return refuse


def _router(absent: dict[tuple[str, str], str]) -> APIRouter:
    router = APIRouter(tags=["absent"])
    for (method, path), why in absent.items():
        router.add_api_route(path, _refusal(path, why), methods=[method], response_model=None, name=path[1:])
    return router


router: Final = _router(UNSUPPORTED)
development: Final = _router(UNSUPPORTED_DEV)
