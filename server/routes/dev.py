"""POST /reset_prefix_cache, /sleep and /wake_up, GET /is_sleeping: with --server-dev-mode only."""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import Response

from pagoda.common.errors import ConfigError, RequestError
from pagoda.server.protocol.errors import HttpError
from pagoda.server.routes.shared import server_of

router = APIRouter(tags=["development"])


@router.post("/reset_prefix_cache", response_model=None)
async def reset_prefix_cache(request: Request) -> Response:
    """Forget all cached prefixes; running requests keep their blocks."""
    await server_of(request).llm().reset_prefix_cache()
    return Response(status_code=200)


@router.post("/sleep", response_model=None)
async def sleep(request: Request, level: str = "1", mode: str = "abort") -> Response:
    """Give the device's memory back. `level` 1: weights in host memory, 2: read again; `mode`: abort or wait."""
    if not level.isdecimal():
        raise RequestError("level", f"level {level[:50]} is not a number")
    try:
        await server_of(request).sleep(int(level[:9]), mode)
    except ConfigError as error:
        raise HttpError(400, str(error)) from None
    return Response(status_code=200)


@router.post("/wake_up", response_model=None)
async def wake_up(request: Request) -> Response:
    """Have the memory again: all, or the parts named by `tags`, which may be repeated."""
    try:
        await server_of(request).wake_up(request.query_params.getlist("tags"))
    except ConfigError as error:
        raise HttpError(400, str(error)) from None
    return Response(status_code=200)


@router.get("/is_sleeping")
async def is_sleeping(request: Request) -> dict[str, bool]:
    """Whether a part of the memory is away."""
    return {"is_sleeping": await server_of(request).llm().is_sleeping()}
